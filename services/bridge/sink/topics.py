"""The topics of a prefix: made where missing, and read back at start (progress, table shapes)."""

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import structlog
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._metadata import ClusterMetadata
from confluent_kafka.cimpl import NewTopic

from schemas.errors import SetupError
from schemas.events import (
    dead_topic,
    divergence_topic,
    message_topic,
    prepared_topic,
    progress_topic,
    recovery_topic,
    schema_topic,
    snapshot_topic,
    table_names_topic,
    transaction_topic,
)
from schemas.kafka import TopicSettings
from schemas.naming import Naming
from schemas.progress import ProgressRecord
from schemas.schema_events import SchemaEvent
from schemas.settings import KafkaSettings
from schemas.shaping import ShapingSettings
from services.bridge.failpoints import reach
from services.bridge.sink.compaction import COMPACT
from services.bridge.sink.leaders import leaderless, require_leaders
from services.bridge.sink.offsets import Asked, Partition, answers, ask_ends, in_parts
from services.bridge.sink.topic_configs import Configs
from services.bridge.sink.topic_creation import TopicCreation, check_writable
from services.bridge.sink.topic_requirements import new_config, replication_factor
from services.kafka.client import (
    Complaints,
    client_options,
    make_client,
    passing,
)
from services.kafka.records import (
    READ_DEADLINE_S,
    TopicReader,
    last_progress,
    parse_record,
)
from services.waiter import Waiter

logger = structlog.get_logger(__name__)

_OF_EVERY_BRIDGE: Final = (
    *(progress_topic, schema_topic, prepared_topic, transaction_topic, message_topic),
)
_WITHOUT_PLACES: Final = (progress_topic, divergence_topic, recovery_topic, table_names_topic)
_OWN: Final = (
    *_OF_EVERY_BRIDGE,
    *(dead_topic, divergence_topic, snapshot_topic, recovery_topic, table_names_topic),
)
CLEANUP_POLICY: Final = "cleanup.policy"
_ATTEMPT_S: Final = 0.5
_LOOK_S: Final = 0.05
_NOTING_RECORDS_MAX: Final = 20_000  # about one record a second notes where partitions ended
_PATIENCE_S: Final = 30.0
"""How long a far or slow cluster may take for its first answer: several round trips of a
connection's handshakes, and a list of thousands of topics."""
_REFUSAL_S: Final = 2.0
"""How long another broker may still take what one has refused."""


class Topics:
    """Knows the topics of the prefix and their partition counts; makes the missing ones."""

    def __init__(
        self,
        settings: KafkaSettings,
        shaping: ShapingSettings | None = None,
        waiter: Waiter | None = None,
    ) -> None:
        """Connect to Kafka; `shaping` names topics that need not begin with the prefix."""
        self.settings = settings
        naming = Naming(settings.topic_prefix, shaping or ShapingSettings())
        self._table_topic = re.compile(naming.pattern())
        self._outbox_topic = re.compile(naming.outbox_pattern())
        self.outbox_is_ours = naming.outbox_is_ours()
        self.hides = naming.hides
        """Whether the settings hide something of a table."""
        self.waiter = waiter or Waiter()
        """Of all that waits for these topics."""
        self._complaints = Complaints()
        options = client_options(settings) | {"error_cb": self._complaints.note}
        self.admin = make_client(AdminClient, options)
        self._partitions: dict[str, int] = {}
        self._replicas: dict[str, int] = {}
        self.brokers = 0
        self.schema_text: Callable[[int], str] | None = None
        """Returns the schema by which a record was written, where there is a schema registry."""
        self.leaderless: frozenset[Partition] = frozenset()
        self._configs = Configs(self.admin, settings)

    def prepare(self) -> None:
        """Make the bridge's own topics. Raise Retryable when no broker answers, or leads one."""
        self.refresh()
        require_leaders(self.written(), self.leaderless)
        prefix = self.prefix
        for topic in self.planned():
            self._make(topic)
        for topic_of in (progress_topic, schema_topic, prepared_topic, transaction_topic):
            if self._partitions[topic_of(prefix)] != 1:
                raise SetupError(
                    "this topic must have one partition: it is read in order",
                    operation="prepare topics",
                    subject=topic_of(prefix),
                    hint="delete the topic before the first start, or use another prefix",
                )
        written = {name for name, _ in self.written()}
        self._configs.check((name, self._replicas.get(name, 0)) for name in sorted(written))
        others = sorted(written - self.own())
        self._configs.compare({name: self._partitions[name] for name in others})

    def check_clocks(self, server_ms: int) -> None:
        """Check the clocks as `Configs.check_clocks` does."""
        self._configs.check_clocks(server_ms)

    def there(self, topic: str) -> bool:
        """Ask the broker whether the topic exists; do not create it."""
        self.refresh()
        return self.has(topic)

    def partitions(self, topic: str) -> int:
        """Return the number of partitions of `topic`; create the topic if it is missing."""
        known = self._partitions.get(topic)
        if known is not None:
            return known
        self._make(self._of_table(topic))
        return self._partitions[topic]

    def make_all(self, topics: Iterable[str], without: Iterable[str] = ()) -> None:
        """Make those of `topics` that are missing by one request, as far as Kafka lets them.

        `partitions` makes what is still missing then, or tells why it can't be made.
        """
        missing = sorted({*topics} - self._partitions.keys() - {*without, ""})
        if len(missing) > 1:
            creation = TopicCreation(self.admin, self.waiter)
            for made in creation.make_together([*map(self._of_table, missing)]):
                self._add(made.name, made.partitions)

    def counts(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the number of partitions of each of `topics` that is known to exist."""
        known = self._partitions
        return {topic: known[topic] for topic in topics if topic in known}

    def prepare_late(self, topic_of: Callable[[str], str], *, compacted: bool = False) -> str:
        """Make an own topic that not every bridge needs, where it is missing; return its name."""
        name = topic_of(self.prefix)
        if not self.has(name):
            self._make(self._new(name, partitions=1, compacted=compacted))
        return name

    def planned(self, tables: Iterable[str] = ()) -> list[NewTopic]:
        """Return the missing topics that a start makes, or the first events of tables' topics."""
        prefix = self.prefix
        new = [
            self._new(name, partitions=1, compacted=compacted, short_lived=short_lived)
            for name, compacted, short_lived in (
                (progress_topic(prefix), True, False),
                (schema_topic(prefix), True, False),
                (prepared_topic(prefix), True, True),
                (transaction_topic(prefix), False, False),
                (message_topic(prefix), False, False),
            )
            if not self.has(name)
        ]
        return new + [self._of_table(name) for name in tables if not self.has(name)]

    def check_writable(self, topic: str) -> None:
        """Raise TopicRefused where the broker says that we may not write to `topic`."""
        check_writable(self.admin, topic)

    def message_bytes_max(self, *others: str) -> dict[str, int]:
        """Return max.message.bytes of each topic of the prefix and of `others` that we may read."""
        self._configs.describe([name for name in others if name in self._partitions])
        return self._configs.bytes_max()

    def config_of(self, topic: str) -> Mapping[str, str] | None:
        """Return a topic's configuration as it was at start, None where it may not be read."""
        return self._configs.known.get(topic)

    def cleanup_policy(self, topic: str) -> str:
        """Return the policy of a table's topic, as it was at start or will be made; "": unknown."""
        given = self.settings.of_topic(topic).config
        config = self.config_of(topic) if self.has(topic) else given
        return str((config or {}).get(CLEANUP_POLICY, ""))

    @property
    def compacts(self) -> bool:
        """Whether a table's topic is compacted, or would be made so."""
        given = (one.config.get(CLEANUP_POLICY, "") for one in self.settings.topics.values())
        own, known = self.own(), self._configs.known
        there = (one.get(CLEANUP_POLICY, "") for name, one in known.items() if name not in own)
        return any(COMPACT in str(policy) for policy in (*given, *there))

    def last_progress(self, slot: str, *, until: int | None = None) -> ProgressRecord | None:
        """Return the last committed progress record of `slot`; see `services.kafka.records`."""
        return last_progress(self.settings, slot, deadline_s=READ_DEADLINE_S, until=until)

    def last_noting_ends(self, slot: str) -> ProgressRecord | None:
        """Return the last visible progress record of `slot` that notes where partitions ended."""
        with self.reader(progress_topic(self.prefix)) as reader:
            visible = min(reader.stable_end(), reader.bounds()[1])
        return last_progress(
            self.settings,
            slot,
            deadline_s=READ_DEADLINE_S,
            having=b'"ends":{"',
            records_max=_NOTING_RECORDS_MAX,
            until=visible,
        )

    def has(self, topic: str) -> bool:
        """Tell whether the topic existed when the broker was last asked."""
        return topic in self._partitions

    def unstable(self) -> dict[Partition, int]:
        """Return the last stable offset of every partition of `written` that has more than that.

        Raise Retryable where a partition does not have a leader, or its leader does not answer.
        """
        found: dict[Partition, int] = {}
        for some in in_parts(self.written()):
            found |= self.unstable_of(some)
            self.waiter.turn()
        return found

    def unstable_of(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Return what `unstable` does, of these partitions alone."""
        asked = [ask_ends(self.admin, partitions, committed=one) for one in (True, False)]
        stable, ends = map(answers, asked)
        return {at: end.offset for at, end in stable.items() if ends[at].offset > end.offset}

    def ask_ends(self, partitions: Iterable[Partition], *, committed: bool) -> Asked:
        """Ask for ends of partitions as `offsets.ask_ends` does."""
        return ask_ends(self.admin, partitions, committed=committed)

    def written(self) -> list[Partition]:
        """Return the partitions of all topics that this slot may have written to."""
        # another bridge may have a prefix that begins with this one: its topics are left out
        mine, others = f"{self.prefix}.", self._longer_prefixes()
        return [
            (name, partition)
            for name, count in sorted(self._partitions.items())
            if (name.startswith(mine) and not name.startswith(others))
            or self._table_topic.fullmatch(name)
            or self.is_outbox(name)
            for partition in range(count)
        ]

    def _longer_prefixes(self) -> tuple[str, ...]:
        """Return the longer prefixes, with their dot, of bridges that begin with this bridge's."""
        last = f".{progress_topic('').lstrip('.')}"
        candidates = [
            name.removesuffix(last)
            for name in self._partitions
            if name.startswith(f"{self.prefix}.") and name.endswith(last)
        ]
        return tuple(
            f"{prefix}."
            for prefix in candidates
            if prefix != self.prefix
            and all(topic_of(prefix) in self._partitions for topic_of in _OF_EVERY_BRIDGE)
        )

    def event_partitions(self) -> list[Partition]:
        """Return the partitions of `written` whose events are this prefix's, or name theirs."""
        others = {topic_of(self.prefix) for topic_of in _WITHOUT_PLACES}
        return [
            (name, partition)
            for name, partition in self.written()
            if name not in others and (self.outbox_is_ours or not self.is_outbox(name))
        ]

    def is_outbox(self, topic: str) -> bool:
        """Tell whether the topic may have an outbox's messages, whose headers tell their place."""
        return self._outbox_topic.fullmatch(topic) is not None

    def own(self) -> set[str]:
        """Return the topics that are the bridge's own, not a table's."""
        return {topic_of(self.prefix) for topic_of in _OWN}

    def shapes(self) -> dict[tuple[str, str], SchemaEvent]:
        """Return (schema, table) -> the last published shape of each table, in their order."""
        topic = schema_topic(self.prefix)
        result: dict[tuple[str, str], SchemaEvent] = {}
        with self.reader(topic) as reader:
            low, end = reader.bounds()
            deadline = time.monotonic() + READ_DEADLINE_S
            for offset, _key, value in reader.between(low, end, deadline):
                if value is not None:
                    event = parse_record(SchemaEvent, topic, offset, value)
                    result.pop((event.schema_, event.table), None)
                    result[event.schema_, event.table] = event
        return result

    @property
    def prefix(self) -> str:
        """The prefix of all topics' names."""
        return self.settings.topic_prefix

    def refresh(self) -> None:
        """Ask for the topics, their partitions and leaders anew."""
        began, attempt_s = time.monotonic(), _ATTEMPT_S
        while True:
            try:
                metadata = self.admin.list_topics(timeout=attempt_s)
                break
            except KafkaException as error:
                self.admin.poll(0 if self._complaints.last else _LOOK_S)
                waited_s = time.monotonic() - began
                patience_s = _REFUSAL_S if self._complaints.refusal else _PATIENCE_S
                hopeless = self._complaints.down and not self._complaints.refusal
                if hopeless or waited_s > patience_s or not passing(error.args[0]):
                    raise self._complaints.explained(
                        error, "connect to Kafka", self.settings.bootstrap_servers
                    ) from error
                attempt_s = max(_ATTEMPT_S, min(2 * attempt_s, patience_s - waited_s))
                self.waiter.turn()
        self._learn_all(metadata)

    def learn_leaders(self) -> None:
        """Refresh the metadata once, briefly; ignore that nobody answers."""
        with contextlib.suppress(KafkaException):
            self._learn_all(self.admin.list_topics(timeout=_ATTEMPT_S))

    def _learn_all(self, metadata: ClusterMetadata) -> None:
        """Take brokers, topics and partitions from Kafka's metadata; forget lost topics."""
        self.brokers, self.leaderless = len(metadata.brokers), leaderless(metadata)
        for name, topic in metadata.topics.items():
            if topic.error is None:
                self._learn(name, topic.partitions.values())
        for name in self._partitions.keys() - metadata.topics.keys():
            del self._partitions[name]

    def reader(self, topic: str, partition: int = 0, *, committed: bool = True) -> TopicReader:
        """Return a reader of a topic's partition, which is a context manager."""
        return TopicReader(self.settings, topic, partition, committed=committed)

    def _of_table(self, name: str) -> NewTopic:
        configured = self.settings.of_topic(name)
        partitions = configured.partitions or self.settings.partitions
        return self._new(name, partitions=partitions, compacted=False, configured=configured)

    def _new(
        self,
        name: str,
        *,
        partitions: int,
        compacted: bool,
        short_lived: bool = False,
        configured: TopicSettings | None = None,
    ) -> NewTopic:
        """Return a topic to be made, with replicas and configuration by the settings."""
        configured = configured or TopicSettings()
        replicas = replication_factor(
            configured.replication_factor or self.settings.replication_factor,
            self.brokers,
            (self._replicas.get(known(self.prefix), 0) for known in _OWN),
        )
        config = new_config(
            replicas, compacted=compacted, short_lived=short_lived, configured=configured.config
        )
        return NewTopic(name, num_partitions=partitions, replication_factor=replicas, config=config)

    def _make(self, topic: NewTopic) -> None:
        creation = TopicCreation(self.admin, self.waiter)
        # As many as topics of ours have: a broker is away, which comes again.
        await_broker = topic.replication_factor in self._replicas.values()
        made = creation.make(topic, await_broker=await_broker)
        self._add(topic.topic, made.partitions.values())

    def _add(self, name: str, partitions: Collection[Any]) -> None:
        self._learn(name, partitions)
        reach("topic made")
        logger.info("topic is ready", topic=name, partitions=self._partitions[name])

    def _learn(self, name: str, partitions: Collection[Any]) -> None:
        self._partitions[name] = len(partitions)
        self._replicas[name] = min([len(one.replicas) for one in partitions], default=0)
