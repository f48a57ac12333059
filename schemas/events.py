"""The wire format in Kafka: topics, keys and values, as pydantic models.

    topic                      key                     value
    <prefix>.<schema>.<table>  primary key columns     Envelope (op c r u d t), or null (tombstone)
    <prefix>.message           {"prefix": …}           MessageEnvelope (op m)
    <prefix>.transaction       {"id": …}               TransactionEvent, one partition
    <prefix>.schema            SchemaKey               SchemaEvent (.schema_events), compacted
    <prefix>.table_names       TableName               TableName (.schema_events), compacted
    <prefix>.dead              {commit_lsn, seq}       DeadLetter, one partition
    <prefix>.progress          the slot's name         ProgressRecord (schemas.progress), compacted,
                               ~settling:…             SettlingNote, or null; one partition
    <prefix>.prepared          PreparedKey             part 0: PreparedRecord; else bytes; compacted
    <prefix>.divergence        the slot's name         DivergenceRecord, one partition
    <prefix>.recovery          the slot's name         RecoveryRecord (schemas.recovery)
    <prefix>.snapshot          SnapshotKey             SnapshotProgress (schemas.snapshot)

(commit_lsn, seq) identifies and orders every event of all topics; after an accepted divergence,
(timeline, commit_lsn, seq) does. Tests validate the bridge's encoder against these models.
"""

from base64 import b64encode
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

UNAVAILABLE = "__debezium_unavailable_value"
"""Stands for a TOASTed value that an UPDATE did not change and the WAL does not hold."""
UNAVAILABLE_BASE64 = b64encode(UNAVAILABLE.encode()).decode()
"""The same in a bytea column, as its bytes in base64."""
PLACEHOLDER_VALUES_HEADER = "slotbridge.placeholder_values"
"""Header of an event in which a column's value, as somebody wrote it, is the placeholder's own
text: a JSON array of the names of these columns. In all others of `after` the text stands for a
value that was not changed. In `before` it never does: PostgreSQL logs an old row whole."""
SETTLED_KEY = b'{"slotbridge":"settled"}'
"""The key of a tombstone that means nothing, in any topic: a transaction that Kafka had decided to
commit, but left open, was ended with it (docs/why/delivery.md)."""
SETTLING_KEY_PREFIX = b"~settling:"
"""How keys of a SettlingNote begin; no slot has a `~` in its name."""
HEARTBEAT_PREFIX = "slotbridge"
"""The prefix of the bridge's own logical messages, which are recognised and not published. All
prefixes that begin so are reserved."""
MARKER_PREFIX = "slotbridge.failover"
"""The prefix of slotfailover's marker messages, which the bridge publishes."""


class Contract(BaseModel):
    """A model that has exactly its fields, and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Contract):
    """Where an event comes from; `commit_lsn`, `seq`, `timeline` are ours, the rest Debezium's."""

    version: str
    connector: Literal["postgresql"]
    name: str
    ts_ms: int
    """Commit time since 1970; also `ts_us`, `ts_ns`."""
    ts_us: int
    ts_ns: int
    snapshot: Literal["true", "false", "first", "last", "incremental", "repair"]
    db: str
    sequence: str
    schema_: str = Field(alias="schema")
    table: str
    txId: int
    lsn: int
    """Where the change itself lies in the WAL: unique, but no order across transactions. Of a row
    that a snapshot read: it shows nothing that was committed after, and may show all before."""
    xmin: int | None
    commit_lsn: int
    """Where its transaction's commit record begins."""
    seq: int
    """The event's number in its transaction, from 0, unique but with gaps: numbers are given to
    changes before settings leave any out. A truncate has the same in every partition."""
    timeline: int


class TransactionOrder(Contract):
    """An event's place in its transaction: among all events, and among those of its table."""

    id: str
    """`txId:commit_lsn`, the same for all events of a transaction, its BEGIN and its END."""
    total_order: int
    data_collection_order: int


class Envelope(Contract):
    """One change of a row (`before`, `after`: column -> JSON form), or a truncate of a table.

    `r`: a row as a snapshot has read it (docs/guides/snapshots.md).
    """

    before: dict[str, Any] | None
    after: dict[str, Any] | None
    source: Source
    transaction: TransactionOrder | None
    op: Literal["c", "r", "u", "d", "t"]
    ts_ms: int
    """When the bridge encoded it, since 1970; also `ts_us`, `ts_ns`."""
    ts_us: int
    ts_ns: int


class DataCollection(Contract):
    """How many events of one table (`schema.table`) a transaction has; a truncate counts once.

    Events that settings leave out are not counted; those in <prefix>.dead are.
    """

    data_collection: str
    event_count: int


class TransactionEvent(Contract):
    """A transaction's beginning or end. Only END has the counts; empty transactions have neither.

    In commit order. `event_count` includes logical messages, which belong to no table.
    """

    status: Literal["BEGIN", "END"]
    id: str
    ts_ms: int
    commit_lsn: int
    event_count: int | None
    data_collections: list[DataCollection] | None


class MessageContent(Contract):
    """A logical message (pg_logical_emit_message); `content` in bytea's form, by default base64."""

    prefix: str
    content: str


class MessageEnvelope(Contract):
    """A logical message as an event; one that was not transactional has its own LSN as commit."""

    message: MessageContent
    source: Source
    transaction: None
    op: Literal["m"]
    ts_ms: int
    ts_us: int
    ts_ns: int


class Content(Contract):
    """Bytes of a refused record: as `text` if they are UTF-8, else as `base64`.

    `truncated`: these are the first of `bytes` bytes; `sha256` is of all of them, in hexadecimal.
    """

    text: str | None = None
    base64: str | None = None
    bytes: int
    sha256: str
    truncated: bool = False


class DeadLetter(Contract):
    """A record that Kafka refused, in the Kafka transaction that it would have been in.

    `topic` is where it belonged (empty: its row named none), `table` its `schema.table`, empty for
    a message. `end_lsn` is null in a part of a large transaction; `value` null: there was none.
    """

    reason: str
    topic: str
    table: str
    commit_lsn: int
    end_lsn: int | None
    lsn: int
    seq: int
    xid: int
    ts_ms: int
    key: Content | None
    value: Content | None
    headers: dict[str, Content | None]


class PreparedKey(Contract):
    """The key of a part of a prepared transaction's staging."""

    slot: str
    gid: str
    part: int


class PreparedRecord(Contract):
    """A transaction that is prepared and not yet decided: part 0 of its staging.

    Parts 1 to `parts` put together are zlib-compressed frames of pgoutput messages
    (services/bridge/transactions/staging.py). A decision replaces all parts by tombstones. For the
    bridge alone.
    """

    slot: str
    gid: str
    xid: int
    prepare_lsn: int
    end_lsn: int
    prepare_ts_ms: int
    streamed: bool
    """Whether the messages carry the xid of their subtransaction, as in streamed blocks."""
    parts: int
    changes: int


class DivergenceRecord(Contract):
    """Transactions that Kafka has and the database lost at a failover, and that were accepted.

    Those events of `lost_timeline` whose commit_lsn is `switch_lsn` or more never happened; Kafka
    had them up to `reached_lsn`. `transactions` are the ENDs of the first of `count`; the last may
    be a BEGIN, where Kafka has only a part. Written in the Kafka transaction after which all events
    are of `timeline`.
    """

    slot: str
    system_identifier: str
    lost_timeline: int
    timeline: int
    switch_lsn: int
    reached_lsn: int
    count: int
    transactions: list[TransactionEvent]
    ts_ms: int


def table_topic(prefix: str, schema: str, table: str) -> str:
    """Return the topic of a table; put `_` for characters that Kafka forbids, as Debezium does."""
    return legal_topic(f"{prefix}.{schema}.{table}")


def legal_topic(name: str) -> str:
    """Replace every character of `name` that Kafka forbids in a topic by `_`."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)


def progress_topic(prefix: str) -> str:
    """Return the name of the compacted topic of progress records."""
    return f"{prefix}.progress"


def prepared_topic(prefix: str) -> str:
    """Return the name of the compacted topic where prepared transactions await their decision."""
    return f"{prefix}.prepared"


def message_topic(prefix: str) -> str:
    """Return the name of the topic of logical messages."""
    return f"{prefix}.message"


def transaction_topic(prefix: str) -> str:
    """Return the name of the topic of transaction boundaries."""
    return f"{prefix}.transaction"


def schema_topic(prefix: str) -> str:
    """Return the name of the compacted topic of schema events, which describe tables' shapes."""
    return f"{prefix}.schema"


def table_names_topic(prefix: str) -> str:
    """Return the compacted topic of the names under which settings hide something of a table."""
    return f"{prefix}.table_names"


def dead_topic(prefix: str) -> str:
    """Return the name of the topic of records that Kafka refused."""
    return f"{prefix}.dead"


def divergence_topic(prefix: str) -> str:
    """Return the name of the topic of accepted divergences."""
    return f"{prefix}.divergence"


def recovery_topic(prefix: str) -> str:
    """Return the name of the topic of repairs by `slotbridge recover`."""
    return f"{prefix}.recovery"


def snapshot_topic(prefix: str) -> str:
    """Return the compacted topic of how much of each table's rows a snapshot has published."""
    return f"{prefix}.snapshot"


def own_topics(prefix: str) -> frozenset[str]:
    """Return the bridge's own topics under the prefix, without those of tables."""
    makers = (
        *(progress_topic, prepared_topic, message_topic),
        *(transaction_topic, schema_topic, dead_topic, divergence_topic),
        *(snapshot_topic, recovery_topic, table_names_topic),
    )
    return frozenset(topic_of(prefix) for topic_of in makers)
