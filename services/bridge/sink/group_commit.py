"""EventBatches to Kafka transactions: what goes into one, and when it is committed.

    nothing else comes    a batch is sent and committed at once
    batches come         while Kafka commits, later ones wait; they make the next transaction
    many come             the more there are, the longer it stays open, up to commit_interval_ms
    then no more come     it is committed QUIET_S later
    more than we read     it stays open for commit_interval_ms

No fixed linger: at a low load the age that a transaction must reach is next to nothing, at a high
one a commit's cost is shared by many. Commits run in a thread of their own, so that reading and
encoding go on. Only what is sent is published (services.bridge.progress.ledger): a record is
never ahead of the events in its own Kafka transaction.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, NamedTuple

from schemas.progress import ProgressRecord
from schemas.settings import BridgeSettings
from services.bridge import metrics
from services.bridge.events.event import Stamp
from services.bridge.failpoints import reach
from services.bridge.progress.ledger import Ledger, Position
from services.bridge.progress.wal_commit import NO_COMMIT, WalCommit
from services.bridge.sink import row_tally
from services.bridge.sink.batch_queue import Waiting
from services.bridge.sink.claim_checks import ClaimChecks
from services.bridge.sink.cloud_events import EventsOf
from services.bridge.sink.dead_letters import Origins, RefusalLearned
from services.bridge.sink.table_names import TableNames
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.source.heartbeat import Heartbeat
from services.bridge.source.standby_status import StandbyStatus
from services.bridge.transactions.assembler import EventBatch

SPACING_MIN_S: Final = 0.002
"""Between the beginnings of two commits there is this, or what the last one took."""
COMPANY_S: Final = 0.000_1
"""How much longer a transaction stays open for each batch in it."""
QUIET_S: Final = 0.01
"""A transaction is committed once nothing was added to it for this long."""
WAITING_BYTES_MAX: Final = 8 * 2**20
"""Bytes of batches that are encoded ahead while Kafka commits."""

Recorder = Callable[[Position, Mapping[str, int], WalCommit], ProgressRecord]


class Commit(NamedTuple):
    """A commit that is in progress; `started`: when it began (time.monotonic)."""

    done: Future[None]
    record: ProgressRecord
    started: float


class GroupCommit:
    """Groups a session's batches into Kafka transactions. For the thread that made it.

    `record_of` makes the progress record of a position, by a transaction's counts so far;
    `record` is the one that the session resumes from. `wakes` is readable after a commit.
    `events_of`: a batch's events as they are sent. `claim_checks`: the large values of these.
    `table_names`: noted before what was encoded when they were known.
    """

    def __init__(
        self,
        producer: TransactionalProducer,
        bridge: BridgeSettings,
        standby_status: StandbyStatus,
        heartbeat: Heartbeat,
        record_of: Recorder,
        ledger: Ledger,
        record: ProgressRecord,
        *,
        subject: str,
        events_of: EventsOf,
        claim_checks: ClaimChecks | None = None,
        table_names: TableNames | None = None,
    ) -> None:
        self._producer = producer
        self._claim_checks = claim_checks
        self._table_names = table_names
        self._bytes_max = bridge.commit_bytes_max
        self._age_max_s = bridge.commit_interval_ms / 1000
        self._standby_status = standby_status
        self._heartbeat = heartbeat
        self._record_of = record_of
        self._subject = subject
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kafka-commit")
        self.wakes, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waiting = Waiting()
        self._committing: Commit | None = None
        self._stamp: Stamp | None = None
        self._not_before = self._oldest = 0.0
        self._due = self._group_due = float("inf")
        self._grouped = 0
        self._bytes = self._events = self._transactions = 0
        self._opened = 0.0
        self._oldest_commit_us = 0
        self._rows: row_tally.Counts = {}
        self._events_of = events_of
        self.failure: BaseException | None = None
        """The error of a commit that was in progress at `close`."""
        self._ledger = ledger
        metrics.DURABLE_LSN.set(ledger.durable.end_lsn)
        metrics.LIVE.delivered(record.committed_us / 1e6)
        self._counts: Mapping[str, int] = record.position.counts
        self._resumed = record

    @property
    def settled(self) -> bool:
        """Whether nothing that was taken is missing in Kafka."""
        waits = self._producer.open or self._waiting or self._names_wait
        return not (waits or self._committing is not None)

    @property
    def _names_wait(self) -> bool:
        """Whether names of tables are to be noted, which the slot must not pass before."""
        return self._table_names is not None and self._table_names.pending

    @property
    def uncommitted(self) -> bool:
        """Whether Kafka lacks something that was published, or has a transaction open."""
        return self._producer.open or self._ledger.outstanding

    def durable_lsn(self) -> int:
        """Return up to which LSN Kafka has everything."""
        return self._ledger.durable.end_lsn

    def next_due(self) -> float:
        """Return when to call `perform` (time.monotonic), if `wakes` does not come first."""
        if self._committing is not None or not self.uncommitted:
            return float("inf")
        return min(self._due, self._group_due)

    def take(self, batch: EventBatch) -> None:
        """Send a batch, or let it wait while Kafka commits. Block when too much waits."""
        if self._committing is not None and self._committing.done.done():
            self._end_commit(self._committing)
            self._send_waiting()
        if self._committing is None and not self._waiting:
            self._send(batch)
            return
        replaced = self._waiting.add(batch)
        if replaced is not None:
            self._count(replaced)
        while self._waiting.bytes >= min(WAITING_BYTES_MAX, self._bytes_max):
            self._await_commit()
            self._send_waiting()

    def hurry(self) -> None:
        """Commit as soon as possible: the server asks how far Kafka is."""
        self._due = 0.0

    def perform(self, now: float, *, behind: bool) -> None:
        """End a commit that is done, begin one that is due (`now`: time.monotonic).

        `behind`: there is more to read than was read just now; nobody waits for this very moment.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakes, 64)
        if self._committing is not None and self._committing.done.done():
            self._end_commit(self._committing)
            self._send_waiting()
        if self._committing is None and self.uncommitted:
            group_due = self._oldest + self._age_max_s if behind else self._group_due
            if now >= min(self._due, group_due):
                self._begin_commit()

    def finish(self) -> None:
        """Commit everything that was taken."""
        while self._waiting or self._committing is not None:
            self._await_commit()
            self._send_waiting()
        if self.uncommitted or self._ledger.ahead:
            self._begin_commit()
            self._await_commit()

    def require_visible(self) -> None:
        """Return once consumers see all that is committed. Raise Retryable where that hangs."""
        self._producer.markers.require_all_delivered()

    def note(self) -> None:
        """Commit the progress record once more, because its content has changed.

        That is the server's identity, or the ends of partitions. No other Kafka transaction is
        open.
        """
        self._producer.tails.hurry()
        self._begin_commit()
        self._await_commit()

    def report(self) -> None:
        """Tell the server how far Kafka is."""
        reach("before feedback")
        self._standby_status.send(follow=self.settled)
        reach("after feedback")

    def close(self) -> None:
        """End all work. A commit in progress may or may not succeed; `failure` tells its error."""
        if self._claim_checks is not None:
            self._claim_checks.cancel()
        if self._table_names is not None:
            self._table_names.cancel()
        self._producer.cancel()
        self._pool.shutdown(wait=True)
        if self._committing is not None:
            self.failure = self._committing.done.exception()
        self._committing = None  # it refers to us: without the cycle all is freed at once
        for end in (self.wakes, self._waker):
            os.close(end)

    def _send_waiting(self) -> None:
        while self._waiting and self._committing is None:
            self._send(self._waiting.next())

    def _send(self, batch: EventBatch) -> None:
        """Put a batch into the open Kafka transaction; part of a large one closes it at once."""
        self._reckon(batch)
        self._count(batch)
        if batch.events:
            self._producer.send(self._events_of(batch), Origins(batch))
            self._tally(batch)
            reach("part sent" if batch.position.seq else "sent")
        if batch.staging:
            self._producer.send(batch.staging)
            reach("decided" if batch.events else "staged")
        self._events += len(batch.events)
        self._bytes += batch.bytes
        if batch.counts is not None:
            self._counts = batch.counts
        if batch.stamp is not None:
            self._stamp = batch.stamp
        self._ledger.publish(batch.position)
        if batch.position.seq or self._bytes >= self._bytes_max:
            self._begin_commit()

    def _tally(self, batch: EventBatch) -> None:
        """Note for the metrics what the open Kafka transaction has, once a batch."""
        row_tally.count(batch.events, self._rows)
        if not self._opened:
            self._opened = time.monotonic()
            stamp = batch.ended[0].stamp if batch.ended else batch.stamp
            self._oldest_commit_us = stamp.commit_time_us if stamp is not None else 0

    def _count(self, batch: EventBatch) -> None:
        if batch.events:
            self._transactions += len(batch.ended) or not batch.position.seq
        if batch.dropped:
            metrics.DROPPED.inc(batch.dropped)
            reach("skipped")

    def _reckon(self, batch: EventBatch) -> None:
        """Set when the open transaction is to be committed, with `batch` in it."""
        now = time.monotonic()
        if not self.uncommitted:
            self._due = self._group_due = float("inf")
            self._grouped = 0
        content = bool(batch.events or batch.staging)
        if self._heartbeat.commits_wait:
            waits = content or self._names_wait or batch.position.end_lsn > self._ledger.ahead
            self._due = min(self._due, now if waits else now + self._heartbeat.interval_s)
        elif not content:
            self._due = min(self._due, now + self._age_max_s)
        else:
            self._oldest = self._oldest if self._grouped else now
            self._grouped += len(batch.ended) or 1
            due = min(self._oldest + COMPANY_S * self._grouped, now + QUIET_S)
            self._group_due = min(max(due, self._not_before), self._oldest + self._age_max_s)

    def _begin_commit(self) -> None:
        """Commit the open Kafka transaction with its progress record, in the other thread."""
        position = self._ledger.published
        record = self._record_of(position, self._counts, self._commit_at(position.commit_lsn))
        self._producer.begin()
        started = time.monotonic()
        reach("before kafka commit")
        done = self._pool.submit(self._commit, record)
        self._committing = Commit(done, record, started)
        done.add_done_callback(self._wake)
        reach("committing")

    def _commit(self, record: ProgressRecord) -> None:
        """Commit, once everything is stored that events refer to. Runs in the other thread."""
        if self._claim_checks is not None:
            self._claim_checks.require_stored()
            reach("claims stored")
        if self._table_names is not None:
            ends = self._table_names.require_noted(record.position.end_lsn)
            if ends:
                self._producer.tails.learn(ends)
                self._producer.tails.hurry()
        self._producer.commit(record)

    def _commit_at(self, lsn: int) -> WalCommit:
        """Return the commit at `lsn`: the last that arrived, or that the session resumed after.

        A message outside of a transaction has none.
        """
        for known in (self._stamp, self._resumed.position):
            if known is not None and known.commit_lsn == lsn and known.xid:
                return WalCommit(known.xid, known.commit_time_us)
        return NO_COMMIT

    def _wake(self, _done: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"!")

    def _await_commit(self) -> None:
        """Wait for Kafka's commit, and answer the server meanwhile."""
        while (commit := self._committing) is not None:
            if wait((commit.done,), self._standby_status.interval_s).done:
                self._standby_status.heard(time.monotonic())  # we did not listen meanwhile
                self._end_commit(commit)
            else:
                self._standby_status.answer()

    def _end_commit(self, commit: Commit) -> None:
        """Confirm to the slot what Kafka has committed. Raise what the commit has raised."""
        commit.done.result()
        self._committing = None
        reach("after kafka commit")
        self._ledger.commit(commit.record.position.ahead_lsn)
        took_s = time.monotonic() - commit.started
        self._not_before = commit.started + max(SPACING_MIN_S, took_s)
        metrics.COMMIT_SECONDS.observe(took_s)
        metrics.EVENTS.inc(self._events)
        metrics.TRANSACTIONS.inc(self._transactions)
        metrics.EVENT_BYTES.inc(self._bytes)
        metrics.DURABLE_LSN.set(self._ledger.durable.end_lsn)
        self._count_delivery()
        self._events = self._bytes = self._transactions = 0
        self.report()
        if commit.record.position.seq:
            reach("between parts")
        if self._producer.done:
            raise RefusalLearned(
                "the refused records are known, or not read again: full batches again",
                operation="stream",
                subject=self._subject,
            )

    def _count_delivery(self) -> None:
        """Publish what the Kafka transaction that was just committed brought, and how late."""
        if self._opened:
            metrics.TRANSACTION_SECONDS.observe(time.monotonic() - self._opened)
            metrics.count_rows(self._rows)
            self._rows.clear()
            self._opened = 0.0
        if self._oldest_commit_us:
            metrics.LAG_SECONDS.observe(max(0.0, time.time() - self._oldest_commit_us / 1e6))
            self._oldest_commit_us = 0
        if self._stamp is not None and not self._ledger.durable.seq:
            metrics.LIVE.delivered(self._stamp.commit_time_us / 1e6)
        self._heartbeat.delivered(self._ledger.durable.end_lsn)
