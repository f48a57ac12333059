"""Asks partitions' leaders whether a transaction's commit or abort markers have arrived.

A producer must not write again where its last transaction hangs (`hanging`): the abort
of what it writes there would take that along. So its next transaction begins only once every
partition's last stable offset is at or beyond where its records end. Nothing else is evidence: no
error need come to the client of a broker that was lost, and of a leader that was none for a moment.

    producer 0   records, acknowledged | commit                        | records …
                                       ends?                       stable?  each >= its end
    producer 1                                  records, acknowledged | commit

Both are asked while a commit is on its way, so that as a rule nobody waits for the answers. The
ends are also what a progress record notes (`partition_ends`).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, Protocol

import structlog

from schemas.errors import ExitCode, Retryable
from services.bridge.sink.offsets import (
    ASKED_AT_ONCE,
    Asked,
    Partition,
    PartitionEnd,
    answers,
    in_parts,
    name_of,
    some_answers,
)
from services.bridge.sink.partition_ends import Lost, lost_tails
from services.bridge.source.standby_status import StoppedLate
from services.kafka.records import REQUEST_TIMEOUT_S
from services.waiter import Waiter

logger = structlog.get_logger(__name__)

PATIENCE_S: Final = 1.5
"""Markers that are being written take some milliseconds."""
_PAUSE_S: Final = 0.01
_AWAIT_S: Final = 0.1
_RECOUNT_S: Final = 60.0
"""Partitions that are added to a topic are seen within this; clients see them after minutes."""
Ends = Mapping[Partition, PartitionEnd]


class TransactionHangs(Retryable):
    """Kafka has decided a transaction of ours, and may not have told every partition.

    Consumers see nothing of what follows it until the next session of the bridge has ended it.
    """


class TopicPartitions(Protocol):
    """The methods of services.bridge.sink.topics.Topics that are used here."""

    waiter: Waiter

    def partitions(self, topic: str) -> int: ...
    def learn_leaders(self) -> None: ...
    def ask_ends(self, partitions: Iterable[Partition], *, committed: bool) -> Asked: ...


class _Transaction:
    """The partitions of a transaction's topics, and what was asked about them."""

    def __init__(self, partitions: list[Partition]) -> None:
        self.partitions = partitions
        self.ends: Asked = {}
        self.stable: Asked = {}


class MarkerCheck:
    """Checks one session's markers: `flushed` for each transaction, `require_delivered` before."""

    def __init__(
        self,
        topics: TopicPartitions,
        look: Callable[[], None],
        judge: Callable[[Sequence[Lost]], None],
    ) -> None:
        """Take the callbacks for open transactions and for lost records.

        `look` raises Retryable where a transaction that is open in partitions is this bridge's.
        `judge` raises OperatorNeeded where partitions have lost what they had acknowledged.
        """
        self._topics = topics
        self.look = look
        self._judge = judge
        self._closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kafka-ends")
        self._asking: Future[None] | None = None
        self._last: _Transaction | None = None
        self._before: _Transaction | None = None
        self._recount_at = time.monotonic() + _RECOUNT_S
        self._others: dict[Partition, int] = {}
        """Where another producer's open transaction begins, though the topic is ours."""
        self._hidden: dict[Partition, int] = {}
        """Where what we have written behind that ends."""

    def flushed(self, topics: Iterable[str]) -> None:
        """Ask where the partitions of `topics` end, just before the commit.

        The records of the open transaction, all in `topics`, are acknowledged.
        """
        partitions = [(name, n) for name in topics for n in range(self._topics.partitions(name))]
        self._before, self._last = self._last, _Transaction(partitions)
        few = (
            max(len(partitions), len(self._before.partitions) if self._before else 0)
            <= ASKED_AT_ONCE
        )
        self._asking = None
        if few:  # no answer is awaited before all is asked
            self._ask(self._last, self._before)
        else:
            self._asking = self._pool.submit(self._ask, self._last, self._before)

    def require_delivered(self) -> None:
        """Return once all partitions have the marker of the next producer's last transaction.

        Raise Retryable where it hangs, or where the leader of a partition does not answer;
        OperatorNeeded where a partition ends before what it had acknowledged: no reader has it.
        """
        if self._others:
            self._look_at_hidden()
        before = self._before
        if before is None:
            return
        if time.monotonic() > self._recount_at:
            self._topics.learn_leaders()
            self._recount_at = time.monotonic() + _RECOUNT_S
        if self._asking is not None:
            self._await([self._asking])
            self._asking.result()
        ends = self._answers(before.ends, committed=False)
        deadline = time.monotonic() + PATIENCE_S
        while behind := self._behind(ends, self._answers(before.stable, committed=True)):
            if time.monotonic() > deadline:
                self._require_kept({partition: ends[partition] for partition in behind})
                self.look()
                self._leave(behind, ends)
                break
            self._topics.waiter.pause(_PAUSE_S)
            before.stable = self._ask_all(behind, self._await, committed=True)
        self._before = None

    def require_all_delivered(self) -> None:
        """Return once all partitions have the markers of the last two transactions.

        Raise TransactionHangs where one hangs, or where a leader does not answer; OperatorNeeded as
        `require_delivered` does.
        """
        try:
            self.require_delivered()
            self._before, self._last = self._last, None
            if self._before is not None:
                asked = self._ask_all(self._before.partitions, self._await, committed=True)
                self._before.stable = asked
            self.require_delivered()
        except (StoppedLate, TransactionHangs):
            raise
        except Retryable as error:
            raise TransactionHangs(
                f"whether consumers see the last transaction is not judged: {error.message}",
                operation="end what was committed to Kafka",
                subject=error.subject,
                hint="the next session of the bridge looks again, and ends it where it hangs",
                exit_code=ExitCode.KAFKA_UNREACHABLE,
            ) from error

    def _require_kept(self, ends: Ends) -> None:
        """Judge partitions that lost records; ask twice, as a former leader may answer first."""
        for _ in range(2):
            asked = self._ask_all(ends, self._await, committed=False)
            lost = lost_tails(ends, self._answers(asked, committed=False))
            if not lost:
                return
            self._topics.learn_leaders()
        self._judge(lost)

    def hide(self, hidden: Mapping[Partition, int]) -> None:
        """Watch partitions where another producer's transaction hides an earlier session's records.

        `hidden`: partition -> its last stable offset. Once that has moved, `_look_at_hidden` looks
        again.
        """
        self._others |= hidden
        ends = self._answers(self._ask_all(hidden, self._await, committed=False), committed=False)
        self._hidden |= {partition: end.offset for partition, end in ends.items()}

    def _look_at_hidden(self) -> None:
        """Look for a hanging transaction of ours where another producer's, which hid it, has ended.

        This must happen before either of our producers writes there again: the abort of that
        transaction would abort the hanging one too.
        """
        asked = self._ask_all(self._others, self._await, committed=True)
        stable = self._answers(asked, committed=True)
        moved = {at: end.offset for at, end in stable.items() if end.offset != self._others[at]}
        if not moved:
            return
        if any(offset < self._hidden[at] for at, offset in moved.items()):
            self.look()
        for at, offset in moved.items():
            if offset < self._hidden[at]:
                self._others[at] = offset
            else:
                del self._others[at], self._hidden[at]

    def _leave(self, behind: Mapping[Partition, int], ends: Ends) -> None:
        """Stop waiting for partitions where another producer's open transaction hides ours."""
        if new := sorted(behind.keys() - self._others.keys()):
            logger.warning(
                "not judged: another producer's open transaction hides the bridge's records",
                partitions=[name_of(partition) for partition in new],
            )
        self._others |= behind
        self._hidden |= {partition: ends[partition].offset for partition in behind}

    def ends(self) -> Ends:
        """Return where the records of the last transaction end, as far as that is known by now."""
        if self._last is None or (self._asking is not None and not self._asking.done()):
            return {}
        asked = self._last.ends
        return some_answers({partition: one for partition, one in asked.items() if one.done()})

    def close(self) -> None:
        """End the thread that asks for offsets."""
        self._closed = True
        self._pool.shutdown(wait=True)

    def _ask(self, last: _Transaction, before: _Transaction | None) -> None:
        last.ends = self._ask_all(last.partitions, wait, committed=False)
        if before is not None:
            before.stable = self._ask_all(before.partitions, wait, committed=True)

    def _ask_all(
        self,
        partitions: Iterable[Partition],
        awaiting: Callable[[Iterable["Future[Any]"]], object],
        *,
        committed: bool,
    ) -> Asked:
        """Ask for some at a time; `awaiting` answers before the next ones, but not the last."""
        asked: dict[Partition, Future[Any]] = {}
        for some in in_parts([*partitions]):
            awaiting({*asked.values()})
            if self._closed:
                break
            asked |= self._topics.ask_ends(some, committed=committed)
        return asked

    def _await(self, futures: Iterable["Future[Any]"]) -> None:
        """Wait for Kafka's answers, and answer the server meanwhile."""
        self._topics.waiter.wait(futures, _AWAIT_S)

    def _behind(self, ends: Ends, stable: Ends) -> dict[Partition, int]:
        """Return the partitions where a transaction may hang -> their last stable offset."""
        return {
            partition: end.offset
            for partition, end in stable.items()
            if end.offset < ends[partition].offset and self._others.get(partition) != end.offset
        }

    def _answers(self, futures: Asked, *, committed: bool) -> dict[Partition, PartitionEnd]:
        """Return the answers to what was asked; ask again while a leader is being elected."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while True:
            self._await(futures.values())
            try:
                return answers(futures)
            except Retryable:
                if time.monotonic() > deadline:
                    raise
            self._topics.waiter.pause(_PAUSE_S)
            self._topics.learn_leaders()  # the client asks by the leader epoch that it knows
            futures = self._ask_all(futures, self._await, committed=committed)
