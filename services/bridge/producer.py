"""Kafka transactions: the events and the progress record that covers them, together or not at all.

A transaction opens at the first record and ends in `commit`. Whatever goes wrong, the caller drops
this object; a new one's `begin_session` aborts what was open and fences what is still alive.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from confluent_kafka import KafkaException, Producer

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from schemas.events import ProgressRecord, progress_topic
from schemas.settings import BridgeSettings, KafkaSettings
from services.bridge.envelope import Event
from services.bridge.topics import Topics, client_options, kafka_error, make_client

INIT_TIMEOUT_S: Final = 30.0
COMMIT_ATTEMPT_S: Final = 1.0
_QUEUE_FULL_PAUSE_S: Final = 0.1
ABORT_TIMEOUT_S: Final = 5.0


class TransactionalProducer:
    """One session's producer. Only one thread may use it at a time."""

    def __init__(
        self,
        kafka: KafkaSettings,
        bridge: BridgeSettings,
        topics: Topics,
        slot: str,
        *,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._while_waiting = while_waiting
        self._cancelled = threading.Event()
        self._topics = topics
        self._slot = slot
        self._progress_topic = progress_topic(kafka.topic_prefix)
        self._subject = f"slot {slot}"
        self._deadline_s = bridge.transaction_timeout_ms / 1000
        self._producer = make_client(
            Producer,
            {
                "compression.type": "lz4",
                "linger.ms": 10,
                "queue.buffering.max.messages": 200_000,
                "queue.buffering.max.kbytes": 65_536,
                "batch.size": 262_144,
                **client_options(kafka),
                "partitioner": "murmur2_random",
                "transactional.id": f"slotbridge.{kafka.topic_prefix}.{slot}",
                "transaction.timeout.ms": bridge.transaction_timeout_ms,
                "enable.idempotence": True,
            },
        )
        self._ready: set[str] = set()
        self.open = False
        """Whether a transaction is open."""

    def begin_session(self) -> None:
        """init_transactions: fence other producers of this slot and end what they left open."""
        try:
            self._producer.init_transactions(INIT_TIMEOUT_S)
        except KafkaException as error:
            raise kafka_error(error, "init transactions", self._subject) from error

    def send(self, events: Sequence[Event]) -> None:
        """Add `events` to the open transaction, which is begun when there is none.

        Calls `while_waiting` often while the broker takes nothing.
        Raises OperatorNeeded (RECORD_REFUSED) naming the topic for a record that can't be sent.
        """
        self._begin()
        for event in events:
            if event.topic not in self._ready:
                self._topics.partitions(event.topic)
                self._ready.add(event.topic)
            if event.broadcast:
                for partition in range(self._topics.partitions(event.topic)):
                    self._produce(event, partition, self._while_waiting)
            else:
                self._produce(event, -1, self._while_waiting)

    def commit(self, record: ProgressRecord) -> None:
        """Add the progress record and commit. Blocks; retries until the transaction's time-out.

        May run in a thread of its own; `cancel` ends it early.
        """
        self._begin()
        value = record.model_dump_json().encode()
        self._produce(Event(self._progress_topic, self._slot.encode(), value), 0, None)
        deadline = time.monotonic() + self._deadline_s
        while True:
            try:
                self._producer.commit_transaction(COMMIT_ATTEMPT_S)
            except KafkaException as error:
                cause = error.args[0]
                again = cause.retriable() and not cause.txn_requires_abort()
                if not again or time.monotonic() > deadline or self._cancelled.is_set():
                    raise kafka_error(error, "commit to Kafka", self._subject) from error
            else:
                self.open = False
                return

    def cancel(self) -> None:
        """Let a commit in another thread give up soon; whether it came through is then unknown."""
        self._cancelled.set()

    def abandon(self) -> None:
        """End the session: abort what is open, as far as the broker lets us, and drop the queue."""
        self._producer.purge()
        if self.open:
            try:
                self._producer.abort_transaction(ABORT_TIMEOUT_S)
            except KafkaException:
                self.open = False  # the next session's begin_session aborts it
        self.open = False

    def _begin(self) -> None:
        if not self.open:
            try:
                self._producer.begin_transaction()
            except KafkaException as error:
                raise kafka_error(error, "begin a Kafka transaction", self._subject) from error
            self.open = True

    def _produce(
        self, event: Event, partition: int, while_waiting: Callable[[], None] | None
    ) -> None:
        deadline = 0.0
        while True:
            try:
                self._producer.produce(
                    event.topic,
                    event.value,
                    event.key,
                    partition,
                    headers=event.headers,
                )
            except BufferError:
                deadline = deadline or time.monotonic() + self._deadline_s
                if time.monotonic() > deadline or self._cancelled.is_set():
                    raise self._stalled() from None
                self._producer.poll(_QUEUE_FULL_PAUSE_S)
                if while_waiting is not None:
                    while_waiting()
            except KafkaException as error:
                raise kafka_error(error, "produce", f"topic {event.topic}") from error
            else:
                return

    def _stalled(self) -> SlotbridgeError:
        return Retryable(
            f"the broker has taken nothing for {self._deadline_s:.0f} s",
            operation="produce",
            subject=self._subject,
            hint="check the broker",
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )
