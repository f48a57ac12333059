"""How a topic's records are written, beside how the bridge would write them. Pure.

Debezium's key is the primary key in its own order, else a unique index; the bridge's is the replica
identity or the primary key, in the order of the table's columns. Where these differ, the changes of
a row would go on under another key, in another partition. The topic's last record tells, whatever
the reason is. Source: PgOutputMessageDecoder.handleRelationMessage, TableSchemaBuilder.create.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from schemas.kafka import Format, KafkaSettings
from schemas.naming import Naming
from schemas.shaping import field_name
from services.adoption.decoding import Decode, decode_json, form_of
from services.adoption.last_records import DebeziumRecord
from services.bridge.events.formats.names import adjusted_column
from services.postgres.published_tables import PublishedTable


class _Written(NamedTuple):
    """The names of a document, () for none, and its format."""

    names: tuple[str, ...]
    form: Format | None


def unlike(
    samples: Mapping[str, DebeziumRecord],
    tables: Iterable[PublishedTable],
    naming: Naming,
    kafka: KafkaSettings,
    decode: Decode = decode_json,
) -> Iterator[str]:
    """Yield how records differ from what the bridge would write.

    `samples`: one record of each topic; `decode`: of their format.
    """
    for table in tables:
        if not naming.publishes(table.schema, table.table):
            continue
        record = samples.get(naming.table(table.schema, table.table).name)
        if record is None:
            continue
        theirs, ours = _written(record.key, decode), key_of(table, naming)
        if theirs.form == "avro":
            ours = tuple(map(adjusted_column, ours))
        if theirs.names != ours:
            yield f"{record.where} has key {_listed(theirs.names)}, the bridge's is {_listed(ours)}"
        value = _written(record.value, decode)
        if (field_name("op") in value.names) != naming.flat(table.schema, table.table):
            yield f"{record.where} is {'a flat row' if field_name('op') in value.names else 'none'}"
        for part, written, form in (
            ("key", theirs, kafka.key_format),
            ("value", value, kafka.value_format),
        ):
            if written.names and written.form != form:
                found = written.form or "neither JSON nor Avro with a schema's id before it"
                yield f"{record.where} has as its {part}: {found}, the bridge would write {form}"


def key_of(table: PublishedTable, naming: Naming) -> tuple[str, ...]:
    """Return the names in the keys that the bridge makes for a table, in their order."""
    if key := naming.key(table.schema, table.table):
        chosen = {*key}
    elif table.replica_identity in "di":
        chosen = {column.name for column in table.columns if column.identity}
    else:
        chosen = {name for name, *_ in table.key}
    return tuple(column.name for column in table.columns if column.name in chosen)


def _written(data: bytes | None, decode: Decode) -> _Written:
    """Return the columns and form of what the connector wrote, ("?",) where it can't be read."""
    if data is None:
        return _Written((), None)
    try:
        return _Written(tuple(decode(data)), form_of(data))
    except (ValueError, TypeError, AttributeError):
        return _Written(("?",), None)


def _listed(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})" if names else "(none)"
