"""How a topic's records are written, beside how the bridge would write them. Pure.

Debezium's key is the primary key in its own order, else a unique index; the bridge's is the replica
identity or the primary key, in the order of the table's columns. Where these differ, the changes of
a row would go on under another key, in another partition. The topic's last record tells, whatever
the reason is. Source: PgOutputMessageDecoder.handleRelationMessage, TableSchemaBuilder.create.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from schemas.kafka import KafkaSettings
from schemas.naming import Naming
from schemas.shaping import field_name
from services.bridge.adoption.last_records import DebeziumRecord
from services.postgres.published_tables import PublishedTable

_ENVELOPE: Final = {"payload", "schema"}


class _Written(NamedTuple):
    """The names of a document, () for none; whether its schema is beside it."""

    names: tuple[str, ...]
    schema: bool


def unlike(
    samples: Mapping[str, DebeziumRecord],
    tables: Iterable[PublishedTable],
    naming: Naming,
    kafka: KafkaSettings,
) -> Iterator[str]:
    """Yield how records differ from what the bridge would write; `samples`: one of each topic."""
    for table in tables:
        if not naming.publishes(table.schema, table.table):
            continue
        record = samples.get(naming.table(table.schema, table.table).name)
        if record is None:
            continue
        theirs, ours = _written(record.key), key_of(table, naming)
        if theirs.names != ours:
            yield f"{record.where} has key {_listed(theirs.names)}, the bridge's is {_listed(ours)}"
        value = _written(record.value)
        if (field_name("op") in value.names) != naming.flat(table.schema, table.table):
            yield f"{record.where} is {'a flat row' if field_name('op') in value.names else 'none'}"
        for part, written, form in (
            ("key", theirs, kafka.key_format),
            ("value", value, kafka.value_format),
        ):
            if written.names and written.schema != (form == "json_schema_envelope"):
                yield f"{record.where} has {'a' if written.schema else 'no'} schema in its {part}"


def key_of(table: PublishedTable, naming: Naming) -> tuple[str, ...]:
    """Return the names in the keys that the bridge makes for a table, in their order."""
    if key := naming.key(table.schema, table.table):
        chosen = {*key}
    elif table.replica_identity in "di":
        chosen = {column.name for column in table.columns if column.identity}
    else:
        chosen = {name for name, _ in table.key}
    return tuple(column.name for column in table.columns if column.name in chosen)


def _written(data: bytes | None) -> _Written:
    try:
        document = json.loads(data or b"{}")
        schema = document.keys() == _ENVELOPE
        return _Written(tuple(document["payload"] if schema else document), schema)
    except (ValueError, TypeError, AttributeError):
        return _Written(("?",), False)


def _listed(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})" if names else "(none)"
