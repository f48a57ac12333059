"""A source table's shape: its columns, what identifies a row, and from which event on. Pure."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from schemas.column_identity import NumberedColumn, numbered, survivors
from schemas.naming import schema_and_table
from schemas.schema_events import Column, SchemaEvent
from spark_consumers.events.columns import ColumnShape


class CommitPosition(NamedTuple):
    """Where an event stands: its transaction's commit LSN, its number in the transaction."""

    commit_lsn: int
    seq: int


START = CommitPosition(-1, -1)
"""Before every event."""


@dataclass(frozen=True)
class Shape:
    """The columns of one source table, and which of them identify a row (none: `keyless`).

    `oid` is pg_class.oid: another one is another table; 0 is unknown. `since` is the first event
    that has this shape.
    """

    schema: str
    table: str
    columns: tuple[ColumnShape, ...]
    key: tuple[str, ...]
    oid: int = 0
    since: CommitPosition = START
    missing: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Added columns, each with its value in the rows that were there (its JSON form as text)."""
    unsent: tuple[str, ...] = field(default=(), compare=False)
    """Columns of whose values in the rows that were there no event tells."""
    former: tuple[str, ...] = field(default=(), compare=False)
    """The names, now, of the columns that the event before had."""
    attnums: tuple[int, ...] = field(default=(), compare=False)
    """The columns' numbers in pg_attribute, 0 where one is not certain."""
    added: tuple[str, ...] = field(default=(), compare=False)
    """Columns that the event tells to be other ones than there were before it."""

    @classmethod
    def from_event(cls, event: SchemaEvent) -> "Shape":
        """Return the table's shape from a schema event on."""
        since = CommitPosition(event.commit_lsn, event.seq)
        missing = tuple((name, _text(form)) for name, form in event.missing.items())
        shape = cls._of(event, event.after, event.oid, since)
        had = {column.name for column in (event.after if event.before is None else event.before)}
        shape = replace(
            shape,
            missing=missing,
            unsent=tuple(event.unsent),
            attnums=tuple(event.attnums),
            added=(*event.missing, *(name for name in event.unsent if name not in had)),
        )
        return replace(shape, former=tuple(survivors_of(cls.before(event), shape).values()))

    @classmethod
    def before(cls, event: SchemaEvent) -> "Shape":
        """Return the table's shape before a schema event, as if it had always been.

        The oid is unknown, hence 0.
        """
        shape = cls._of(event, event.before or (), 0, START)
        return replace(shape, attnums=tuple(event.attnums_before))

    @classmethod
    def _of(
        cls, event: SchemaEvent, columns: Iterable[Column], oid: int, since: CommitPosition
    ) -> "Shape":
        shapes = tuple(ColumnShape(c.name, c.type, c.typmod, c.key) for c in columns)
        key = tuple(column.name for column in shapes if column.key)
        return cls(event.schema_, event.table, shapes, key, oid, since)

    @classmethod
    def from_document(cls, name: str, document: dict[str, Any]) -> "Shape":
        """Read a shape that `document` wrote."""
        schema, table = schema_and_table(name)
        columns = tuple(ColumnShape(*column) for column in document["columns"])
        key = tuple(column.name for column in columns if column.key)
        since = CommitPosition(*document["since"])
        attnums = tuple(document.get("attnums", ()))
        return cls(schema, table, columns, key, document["oid"], since, attnums=attnums)

    def document(self) -> dict[str, Any]:
        """Return the shape as JSON, to keep with the table."""
        columns = [[c.name, c.type, c.typmod, c.key] for c in self.columns]
        found = {"columns": columns, "oid": self.oid, "since": list(self.since)}
        return found | ({"attnums": list(self.attnums)} if self.attnums else {})

    @property
    def name(self) -> str:
        """`schema.table` as in PostgreSQL."""
        return f"{self.schema}.{self.table}"

    @property
    def keyless(self) -> bool:
        """Whether the table's rows have no identity but the event that inserted them."""
        return not self.key

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def key_positions(self) -> tuple[int, ...]:
        """Where in `columns` the key's columns are."""
        return tuple(self.names.index(name) for name in self.key)

    def numbered(self) -> list[NumberedColumn]:
        """Return the columns, in order, as schemas.column_identity compares them."""
        return numbered(((c.name, (c.type, c.typmod)) for c in self.columns), self.attnums)

    def another_table(self, other: "Shape") -> bool:
        """Tell whether `other` is the shape of another table under the same name."""
        return bool(self.oid and other.oid and self.oid != other.oid)


def _text(form: Any) -> str:
    """Return a JSON form as the text that it is read from."""
    if isinstance(form, str):
        return form
    return json.dumps(form, ensure_ascii=False, separators=(",", ":"))


def filled(before: Shape, after: Shape) -> dict[str, str]:
    """Return the columns that were added with a value for the rows that were there.

    Column -> the JSON form of the value, as text.
    """
    if before.another_table(after):
        return {}
    there = survivors_of(before, after).values()
    return {name: text for name, text in after.missing if name not in there}


def unsent_columns(before: Shape, after: Shape) -> Sequence[str]:
    """Return the columns of whose values in the rows that were there no event tells.

    Also those that an event between the two has added, which the compacted topic has lost.
    """
    there = survivors_of(before, after).values()
    lost = [] if before.another_table(after) else [n for n in after.former if n not in there]
    return [*after.unsent, *(name for name in lost if name not in after.unsent)]


def survivors_of(before: Shape, after: Shape) -> dict[str, str]:
    """Return the columns that are there before and after a change of shape: name -> name after.

    Of another table under the same name, these are the columns of the same names.
    """
    if before.another_table(after):
        return {name: name for name in before.names if name in after.names}
    known = {*dict(after.missing), *after.unsent}
    return survivors(before.numbered(), after.numbered(), added=after.added, not_renamed=known)


def replacements(shapes: Sequence[Shape]) -> list[CommitPosition]:
    """Return the events from which on the source is another table than before."""
    return [after.since for before, after in pairwise(shapes) if before.another_table(after)]


def last_replacement(shapes: Sequence[Shape]) -> CommitPosition | None:
    """Return the event from which on the source is another table for the last time, if it is."""
    return max(replacements(shapes), default=None)


def in_use(shapes: Sequence[Shape], after_lsn: int) -> Sequence[Shape]:
    """Return the shapes that events after a commit LSN were written with, in their order."""
    first = 0
    for place, shape in enumerate(shapes):
        if shape.since.commit_lsn <= after_lsn:
            first = place
    return shapes[first:]
