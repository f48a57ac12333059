"""A published table as a snapshot reads it, and the SQL of its next chunk. Pure.

Rows are read in the order of a unique key, on after the last row of the chunk before. The server
alone compares: its bounds are literals in text form, cast to the columns' types, so that
collations, uuids, numerics and composite keys are ordered as the index has them. A table without a
key is read in the order of its rows' places (services.bridge.snapshot.places).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple

from services.bridge.compiled import Messages
from services.bridge.pgoutput.messages import Relation
from services.bridge.pgoutput.pg_types import TYPE_NAMES
from services.bridge.snapshot.copied_rows import LineForm, form_of
from services.postgres.identifiers import identifier, literal


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of the key that rows are read by; `type`: as SQL names it.

    `operators`: the schema of those that compare it, as SQL names it.
    """

    name: str
    type: str
    operators: str = "pg_catalog"


PLACE: Final = KeyColumn("ctid", "tid")


@dataclass(frozen=True, slots=True)
class TableShape:
    """A table as the publication has it. `relation`: as pgoutput describes it.

    `partitioned`: published as its root. `row_filter`: the publication's, "" for none. `key`: the
    columns of the primary key or the replica identity's index; () for a table with neither.
    """

    relation: Relation
    partitioned: bool
    row_filter: str
    key: tuple[KeyColumn, ...]

    @property
    def name(self) -> str:
        """Return the name as `schema.table`."""
        return f"{self.relation.schema}.{self.relation.table}"

    @property
    def read_by(self) -> tuple[KeyColumn, ...]:
        """The columns of the order in which rows are read: the key, or where they lie."""
        return self.key or (PLACE,)

    @property
    def read_by_names(self) -> list[str]:
        """The names of `read_by`."""
        return [column.name for column in self.read_by]

    def keyed(self, names: Collection[str]) -> Relation:
        """Return the relation with these key columns, where pgoutput flags all columns or none."""
        if self.relation.replica_identity not in ("f", "n"):
            return self.relation
        columns = (replace(column, key=column.name in names) for column in self.relation.columns)
        return replace(self.relation, columns=tuple(columns))

    @property
    def built_in_columns(self) -> set[str]:
        """The names of the published columns whose types, or a domain's base type, are built in."""
        return {
            column.name
            for column in self.relation.columns
            if column.type_oid in TYPE_NAMES or column.type_name.startswith("pg_catalog.")
        }

    @property
    def identifier(self) -> str:
        """The table in SQL, without the tables that inherit from it."""
        relation = self.relation
        name = f"{identifier(relation.schema)}.{identifier(relation.table)}"
        return name if self.partitioned else f"ONLY {name}"


class Chunk(NamedTuple):
    """Rows as they were read, in parts that follow each other.

    `last`: the key of the last one that was looked at, of `looked_at` rows. `ends`: the table has
    none after them. `bytes`: of all that was fetched for them.
    """

    parts: list[Messages]
    last: list[str] | None
    looked_at: int
    ends: bool
    bytes: int = 0

    @property
    def row_count(self) -> int:
        """How many rows it has."""
        return sum(map(len, self.parts))


class KeyRange(NamedTuple):
    """Keys after `after` up to `until`, in text form; None: from the beginning, to the end."""

    after: Sequence[str] | None
    until: Sequence[str] | None


def shape_difference(planned: TableShape, seen: TableShape | None) -> str:
    """Say in what two descriptions of a table differ."""
    if seen is None:
        return "it is not published any more"
    names = [one.name for one in fields(seen)]
    pairs = [(name, getattr(planned, name), getattr(seen, name)) for name in names]
    return "; ".join(f"{name} {now}, was {was}" for name, was, now in pairs if was != now)


def filtered(shape: TableShape, where: str) -> bool:
    """Tell whether only some rows of the table are wanted."""
    return bool(shape.row_filter or where)


class SettingsCondition(str):
    """A condition whose names are found by the role's search_path; those of signals are not.

    The operator has written it. With an empty path, citext's `=` would be that of text, without an
    error, and other rows be read (PostgreSQL documentation, citext, "Limitations").
    """

    __slots__ = ()


class Query(NamedTuple):
    """A query, and how COPY writes its rows. `meant`: a SettingsCondition is in it."""

    text: bytes
    form: LineForm
    meant: bool = False


def chunk_query(
    shape: TableShape, keys: KeyRange, where: str, rows: int, within: str = ""
) -> Query:
    """Make the SQL that reads the next `rows` rows.

    Of those with such keys; of rows `within` that condition alone.
    The rows have the published columns and then those of `read_by`. Where the table is `filtered`,
    a last column tells whether the row is wanted, and others have no values: the server must not
    look for a wanted row without end.
    """
    key = [identifier(column.name) for column in shape.read_by]
    columns = [identifier(column.name) for column in shape.relation.columns]
    after = _where([*_bounds(shape, keys), within])
    # By number: a name would be that of an output column first.
    order = ", ".join(str(len(columns) + n) for n in range(1, len(key) + 1))
    source = f"FROM {shape.identifier}{after} ORDER BY {order} LIMIT {rows:d}"
    query = f"SELECT {', '.join([*columns, *key])} {source}"
    if filtered(shape, where):
        wanted = " AND ".join(f"({part})" for part in (shape.row_filter, where) if part)
        named = [f"{name} AS c{n}" for n, name in enumerate(columns)]
        aliases = [f"k{n}" for n in range(len(key))]
        named += [f"{name} AS {alias}" for name, alias in zip(key, aliases, strict=True)]
        values = [f"CASE WHEN wanted THEN c{n} END" for n in range(len(columns))]
        query = (
            f"SELECT {', '.join([*values, *aliases])}, wanted"  # noqa: S608
            f" FROM (SELECT {', '.join(named)}, ({wanted}) IS TRUE AS wanted {source}) AS chunk"
            f" ORDER BY {order}"
        )
    form = form_of(shape.relation, len(key), filtered=filtered(shape, where))
    return Query(query.encode(), form, isinstance(where, SettingsCondition))


def bounds_query(shape: TableShape, last: Sequence[str] | None, rows: int, count: int) -> bytes:
    """Make the SQL that reads the key of each `rows`-th row after `last`, `count` times."""
    key = ", ".join(identifier(column.name) for column in shape.read_by)
    conditions = _bounds(shape, KeyRange(last, None))
    aliases = ", ".join(f"k{n}" for n in range(len(shape.read_by)))
    query = (
        f"SELECT {aliases}"  # noqa: S608
        f" FROM (SELECT *, row_number() OVER (ORDER BY {aliases}) AS number FROM (SELECT {key}"
        f" FROM {shape.identifier}{_where(conditions)} ORDER BY {key} LIMIT {rows * count:d})"
        f" AS next ({aliases})) AS numbered WHERE number % {rows:d} = 0 ORDER BY number"
    )
    return query.encode()


def _bounds(shape: TableShape, keys: KeyRange) -> list[str]:
    """Return the conditions for rows with such keys."""
    conditions: list[str] = []
    for sign, bound in ((">", keys.after), ("<=", keys.until)):
        if bound is not None:
            pairs = zip(bound, shape.read_by, strict=True)
            bounds = [f"{literal(value)}::{column.type}" for value, column in pairs]
            conditions.append(_beyond(shape.read_by, bounds, sign))
    return conditions


def _beyond(key: Sequence[KeyColumn], bounds: Sequence[str], sign: str) -> str:
    """Return the condition that the key is beyond `bounds`, by operators that are named in full.

    An operator that somebody has planted may fit better than the type's own.
    """
    schema, names = key[0].operators, [identifier(column.name) for column in key]
    if all(column.operators == schema for column in key):
        return f"({', '.join(names)}) OPERATOR({schema}.{sign}) ({', '.join(bounds)})"
    at_least, more = (
        f"{names[0]} OPERATOR({schema}.{one}) {bounds[0]}" for one in (sign[0] + "=", sign[0])
    )
    return f"{at_least} AND ({more} OR {_beyond(key[1:], bounds[1:], sign)})"


def _where(conditions: Sequence[str]) -> str:
    given = [condition for condition in conditions if condition]
    return f" WHERE {' AND '.join(given)}" if given else ""
