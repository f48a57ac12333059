"""Kafka transactions: the events and the progress record that covers them, together or not at all.

A transaction opens at the first record and ends in `commit`. Whatever goes wrong, the caller drops
this object; a new one's `begin_session` aborts what was open and fences what is still alive.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from schemas.acceptance import Acceptance
from schemas.errors import ExitCode, Retryable, SlotbridgeError
from schemas.events import dead_topic, progress_topic
from schemas.lsn import format_lsn
from schemas.progress import ProgressRecord
from schemas.settings import BridgeSettings, KafkaSettings
from services.bridge import metrics
from services.bridge.events.event import Event
from services.bridge.sink.batch_produce import partition_of
from services.bridge.sink.dead_letters import (
    Origin,
    Origins,
    RefusalLearned,
    Refused,
    Sent,
    letter,
    may_be_dead,
    may_be_known,
    no_place,
    refusal,
)
from services.bridge.sink.leader_epochs import cut_off
from services.bridge.sink.markers import MarkerCheck
from services.bridge.sink.offsets import count_partitions
from services.bridge.sink.options import MESSAGE_BYTES_MAX, producer_options
from services.bridge.sink.partition_ends import Tails
from services.bridge.sink.producer_pair import ProducerPair
from services.bridge.sink.topics import Topics
from services.kafka.client import RECORD_REFUSALS, TOPIC_REFUSALS, TopicRefused, kafka_error

logger = structlog.get_logger(__name__)

COMMIT_ATTEMPT_S: Final = 1.0
_BATCH_EVENTS: Final = 2_000
_QUEUE_FULL_PAUSE_S: Final = 0.005
ABORT_TIMEOUT_S: Final = 5.0
REPORT_TIMEOUT_S: Final = 5.0
NOWHERE: Final = Origin(0, 0, None)


class TransactionalProducer:
    """One session's producer. Only one thread may use it at a time."""

    def __init__(
        self,
        kafka: KafkaSettings,
        bridge: BridgeSettings,
        topics: Topics,
        slot: str,
        refused: Refused | None = None,
    ) -> None:
        """Make two producers, and `markers`, whose `look` hanging.settle_all sets."""
        self.tails = Tails(slot, kafka.topic_prefix, partial(cut_off, kafka))
        self.markers = MarkerCheck(topics, lambda: None, self.tails.judge)
        self._touched: set[str] = set()
        self._counts: dict[str, int] = {}
        self._waiter = topics.waiter
        self._cancelled = threading.Event()
        self._topics = topics
        self._slot = slot
        self._prefix = kafka.topic_prefix
        self._progress_topic = progress_topic(kafka.topic_prefix)
        self._subject = f"slot {slot}"
        self._deadline_s = bridge.transaction_timeout_ms / 1000
        self._dead_letters = bridge.on_refused == "dead_letter"
        self._refused = refused or Refused()
        self._careful = self._refused.careful_until is not None
        self._limits = topics.message_bytes_max(*self._refused.topics)
        self._message_bytes_max = int(kafka.options.get("message.max.bytes", MESSAGE_BYTES_MAX))
        options = producer_options(kafka, bridge, slot, self._limits.values(), self._careful)
        self._pair = ProducerPair(options, topics.waiter, subject=self._subject)
        self._ready = {self._progress_topic: 1}
        """Topics that exist, and how many partitions each has for this session."""
        self._denied: dict[str, TopicRefused] = {}
        self._dead: Counter[tuple[str, str]] = Counter()
        self._culprits: list[tuple[Event, Origin, str]] = []
        self._sent = Sent()
        self.open = False
        """Whether a transaction is open."""
        self.done = False
        """A careful session's work is done: the next session goes on with full batches."""

    @property
    def _producer(self) -> Producer:
        return self._pair.current

    def begin_session(self) -> None:
        """Fence other producers of this slot and end what they left open (init_transactions)."""
        self._pair.begin_session()

    def follow(self, record: ProgressRecord | None, accepted: Acceptance) -> None:
        """Let the next Kafka transaction follow that of `record`, the last one that is visible.

        Raise OperatorNeeded where Kafka has lost what was written by then, unless it is `accepted`.
        """
        self._pair.follow(record)
        self.tails.start(self._topics, record, accepted)

    def settle(
        self, records: Sequence[tuple[int, Event]], turns: Iterable[int], *, commit: bool
    ) -> None:
        """Write `records` and commit or abort, as the producer of each of `turns`.

        Each record goes into the partition before it. The producer's marker also ends what an
        earlier session of that producer has left open there.
        """
        for turn in turns:
            self._pair.turn = turn
            self.open = True  # without a look at what hangs: it is ended here
            self._pair.settle(records, commit=commit)
            self.open = False

    def send(self, events: Sequence[Event], origins: Origins | None = None) -> None:
        """Add `events`, which are of `origins`, to the open Kafka transaction, begun if need be.

        The session's other work goes on meanwhile. A record that can't be sent goes to the dead
        letters if the settings say so; else it raises BadInput (RECORD_REFUSED) or SetupError that
        names it.
        """
        self.begin()
        if origins is not None:
            self._sent.add(events, origins)
        events, count = list(events), len(events)
        for since in range(0, count, _BATCH_EVENTS):
            if since:
                self._waiter.turn()
            self._send_some(events, since, min(since + _BATCH_EVENTS, count), origins)

    def _send_some(
        self, events: Sequence[Event], index: int, end: int, origins: Origins | None
    ) -> None:
        """Send events[index:end]: many at once, but singly those that call for care."""
        send = self._pair.send
        while index < end:
            if not (self._careful or self._refused.records):
                since, index = index, send(events, index, end, self._ready, self._touched)
                if index > since:
                    self._counts.clear()
            if index < end:
                if events[index].topic not in self._ready:
                    self._topics.make_all({e.topic for e in events[index:end]}, self._denied)
                self._send_one(events[index], NOWHERE if origins is None else origins.of(index))
                index += 1

    def _send_one(self, event: Event, origin: Origin) -> None:
        """Send one event, with regard to what is known of this record and its topic."""
        denied = None
        if event.topic and event.topic not in self._ready:
            denied = self._prepare(event.topic)
        denied = denied or no_place(event, self._ready)
        if denied is not None:
            self._refuse(event, origin, denied.message, denied)
            return
        if (reason := self._refused.reason(event, origin)) is not None:
            self._refuse(event, origin, reason)
        elif event.broadcast:
            for partition in range(self._partitions_of(event.topic)):
                self._produce(event, partition, origin)
        else:
            self._counts.clear()
            partition = partition_of(event.placed_by, self._ready[event.topic])
            self._produce(event, partition, origin)

    def _partitions_of(self, topic: str) -> int:
        """Count a topic's partitions, with those added since, so that all get a broadcast event."""
        if topic not in self._counts:
            self._waiter.turn()
            count = count_partitions(self._producer, topic)
            self._counts[topic] = max(self._topics.partitions(topic), count)
        return self._counts[topic]

    def commit(self, record: ProgressRecord) -> None:
        """Add the progress record and commit. Blocks; retries until the transaction's time-out.

        May run in a thread of its own; `cancel` ends it early.
        """
        self.begin()
        self.tails.learn(self.markers.ends())
        kafka = self.tails.note_all(self._pair.turn)
        value = record.model_copy(update={"kafka": kafka}).model_dump_json().encode()
        self._produce(
            Event(self._progress_topic, self._slot.encode(), value), 0, NOWHERE, in_session=False
        )
        self._commit_open(time.monotonic() + self._deadline_s)
        self._log_dead_letters()
        if self._careful and not record.position.seq:
            now = time.monotonic()
            self.done = self._refused.passed(record.position.commit_lsn, self._sent, now)

    def _commit_open(self, deadline: float) -> None:
        """Commit the open transaction; try again on retriable errors until `deadline`."""
        asked = False
        while True:
            try:
                if not asked and self._producer.flush(COMMIT_ATTEMPT_S) == 0:
                    self.markers.flushed(self._touched)
                    asked = True
                self._producer.commit_transaction(COMMIT_ATTEMPT_S)
            except KafkaException as error:
                cause = error.args[0]
                again = cause.retriable() and not cause.txn_requires_abort()
                if not again or time.monotonic() > deadline or self._cancelled.is_set():
                    raise self._failed(error, "commit to Kafka", self._subject) from error
            else:
                break
        if not asked:
            self.markers.flushed(self._touched)
        self.open = False
        self._pair.pass_on()

    def cancel(self) -> None:
        """Let a commit in another thread give up soon; whether it came through is then unknown."""
        self._cancelled.set()

    def abandon(self) -> None:
        """End the session: abort what is open, as far as the broker lets us, and drop the queue."""
        self.markers.close()
        self._producer.purge()
        if self.open:
            with contextlib.suppress(KafkaException):  # the next session's begin_session aborts it
                self._producer.abort_transaction(ABORT_TIMEOUT_S)
        self.open = False

    def begin(self) -> None:
        """Open a Kafka transaction, if none is."""
        if not self.open:
            self._pair.poll()
            self.markers.require_delivered()
            self._touched, self._counts, self._sent.read_rows = set(), {}, False
            self._pair.begin()
            self.open = True

    def _prepare(self, topic: str) -> TopicRefused | None:
        """Make `topic` if it is missing; return why it takes no records, None if it does."""
        if topic in self._denied:
            return self._denied[topic]
        try:
            partitions = self._topics.partitions(topic)
            if self._careful or topic in self._refused.topics:
                self._topics.check_writable(topic)
        except TopicRefused as error:
            self._denied[topic] = error
            self._refused.topics.add(topic)
            return error
        self._ready[topic] = partitions
        return None

    def _produce(
        self,
        event: Event,
        partition: int,
        origin: Origin,
        *,
        in_session: bool = True,
    ) -> None:
        """Produce a record; `in_session`: in the session's thread, whose work goes on meanwhile."""
        deadline = 0.0
        self._touched.add(event.topic)
        delivered = partial(self._delivered, event, origin)
        extra: Any = {"on_delivery": delivered} if self._careful else {}
        while True:
            try:
                self._producer.produce(
                    event.topic, event.value, event.key, partition, headers=event.headers, **extra
                )
            except BufferError:
                deadline = deadline or time.monotonic() + self._deadline_s
                if time.monotonic() > deadline or self._cancelled.is_set():
                    raise self._stalled() from None
                self._await_room(f"topic {event.topic}")
                if in_session:
                    self._waiter.turn()
            except KafkaException as error:
                cause = error.args[0]
                if cause.code() not in RECORD_REFUSALS or cause.txn_requires_abort():
                    raise self._failed(error, "produce", f"topic {event.topic}") from error
                self._refuse(event, origin, cause.str())
                return
            else:
                return

    def _await_room(self, subject: str) -> None:
        try:
            self._producer.poll(_QUEUE_FULL_PAUSE_S)
        except KafkaException as error:
            raise self._failed(error, "produce", subject) from error

    def _delivered(
        self, event: Event, origin: Origin, error: KafkaError | None, _message: object
    ) -> None:
        if error is not None and error.code() in RECORD_REFUSALS:
            self._culprits.append((event, origin, error.str()))

    def _refuse(
        self, event: Event, origin: Origin, reason: str, cause: SlotbridgeError | None = None
    ) -> None:
        """Send the dead letter of `event` instead, or raise the error that names it."""
        avoidable = may_be_dead(event, self._prefix)
        if not (avoidable and (self._dead_letters or not event.table)):  # as any login writes
            raise refusal(event, origin, reason, cause, avoidable=avoidable)
        topic = self._topics.prepare_late(dead_topic)
        self._ready[topic] = 1
        bytes_max = min(self._message_bytes_max, self._limits.get(topic, MESSAGE_BYTES_MAX))
        if not self._dead:
            logger.warning(
                "Kafka refuses a record: writing it to the dead letters",
                reason=reason,
                topic=event.topic,
                table=event.table,
                commit_lsn=format_lsn(origin.commit_lsn),
                xid=origin.xid,
                seq=event.seq,
            )
        self._dead[event.topic, reason] += 1
        now_ms = time.time_ns() // 1_000_000
        dead = letter(event, origin, reason, topic=topic, bytes_max=bytes_max, now_ms=now_ms)
        self._produce(dead, 0, origin)

    def _log_dead_letters(self) -> None:
        for (topic, reason), count in self._dead.items():
            metrics.DEAD_LETTERS.inc(count)
            logger.warning("dead letters committed", topic=topic, reason=reason, count=count)
        self._dead.clear()

    def _failed(self, error: KafkaException, operation: str, subject: str) -> SlotbridgeError:
        """Return the error for a failure of the open transaction.

        Note in `Refused` what the next session must know.
        """
        error = self._reported(self._reason(error))
        code, refused = error.args[0].code(), self._refused
        for event, origin, reason in self._culprits:
            avoidable = may_be_known(event, origin, self._prefix)
            if not (avoidable and (self._dead_letters or not event.table)):
                return refusal(event, origin, reason, avoidable=avoidable)
            refused.note(event, origin, reason)
        if self._culprits:
            what = f"{len(self._culprits)} records are refused and will be dead letters"
        elif code in RECORD_REFUSALS + TOPIC_REFUSALS and not self._careful:
            what = f"a record is refused ({error.args[0].str()}); looking for it"
            refused.topics |= self._ready.keys() - self._limits
        else:
            return kafka_error(error, operation, subject)
        refused.take_care(self._sent)
        return RefusalLearned(
            what,
            operation=operation,
            subject=subject,
            hint="the bridge sends the transaction again, record by record",
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )

    def _reported(self, error: KafkaException) -> KafkaException:
        """Serve the delivery reports; a culprit's own may come after the failure it has caused."""
        awaited = self._careful and error.args[0].code() in RECORD_REFUSALS
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        try:
            self._producer.poll(0)
            while awaited and not self._culprits and time.monotonic() < deadline:
                self._producer.poll(_QUEUE_FULL_PAUSE_S)
        except KafkaException as fatal:  # fenced: it says so here, and less clearly elsewhere
            return fatal
        return error

    def _reason(self, error: KafkaException) -> KafkaException:
        """Return why the transaction has failed, where `error` only says that it has."""
        if error.args[0].code() == KafkaError._STATE:
            try:
                self._producer.commit_transaction(COMMIT_ATTEMPT_S)
            except KafkaException as reason:
                return reason
        return error

    def _stalled(self) -> SlotbridgeError:
        return Retryable(
            f"the broker has accepted no records for {self._deadline_s:.0f} s",
            operation="produce",
            subject=self._subject,
            hint="check that the broker runs, and that its disk is not full",
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )
