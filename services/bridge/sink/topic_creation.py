"""Makes a topic, and waits until it can be written to."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclOperation
from confluent_kafka.admin._metadata import TopicMetadata
from confluent_kafka.admin._topic import TopicDescription
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from services.kafka.client import TOPIC_REFUSALS, kafka_error, refused_topic
from services.kafka.records import REQUEST_TIMEOUT_S
from services.waiter import Waiter

_ATTEMPT_S: Final = 0.5
_LOOK_S: Final = 0.05
_PATIENCE_S: Final = 30.0
"""How long a broker that is away is waited for."""


class TopicCreation:
    """Makes topics, and waits until brokers know them."""

    def __init__(self, admin: AdminClient, waiter: Waiter) -> None:
        self._admin = admin
        self._waiter = waiter

    def make(self, topic: NewTopic, *, await_broker: bool) -> TopicMetadata:
        """Make a topic that another may have made meanwhile; return it once it has a leader.

        await_broker: wait for a broker that is away, if too few answer for its replicas. Raise
        SlotbridgeError where the broker refuses it.
        """
        until = time.monotonic() + (_PATIENCE_S if await_broker else 0.0)
        while error := self._create(topic):
            few = error.args[0].code() == KafkaError.INVALID_REPLICATION_FACTOR and await_broker
            if not few:
                raise not_created(error, topic.topic) from error
            if time.monotonic() > until:
                raise Retryable(
                    f"{error.args[0].str()} Other topics have that many replicas: a broker is down",
                    operation="create the topic",
                    subject=topic.topic,
                    hint="start the missing broker",
                    exit_code=ExitCode.KAFKA_UNREACHABLE,
                ) from error
            self._waiter.pause(_ATTEMPT_S)
        return self._await_leader(topic.topic)

    def make_together(self, topics: Sequence[NewTopic]) -> list[TopicDescription]:
        """Make topics by one request; return those that have leaders. `make` judges the others."""
        asked = self._admin.create_topics([*topics], request_timeout=REQUEST_TIMEOUT_S)
        self._waiter.wait(asked.values(), _ATTEMPT_S)
        names = [name for name, made in asked.items() if _is_there(made)]
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while names:
            described = self._admin.describe_topics(
                TopicCollection(names), request_timeout=REQUEST_TIMEOUT_S
            )
            self._waiter.wait(described.values(), _ATTEMPT_S)
            known = [one.result() for one in described.values() if one.exception() is None]
            led = [one for one in known if all(part.leader for part in one.partitions)]
            if len(led) == len(names) or time.monotonic() > deadline:
                return led
            self._waiter.pause(_LOOK_S)
        return []

    def _create(self, topic: NewTopic) -> KafkaException | None:
        """Return why it could not be made, if it could not."""
        future = self._admin.create_topics([topic], request_timeout=REQUEST_TIMEOUT_S)[topic.topic]
        try:
            self._waiter.wait([future], _ATTEMPT_S)
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                return error
        return None

    def _await_leader(self, name: str) -> TopicMetadata:
        """Wait until the metadata has a new topic with a leader. Raise Retryable after a while."""
        deadline, attempt_s = time.monotonic() + REQUEST_TIMEOUT_S, _ATTEMPT_S
        while time.monotonic() < deadline:
            try:
                described = self._admin.list_topics(name, timeout=attempt_s).topics[name]
            except KafkaException:
                attempt_s = min(2 * attempt_s, REQUEST_TIMEOUT_S)
            else:
                if described.error is None and described.partitions:
                    return described
            self._waiter.pause(_LOOK_S)
        raise Retryable(
            "the topic was created but has no leader",
            operation="create the topic",
            subject=name,
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )


def check_writable(admin: AdminClient, topic: str) -> None:
    """Raise TopicRefused where the broker says that we may not write to `topic`."""
    asked = admin.describe_topics(
        TopicCollection([topic]),
        include_authorized_operations=True,
        request_timeout=REQUEST_TIMEOUT_S,
    )
    try:
        allowed = asked[topic].result(REQUEST_TIMEOUT_S + 5).authorized_operations
    except KafkaException as error:
        if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise refused_topic(error.args[0], "describe the topic", topic) from error
        raise kafka_error(error, "describe the topic", topic) from error
    except TimeoutError as error:
        late = KafkaException(KafkaError(KafkaError._TIMED_OUT))
        raise kafka_error(late, "describe the topic", topic) from error
    if allowed is not None and AclOperation.WRITE not in allowed:
        denied = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        raise refused_topic(denied, "describe the topic", topic)


def _is_there(made: Future[None]) -> bool:
    """Whether a topic was made, by this request or by another."""
    error = made.exception()
    return error is None or (
        isinstance(error, KafkaException)
        and error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    )


def not_created(error: KafkaException, topic: str) -> SlotbridgeError:
    """Return the error of a topic that the broker does not make."""
    cause = error.args[0]
    if cause.code() in TOPIC_REFUSALS:
        return refused_topic(cause, "create the topic", topic)
    return kafka_error(error, "create the topic", topic)
