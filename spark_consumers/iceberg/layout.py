"""The layout of an Iceberg table by the rules: columns, kind, partitioning and order. Pure.

kind        besides the source's columns
current     _commit_lsn, _seq: the event that a row is of
history     the same, of the event that began the version; _op; _valid_from, _valid_to: commit
            times, the second NULL in the version that holds; _end_lsn, _end_seq, _end_op
changelog   _commit_lsn, _seq, _op, _commit_time; _unavailable: columns that the UPDATE left
            unchanged and that the WAL does not hold
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from pyspark.sql import types as T

from schemas.errors import SettingsError
from schemas.naming import column_matches, table_matches
from schemas.tables import Kind, TableRule, TablesSettings, sort_field, transform
from spark_consumers.events.shape import Shape
from spark_consumers.sql import pairs, quoted

_PLACE: Final = (("_commit_lsn", "bigint"), ("_seq", "bigint"))
METADATA: Final[dict[Kind, tuple[tuple[str, str], ...]]] = {
    "current": _PLACE,
    "history": (
        *_PLACE,
        *(("_op", "string"), ("_valid_from", "timestamp"), ("_valid_to", "timestamp")),
        *(("_end_lsn", "bigint"), ("_end_seq", "bigint"), ("_end_op", "string")),
    ),
    "changelog": (
        *_PLACE,
        *(("_op", "string"), ("_commit_time", "timestamp"), ("_unavailable", "array<string>")),
    ),
}
"""The columns each Iceberg table has besides the source's: name and Spark type."""
METADATA_NAMES: Final = frozenset(name for kind in METADATA.values() for name, _ in kind)
RESERVED_NAMES: Final = frozenset(
    (
        *("_file", "_pos", "_deleted", "_spec_id", "_partition"),
        *("_row_id", "_last_updated_sequence_number", "__row_from_source"),
    )
)
"""Names that Iceberg gives to a row's place and history, and Spark to rows that it merges."""
FEW_METADATA_FILES: Final = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "5",
}
"""Properties of our own tables: each commit writes the metadata anew, with all snapshots."""
_FORMAT: Final = {
    "format-version": "3",
    "write.merge.mode": "copy-on-write",
    "write.update.mode": "merge-on-read",
    "write.delete.mode": "merge-on-read",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    "write.spark.fanout.enabled": "true",
    # An epoch goes to a branch first (iceberg/staging.py).
    "write.wap.enabled": "true",
}


class Field(NamedTuple):
    """A column of the Iceberg table: its index in the shape, its name, its Spark type."""

    source_index: int
    name: str
    type: T.DataType


@dataclass(frozen=True)
class Layout:
    """A source table's shape, and how its Iceberg table is made.

    `kept`: further columns of the Iceberg table, which nothing fills any more.
    """

    shape: Shape
    rule: TableRule
    kept: tuple[str, ...] = ()

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The source's columns, as selected and renamed."""
        rename = self.rule.rename
        return tuple(
            Field(place, rename.get(column.name, column.name), column.data_type)
            for place, column in enumerate(self.shape.columns)
            if selects(self.rule, column.name)
        )

    @property
    def values(self) -> tuple[str, ...]:
        """SQL that gives changes' values (`c<source_index>`) the names of the fields."""
        return tuple(f"c{field.source_index} AS {quoted(field.name)}" for field in self.fields)

    @property
    def kind(self) -> Kind:
        """The kind of the table."""
        return self.rule.kind

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Our own columns: name and Spark type."""
        return METADATA[self.kind]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All columns of the Iceberg table, in order."""
        return (*(field.name for field in self.fields), *(name for name, _ in self.metadata))

    @cached_property
    def key(self) -> tuple[Field, ...]:
        """The fields that identify a row."""
        return tuple(field for field in self.fields if self.shape.columns[field.source_index].key)


def selects(rule: TableRule, column: str) -> bool:
    """Tell whether the Iceberg table of a rule has a source column of this name."""
    if rule.include and not any(column_matches(pattern, column) for pattern in rule.include):
        return False
    return not any(column_matches(pattern, column) for pattern in rule.exclude)


def rule_of(settings: TablesSettings, schema: str, table: str) -> TableRule:
    """Return the first rule that fits a table, else the rule of a current-state table."""
    found = (r for p, r in settings.rules.items() if table_matches(p, schema, table))
    return next(found, TableRule())


def layout_of(settings: TablesSettings, shape: Shape) -> Layout:
    """Return the layout of a table.

    Raise SettingsError for a rule that the table's columns can't follow.
    """
    layout = Layout(shape, rule_of(settings, shape.schema, shape.table))
    problem = _problem(layout)
    if problem:
        raise SettingsError(
            problem,
            operation="read settings",
            subject=shape.name,
            hint="correct the table's rule in tables.rules",
        )
    return layout


def _problem(layout: Layout) -> str:
    """Return why the Iceberg table can't have this layout, "" if it can."""
    shape, rule, names = layout.shape, layout.rule, layout.names
    needed = METADATA_NAMES | RESERVED_NAMES
    taken = [field.name for field in layout.fields if field.name in needed]
    twice = [name for name in names if names.count(name) > 1]
    lost = [name for name in shape.key if shape.names.index(name) not in _places(layout)]
    unknown = [name for name in rule.rename if name not in shape.names]
    asked = [transform(text).column for text in rule.partition]
    asked += [sort_field(text)[0] for text in rule.sort]
    wrong = [name for name in asked if name not in names]
    if rule.kind == "history" and shape.keyless:
        return "a table without a key can't have a history: choose changelog"
    if lost and rule.kind != "changelog":
        return f"column {lost[0]} is of the key and can't be left out"
    if unknown:
        return f"rename: there is no column {unknown[0]}"
    if taken:
        return f"column {taken[0]} has a name that slottables or Iceberg needs itself: rename it"
    if twice:
        return f"two columns would be named {twice[0]}"
    if wrong:
        return f"partition or sort: the Iceberg table has no column {wrong[0]}"
    hours = {transform(text).column for text in rule.partition if transform(text).name == "hour"}
    endless = [field.name for field in layout.fields if field.name in hours]
    if endless:
        return f"partition: column {endless[0]} may hold infinity, whose hour is none: choose day"
    return "" if layout.fields else "no column is left"


def _places(layout: Layout) -> tuple[int, ...]:
    return tuple(field.source_index for field in layout.fields)


def create_sql(identifier: str, layout: Layout, properties: dict[str, str]) -> str:
    """Return the SQL that creates the table."""
    columns = [f"{quoted(field.name)} {field.type.simpleString()}" for field in layout.fields]
    columns += [f"{name} {kind}" for name, kind in layout.metadata]
    parts = [_partition_sql(text) for text in layout.rule.partition]
    mode = {"write.distribution-mode": "hash" if parts else "none"}
    mode |= {"write.merge.distribution-mode": mode["write.distribution-mode"]}
    given = _FORMAT | mode | layout.rule.properties | properties
    return (
        f"CREATE TABLE {identifier} ({', '.join(columns)}) USING iceberg"
        + (f" PARTITIONED BY ({', '.join(parts)})" if parts else "")
        + f" TBLPROPERTIES ({pairs(given)})"
    )


def sort_sql(identifier: str, sort: Sequence[str]) -> str:
    """Return the SQL that orders rows within the files that are written."""
    fields = (sort_field(text) for text in sort)
    order = ", ".join(f"{quoted(name)} {way}" for name, way in fields)
    return f"ALTER TABLE {identifier} WRITE LOCALLY ORDERED BY {order}"


def _partition_sql(text: str) -> str:
    name, number, column = transform(text)
    if not name:
        return quoted(column)
    plural = {"year": "years", "month": "months", "day": "days", "hour": "hours"}.get(name, name)
    return f"{plural}({f'{number}, ' if number else ''}{quoted(column)})"
