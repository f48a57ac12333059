"""Finds the epoch that has exactly what commits before an LSN, once `run` has brought it.

    ask      `run` ends an epoch before what commits at the LSN (epochs/audit_log)
    witness  Kafka has all that commits before the LSN: the bridge's progress record is there
    target   the last transaction with events of the tables before the LSN: the epoch ends with it
    epoch    the record of epochs has one with the target's commit LSN; of several, the last

The target is read from the transaction topic, so that an epoch is not believed to be the cut
because it was asked for. `run` may have gone beyond the LSN before it could see the request: then
there is not such an epoch, and the audit takes another snapshot.
"""

import threading
import time
from collections.abc import Callable

from pyspark.sql import SparkSession

from schemas.errors import ExitCode, OperatorNeeded, Retryable
from schemas.progress import ProgressRecord
from schemas.settings import Settings, require
from spark_consumers.audit.source_snapshot import OPERATION
from spark_consumers.epochs.ledger import EpochRecord, Ledger
from spark_consumers.epochs.small_topics import expect_noted_ids
from spark_consumers.failures import FOREIGN
from spark_consumers.iceberg import catalog
from spark_consumers.kafka.divergence import Divergences
from spark_consumers.kafka.progress import ProgressTail
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.transaction_topic import TransactionTopic

_POLL_S = 0.2
_RUNNING = "see that bridge and `slottables run` are running, or raise tables.audit_deadline_ms"


class Cuts:
    """The positions that Kafka and the record of epochs tell."""

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        follows: Callable[[str], bool],
        stop: threading.Event,
    ) -> None:
        kafka, tables = require(settings.kafka, "kafka"), require(settings.tables, "tables")
        topics = TopicOffsets(kafka)
        self._spark = spark
        self._stop = stop
        self._deadline_s = tables.audit_deadline_ms / 1000
        self._topics = topics
        self._topic = TransactionTopic(kafka, topics, follows)
        self._progress = ProgressTail(kafka, topics, require(settings.source, "source").slot)
        self._divergences = Divergences(kafka, topics)
        self._ledger = Ledger(catalog.namespace(kafka, tables), tables)
        # The audit tells of ids that were not noted where it reads the shapes.
        expect_noted_ids(self._divergences.tail, self._ledger, spark, before=False)

    def close(self) -> None:
        """Close the connections to the broker."""
        self._progress.close()
        self._divergences.close()

    def progress(self) -> ProgressRecord:
        """Return what the bridge has brought to Kafka, of which server."""
        return self._progress.last()

    def last_epoch(self) -> EpochRecord | None:
        """Return the last epoch that is recorded, None before the first."""
        return self._ledger.last(self._spark)

    def epoch_before(self, lsn: int, timeline: int) -> EpochRecord | None:
        """Wait for the epoch of exactly what commits before `lsn`; None where `run` missed it.

        Raise Retryable (NOT_JUDGED) where Kafka or `run` does not come so far within the deadline,
        OperatorNeeded (TIMELINE) after a failover.
        """
        deadline = time.monotonic() + self._deadline_s
        self._await_kafka(lsn, timeline, deadline)
        target = self._target(lsn)
        while True:
            last = self._ledger.last(self._spark)
            if last is not None and last.commit_lsn == target:
                return last
            if last is not None and last.commit_lsn > target:
                # Of epochs with one LSN the last has the rows that readers have: a rebuild's.
                kept = reversed(self._ledger.all(self._spark))
                return next((e for e in kept if e.commit_lsn == target), None)
            self._pause(lsn, deadline, "`slottables run` has not brought the tables there yet")

    def _await_kafka(self, lsn: int, timeline: int, deadline: float) -> None:
        """Wait until Kafka has all that commits before `lsn`."""
        while True:
            record = self._progress.last()
            present = record.server.timeline
            if present != timeline:
                raise OperatorNeeded(
                    f"Kafka's events are of timeline {present} now: a failover has happened",
                    operation=OPERATION,
                    lsn=lsn,
                    hint="audit again",
                    exit_code=ExitCode.TIMELINE,
                )
            if record.position.end_lsn >= lsn:
                break
            self._pause(lsn, deadline, "the bridge has not brought Kafka there yet")
        self._divergences.require_none()

    def _target(self, lsn: int) -> int:
        """Return the commit LSN of the last transaction before `lsn` that the tables follow.

        Kafka has it: its progress record was seen before.
        """
        kept = [e for e in self._ledger.all(self._spark) if e.commit_lsn < lsn]
        if not kept:
            raise self._not_judged(lsn, "there is not an epoch from before the snapshot")
        base = kept[-1]
        topic = self._topic
        topic.exists()
        before = base.transaction_offset is not None
        topic.require_same(base.transaction_topic_id, before=before)
        start = base.transaction_offset or 0
        try:
            return self._last(base.commit_lsn, start, lsn)
        except (OperatorNeeded, *FOREIGN) as error:
            if topic.first() <= start:
                raise
            raise self._not_judged(
                lsn,
                "Kafka has deleted transactions since the last epoch before the snapshot: nobody "
                "can tell which one was the last",
                hint=f"keep {topic.name} for longer (retention.ms), and audit again",
            ) from error

    def _last(self, base_lsn: int, offset: int, lsn: int) -> int:
        """Return the commit LSN of the last transaction before `lsn` from `offset` on.

        Return `base_lsn` where there is none. Raise OperatorNeeded, or Spark's error, where Kafka
        does not have all records from there on, also if it deletes them while they are read.
        """
        topic = self._topic
        start, end = topic.require(offset), self._written()
        if start >= end:
            return base_lsn
        ends = topic.ends(topic.between(self._spark, start, end), base_lsn)
        found = [e.commit_lsn for e in ends if e.counts and e.commit_lsn < lsn]
        return max(found, default=base_lsn)

    def _written(self) -> int:
        """Return the end of the transaction topic, once it shows all that is written there now."""
        name = self._topic.name
        end = self._topics.written({name: (0,)})[name][0]
        deadline = time.monotonic() + self._deadline_s
        while self._topic.stable() < end:
            self._pause(0, deadline, "a Kafka transaction does not end")
        return end

    def _pause(self, lsn: int, deadline: float, why: str) -> None:
        if time.monotonic() > deadline:
            raise self._not_judged(lsn, why)
        if self._stop.wait(_POLL_S):
            raise self._not_judged(lsn, "the audit was stopped")

    @staticmethod
    def _not_judged(lsn: int, why: str, hint: str = _RUNNING) -> Retryable:
        return Retryable(
            why,
            operation=OPERATION,
            lsn=lsn or None,
            hint=hint,
            exit_code=ExitCode.NOT_JUDGED,
        )
