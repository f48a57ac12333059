"""Reads committed records of Kafka, other than events: those are read by Spark."""

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import structlog
import tenacity
from confluent_kafka import (
    OFFSET_INVALID,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
    Uuid,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin import OffsetSpec as _OffsetSpec  # type: ignore[attr-defined]

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SetupError, SlotbridgeError
from schemas.settings import KafkaSettings
from services.kafka.client import passing
from spark_consumers.kafka.security import java_security

log = structlog.get_logger()
_Spec: Any = _OffsetSpec
REQUEST_TIMEOUT_S = 20.0
PATIENCE_S = 150.0
"""How long `run` asks again while Kafka does not answer; the last request comes on top."""
_ANSWER_WITHIN_S = 5.0
"""The time in which the client tells that a request has timed out."""
_PAUSE_S = 0.2
_PROBE_TIMEOUT_S = 5.0
_DISCOVERY_INTERVAL_MS = 5_000
_FETCH_WAIT_MS = 10
_NO_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
_NO_LEADER = (KafkaError._NOENT, KafkaError.UNKNOWN_TOPIC_OR_PART)
"""What the client says where no broker, or one, knows a leader of the partitions."""
_NO_ID = str(Uuid(0, 0))
"""The id that a broker without topic ids reports."""
Offsets = dict[str, dict[int, int]]
"""topic -> partition -> offset."""


def reader_options(kafka: KafkaSettings) -> dict[str, str]:
    """Return Spark's options of a Kafka source, with librdkafka's security settings translated."""
    options = {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "kafka.isolation.level": "read_committed",
        "kafka.metadata.max.age.ms": str(_DISCOVERY_INTERVAL_MS),
        "kafka.fetch.max.wait.ms": str(_FETCH_WAIT_MS),
    }
    given = {name: str(value) for name, value in kafka.options.items()}
    return options | {f"kafka.{name}": value for name, value in java_security(given).items()}


def client_options(kafka: KafkaSettings) -> dict[str, str | int | float | bool]:
    """Return the options of a Kafka client in this process."""
    own: dict[str, str | int | float | bool] = {
        "bootstrap.servers": kafka.bootstrap_servers,
        "log_level": 0,
    }
    return own | kafka.options


def require_broker(kafka: KafkaSettings) -> None:
    """Raise Retryable (KAFKA_UNREACHABLE) within seconds where Spark would wait for minutes."""
    try:
        AdminClient(client_options(kafka)).list_topics(timeout=_PROBE_TIMEOUT_S)
    except KafkaException as error:
        raise _unreachable(kafka.bootstrap_servers) from error


def kafka_failure(error: KafkaException, topic: str) -> SlotbridgeError:
    """Return the error to raise for an error of a Kafka client."""
    failure = error.args[0]
    if failure.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
        return OperatorNeeded(
            "Kafka has deleted events that the tables have not read",
            operation="read Kafka",
            subject=topic,
            hint="topic retention was too short, or a topic was recreated: the next start of "
            "`slottables run` names what helps",
        )
    if failure.code() in (
        *(KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED),
        *(KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._AUTHENTICATION),
    ):
        return SetupError(
            "Kafka refused the credentials or a topic",
            operation="read Kafka",
            subject=topic,
            hint="allow this principal to read and describe the topics",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
    return _unreachable(topic)


def _unreachable(subject: str) -> Retryable:
    return Retryable(
        "Kafka does not answer",
        operation="connect to Kafka",
        subject=subject,
        hint="check kafka.bootstrap_servers and that the broker runs",
        exit_code=ExitCode.KAFKA_UNREACHABLE,
    )


def _refusal_passes(error: BaseException) -> bool:
    """Tell whether Kafka may grant later what it has refused, as of a topic that is being made.

    Where no broker answers at all, the code is another of the client's own, below 0.
    """
    cause = error.__cause__
    failure = cause.args[0] if isinstance(cause, KafkaException) else None
    if not isinstance(failure, KafkaError):
        return False
    return failure.code() in _NO_LEADER or (failure.code() > 0 and passing(failure))


def _log_silence(attempt: tenacity.RetryCallState) -> None:
    error = attempt.outcome and attempt.outcome.exception()
    log.warning("Kafka does not answer: asking again", error=str(error))


def _answer(future: "Future[Any]", topic: str) -> Any:
    """Return the answer of a request; raise KafkaException, or Retryable where there is none.

    The client gives a request up after REQUEST_TIMEOUT_S and tells so a moment later.
    """
    try:
        return future.result(REQUEST_TIMEOUT_S + _ANSWER_WITHIN_S)
    except TimeoutError as error:
        raise _unreachable(topic) from error


class TopicOffsets:
    """Asks for the partitions and offsets of topics.

    Each request raises Retryable (KAFKA_UNREACHABLE) where Kafka does not answer in time.
    """

    def __init__(self, kafka: KafkaSettings, *, patience_s: float = 0.0) -> None:
        """Ask again for `patience_s` while Kafka does not answer."""
        self._admin = AdminClient(client_options(kafka))
        self._patience_s = patience_s
        self._partitions: dict[str, tuple[int, ...]] = {}
        self._ids: dict[str, str] = {}

    def id(self, topic: str) -> str:
        """Return the id that Kafka has given the topic, as of the last `refresh`; "" without one.

        A topic that was deleted and made again under its name has another id. Brokers before
        Kafka 2.8 give none.
        """
        return self._ids.get(topic, "")

    def refresh(self, *topics: str) -> None:
        """Ask anew for topics, by default all that were asked for before, in one request."""
        self._partitions |= self._described(topics or self._partitions)

    def partitions(self, topic: str) -> tuple[int, ...]:
        """Return the topic's partitions as of the last `refresh`, () if there is no such topic."""
        return self.all_partitions((topic,))[topic]

    def all_partitions(self, topics: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the partitions of each topic.

        All topics that were not asked for before are asked for in one request. Only these topics
        are asked for, not all that the cluster has.
        """
        wanted = list(topics)
        self._partitions |= self._described([t for t in wanted if t not in self._partitions])
        return {topic: self._partitions[topic] for topic in wanted}

    def first(self, partitions: Mapping[str, tuple[int, ...]]) -> Offsets:
        """Return the first offset that Kafka still has, of each partition."""
        return self._offsets(partitions, _Spec.earliest())

    def stable(self, partitions: Mapping[str, tuple[int, ...]]) -> Offsets:
        """Return each partition's last stable offset: open transactions begin at or after it."""
        return self._offsets(partitions, _Spec.latest())

    def written(self, partitions: Mapping[str, tuple[int, ...]]) -> Offsets:
        """Return the end of each partition, open transactions included."""
        return self._offsets(partitions, _Spec.latest(), IsolationLevel.READ_UNCOMMITTED)

    def written_until(self, partitions: Mapping[str, tuple[int, ...]], ts_ms: int) -> Offsets:
        """Return each partition's first offset after the time `ts_ms`, else its end (`written`)."""
        ends = self.written(partitions)
        later = _Spec.for_timestamp(ts_ms + 1)
        for topic, found in self._offsets(
            partitions, later, IsolationLevel.READ_UNCOMMITTED
        ).items():
            ends[topic] |= {number: offset for number, offset in found.items() if offset >= 0}
        return ends

    def _patient(self) -> tenacity.Retrying:
        """Return a loop that calls a function again while Kafka does not answer."""
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Retryable),
            wait=tenacity.wait_fixed(_PAUSE_S),
            stop=tenacity.stop_after_delay(self._patience_s),
            before_sleep=_log_silence,
            reraise=True,
        )

    def _described(self, topics: Collection[str]) -> dict[str, tuple[int, ...]]:
        return self._patient()(self._describe, topics)

    def _describe(self, topics: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the partitions of topics, () for one that does not exist; note the topics' ids."""
        found: dict[str, tuple[int, ...]] = {}
        if not topics:
            return found
        asked = self._admin.describe_topics(
            TopicCollection(list(topics)), request_timeout=REQUEST_TIMEOUT_S
        )
        for topic, future in asked.items():
            self._ids.pop(topic, None)
            try:
                description = _answer(future, topic)
                parts = description.partitions
                if str(description.topic_id) != _NO_ID:
                    self._ids[topic] = str(description.topic_id)
            except KafkaException as error:
                if error.args[0].code() not in _NO_TOPIC:
                    raise kafka_failure(error, topic) from error
                parts = []
            found[topic] = tuple(sorted(part.id for part in parts))
        return found

    def _offsets(
        self,
        partitions: Mapping[str, tuple[int, ...]],
        spec: Any,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> Offsets:
        return self._patient()(self._list_offsets, partitions, spec, isolation)

    @tenacity.retry(
        retry=tenacity.retry_if_exception(_refusal_passes),
        wait=tenacity.wait_fixed(_PAUSE_S),
        stop=tenacity.stop_after_delay(REQUEST_TIMEOUT_S),
        reraise=True,
    )
    def _list_offsets(
        self, partitions: Mapping[str, tuple[int, ...]], spec: Any, isolation: IsolationLevel
    ) -> Offsets:
        """Return the offsets that `spec` asks for. Raise Retryable where a request timed out."""
        wanted = {
            TopicPartition(topic, number): spec
            for topic, numbers in partitions.items()
            for number in numbers
        }
        found: Offsets = {topic: {} for topic in partitions}
        if not wanted:
            return found
        asked = self._admin.list_offsets(
            wanted, isolation_level=isolation, request_timeout=REQUEST_TIMEOUT_S
        )
        for place, future in asked.items():
            try:
                offset = _answer(future, place.topic).offset
            except KafkaException as error:
                raise kafka_failure(error, place.topic) from error
            if offset == OFFSET_INVALID:  # so a request that has timed out is answered
                raise _unreachable(place.topic)
            found[place.topic][place.partition] = offset
        return found
