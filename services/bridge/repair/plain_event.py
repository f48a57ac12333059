"""Takes the row out of a plain event's text, without reading it as JSON. Pure.

A plain event is one that the bridge wrote, of a row with all of its values and without the row
before: nearly all events of a topic. Its text begins and ends in one form (events.rows,
events.transaction_texts); what is between is the row, as the same encoders write it today. All
other events, and what only looks alike, are left to the reader of JSON: None.
"""

import re
from collections.abc import Iterable
from json.encoder import encode_basestring as quoted
from typing import Any, Final, NamedTuple

from schemas.events import UNAVAILABLE, UNAVAILABLE_BASE64

_BEGINNINGS: Final = tuple(f'{{"op":"{op}","before":null,"after":'.encode() for op in "rcu")
_BEGINNING_BYTES: Final = len(_BEGINNINGS[0])
_SOURCE: Final = b'},"source":{"version":"'
"""In a JSON text its quotes stand between members alone: in a string they have a backslash."""
_NAME: Final = rb'"[^"\\]*"'
_HEAD: Final = (
    rb'\},"source":\{"version":%(any)s,"connector":"postgresql","name":%(any)s'
    rb',"ts_ms":\d+,"ts_us":\d+,"ts_ns":\d+,"snapshot":"[a-z]+","db":%(any)s'
    rb',"txId":\d+,"xmin":null,"commit_lsn":(\d+),"timeline":\d+'
    rb',"sequence":"\[\\"\d+\\",\\"\d+\\"\]"' % {b"any": _NAME}
)
_TAIL: Final = (
    rb',"lsn":\d+,"seq":(\d+)\}'
    rb',"transaction":(?:null|\{"id":"\d+:\d+","total_order":\d+,"data_collection_order":\d+\})'
    rb',"ts_ms":\d+,"ts_us":\d+,"ts_ns":\d+\}'
)


class PlainEvent(NamedTuple):
    """A row as JSON, and the event's (commit_lsn, seq)."""

    row: bytes
    position: tuple[int, int]


class PlainEvents:
    """Reads the plain events of one table. `placeholders`: those of values that the WAL lacked."""

    def __init__(self, schema: str, table: str, placeholders: Iterable[Any]) -> None:
        names = f',"schema":{quoted(schema)},"table":{quoted(table)}'
        self._ending = re.compile(_HEAD + re.escape(names.encode()) + _TAIL)
        self._placeholders = _texts_of(placeholders)

    def read(self, value: bytes | str) -> PlainEvent | None:
        """Return the row of a plain event; None for any other record."""
        if isinstance(value, str) or not value.startswith(_BEGINNINGS):
            return None
        end = value.rfind(_SOURCE)
        found = self._ending.fullmatch(value, end) if end > _BEGINNING_BYTES else None
        if found is None:
            return None
        row = value[_BEGINNING_BYTES : end + 1]
        for text in self._placeholders:
            if text in row:
                return None
        commit_lsn, seq = found.groups()
        return PlainEvent(row, (int(commit_lsn), int(seq)))


def row_of(value: bytes) -> bytes:
    """Return the row of a plain event, which its text is known to be."""
    return value[_BEGINNING_BYTES : value.rfind(_SOURCE) + 1]


def _texts_of(placeholders: Iterable[Any]) -> tuple[bytes, ...]:
    """Return texts of which each placeholder has one, or the empty text, which all rows have."""
    texts = {UNAVAILABLE.encode(), UNAVAILABLE_BASE64.encode()}
    for value in placeholders:
        leaves = [leaf.encode() for leaf in _leaves(value) if leaf.isascii()]
        texts.add(leaves[0] if leaves else b"")
    return tuple(texts)


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for one in (*value, *value.values()) for leaf in _leaves(one)]
    if isinstance(value, list):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value] if isinstance(value, str) else []
