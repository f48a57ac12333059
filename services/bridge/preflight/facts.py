"""The facts that `slotbridge preflight` reads from the primary, Kafka and the bridge. Pure.

Facts ── primary: Primary      settings, slots, statistics, published tables
      ├─ kafka: Kafka          topics with their configuration; None where it gave no answer
      ├─ standby: SnapshotStandby  where a snapshot reads rows; None if not set
      └─ sample: Sample        what was decoded and published in some seconds; None if not asked
"""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import SettingsError
from services.bridge.pgoutput.messages import Relation
from services.bridge.sink.compaction import Compacted
from services.bridge.sink.topic_differences import TopicDifference
from services.bridge.sink.topic_requirements import Topic
from services.bridge.source.publication_drift import PublicationDifference
from services.postgres.partitions import Partition
from services.postgres.slots import Slot, SlotStatistics


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication, and what it publishes."""

    name: str
    all_tables: bool
    updates: bool
    deletes: bool
    truncates: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A published table. `identity`: pg_class.relreplident (d, n, f, i)."""

    schema: str
    name: str
    identity: str
    primary_key: bool
    included: bool
    """The settings publish its events."""
    keyed: bool
    """shaping.keys names a key for it."""
    full_wanted: bool = False
    """A setting may need the old values that REPLICA IDENTITY FULL tells."""

    @property
    def full_name(self) -> str:
        """Return the name of the table with its schema."""
        return f"{self.schema}.{self.name}"

    @property
    def has_key(self) -> bool:
        """Whether its events have a key without any setting."""
        return self.identity == "i" or (self.primary_key and self.identity != "n")


@dataclass(frozen=True, slots=True)
class PartitionedTable:
    """A table that is published as the root of its partitions; `relation`: as pgoutput has it."""

    relation: Relation
    partitions: tuple[Partition, ...]

    @property
    def hiding(self) -> tuple[Partition, ...]:
        """The partitions whose old rows lack values that the root's replica identity promises."""
        promised = {column.name for column in self.relation.columns if column.key}
        return tuple(one for one in self.partitions if not promised <= one.identity)


@dataclass(frozen=True, slots=True)
class Primary:
    """The primary; settings as pg_settings.setting has them, in its units."""

    version: int
    settings: Mapping[str, str]
    wal_lsn: int
    slots: tuple[Slot, ...]
    statistics: SlotStatistics | None
    publication: Publication | None
    tables: tuple[Table, ...]
    followers_without_slot: tuple[str, ...]
    differences: tuple[PublicationDifference, ...] = ()
    """Between the publication and the settings."""
    unfit: tuple[SettingsError, ...] = ()
    """Of settings in `shaping` that do not fit a published table."""
    partitioned: tuple[PartitionedTable, ...] = ()
    """Tables that are published as the root of their partitions."""

    def number(self, name: str, default: int) -> int:
        """Return a setting as a number, `default` where the server does not have it."""
        value = self.settings.get(name, "")
        return int(value) if value.lstrip("-").isdigit() else default


@dataclass(frozen=True, slots=True)
class Kafka:
    """The topics that the slot may have written to, and what the producer may send."""

    topics: tuple[Topic, ...]
    partitions: Mapping[str, int]
    table_topics: frozenset[str]
    message_bytes_max: int
    counted: frozenset[str] = frozenset()
    """Topics whose partitions kafka.topics gives."""
    differences: tuple[TopicDifference, ...] = ()
    """Between the topics and kafka.topics."""
    compacted: tuple[Compacted, ...] = ()
    """Tables some of whose events a compacted topic refuses."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Transactions that the server decoded, and that the bridge published, in the same seconds."""

    seconds: float
    decoded: int
    published: int


@dataclass(frozen=True, slots=True)
class SnapshotStandby:
    """The server of snapshot.conninfo. `feedback`: its hot_standby_feedback.

    `waits`: why no rows can be read there now; "" where they can. `denied`: published tables
    that its role may not read. `hidden`: the role can't see which timeline it replays.
    """

    host: str
    same_database: bool
    recovers: bool
    feedback: bool
    waits: str = ""
    denied: tuple[str, ...] = ()
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that was read; `unread`: what could not be read, as (subject, why)."""

    slot: str
    prefix: str
    servers: str
    streaming: bool
    """bridge.streaming"""
    partitions_wanted: int
    compiled: bool
    primary: Primary
    kafka: Kafka | None
    sample: Sample | None
    unread: tuple[tuple[str, str], ...] = ()
    standby: SnapshotStandby | None = None
    """None where snapshot.conninfo is not set, or it could not be asked."""

    @property
    def own_slot(self) -> Slot | None:
        """The bridge's slot, None where there is none yet."""
        return next((s for s in self.primary.slots if s.slot_name == self.slot), None)
