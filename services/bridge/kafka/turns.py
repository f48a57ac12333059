"""Two producers that take turns: the abort of a transaction does not undo the one before it.

A marker ends all that its producer id has open in a partition. Where a coordinator has skipped the
markers of a transaction that it had decided (`hanging` tells when), the next transaction of the
same id decides over both: aborted, it takes along what Kafka had said was committed. With two ids,
in turns, the earlier one stays as it is until `hanging` has ended it.
"""

from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaException, Producer

from schemas.events import ProgressRecord
from services.bridge.kafka.sending import Send, sender
from services.kafka.client import kafka_error, make_client

INIT_TIMEOUT_S: Final = 30.0
BOTH: Final = (0, 1)
_SUFFIXES: Final = ("", ".2")
"""Of the transactional ids; a slot's name has no dot."""


class Turns:
    """One session's two producers. Each Kafka transaction that commits is the other one's turn."""

    def __init__(self, options: Mapping[str, Any], *, subject: str) -> None:
        """`options`: of a producer; its `transactional.id` is the first one's."""
        self._subject = subject
        name = options["transactional.id"]
        self._both = [
            make_client(Producer, {**options, "transactional.id": name + suffix})
            for suffix in _SUFFIXES
        ]
        self._senders = [sender(producer) for producer in self._both]
        self.turn = 0

    @property
    def current(self) -> Producer:
        """Whose turn it is."""
        return self._both[self.turn]

    @property
    def send(self) -> Send:
        """Many records into the current one."""
        return self._senders[self.turn]

    def begin_session(self) -> None:
        """init_transactions of both: fences other sessions, and ends what they have open."""
        for producer in self._both:
            try:
                producer.init_transactions(INIT_TIMEOUT_S)
            except KafkaException as error:
                raise kafka_error(error, "init transactions", self._subject) from error

    def follow(self, record: ProgressRecord | None) -> None:
        """The next transaction comes after that of `record`."""
        self.turn = 0 if record is None else 1 - record.producer

    def begin(self) -> None:
        """Begin a transaction of the current one."""
        try:
            self.current.begin_transaction()
        except KafkaException as error:
            raise kafka_error(error, "begin a Kafka transaction", self._subject) from error

    def pass_on(self) -> None:
        """The transaction has committed."""
        self.turn = 1 - self.turn

    def hear(self) -> None:
        """Serve what the clients' threads have to tell."""
        for producer in self._both:
            producer.poll(0)
