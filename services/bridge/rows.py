"""A table's rows and keys to JSON text, by its plan. Pure; made once per relation."""

import base64
from dataclasses import dataclass
from json.encoder import encode_basestring as quoted
from typing import Final

from schemas.events import UNAVAILABLE
from services.bridge.messages import UNCHANGED, Row, Unchanged
from services.bridge.shaping.tables import Plan
from services.bridge.values import Encode, encoder_for

_UNAVAILABLE_JSON: Final = quoted(UNAVAILABLE)
_BYTEA_OID: Final = 17


@dataclass(slots=True)
class Counter:
    """A table's events in the current transaction, however often it is described; `name`: JSON."""

    table: str
    name: str
    events: int = 0


class Table:
    """The encoders of one relation's rows and keys, as planned."""

    def __init__(self, plan: Plan, counter: Counter) -> None:
        relation = plan.relation
        self.counter = counter
        self.name = counter.table
        self.topic = plan.topic.name
        self.skipped = plan.skipped
        self.outbox = plan.outbox
        self.names = f'"schema":{quoted(relation.schema)},"table":{quoted(relation.table)},'
        self._columns: list[tuple[str, Encode, str]] = [
            (
                f"{quoted(column.name)}:",
                plan.masks.get(column.name) or encoder_for(column.type_oid),
                _unavailable(column.type_oid),
            )
            for column in relation.columns
        ]
        self._places = plan.places
        places = range(len(relation.columns)) if plan.places is None else plan.places
        self._key = [
            (place, name, encode)
            for place, (name, encode, _), column in zip(
                places, self._columns, relation.columns, strict=True
            )
            if column.key
        ]

    def row(self, row: Row) -> str:
        """`{"column":value,…}`; a value that the WAL lacks is the placeholder."""
        if self._places is not None:
            row = [row[place] for place in self._places]
        return (
            "{"
            + ",".join(
                [
                    name
                    + (
                        "null"
                        if value is None
                        else unavailable
                        if value is UNCHANGED
                        else encode(value)  # type: ignore[arg-type]
                    )
                    for (name, encode, unavailable), value in zip(self._columns, row, strict=True)
                ]
            )
            + "}"
        )

    def lacks_key(self, row: Row) -> bool:
        """Whether an old row that has but its identity does not have this key."""
        return any(row[place] is None for place, _, _ in self._key)

    def key(self, row: Row) -> bytes | None:
        """The key columns as JSON, None for a table without a key."""
        if not self._key:
            return None
        parts = []
        for index, name, encode in self._key:
            value = row[index]
            if isinstance(value, Unchanged):
                parts.append(name + _UNAVAILABLE_JSON)
            else:
                parts.append(name + ("null" if value is None else encode(value)))
        return ("{" + ",".join(parts) + "}").encode()


def _unavailable(type_oid: int) -> str:
    if type_oid == _BYTEA_OID:
        return quoted(base64.b64encode(UNAVAILABLE.encode()).decode("ascii"))
    return _UNAVAILABLE_JSON
