"""Runs the streaming query over `<prefix>.transaction` whose micro-batches are epochs.

A micro-batch is a range of that topic's offsets, so a set of whole transactions, in commit order.
It is one epoch, or several: an epoch ends before a transaction that changes a shape, and has a
limit of events. What a batch brings is told from its transactions' LSNs; a batch that Spark hands
out again after a kill changes nothing.

    main thread        waits for the end: a signal, a failure, nothing to read; maintains when idle
    the query's own    `_batch`: takes the batch's records, brings its epochs, one after the other
"""

import threading
import time
from collections.abc import Callable, Mapping

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from schemas.tables import TablesSettings
from spark_consumers.epochs.audit_log import AuditLog
from spark_consumers.epochs.checkpoint import Checkpoint
from spark_consumers.epochs.epoch_runner import EpochRunner
from spark_consumers.epochs.last_epoch import late
from spark_consumers.epochs.listener import BatchListener
from spark_consumers.epochs.metrics import Metrics
from spark_consumers.epochs.report import EpochReport
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import sums
from spark_consumers.kafka.snapshots import SnapshotTail
from spark_consumers.session import local_folder

log = structlog.get_logger()
_POLL_S = 0.1
_REDO_DEADLINE_S = 60.0
_LOOK_EVERY_S = 10.0
_LOOK_DEADLINE_S = 2.0
CHECKPOINTS = "_checkpoints"
"""The folder in the warehouse that has the checkpoints, one for each namespace."""


class _EndedError(Exception):
    """The error that Spark gets when a micro-batch fails: without values and causes."""


def show_behind(metrics: Metrics, runner: EpochRunner) -> None:
    """Let metrics and waits know which tables stay behind the record of epochs."""
    record, states = runner.record, runner.states
    dropped = [name for name in record.tables if name not in states and runner.follows(name)]
    metrics.parked(runner.parking.tables, late(states, dropped, record.commit_lsn))


class Stream:
    """One query, from its start to its end."""

    def __init__(
        self,
        spark: SparkSession,
        settings: TablesSettings,
        runner: EpochRunner,
        metrics: Metrics,
        report: Callable[[EpochReport], None],
        stop: threading.Event,
        snapshots: SnapshotTail | None,
    ) -> None:
        """`snapshots`: of the bridge's slot; None where the slot is not known."""
        self._spark = spark
        self._settings = settings
        self._runner = runner
        self._metrics = metrics
        self._report = report
        self._stop = stop
        self._snapshots = snapshots
        self._name = f"slottables {runner.namespace}"
        place = settings.checkpoint_location or f"{local_folder(settings)}/{CHECKPOINTS}"
        self._checkpoint = Checkpoint(spark, f"{place}/{runner.namespace}", runner.topic.name)
        self._working = threading.Lock()
        self._ending = False
        self._failure: BaseException | None = None
        self._read_to = 0
        """The offset up to which all micro-batches are done."""
        self._from_first = False
        """Whether tables that have nothing yet read the topic from its first record on."""
        self._maintained = time.monotonic()
        self._audits = AuditLog(runner.namespace)
        self._next_look = self._next_request = self._maintained

    def run(self, *, until_idle_s: float | None, once: bool) -> None:
        """Run epochs until `stop` is set; finish the epoch under way first.

        `once`: end when the tables have all that Kafka has at the start. `until_idle_s`: end when
        nothing has come for that time. Raise what failed in an epoch unchanged, and what failed in
        the query as a StreamingQueryException.
        """
        if not self._await_topic(until_idle_s, once=once):
            return
        self._show_tables({})
        listener = BatchListener(self._name, self._metrics)
        self._spark.streams.addListener(listener)
        try:
            query = self._start(once=once)
            try:
                self._watch(query, until_idle_s)
                if once:
                    self._finish(query)
            finally:
                self._end(query)
        finally:
            self._spark.streams.removeListener(listener)
        if once and not self._stop.is_set():
            self._runner.require_redone()

    def _await_topic(self, until_idle_s: float | None, *, once: bool) -> bool:
        """Wait until the bridge has made the topic; whether it has."""
        started = time.monotonic()
        while not self._runner.topic.exists():
            waited_s = time.monotonic() - started
            idle = until_idle_s is not None and waited_s >= until_idle_s
            self._metrics.health.worked()
            if once or idle or self._stop.wait(_POLL_S):
                self._runner.require_redone()
                return False
        return not self._stop.is_set()

    def _start(self, *, once: bool) -> StreamingQuery:
        """Start the query where the tables are: on its checkpoint if that agrees with them."""
        offset = self._runner.topic.require(self._runner.offset)
        record = self._runner.record
        known = record.transaction_offset is not None
        before = known or self._runner.goes_on
        self._runner.topic.require_same(record.transaction_topic_id, before=before)
        self._runner.small_topics.require_same()
        self._from_first = offset == 0 and not before
        taken = self._take_checkpoint(offset)
        read_to = self._runner.offset
        self._read_to = offset if read_to is None else read_to
        self._show_read()
        settings = self._settings
        source = self._spark.readStream.format("kafka").options(**self._runner.topic.options())
        source = source.option("startingOffsets", self._runner.topic.at(offset))
        most = settings.transaction_offsets_per_trigger_max
        records = source.option("maxOffsetsPerTrigger", most).load()
        writer = records.writeStream.queryName(self._name).foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", self._checkpoint.location)
        interval = f"{settings.trigger_interval_ms} milliseconds"
        started = (
            writer.trigger(availableNow=True) if once else writer.trigger(processingTime=interval)
        ).start()
        log.info("streaming", offset=offset, checkpoint="taken" if taken else "new")
        return started

    def _take_checkpoint(self, offset: int) -> bool:
        """Tell whether the query can go on from its checkpoint; remove one that does not agree."""
        if not self._checkpoint.exists():
            return False
        found = self._checkpoint.progress()
        known = self._runner.offset is not None
        if found is not None and known and (found.agrees(offset) or self._agrees(found.start)):
            return True
        log.warning(
            "the checkpoint does not agree with the tables: the query begins where they are",
            checkpoint=self._checkpoint.location,
            tables_offset=offset,
            checkpoint_offset=found and found.start,
        )
        self._checkpoint.remove()
        return False

    def _agrees(self, start: int) -> bool:
        """Tell whether a checkpoint is ahead of the tables only by transactions without events.

        Take them in then: the query does not bring them again.
        """
        offset = self._runner.offset
        if offset is None or self._runner.redoes:
            return False
        if not offset <= start <= self._runner.topic.stable():
            return False
        records = self._runner.topic.between(self._spark, offset, start)
        if self._runner.brings(records):
            return False
        self._runner.take(records, start)
        return True

    def _batch(self, records: DataFrame, number: int) -> None:
        """Bring the epochs of one micro-batch; the query calls this for each."""
        try:
            end = self._take(records, number)
            while self._bring():
                pass
            self._read_to = end
            self._show_read()
        except BaseException as error:
            if not isinstance(error, _EndedError):
                self._failure = error
            # Spark logs what it gets, and an error may name values.
            raise _EndedError("slottables ends this micro-batch, and says why itself") from None

    def _show_read(self) -> None:
        """Let waits for the tables know how far they are, unless an epoch is yet to be made.

        Without a record of epochs that is one which reads all tables again.
        """
        outstanding = self._runner.redoes or self._runner.waiting()[0]
        known = self._runner.record.transaction_offset is not None
        if not outstanding and (self._from_first or known):
            self._metrics.read_to(self._read_to)

    def _take(self, records: DataFrame, number: int) -> int:
        """Take in a micro-batch; return where it ends. Raise where another program took it."""
        with self._working:
            self._require_going_on()
            end = self._checkpoint.end(number)
            if end is None:
                raise self._overtaken()
            self._runner.take(records, end)
            self._metrics.waiting(*self._runner.waiting())
        return end

    def _bring(self) -> bool:
        """Bring the next epoch; whether there may be another one."""
        with self._working:
            if self._runner.waiting()[0]:
                self._require_going_on()
            return self._step()

    def _step(self) -> bool:
        """Bring the next epoch, if there is one; whether there was. Call it with `_working`."""
        self._show_rebuilds()
        done = self._runner.step()
        self._metrics.waiting(*self._runner.waiting())
        self._metrics.health.worked()
        self._show_rebuilds()
        if done is not None:
            self._show_tables(self._runner.parking.seconds)
            self._report(done)
            self._maintain()
        return done is not None

    def _show_rebuilds(self) -> None:
        self._metrics.rebuilding(self._runner.rebuilds.progress(self._runner.states))
        show_behind(self._metrics, self._runner)

    def _show_tables(self, seconds: Mapping[str, float]) -> None:
        """Let the metrics have how far each table is; `seconds`: of their parts of an epoch."""
        parked = self._runner.parking.tables.items()
        lsns = {n: s.commit_lsn for n, s in self._runner.states.items() if not sums.is_sums(n)}
        lsns |= {n: p.parked.commit_lsn for n, p in parked if not sums.is_sums(n)}
        self._metrics.reached(lsns, seconds)

    def _look_around(self) -> None:
        """Let the metrics have what other programs tell: audits, and snapshots of the bridge."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        self._show_filling()
        try:
            self._metrics.audited(self._audits.findings(self._spark))
        except FOREIGN as error:
            failure = translated(error, "read the results of audits")
            log.warning("the metrics of audits are out of date", error=str(failure))

    def _show_filling(self) -> None:
        """Show in metrics which tables a snapshot has yet to fill."""
        if self._snapshots is None:
            return
        filling = []
        try:
            progress = self._snapshots.read(_LOOK_DEADLINE_S)
            lsn = self._runner.record.commit_lsn
            filling = progress.filling(list(self._runner.states), lsn)
        except SlotbridgeError as error:
            log.warning("not judged: which tables a snapshot has yet to fill", error=str(error))
        self._metrics.filling(filling)

    def _overtaken(self) -> Retryable:
        return Retryable(
            "another program has changed the checkpoint of the streaming query",
            operation="apply an epoch",
            subject=self._checkpoint.location,
            hint="run one slottables for each namespace",
            exit_code=ExitCode.LOCKED,
        )

    def _require_going_on(self) -> None:
        if self._ending or self._stop.is_set():
            raise _EndedError("slottables stops")

    def _watch(self, query: StreamingQuery, until_idle_s: float | None) -> None:
        """Wait for the end of the query, or for a reason to end it."""
        idle_since, judged = time.monotonic(), False
        while query.isActive and not self._stop.wait(_POLL_S):
            self._look_around()
            if not self._working.acquire(blocking=False):
                idle_since = time.monotonic()
                continue
            try:
                self._maintain()
                works = self._work_alone()
            finally:
                self._working.release()
            if until_idle_s is None and not self._runner.redoes:
                continue
            if works or self._runner.topic.stable() > self._read_to:
                idle_since, judged = time.monotonic(), False
            idle_s = time.monotonic() - idle_since
            if idle_s >= _REDO_DEADLINE_S and not judged:
                self._runner.require_redone()
                judged = True
            if until_idle_s is not None and idle_s >= until_idle_s:
                if not judged:
                    self._runner.require_redone()
                break

    def _work_alone(self) -> bool:
        """Do what does not wait for transactions; whether there may be more. Needs `_working`."""
        if time.monotonic() >= self._next_request:
            self._next_request = time.monotonic() + _LOOK_EVERY_S
            self._runner.look_for_requests()
        if not self._runner.works_alone:
            return False
        self._step()
        self._show_read()
        return True

    def _finish(self, query: StreamingQuery) -> None:
        """Bring what does not wait for transactions to its end, once the query has ended well."""
        while self._failure is None and query.exception() is None and not self._stop.is_set():
            with self._working:
                if not self._work_alone():
                    break

    def _end(self, query: StreamingQuery) -> None:
        """End the query after the epoch under way; raise what it ended with by itself."""
        ended = not query.isActive
        self._ending = True
        with self._working:
            pass
        query.stop()
        if self._failure is not None:
            raise self._failure
        error = query.exception() if ended else None
        if error is not None and not self._stop.is_set():
            if self._checkpoint.query() != str(query.id):
                raise self._overtaken() from error
            raise error

    def _maintain(self) -> None:
        """Maintain the tables where it is time to; between two epochs."""
        interval_s = self._settings.maintenance_interval_ms / 1000
        if 0 < interval_s <= time.monotonic() - self._maintained:
            self._runner.maintain()
            self._metrics.health.worked()
            self._maintained = time.monotonic()
