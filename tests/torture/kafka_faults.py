"""Kafka loses what it had committed, or does not tell partitions how it has decided."""

import contextlib
import random
import time
import zlib
from typing import Final

from schemas.errors import ExitCode
from schemas.events import transaction_topic
from tests.promises.bridge.faults.markers import (
    is_any,
    is_not_of_transactions,
    is_not_the_progress,
    is_of_stagings,
)
from tests.providers.waiting import eventually
from tests.torture.bridge_faults import FAILPOINT_WAIT_S
from tests.torture.faults import Fault
from tests.torture.torture_run import TortureRun

LOST_RECORDS: Final = "Kafka lost committed records"
_TABLE: Final = "public.ledger"
_AWAIT_S: Final = 120.0
_WRITTEN_ON_SHARE: Final = 0.5
_MORE_RECORDS: Final = 10
_NEXT_S: Final = 10.0
_LOOK_S: Final = 0.005
_DECIDED: Final = ("after kafka commit:1:stop", "after kafka commit:2:stop")
"""No more than two: of the one before them, the bridge has been told that its markers are there."""
_KILLS: Final[tuple[list[str], ...]] = (
    [],
    ["noted:1"],
    ["settling:1"],
    ["settling:1", "settling:1"],
    ["settled:1"],
)


def lose_records(run: TortureRun, fault: Fault) -> None:
    """The end of one partition is gone on every broker, as after an unclean election.

    Others may have written on behind it, farther than it went. The bridge must refuse by name; then
    the partition is put right again. It was stopped in order before: nothing is open then.
    """
    if run.given_up:
        return
    topic, partition = f"{run.bridge.prefix}.{_TABLE}", 0
    _await_noted(run, topic, partition, 0)
    with run.supervised.paused():
        before = _noted(run, topic, partition)
        run.brokers.copy_partition(topic, partition, "old")
    _await_noted(run, topic, partition, before)
    with run.refusal(ExitCode.WITNESSES_DISAGREE, LOST_RECORDS) as await_refusal:
        with run.supervised.paused():
            until = _noted(run, topic, partition)
            run.brokers.swap_partition(topic, partition, "old", "new")
            if random.Random(f"{fault}").random() < _WRITTEN_ON_SHARE:
                run.faults["written on since"] += 1
                run.brokers.write_up_to(topic, partition, until + _MORE_RECORDS)
        await_refusal(run.primary)
        with run.supervised.paused():
            run.brokers.swap_partition(topic, partition, "new", "lost")


def lose_markers(run: TortureRun, fault: Fault) -> None:
    """All brokers die after a commit was decided, before some partitions, or all, were told.

    The bridge stood still right after its first or second one; the slot may know of the first.
    Then it is killed, or goes on and is killed once its next transaction has begun. The next ones
    may be killed while they end what hangs, or repeat what that has lost. Nobody has seen the
    markers that are cut off, as Kafka has never written them: no record notes an end behind one,
    and the bridge has asked for ends before it had Kafka commit.
    """
    moments = random.Random(f"{fault}")
    where = moments.choice(_DECIDED)
    wanted = moments.choice(
        [is_any, is_any, is_not_the_progress, is_not_of_transactions, is_of_stagings, _every_other]
    )
    with run.supervised.paused():
        since_ms = time.time_ns() // 1_000_000
        run.supervised.arm(where, ends_first=True)
    with contextlib.suppress(AssertionError):
        eventually(run.supervised.stopped, what="it has stopped", timeout_s=FAILPOINT_WAIT_S)
    run.supervised.freeze()
    seen, run.hiding = run.noted_ends(), True
    if not run.brokers.forget_markers(run.bridge.prefix, since_ms, wanted, seen):
        run.faults[fault.name] -= 1  # there were none
    if moments.random() < 0.5:
        with run.brokers.end_of(transaction_topic(run.bridge.prefix)) as end:
            before, until = end(), time.monotonic() + _NEXT_S
            run.supervised.thaw()
            while end() == before and time.monotonic() < until:
                time.sleep(_LOOK_S)
    run.supervised.arm(*moments.choice(_KILLS))
    run.bridge_streams()
    run.hiding = False


def _every_other(name: str) -> bool:
    return zlib.crc32(name.encode()) % 2 == 0


def _await_noted(run: TortureRun, topic: str, partition: int, before: int) -> None:
    with run.left_alone():
        eventually(
            lambda: run.given_up or _noted(run, topic, partition) > before,
            what=f"the record notes a later end of {topic}[{partition}]",
            timeout_s=_AWAIT_S,
            interval_s=0.5,
        )


def _noted(run: TortureRun, topic: str, partition: int) -> int:
    """The last end of the partition that a progress record tells."""
    ends = [
        offset
        for record in run.progress()
        for number, offset, _ in record.kafka.ends.get(topic, [])
        if number == partition
    ]
    return max(ends, default=0)
