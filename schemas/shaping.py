"""The settings of the section `shaping`: which changes are published, how, and where to. Pure.

A table pattern is `schema.table`, a column pattern a name; in both `*` stands for any characters.
The first dot parts schema and table. Templates are names of topics with `{prefix}`, `{schema}` and
`{table}` in them.
"""

import re
import string
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from schemas.large_values import LargeValueSettings

Operation = Literal["c", "u", "d", "t"]
DEFAULT_TEMPLATE = "{prefix}.{schema}.{table}"
POSITION = ("op", "commit_lsn", "seq", "timeline")
"""Fields that every record needs: what it is, and where it stands in the order of all events."""
_OF_SOURCE = (
    *("commit_lsn", "seq", "timeline", "lsn", "txId", "table", "schema", "db", "name"),
    *("version", "connector", "snapshot"),
)
FIELDS = (
    *("op", "ts_ms", *_OF_SOURCE),
    *(f"source.{name}" for name in (*_OF_SOURCE, "ts_ms", "ts_us", "ts_ns")),
    *(f"transaction.{name}" for name in ("id", "total_order", "data_collection_order")),
)
"""Fields of an event that can be chosen; `ts_ms` is the time of encoding, the rest of `source`."""
_LITERAL = re.compile(r"[A-Za-z0-9._-]*")
_SALT_CHARACTERS_MIN = 16
_HEADERS = ("id", "type", "commit_lsn", "seq", "end_lsn", "traceparent", "content-type")


def _table_pattern(pattern: str) -> str:
    schema, _, table = pattern.partition(".")
    if not schema or not table:
        raise ValueError(f"{pattern!r} is not of the form schema.table (* for any characters)")
    return pattern


def template_fields(template: str) -> set[str]:
    """Return the names of the `{fields}` in a template of a topic's name.

    Raise ValueError for a template that could not give a legal topic name.
    """
    fields = set()
    for literal, field, specification, conversion in string.Formatter().parse(template):
        if not _LITERAL.fullmatch(literal):
            raise ValueError(f"{template!r}: a topic has only letters, digits, `.`, `_` and `-`")
        if specification or conversion or field == "":
            raise ValueError(f"{template!r}: write a field as {{name}}, without a format")
        if field is not None:
            fields.add(field)
    return fields


def _field(name: str) -> str:
    if name not in FIELDS:
        raise ValueError(f"{name!r} is not one of {', '.join(FIELDS)}")
    return name


def field_name(field: str) -> str:
    """Return what a field of an event is called in a flat row and as a header, as in Debezium."""
    return "__" + field.replace(".", "_")


TablePattern = Annotated[str, AfterValidator(_table_pattern)]
EventField = Annotated[str, AfterValidator(_field)]
ColumnPattern = Annotated[str, Field(min_length=1)]
ColumnName = Annotated[str, Field(min_length=1, max_length=63)]
PartitionColumns = Annotated[tuple[ColumnName, ...], Field(min_length=1)]
Expression = Annotated[str, Field(min_length=1, max_length=10_000)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ColumnSettings(_Part):
    """Which columns of a table are published; `include` empty: all that `exclude` does not name."""

    include: tuple[ColumnPattern, ...] = ()
    """Columns; empty: all that `exclude` does not name."""
    exclude: tuple[ColumnPattern, ...] = ()
    """Columns that are not published."""


class MaskSettings(_Part):
    """The text that replaces a column's value; NULL stays NULL. The published type becomes text."""

    text: str | None = Field(None, max_length=1000)
    """Text that replaces every value of the column."""
    hash: Literal["sha256"] | None = None
    """HMAC-SHA256 of the value's text form, keyed with `shaping.salt`, in hexadecimal."""
    truncate: int | None = Field(None, ge=0, le=2**20)
    """How many leading characters of the value's text form are published."""

    @model_validator(mode="after")
    def _one(self) -> "MaskSettings":
        if sum(x is not None for x in (self.text, self.hash, self.truncate)) != 1:
            raise ValueError("a mask needs exactly one of text, hash, truncate")
        return self


class RouteSettings(_Part):
    """Tables of a topic, which they may share.

    `tables`: a regular expression for the whole of `schema.table`; its named groups are fields of
    the template `topic`.
    """

    tables: str
    """Regular expression for the whole of `schema.table`."""
    topic: str
    """Template of the topic's name; named groups of `tables` are fields of it."""

    @model_validator(mode="after")
    def _valid(self) -> "RouteSettings":
        """Refuse a wrong regular expression, and topic fields that it has no group of."""
        try:
            groups = set(re.compile(self.tables).groupindex)
        except re.error as error:
            raise ValueError(f"{self.tables!r} is not a regular expression: {error}") from None
        unknown = template_fields(self.topic) - {"prefix", "schema", "table"} - groups
        if unknown:
            raise ValueError(f"{self.topic!r}: {{{min(unknown)}}} is neither a field nor a group")
        return self


class OutboxSettings(_Part):
    """An outbox: each inserted row, or logical message, is a Kafka message of its own."""

    table: TablePattern | None = None
    """`schema.table` of the outbox."""
    message_prefix: str | None = None
    """Prefix of logical messages (`pg_logical_emit_message`) that are outbox messages: JSON objects
    with the columns below as members. No table is needed then."""
    topic: str = "{prefix}.outbox.{type}"
    """`{type}`: the row's aggregate type."""
    id: str = "id"
    """The column that becomes the header `id`."""
    aggregate_type: str = "aggregatetype"
    """The column that names the topic."""
    aggregate_id: str = "aggregateid"
    """The column that becomes the key."""
    type: str = "type"
    """The column that becomes the header `type`."""
    payload: str = "payload"
    """The column that becomes the message's value."""
    headers: dict[str, str] = {}
    """Column -> header that gets its value, too."""
    partition: str | None = None
    """The column with the number of the message's partition; where it is NULL, the key chooses."""

    @model_validator(mode="after")
    def _valid(self) -> "OutboxSettings":
        """Refuse an outbox without a source, and names that clash with the bridge's own."""
        if self.table is None and not self.message_prefix:
            raise ValueError("outbox: needs table, message_prefix or both")
        if (self.message_prefix or "").startswith("slotbridge"):
            raise ValueError("outbox.message_prefix: the bridge's own messages begin so")
        taken = {"id", "type", "commit_lsn", "seq"} & set(self.headers.values())
        if taken:
            raise ValueError(f"outbox.headers: every message has its own header {min(taken)}")
        unknown = template_fields(self.topic) - {"prefix", "type"}
        if unknown:
            raise ValueError(
                f"{self.topic!r}: {{{min(unknown)}}} is neither {{prefix}} nor {{type}}"
            )
        return self


class AnnotationSettings(_Part):
    """Logical messages at the beginning of a transaction that become headers of its events."""

    message_prefix: str = Field(min_length=1)
    """Prefix of these messages (`pg_logical_emit_message(true, …)`)."""
    header: str = Field("annotation", min_length=1)
    """Name of the header with a message's content, one for each message."""

    @model_validator(mode="after")
    def _valid(self) -> "AnnotationSettings":
        if self.message_prefix.startswith("slotbridge"):
            raise ValueError("annotations.message_prefix: the bridge's own messages begin so")
        if self.header in _HEADERS or self.header.startswith(("__", "ce_")):
            raise ValueError(f"annotations.header: events have their own header {self.header}")
        return self


class FlatSettings(_Part):
    """Rows as records of their own, without an envelope: as Debezium's ExtractNewRecordState."""

    tables: tuple[TablePattern, ...] = ("*.*",)
    """Tables whose records are flat."""
    fields: tuple[EventField, ...] = ()
    """Fields of the event that a row has too, as `__op`, `__source_ts_ms`. `op`, `commit_lsn`,
    `seq`, `timeline` are always there."""
    deletes: Literal["rewrite", "tombstone"] = "rewrite"
    """`rewrite`: the old row with `__deleted` "true", then a tombstone (bridge.tombstones);
    `tombstone`: a tombstone alone, with `op`, `commit_lsn`, `seq`, `timeline` as headers."""


class ShapingSettings(_Part):
    """Which changes are published, how, and where to; the default publishes everything."""

    include: tuple[TablePattern, ...] = ()
    """Tables; empty: all of the publication."""
    exclude: tuple[TablePattern, ...] = ()
    """Tables that are not published, though `include` names them."""
    columns: dict[TablePattern, ColumnSettings] = {}
    masks: dict[TablePattern, dict[ColumnPattern, MaskSettings]] = {}
    salt: SecretStr = SecretStr("")
    """The secret of `hash`."""
    large_values: dict[TablePattern, dict[ColumnPattern, LargeValueSettings]] = {}
    """Table -> column -> limit of its values; the first match applies. With `*` for a
    column: all columns of a type that can be cut or stored."""
    keys: dict[TablePattern, tuple[str, ...]] = {}
    """The columns of a table's message key, instead of its primary key."""
    partition_by: dict[TablePattern, PartitionColumns | Literal["row"]] = {}
    """What chooses the partition of a table's events instead of the key: columns, by their values;
    or `row`, of tables without a key, by the whole row. Else a table without a key is in the first
    partition, in order. The first match applies."""
    skip: dict[TablePattern, tuple[Operation, ...]] = {}
    """Operations that are not published: c insert, u update, d delete, t truncate."""
    filters: dict[TablePattern, Expression] = {}
    """Rows that are published: a CEL expression over a row's columns, true for those."""
    computed: dict[TablePattern, dict[ColumnName, Expression]] = {}
    """Columns published beside the table's own: name -> CEL expression over its columns."""
    renames_allowed: tuple[TablePattern, ...] = ()
    """Names that a table may get though more of it is hidden under another name of it."""
    skip_unchanged: tuple[TablePattern, ...] = ()
    """Tables with REPLICA IDENTITY FULL whose updates are not published where no published column
    has another value."""
    topic: str = DEFAULT_TEMPLATE
    """The name of a table's topic."""
    routes: tuple[RouteSettings, ...] = ()
    """The first route that matches a table names its topic; `topic` names all other topics."""
    outbox: OutboxSettings | None = None
    flat: FlatSettings | None = None
    annotations: AnnotationSettings | None = None

    @model_validator(mode="after")
    def _valid(self) -> "ShapingSettings":
        """Refuse a topic without the table, hashes without salt, and clashing names."""
        fields = template_fields(self.topic)
        if not {"table"} <= fields <= {"prefix", "schema", "table"}:
            raise ValueError("topic: needs {table}, and may have {prefix} and {schema}")
        templates = (self.topic, *(route.topic for route in self.routes))
        if self.flat and not all("prefix" in template_fields(one) for one in templates):
            raise ValueError(
                "flat: needs {prefix} in topic and routes, as a flat row does not name its bridge"
            )
        hashes = any(mask.hash for masks in self.masks.values() for mask in masks.values())
        if hashes and len(self.salt.get_secret_value()) < _SALT_CHARACTERS_MIN:
            raise ValueError(f"hash needs a secret `salt` of {_SALT_CHARACTERS_MIN} characters")
        if self.annotations and self.outbox:
            if self.annotations.message_prefix == self.outbox.message_prefix:
                raise ValueError("annotations.message_prefix: the outbox has the same")
            if self.annotations.header in self.outbox.headers.values():
                raise ValueError("annotations.header: a column of the outbox has the same")
        if not all(self.keys.values()):
            raise ValueError("keys: name at least one column for each table")
        return self

    @property
    def claims(self) -> bool:
        """Whether values of some column are stored outside of events."""
        rules = (rule for columns in self.large_values.values() for rule in columns.values())
        return any(rule.claim_check_bytes is not None for rule in rules)
