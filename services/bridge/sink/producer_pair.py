"""Two producers that take turns: the abort of a transaction does not undo the one before it.

A marker ends all that its producer id has open in a partition. Where a coordinator has skipped the
markers of a transaction that it had decided (`hanging` says when), the next transaction of the same
id decides over both: aborted, it takes along what Kafka had said was committed. With two ids, in
turns, the earlier one stays as it is until `hanging` has ended it.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from schemas.progress import ProgressRecord
from services.bridge.events.event import Event
from services.bridge.failpoints import reach
from services.bridge.sink.batch_produce import Send, sender
from services.kafka.client import kafka_error, make_client
from services.waiter import Waiter

INIT_TIMEOUT_S: Final = 30.0
BOTH: Final = (0, 1)
_QUEUE_FULL_PAUSE_S: Final = 0.005
_SUFFIXES: Final = ("", "~2")
"""Of the transactional ids. No prefix and no slot has a `~`: no other slot has the same."""


class ProducerPair:
    """One session's two producers. Each Kafka transaction that commits is the other one's turn."""

    def __init__(self, options: Mapping[str, Any], waiter: Waiter, *, subject: str) -> None:
        """Make two producers from `options`, whose `transactional.id` is the first producer's."""
        self._subject = subject
        self._waiter = waiter
        name = options["transactional.id"]

        def made(suffix: str) -> Producer:
            return make_client(Producer, {**options, "transactional.id": name + suffix})

        self._both = [made(suffix) for suffix in _SUFFIXES]
        self._senders = [sender(producer) for producer in self._both]
        self.turn = 0

    @property
    def current(self) -> Producer:
        """The producer whose turn it is."""
        return self._both[self.turn]

    @property
    def send(self) -> Send:
        """Send many records by the current producer."""
        return self._senders[self.turn]

    def begin_session(self) -> None:
        """Fence other sessions of both producers, and end their open transactions."""
        for producer in self._both:
            try:
                producer.init_transactions(INIT_TIMEOUT_S)
            except KafkaException as error:
                raise kafka_error(error, "init transactions", self._subject) from error

    def settle(self, records: Iterable[tuple[int, Event]], *, commit: bool) -> None:
        """Write `records` in one whole transaction of the current producer.

        Each record goes into the partition before it. Raise SlotbridgeError.
        """
        producer = self.current
        try:
            producer.begin_transaction()
            for partition, event in records:
                self._produce(partition, event)
            producer.flush(INIT_TIMEOUT_S)
            reach("settling")
            end = producer.commit_transaction if commit else producer.abort_transaction
            end(INIT_TIMEOUT_S)
        except KafkaException as error:
            raise kafka_error(error, "end hanging transactions", self._subject) from error

    def _produce(self, partition: int, event: Event) -> None:
        """Produce an event; while the queue is full, wait. Raise after INIT_TIMEOUT_S."""
        producer = self.current
        topic, key, value, headers = event[:4]
        deadline = time.monotonic() + INIT_TIMEOUT_S
        while True:
            try:
                producer.produce(topic, value, key, partition, headers=headers)
            except BufferError:
                if time.monotonic() > deadline:
                    full = KafkaError(KafkaError._QUEUE_FULL)
                    raise kafka_error(KafkaException(full), "produce", self._subject) from None
                producer.poll(_QUEUE_FULL_PAUSE_S)
                self._waiter.turn()
            else:
                return

    def follow(self, record: ProgressRecord | None) -> None:
        """Give the turn to the producer that did not write `record`, the last visible one."""
        self.turn = 0 if record is None else 1 - record.kafka.producer

    def begin(self) -> None:
        """Begin a transaction of the current producer."""
        try:
            self.current.begin_transaction()
        except KafkaException as error:
            raise kafka_error(error, "begin a Kafka transaction", self._subject) from error

    def pass_on(self) -> None:
        """Give the turn to the other producer: the transaction has committed."""
        self.turn = 1 - self.turn

    def poll(self) -> None:
        """Serve the callbacks of both clients."""
        for producer in self._both:
            producer.poll(0)
