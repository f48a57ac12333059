"""The topics of a prefix: made where missing, and read back at start (progress, table shapes)."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from typing import Final, TypeVar

import structlog
from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclOperation
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode, Retryable, SetupError, SlotbridgeError
from schemas.events import (
    ProgressRecord,
    SchemaEvent,
    dead_topic,
    divergence_topic,
    message_topic,
    prepared_topic,
    progress_topic,
    schema_topic,
    transaction_topic,
)
from schemas.settings import KafkaSettings
from services.bridge.failpoints import reach
from services.kafka.client import (
    TOPIC_REFUSALS,
    Complaints,
    client_options,
    kafka_error,
    make_client,
    refused_topic,
)
from services.kafka.records import (
    READ_DEADLINE_S,
    REQUEST_TIMEOUT_S,
    TopicReader,
    last_progress,
    parse_record,
)

logger = structlog.get_logger(__name__)

_OWN: Final = (
    progress_topic,
    schema_topic,
    prepared_topic,
    transaction_topic,
    message_topic,
    dead_topic,
    divergence_topic,
)
_T = TypeVar("_T")
_ATTEMPT_S: Final = 0.5
_ASKED_AT_ONCE: Final = 200
"""Topics or partitions: answers about 5,000 take more memory than everything else."""
_REFUSAL_S: Final = 2.0
"""How long another broker may still take what one has refused."""


class Topics:
    """Knows the topics of the prefix and their partition counts; makes the missing ones."""

    def __init__(
        self, settings: KafkaSettings, *, while_waiting: Callable[[], None] = lambda: None
    ) -> None:
        self._settings = settings
        self._while_waiting = while_waiting
        self._complaints = Complaints()
        options = client_options(settings) | {"error_cb": self._complaints.note}
        self._admin = make_client(AdminClient, options)
        self._partitions: dict[str, int] = {}

    def prepare(self) -> None:
        """Make the bridge's own topics. Raises Retryable when no broker answers."""
        self.refresh()
        prefix = self.prefix
        for name in (progress_topic(prefix), schema_topic(prefix)):
            self._ensure(name, partitions=1, compacted=True)
        self._ensure(prepared_topic(prefix), partitions=1, compacted=True, short_lived=True)
        for name in (transaction_topic(prefix), message_topic(prefix)):
            self._ensure(name, partitions=1, compacted=False)
        for topic_of in (progress_topic, schema_topic, prepared_topic, transaction_topic):
            if self._partitions[topic_of(prefix)] != 1:
                raise SetupError(
                    "this topic must have one partition: it is read in order",
                    operation="prepare topics",
                    subject=topic_of(prefix),
                    hint="delete it before the first start, or use another kafka.topic_prefix",
                )

    def there(self, topic: str) -> bool:
        """Whether the broker has it; it is not made."""
        self.refresh()
        return topic in self._partitions

    def partitions(self, topic: str) -> int:
        """The number of partitions of `topic`, which is made when missing."""
        known = self._partitions.get(topic)
        if known is None:
            self._ensure(topic, partitions=self._settings.partitions, compacted=False)
            known = self._partitions[topic]
        return known

    def prepare_dead(self) -> str:
        """Make the topic of refused records where it is missing; return its name."""
        name = dead_topic(self.prefix)
        self._ensure(name, partitions=1, compacted=False)
        return name

    def prepare_divergence(self) -> str:
        """Make the topic of accepted divergences where it is missing; return its name."""
        name = divergence_topic(self.prefix)
        self._ensure(name, partitions=1, compacted=False)
        return name

    def check_writable(self, topic: str) -> None:
        """Raises TopicRefused where the broker says that we may not write to `topic`."""
        asked = self._admin.describe_topics(
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
        if allowed is not None and AclOperation.WRITE not in allowed:
            denied = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
            raise refused_topic(denied, "describe the topic", topic)

    def message_bytes_max(self, *others: str) -> dict[str, int]:
        """max.message.bytes of every topic of the prefix and of `others`, where we may read it."""
        names = {name for name in self._partitions if name.startswith(f"{self.prefix}.")}
        names |= {name for name in others if name in self._partitions}
        found = {}
        for some in _some(sorted(names)):
            resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in some]
            asked = self._admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S)
            for resource, future in asked.items():
                with contextlib.suppress(KafkaException):
                    entries = future.result(REQUEST_TIMEOUT_S + 5)
                    found[resource.name] = int(entries["max.message.bytes"].value)
        return found

    def last_progress(self, slot: str, *, until: int | None = None) -> ProgressRecord | None:
        """The last committed progress record of `slot`; as in `services.kafka.records`."""
        return last_progress(self._settings, slot, deadline_s=READ_DEADLINE_S, until=until)

    def unstable(self) -> dict[tuple[str, int], int]:
        """The last stable offset of every partition of the prefix that has more than that."""
        found: dict[tuple[str, int], int] = {}
        for some in _some(self._own_partitions()):
            found |= self._unstable_of(some)
        return found

    def _unstable_of(self, asked: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        stable, ends = (
            {
                (where.topic, where.partition): future
                for where, future in self._admin.list_offsets(
                    {TopicPartition(*place): OffsetSpec.latest() for place in asked},  # type: ignore[no-untyped-call]
                    isolation_level=level,
                    request_timeout=REQUEST_TIMEOUT_S,
                ).items()
            }
            for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        )
        found = {}
        for place, future in stable.items():
            try:
                at = future.result().offset
                if ends[place].result().offset > at:
                    found[place] = at
            except KafkaException as error:
                if not error.args[0].retriable():  # else its topic was just made
                    raise kafka_error(error, "look for open transactions", place[0]) from error
        return found

    def event_partitions(self) -> list[tuple[str, int]]:
        """The partitions of the prefix that hold events, or transactions' beginnings and ends."""
        others = self.own() - {transaction_topic(self.prefix), message_topic(self.prefix)}
        return [place for place in self._own_partitions() if place[0] not in others]

    def own(self) -> set[str]:
        """The topics that are the bridge's own, not a table's."""
        return {topic_of(self.prefix) for topic_of in _OWN}

    def _own_partitions(self) -> list[tuple[str, int]]:
        return [
            (name, partition)
            for name, count in sorted(self._partitions.items())
            if name.startswith(f"{self.prefix}.")
            for partition in range(count)
        ]

    def shapes(self) -> dict[tuple[str, str], SchemaEvent]:
        """(schema, table) -> the last published shape of each table."""
        topic = schema_topic(self.prefix)
        result = {}
        with self.reader(topic) as reader:
            low, end = reader.bounds()
            deadline = time.monotonic() + READ_DEADLINE_S
            for offset, _key, value in reader.between(low, end, deadline):
                if value is not None:
                    event = parse_record(SchemaEvent, topic, offset, value)
                    result[event.schema_, event.table] = event
        return result

    @property
    def prefix(self) -> str:
        """Of all their names."""
        return self._settings.topic_prefix

    def refresh(self) -> None:
        """Ask for the topics, their partitions and leaders anew."""
        began, attempt_s = time.monotonic(), _ATTEMPT_S
        while True:
            try:
                metadata = self._admin.list_topics(timeout=attempt_s)
                break
            except KafkaException as error:
                self._admin.poll(0 if self._complaints.last else _ATTEMPT_S)
                patience_s = _REFUSAL_S if self._complaints.refusal else REQUEST_TIMEOUT_S
                left_s = began + patience_s - time.monotonic()
                if left_s < 0 or not error.args[0].retriable():
                    raise self._complaints.explained(
                        error, "connect to Kafka", self._settings.bootstrap_servers
                    ) from error
                # A cluster of thousands of topics needs longer to list them.
                attempt_s = max(_ATTEMPT_S, min(2 * attempt_s, left_s))
                self._while_waiting()
        self._partitions = {
            name: len(topic.partitions)
            for name, topic in metadata.topics.items()
            if topic.error is None
        }

    def reader(self, topic: str, partition: int = 0, *, committed: bool = True) -> TopicReader:
        """A reader of one of the topics' partitions; a context manager."""
        return TopicReader(self._settings, topic, partition, committed=committed)

    def _ensure(
        self, name: str, *, partitions: int, compacted: bool, short_lived: bool = False
    ) -> None:
        if name in self._partitions:
            return
        topic = NewTopic(
            name,
            num_partitions=partitions,
            replication_factor=self._settings.replication_factor,
            config=_config(compacted, short_lived),
        )
        future = self._admin.create_topics([topic], request_timeout=REQUEST_TIMEOUT_S)[name]
        try:
            while not future.done():
                wait([future], _ATTEMPT_S)
                self._while_waiting()
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise _not_created(error, name) from error
        self._await_leader(name)
        reach("topic made")
        logger.info("topic is there", topic=name, partitions=self._partitions[name])

    def _await_leader(self, name: str) -> None:
        """A new topic is not at once known to the broker's metadata; wait for it."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(KafkaException):
                described = self._admin.list_topics(name, timeout=_ATTEMPT_S).topics[name]
                if described.error is None and described.partitions:
                    self._partitions[name] = len(described.partitions)
                    return
            self._while_waiting()
            time.sleep(0.05)
        raise Retryable(
            "the topic was created but has no leader",
            operation="create the topic",
            subject=name,
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )


def _some(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """`items`, as many at a time as are asked about at once."""
    for at in range(0, len(items), _ASKED_AT_ONCE):
        yield items[at : at + _ASKED_AT_ONCE]


def _config(compacted: bool, short_lived: bool) -> dict[str, str]:
    """`short_lived`: records soon replaced by tombstones; the topic is read whole at a start."""
    config = {"cleanup.policy": "compact"} if compacted else {}
    if short_lived:
        config |= {
            "segment.bytes": str(32 * 2**20),
            "max.compaction.lag.ms": "600000",
            "min.cleanable.dirty.ratio": "0.1",
            "delete.retention.ms": "3600000",
        }
    return config


def _not_created(error: KafkaException, topic: str) -> SlotbridgeError:
    cause = error.args[0]
    if cause.code() in TOPIC_REFUSALS:
        return refused_topic(cause, "create the topic", topic)
    return kafka_error(error, "create the topic", topic)
