"""The common options of Kafka clients, and the translation of their errors into ours."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import structlog
from confluent_kafka import KafkaError, KafkaException

from schemas.errors import (
    ExitCode,
    OperatorNeeded,
    Retryable,
    SettingsError,
    SetupError,
    SlotbridgeError,
)
from schemas.settings import KafkaSettings

logger = structlog.get_logger(__name__)

_DENIED: Final = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
)
RECORD_REFUSALS: Final = (
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_RECORD,
)
INVALID_RECORD: Final = KafkaError(KafkaError.INVALID_RECORD).str()
"""The client's words for a record that fails a check of the broker."""
TOPIC_REFUSALS: Final = (
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.POLICY_VIOLATION,
)
_FENCED: Final = (
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
)


_PASSING: Final = frozenset(
    {
        *(KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._TIMED_OUT_QUEUE),
        *(KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, KafkaError._WAIT_COORD),
        *(KafkaError._DESTROY_BROKER, KafkaError._WAIT_CACHE),
        *(KafkaError.LEADER_NOT_AVAILABLE, KafkaError.NOT_LEADER_FOR_PARTITION),
        *(KafkaError.BROKER_NOT_AVAILABLE, KafkaError.REPLICA_NOT_AVAILABLE),
        *(KafkaError.REQUEST_TIMED_OUT, KafkaError.NETWORK_EXCEPTION),
        *(KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE),
        *(KafkaError.NOT_COORDINATOR, KafkaError.NOT_CONTROLLER),
        *(KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH),
        *(KafkaError.OFFSET_NOT_AVAILABLE, KafkaError.KAFKA_STORAGE_ERROR),
        *(KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND),
        *(KafkaError.THROTTLING_QUOTA_EXCEEDED, KafkaError.REBALANCE_IN_PROGRESS),
    }
)
_IMPOSSIBLE: Final = {
    KafkaError.INVALID_REPLICATION_FACTOR: "set kafka.replication_factor to at most the number of "
    "brokers; -1 takes the broker's default",
    KafkaError.INVALID_PARTITIONS: "correct kafka.partitions",
    KafkaError.INVALID_REPLICA_ASSIGNMENT: "correct kafka.replication_factor and kafka.partitions",
    KafkaError.INVALID_CONFIG: "the broker does not take a configuration that the bridge gives its "
    "topics: make the topic yourself (docs/guides/configure.md)",
}
"""Errors that no retry mends, because the settings ask for them -> remedy."""
Client = TypeVar("Client")


def passing(error: KafkaError) -> bool:
    """Tell whether the same request may succeed later.

    `KafkaError.retriable()` tells it only of errors that librdkafka's transactional calls return:
    it is False for every error that has a code alone.
    """
    return error.retriable() or error.code() in _PASSING


def make_client(kind: Callable[[dict[str, Any]], Client], options: dict[str, Any]) -> Client:
    """Make a Kafka client of `kind`. Raise SettingsError for options that librdkafka refuses."""
    try:
        return kind(options)
    except KafkaException as error:
        cause = error.args[0]
        raise SettingsError(
            f"Kafka's client refuses the options: {cause.str()}",
            operation="read settings",
            hint="correct kafka.options or kafka.bootstrap_servers",
        ) from error


class Complaints:
    """Errors that a client's own threads report; its calls only tell that no broker answered.

    Its errors come by `Client.poll`; pass `note` as `error_cb`.
    """

    def __init__(self) -> None:
        self.last: KafkaError | None = None
        self.refusal: KafkaError | None = None
        """Credentials or certificates that one side does not take: waiting does not help."""
        self.down = False
        """Whether no broker could be connected to: a new client finds out sooner when one can."""

    def note(self, error: KafkaError) -> None:
        """Remember an error that a client's thread reported; the callback `error_cb`."""
        _log_client_error(error)
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.down = True
        else:
            self.last = error
        if error.code() == KafkaError._AUTHENTICATION or _is_distrust(error):
            self.refusal = error

    def explained(self, error: KafkaException, operation: str, subject: str) -> SlotbridgeError:
        """Return the `kafka_error` of an earlier complaint, if that explains more than `error`."""
        if self.refusal is not None:
            return kafka_error(KafkaException(self.refusal), operation, subject)
        reason = error.args[0].str() if self.last is None else self.last.str()
        clearer = KafkaException(KafkaError(error.args[0].code(), reason))
        return kafka_error(clearer, operation, subject)


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """Return the options that all Kafka clients of the bridge share; the user's own come last."""
    return {
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": "slotbridge",
        "log_level": 2,
        "error_cb": _log_client_error,
        "socket.keepalive.enable": True,
        **settings.options,
    }


def kafka_error(error: KafkaException, operation: str, subject: str) -> SlotbridgeError:
    """Return the error that says what to do about a Kafka failure."""
    cause = error.args[0]
    text = cause.str() if isinstance(cause, KafkaError) else str(cause)
    code = cause.code() if isinstance(cause, KafkaError) else KafkaError.UNKNOWN
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return SettingsError(
            text,
            operation=operation,
            subject=subject,
            hint="lower bridge.transaction_timeout_ms",
        )
    if code in _IMPOSSIBLE:
        return SettingsError(text, operation=operation, subject=subject, hint=_IMPOSSIBLE[code])
    if code == KafkaError.INVALID_TIMESTAMP:
        return SetupError(
            f"{text}: this machine's clock is further from the broker's than the topic allows",
            operation=operation,
            subject=subject,
            hint="correct the clocks (NTP) of this machine and of the brokers; topics with "
            "message.timestamp.type=LogAppendTime take records of any clock",
        )
    if code in _FENCED:
        return Retryable(
            "Kafka has fenced this producer: another bridge has taken over, or this one stood "
            "still for longer than bridge.transaction_timeout_ms",
            operation=operation,
            subject=subject,
            hint="restart the bridge: it resumes, or waits as a hot standby (bridge.standby)",
            exit_code=ExitCode.FENCED,
        )
    if isinstance(cause, KafkaError) and _is_distrust(cause):
        return SetupError(
            text,
            operation=operation,
            subject=subject,
            hint="name the broker in kafka.bootstrap_servers as its certificate does, and let "
            "ssl.ca.location and ssl.certificate.location in kafka.options name files of the same "
            "certificate authority",
        )
    if code in _DENIED:
        return SetupError(
            text,
            operation=operation,
            subject=subject,
            hint="grant the operation in Kafka's ACLs, or correct kafka.options",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
    if code in RECORD_REFUSALS:
        return OperatorNeeded(
            f"Kafka refuses the record: {text}",
            operation=operation,
            subject=subject,
            hint="a compacted topic takes no record without a key; the broker's log names the "
            "check that the record fails (InvalidRecordException)"
            if code == KafkaError.INVALID_RECORD
            else "raise message.max.bytes on the topic and in kafka.options",
            exit_code=ExitCode.RECORD_REFUSED,
        )
    return Retryable(
        text,
        operation=operation,
        subject=subject,
        hint="check kafka.bootstrap_servers and security.protocol, and that the broker runs",
        exit_code=ExitCode.KAFKA_UNREACHABLE,
    )


class TopicRefused(SetupError):
    """Kafka takes no record for this topic: it can't be made, or not be written to."""


def refused_topic(cause: KafkaError, operation: str, topic: str) -> TopicRefused:
    """Return the error for a refused topic, for a code in TOPIC_REFUSALS."""
    if cause.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return TopicRefused(
            "Topic authorization failed",
            operation=operation,
            subject=f"topic {topic}",
            hint="grant the operation in Kafka's ACLs, or correct kafka.options",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
    return TopicRefused(
        cause.str(),
        operation=operation,
        subject=f"topic {topic}",
        hint="for Kafka, names that differ only in `.` and `_` collide, and 249 characters are "
        "the most: rename the table, leave it out, or give it another topic (shaping.routes)",
    )


def _is_distrust(error: KafkaError) -> bool:
    """Tell whether a certificate was refused, and not a handshake cut short by a dying broker.

    What a broker refuses comes after the handshake (TLS 1.3), as a failed read.
    """
    text = error.str()
    return error.code() in (KafkaError._SSL, KafkaError._TRANSPORT) and (
        "certificate" in text or "unknown ca" in text
    )


def _log_client_error(error: KafkaError) -> None:
    logger.debug("kafka client", error=error.str())
