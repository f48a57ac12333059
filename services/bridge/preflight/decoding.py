"""logical_decoding_work_mem against what the slot's decoding spilled and streamed. Pure.

The server keeps the changes of all transactions in progress in memory. Once they exceed
logical_decoding_work_mem together, the largest transaction is spilled to disk, or sent in blocks
to a consumer that takes these, and so is all of it that follows. So, by pg_stat_replication_slots:

    bytes of a large transaction    spill_bytes / spill_txns, or stream_bytes / stream_txns
    times that it was evicted       spill_count / spill_txns
    share of decoding               spill_bytes / total_bytes

3000 rows of one integer under 64kB are 1 transaction, 7 spills, 396000 bytes: 132 bytes a row, six
times the threshold and a rest at the commit. With twice the mean size the mean transaction fits
beside others.
"""

from collections.abc import Iterator
from typing import Final

from schemas.findings import Finding, Severity
from services.bridge.preflight.facts import Facts
from services.bridge.preflight.finding import advice, alter, amount
from services.postgres.server import untried_version

_SHARE_MIN: Final = 0.01
_WORK_MEM_MAX: Final = 2**30
_EMPTY_SHARE: Final = 0.9
_SAMPLE_MIN: Final = 20


def decoding(facts: Facts) -> Iterator[Finding]:
    """Yield findings from the slot's decoding statistics and from the bridge's engine."""
    yield from _spills(facts)
    yield from _streams(facts)
    yield from _empty(facts)
    if untried := untried_version(facts.primary.version):
        yield advice(
            "server-newer-than-tried",
            Severity.NOTE,
            "the primary",
            f"server_version_num = {facts.primary.version}: {untried}",
            "what has changed in PostgreSQL since is not known to this release",
            "update slotbridge, or try it on a copy of the database: docs/start/set-up.md, "
            "Versions",
        )
    if not facts.compiled:
        yield advice(
            "engine-not-compiled",
            Severity.NOTE,
            "slotbridge",
            "the compiled part (services.bridge.compiled) is missing or switched off",
            "the bridge takes about ten times the CPU for each row",
            "install the wheel for this Python version, and unset SLOTBRIDGE_COMPILED",
        )


def _spills(facts: Facts) -> Iterator[Finding]:
    """Warn where the walsender writes much of what it decodes to disk."""
    seen = facts.primary.statistics
    if seen is None or not seen.spill_txns:
        return
    share = seen.spill_bytes / max(seen.total_bytes, seen.spill_bytes, 1)
    if share < _SHARE_MIN:
        return
    mean = seen.spill_bytes / seen.spill_txns
    evidence = (
        f"spill_txns = {seen.spill_txns}, spill_count = {seen.spill_count}, spill_bytes = "
        f"{seen.spill_bytes} of total_bytes = {seen.total_bytes}: {amount(mean)} a transaction, "
        f"evicted {seen.spill_count / seen.spill_txns:.1f} times each; {_work_mem(facts)}"
    )
    consequence = "the server writes each of these changes to disk and reads it again at the commit"
    change = alter("logical_decoding_work_mem", _memory_for(mean))
    if not facts.streaming:
        change = f"set bridge.streaming: true, and restart the bridge; or {change}"
    yield advice(
        "decoding-spills", Severity.WARNING, f"slot {facts.slot}", evidence, consequence, change
    )


def _streams(facts: Facts) -> Iterator[Finding]:
    """Advise more memory where transactions are streamed that would fit in it."""
    seen = facts.primary.statistics
    if seen is None or not seen.stream_txns:
        return
    mean = seen.stream_bytes / seen.stream_txns
    if seen.stream_bytes < _SHARE_MIN * seen.total_bytes or mean > _WORK_MEM_MAX / 2:
        return
    yield advice(
        "decoding-streams",
        Severity.NOTE,
        f"slot {facts.slot}",
        f"stream_txns = {seen.stream_txns}, stream_count = {seen.stream_count}, stream_bytes = "
        f"{seen.stream_bytes}: {amount(mean)} a transaction, in "
        f"{seen.stream_count / seen.stream_txns:.1f} blocks each; {_work_mem(facts)}",
        "the bridge keeps these transactions in its spool until they commit; they would fit the "
        "server's memory",
        alter("logical_decoding_work_mem", _memory_for(mean)),
    )


def _empty(facts: Facts) -> Iterator[Finding]:
    """Advise where most decoded transactions have no published change."""
    sample = facts.sample
    if sample is None or sample.decoded < _SAMPLE_MIN:
        return
    empty = max(0, sample.decoded - sample.published)
    if empty / sample.decoded < _EMPTY_SHARE:
        return
    yield advice(
        "empty-transactions",
        Severity.NOTE,
        f"slot {facts.slot}",
        f"in {sample.seconds:.0f} s the server decoded {sample.decoded} transactions, of which "
        f"{sample.published} had events",
        "the walsender spends its processor on tables that are not published",
        "move the busy tables that nobody needs in Kafka to another database, or accept it",
    )


def _work_mem(facts: Facts) -> str:
    return f"logical_decoding_work_mem = {facts.primary.number('logical_decoding_work_mem', 0)}kB"


def _memory_for(mean_bytes: float) -> str:
    """Double the mean transaction, to a power of two between the default of 64MB and 1GB."""
    wanted = 64 * 2**20
    while wanted < 2 * mean_bytes and wanted < _WORK_MEM_MAX:
        wanted *= 2
    return f"{wanted // 2**20}MB"
