"""How one table's records are written: the JSON text of a key or value to its bytes. Pure.

    json                    the text itself
    json_schema_envelope    {"payload":text,"schema":…}, as Connect's JsonConverter reads it
    json_schema             the text behind the id of its JSON Schema in the registry
    avro, protobuf          their binary forms behind the id of the schema in the registry

The schema is a constant of the table's shape, so that an envelope costs a concatenation. It is
registered when a table is described, before its first record is made.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple, Protocol

from schemas import wire
from schemas.events import table_topic
from schemas.kafka import REGISTERED, Format, KafkaSettings
from schemas.naming import Naming
from schemas.registry import SubjectNaming
from services.bridge.events import fields
from services.bridge.events.event import FIRST_PARTITION
from services.bridge.events.formats import connect, json_schema
from services.bridge.events.formats.connect import Schema
from services.bridge.events.formats.strict_encoders import FiniteEncoders, StrictEncoders
from services.bridge.events.formats.type_schemas import column_schema
from services.bridge.events.shaping.outbox import Headers
from services.bridge.events.shaping.tables import TableShaping
from services.bridge.events.values.encoders import Encoders

Serialize = Callable[[str], bytes]


class Registry(Protocol):
    """A schema registry.

    `register` returns the id of a schema of `kind` under a subject, `schema_text` the schema of an
    id.
    """

    @property
    def subject_naming(self) -> SubjectNaming: ...
    def register(self, subject: str, schema: str, kind: str, /) -> int: ...
    def schema_text(self, schema_id: int, /) -> str: ...


class Rendering(Protocol):
    """A module that writes a Connect schema as the schema of another language."""

    REGISTRY_TYPE: str
    """The registry's name of the language."""

    def record_name(self, schema: Schema, /) -> str: ...
    def schema_text(self, schema: Schema, /) -> str: ...


class BinaryRendering(Rendering, Protocol):
    """A module that also writes JSON text that fits a schema in a binary form."""

    def serializer(self, schema: Schema, schema_id: int, /) -> Serialize: ...


class Affixes(NamedTuple):
    """The text around the JSON of a key or value, for `wire.text_as_bytes`."""

    opening: str = ""
    closing: str = ""


class Key(NamedTuple):
    """A record's key. `placed_by`: as an event has it."""

    data: bytes | None
    placed_by: bytes | int | None = None

    def as_header(self, name: str) -> Headers | None:
        """Return the headers that tell this key, None where there is none."""
        return None if self.data is None else [(name, self.data)]


class TableFormat(NamedTuple):
    """The functions that make a record's key and value of their JSON text.

    `key_affixes`, `value_affixes`: what these functions do is no more than put this around the
    text; None: they make a binary form of it, or a text that depends on more. `places_by_bytes`: a
    key's bytes choose its partition, not its JSON.
    """

    key: Serialize = str.encode
    value: Serialize = str.encode
    key_affixes: Affixes | None = Affixes()
    value_affixes: Affixes | None = Affixes()
    places_by_bytes: bool = False

    def keyed(self, text: str) -> Key:
        """Return the key of its JSON text."""
        if self.key is str.encode or self.places_by_bytes:
            return Key(self.key(text))
        return Key(self.key(text), text.encode())


NO_KEY: Final = Key(None, FIRST_PARTITION)
PLAIN: Final = TableFormat()
_FINITE: Final[frozenset[Format]] = frozenset({"json_schema", "json_schema_envelope"})
"""Formats whose numbers are JSON's. Connect's JsonConverter reads the text "NaN" as 0.0."""


class Formats:
    """The formats of one session's tables, as `kafka` has them."""

    def __init__(
        self,
        kafka: KafkaSettings,
        naming: Naming,
        encoders: Encoders,
        registry: Registry | None = None,
        last_key: Callable[[str], bytes | None] = lambda _topic: None,
    ) -> None:
        """Make the formats. `last_key`: returns a topic's last key, for `kafka.key_bytes`."""
        self._as_connect = kafka.key_bytes == "connect"
        self._last_key = cache(last_key)
        self._registry = registry
        self._key, self._value = kafka.key_format, kafka.value_format
        self._prefix = kafka.topic_prefix
        self._naming = naming
        self._encoders = encoders

    def of(self, plan: TableShaping) -> TableFormat:
        """Return the format of a relation's records, as the relation is planned."""
        if self._key == self._value == "json" or not plan.published:
            return PLAIN
        return self._made(*self._schemas(plan), plan.topic.name)

    def keys_are_like(self, plan: TableShaping, last: bytes) -> bool:
        """Tell whether a table's keys, as they are now, have the schema of a key of its topic."""
        from services.bridge.events.formats import connect_keys

        return connect_keys.is_like(self._schemas(plan)[0], last, self._schema_text)

    def _schemas(self, plan: TableShaping) -> tuple[Schema, Schema]:
        """Return the schemas of a relation's keys and values, as the relation is planned."""
        relation = plan.relation
        chosen = bool(self._naming.key(relation.schema, relation.table))
        may_lack_key = chosen and not self._as_connect  # Debezium's keys are never null
        may_be_truncated = plan.flat is not None and "t" not in plan.skipped
        name = plan.topic.name
        if plan.topic.routed:
            name = table_topic(self._prefix, relation.schema, relation.table)
        keys, columns = {}, {}
        for column in relation.columns:
            schema = column_schema(self._encoders, column.type_oid, column.typmod)
            if column.key:
                schema_of_key = connect.without_labels(schema)
                needed = connect.needed(schema_of_key)
                keys[column.name] = schema_of_key if may_lack_key else needed
                if not (may_lack_key or may_be_truncated):
                    schema = connect.needed(schema)
            if column.name in plan.limits:
                schema = connect.with_large_values(schema, plan.large_values[column.name].settings)
            columns[column.name] = schema
        whole = connect.envelope(name, columns)
        if plan.flat is not None:
            whole = connect.flat(name, fields.schemas(plan.flat), columns)
        return connect.key(name, keys), whole

    def _made(self, keys: Schema, values: Schema, topic: str) -> TableFormat:
        """Return the format of a topic's records with these schemas."""
        value, affixes = self._part(self._value, values, topic, "value")
        if self._as_connect and keys["fields"]:
            key = self._connect_key(keys, topic)
            return TableFormat(key, value, None, affixes, places_by_bytes=True)
        key, key_affixes = self._part(self._key, keys, topic, "key")
        return TableFormat(key, value, key_affixes, affixes)

    def _connect_key(self, schema: Schema, topic: str) -> Serialize:
        """Return how keys with the schema of the topic's last key are written, or with `schema`."""
        from services.bridge.events.formats import connect_keys

        last = self._last_key(topic)
        if self._key != "avro":
            return _within(Affixes(connect_keys.opening(schema, last), connect_keys.CLOSING))
        binary = _binary(self._key)
        found = connect_keys.schema_id(schema, last, self._schema_text)
        if found is None:
            found = self._register(binary, schema, topic, "key")
        return binary.serializer(schema, found)

    def _schema_text(self, schema_id: int) -> str:
        if self._registry is None:
            raise ValueError("a schema's id needs a schema registry")
        return self._registry.schema_text(schema_id)

    def _part(
        self, form: Format, schema: Schema, topic: str, part: str
    ) -> tuple[Serialize, Affixes | None]:
        """Return what writes the `part` (key or value) of records, and the text around its JSON.

        That is None for formats that are not text around JSON.
        """
        if form not in REGISTERED:
            affixes = _affixes(form, schema)
            return _within(affixes), affixes
        if not schema["fields"]:
            return _unused, None
        if form == "json_schema":
            affixes = Affixes(json_schema.opening(self._register(json_schema, schema, topic, part)))
            return _within(affixes), affixes
        binary = _binary(form)
        return binary.serializer(schema, self._register(binary, schema, topic, part)), None

    def _register(self, rendering: Rendering, schema: Schema, topic: str, part: str) -> int:
        """Return the id that the registry has for a schema of keys or values."""
        if self._registry is None:
            raise ValueError(f"{rendering.REGISTRY_TYPE} needs a schema registry")
        record = rendering.record_name(schema)
        subject = {
            "topic": f"{topic}-{part}",
            "record": record,
            "topic_record": f"{topic}-{record}",
        }[self._registry.subject_naming]
        text, kind = rendering.schema_text(schema), rendering.REGISTRY_TYPE
        return self._registry.register(subject, text, kind)


def encoders_for(kafka: KafkaSettings) -> type[Encoders]:
    """Return the class of encoders whose JSON fits the formats."""
    formats = {kafka.key_format, kafka.value_format}
    if formats == {"json"}:
        return Encoders
    return StrictEncoders if formats.isdisjoint(_FINITE) else FiniteEncoders


def _binary(form: Format) -> BinaryRendering:
    """Return a module whose library is loaded only where it is needed."""
    if form == "avro":
        from services.bridge.events.formats import avro

        return avro
    from services.bridge.events.formats import protobuf

    return protobuf


def _affixes(form: Format, schema: Schema) -> Affixes:
    if form == "json":
        return Affixes()
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return Affixes('{"payload":', f',"schema":{text}}}')


def _unused(_text: str) -> bytes:
    raise AssertionError("a table without a key has no keys")


def _within(affixes: Affixes) -> Serialize:
    if affixes == Affixes():
        return str.encode
    opening, closing = affixes
    return lambda text: wire.text_as_bytes(f"{opening}{text}{closing}")
