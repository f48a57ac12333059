"""What Kafka has against what the database has and the clients know. Pure.

    lost          in the database's ledger, not in Kafka
    phantom       in Kafka, not in the ledger, or rolled back to a savepoint
    duplicated    an event twice, or a ledger row in two transactions
    torn          a transaction without all of its events, or in two Kafka transactions
    disordered    events of a partition, or transactions, not in commit order
    wrong         a balance that no transfer makes of the one before it; a column's old name
    missing       acknowledged to a client, not in the database
    resurrected   refused or rolled back for a client, and in the database

All of a source transaction's events in a partition must be in one Kafka transaction, and so must
its BEGIN and END. Which Kafka transaction a record is in says the broker's log (`kafka_log`).
The chunks of snapshots are judged by `snapshot_checker`.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tests.promises.bridge.reading import Record
from tests.torture.bank import MADE, NEVER, RENAMED

KafkaTransactionOf = Callable[[str, int, int], Hashable]
"""(topic, partition, offset) -> what tells the record's Kafka transaction from others there."""
PARTED_EVENTS_MIN: Final = 50
"""A transaction of fewer events is not larger than transaction_bytes_max, without large rows."""
TRANSFERRED: Final = 10
"""What each of a transfer's two updates changes a balance by."""


class Finding(NamedTuple):
    """One violation; `kind` as above."""

    kind: str
    what: str


class Repair(NamedTuple):
    """What `slotbridge recover` has published at `commit_lsn`, instead of single changes.

    Of these Kafka had all up to `from_lsn`; from `lsn` on they come again.
    """

    from_lsn: int
    lsn: int
    commit_lsn: int


@dataclass
class Truth:
    """The surviving database and the clients.

    `ledger`: tid -> table -> number of events. `parted`: commit_lsn of the transactions that were
    larger than transaction_bytes_max; none is where it is above all of them (`undivided`).
    `partitions`: of each topic of a table.
    """

    ledger: Mapping[str, Mapping[str, int]]
    outcomes: Mapping[str, str]
    parted: Collection[int] = ()
    partitions: int = 2
    undivided: bool = False
    repairs: Sequence[Repair] = ()


@dataclass
class _Transaction:
    """A source transaction as Kafka has it."""

    tids: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ends: list[Mapping[str, int]] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    copies: Counter[int] = field(default_factory=Counter)
    offsets: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))


def check(
    records: Iterable[Record],
    transaction_topic: str,
    truth: Truth,
    kafka_transaction_of: KafkaTransactionOf,
) -> list[Finding]:
    """Return every violation. `records`: all of the table topics and the transaction topic."""
    transactions: dict[int, _Transaction] = defaultdict(_Transaction)
    findings: list[Finding] = []
    seen: set[tuple[int, int, int]] = set()
    content, repaired = [], []
    for record in records:
        if record.value is None:
            continue
        event = _outbox_event(record) or json.loads(record.value)
        content.append((record, event))
        if chunk_of(event):
            repaired += [event["after"]["tid"]] if _is_repaired_ledger(event) else []
            continue  # snapshot_checker
        if record.topic == transaction_topic:
            _boundary(record, event, transactions, findings)
        else:
            _event(record, event, transactions, seen, findings)
    findings += _order(content, transaction_topic)
    findings += _balances(event for _, event in content if event.get("op") in ("c", "u"))
    for commit_lsn, found in transactions.items():
        findings += _whole(commit_lsn, found, truth)
        if commit_lsn not in truth.parted:
            findings += _undivided(commit_lsn, found, transaction_topic, kafka_transaction_of)
    findings += _accounted(transactions, truth, repaired)
    return findings


def chunk_of(event: Mapping[str, Any]) -> int:
    """Return the commit_lsn of the snapshot's chunk, or repair, of the event; 0: it is of none."""
    if event.get("op") == "r" or is_repair(event):
        return int(event["source"]["commit_lsn"])
    return int(event["commit_lsn"]) if str(event.get("id", "")).startswith("0:") else 0


def is_repair(event: Mapping[str, Any]) -> bool:
    """Whether the event is of `slotbridge recover`."""
    return (event.get("source") or {}).get("snapshot") == "repair"


def _is_repaired_ledger(event: Mapping[str, Any]) -> bool:
    return is_repair(event) and event["source"]["table"] == "ledger" and event["op"] == "c"


def _outbox_event(record: Record) -> dict[str, Any] | None:
    """Return an outbox's message as an event; its place is in its headers, its payload a tid."""
    if "commit_lsn" not in record.headers:
        return None
    assert record.value is not None
    commit_lsn, seq = (int(record.headers[name] or b"") for name in ("commit_lsn", "seq"))
    source = {"commit_lsn": commit_lsn, "seq": seq, "table": "outbox"}
    return {"op": "c", "after": {"tid": record.value.decode()}, "source": source}


def _boundary(
    record: Record,
    event: dict[str, Any],
    transactions: dict[int, _Transaction],
    findings: list[Finding],
) -> None:
    found = transactions[event["commit_lsn"]]
    found.boundaries.append(record.offset)
    if event["status"] != "END":
        return
    found.ends.append(
        {
            c["data_collection"].removeprefix("public."): c["event_count"]
            for c in event["data_collections"]
        }
    )
    if len(found.ends) > 1:
        findings.append(Finding("duplicated", f"END of {event['id']}"))


def _event(
    record: Record,
    event: dict[str, Any],
    transactions: dict[int, _Transaction],
    seen: set[tuple[int, int, int]],
    findings: list[Finding],
) -> None:
    source, after = event["source"], event["after"] or {}
    where = f"{record.topic}[{record.partition}]@{record.offset}"
    found = transactions[source["commit_lsn"]]
    found.offsets[record.topic, record.partition].append(record.offset)
    copy = record.partition if event["op"] == "t" else -1
    number = (source["commit_lsn"], source["seq"], copy)
    if number in seen:
        findings.append(Finding("duplicated", f"{where}: event {number}"))
        return
    seen.add(number)
    if after.get("tid") == NEVER:
        findings.append(Finding("phantom", f"{where}: rolled back to a savepoint"))
    if source["table"] == "renamed" and event["op"] == "c":
        names = {name: value for name, value in after.items() if name.startswith(RENAMED)}
        if list(names) != list(names.values()):
            findings.append(Finding("wrong", f"{where}: a row of another column's time: {names}"))
    if event["op"] == "t":
        found.copies[source["seq"]] += 1
    if event["op"] != "t" or copy == 0:
        found.counts[source["table"]] += 1
    if source["table"] == "ledger":
        found.tids.append(after["tid"])


def _order(
    content: Iterable[tuple[Record, dict[str, Any]]], transaction_topic: str
) -> list[Finding]:
    findings = []
    last: dict[tuple[str, int], tuple[int, int]] = {}
    for record, event in content:
        if record.topic == transaction_topic:
            position = (event["commit_lsn"], int(event["status"] == "END"))
        else:
            position = (event["source"]["commit_lsn"], event["source"]["seq"])
        place = (record.topic, record.partition)
        if place in last and position < last[place]:
            findings.append(Finding("disordered", f"{record[:4]}: {position} < {last[place]}"))
        last[place] = position
    return findings


def _balances(events: Iterable[dict[str, Any]]) -> list[Finding]:
    """Each update of an account moves its balance by what is transferred, and no sum changes."""
    findings = []
    balances: dict[int, int] = {}
    sums: Counter[int] = Counter()
    accounts = [event for event in events if "balance" in (event["after"] or {})]
    for event in sorted(accounts, key=lambda e: (e["source"]["commit_lsn"], e["source"]["seq"])):
        number, balance = event["after"]["id"], event["after"]["balance"]
        if is_repair(event):
            balances[number] = balance
            continue
        moved = balance - balances.get(number, 0)
        if event["op"] == "u" and abs(moved) != TRANSFERRED:
            what = f"{event['after']['tid']}: account {number} by {moved} to {balance}"
            findings.append(Finding("wrong", what))
        sums[event["source"]["commit_lsn"]] += moved
        balances[number] = balance
    findings += [Finding("wrong", f"{lsn}: balances by {by}") for lsn, by in sums.items() if by]
    return findings


def _whole(commit_lsn: int, found: _Transaction, truth: Truth) -> list[Finding]:
    if any(one.from_lsn <= commit_lsn < one.lsn for one in truth.repairs):  # a part, and no more
        if found.ends == [dict(found.counts)]:
            return []
        return [Finding("torn", f"{commit_lsn}: {dict(found.counts)}, ENDs say {found.ends}")]
    if len(found.tids) != 1 or len(found.ends) != 1:
        return [Finding("torn", f"{commit_lsn}: ledger {found.tids}, {len(found.ends)} ENDs")]
    expected = truth.ledger.get(found.tids[0])
    findings = []
    if expected is not None and Counter(expected) != found.counts:
        what = f"{found.tids[0]}: {dict(found.counts)} instead of {dict(expected)}"
        findings.append(Finding("torn", what))
    if Counter(found.ends[0]) != found.counts:
        what = f"{found.tids[0]}: END says {found.ends[0]}, found {dict(found.counts)}"
        findings.append(Finding("torn", what))
    for seq, copies in found.copies.items():
        if copies != truth.partitions:
            what = f"{found.tids[0]}: truncate {seq} in {copies} of {truth.partitions} partitions"
            findings.append(Finding("torn", what))
    large_rows = any(table.startswith(MADE) for table in found.counts)
    small = found.counts.total() < PARTED_EVENTS_MIN and not large_rows
    if commit_lsn in truth.parted and (small or truth.undivided):
        findings.append(Finding("torn", f"{found.tids[0]}: parted, though it is small"))
    return findings


def _undivided(
    commit_lsn: int,
    found: _Transaction,
    transaction_topic: str,
    kafka_transaction_of: KafkaTransactionOf,
) -> list[Finding]:
    findings = []
    if len({kafka_transaction_of(transaction_topic, 0, offset) for offset in found.boundaries}) > 1:
        what = f"{found.tids}, {commit_lsn}: BEGIN and END in two Kafka transactions"
        findings.append(Finding("torn", what))
    for (topic, partition), offsets in found.offsets.items():
        among = {kafka_transaction_of(topic, partition, offset) for offset in offsets}
        if len(among) > 1:
            what = f"{found.tids}, {commit_lsn}: in {len(among)} Kafka transactions in "
            findings.append(
                Finding("torn", f"{what}{topic}[{partition}]: {sorted(map(str, among))}")
            )
    return findings


def _accounted(
    transactions: Mapping[int, _Transaction], truth: Truth, repaired: Iterable[str]
) -> list[Finding]:
    in_kafka = Counter(tid for found in transactions.values() for tid in found.tids)
    in_kafka.update(repaired)
    findings = [Finding("duplicated", f"{tid} {n} times") for tid, n in in_kafka.items() if n > 1]
    findings += [Finding("lost", tid) for tid in truth.ledger if tid not in in_kafka]
    findings += [Finding("phantom", tid) for tid in in_kafka if tid not in truth.ledger]
    for tid, outcome in truth.outcomes.items():
        if outcome == "acknowledged" and tid not in truth.ledger:
            findings.append(Finding("missing", tid))
        if outcome in ("refused", "rolled back") and tid in truth.ledger:
            findings.append(Finding("resurrected", tid))
    return findings
