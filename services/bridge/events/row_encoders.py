"""Columns and JSON frames by which the C extension encodes rows straight to records. Pure.

    I|U oid         'N' n { 't' length:u32 bytes | 'n' | 'u' }    ->    Event(topic, key, value, …)
    U   oid 'O' n { … } 'N' n { … }                               ->    the same, with `before`

An insert, or an update without a change of key, needs no object for message or row. What
RowWriter (services.bridge.compiled.rows) does not take (None) goes the long way, by Decoder and
Envelope, which also says what is wrong with it. Without the C extension all rows go that way.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from schemas.events import UNAVAILABLE, UNAVAILABLE_BASE64
from services.bridge import compiled
from services.bridge.events.formats.table_format import Serialize
from services.bridge.events.values import datetimes, plain
from services.bridge.events.values.plain import Encode

Write = Any
"""A RowWriter: from a row's bytes to its Event, or to None (services.bridge.compiled.rows)."""


def holds_placeholder(unavailable: str) -> bool:
    """Tell whether what stands for an unchanged value has the placeholder's text, or its base64.

    Numbers are never stored apart: null or 0 stands for theirs, which says nothing.
    """
    return UNAVAILABLE in unavailable or UNAVAILABLE_BASE64 in unavailable


class Column(NamedTuple):
    """A published column: its source_index among the server's, `"name":`, and how it is written."""

    source_index: int
    name: str
    encode: Encode
    unavailable: str
    key: bool

    @property
    def placeholder(self) -> str:
        """The text that stands for an unchanged value, empty where no value can be that text."""
        return self.unavailable if holds_placeholder(self.unavailable) else ""


class Frame(NamedTuple):
    """The JSON text around a row, apart from the fields of its transaction.

    `op`: the events' operation. `closing` stands behind these, `key_opening` and `key_closing`
    around the key. `flat`: the fields of the row itself (text, kind), which stand between
    `opening`, those of the transaction, and the row's columns; None: the event has an envelope.
    `placed_by`: that of each event where the key does not choose it. `serialize_key`,
    `serialize_value`: what makes a binary form of the JSON text, None: it stays text.
    `places_by_bytes`: a key's binary form chooses the partition.
    """

    op: str
    opening: str
    names: str
    metadata: bool
    old: bool = False
    closing: str = ""
    key_opening: str = ""
    key_closing: str = ""
    flat: tuple[tuple[str, str], ...] | None = None
    placed_by: int | None = None
    serialize_key: Serialize | None = None
    serialize_value: Serialize | None = None
    places_by_bytes: bool = False


_FORMS: Final[dict[Encode, str]] = {
    plain.string: "string",
    plain.integer: "integer",
    plain.boolean: "boolean",
    plain.floating: "floating",
    datetimes.instant: "instant",
    datetimes.timestamp_us: "timestamp",
    datetimes.timestamp_us_of_64_bits: "timestamp",
    datetimes.date_days: "date",
}
"""Encoders that the C extension has a form of its own for."""


def writer(
    event: type, topic: str, table: str, columns: Sequence[Column], count: int, frame: Frame
) -> Write:
    """Return the function that encodes rows of a table with `count` columns on the server.

    `event` is the Event type. Requires the C extension.
    """
    engine = compiled.engine
    assert engine is not None
    kinds = engine.forms.KINDS
    forms = [kinds.get(_FORMS.get(column.encode, ""), 0) for column in columns]
    made: Write = engine.rows.RowWriter(event, topic, table, columns, count, frame, forms)
    return made
