"""A table as an audit sees it: which columns are compared, and why some, or all, are not. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.naming import Naming, schema_and_table, table_matches
from schemas.shaping import ShapingSettings
from schemas.tables import TablesSettings
from spark_consumers.events.columns import ColumnShape
from spark_consumers.events.shape import Shape
from spark_consumers.iceberg.layout import Field, layout_of, rule_of
from spark_consumers.iceberg.sums import is_sums
from spark_consumers.iceberg.tables import State
from spark_consumers.verify.comparison import CHANGELOG

PARKED = "it is parked: slottables rebuild brings it back"
NO_EVENT = "the source has it, the table does not: not published, left out, or no event since"


@dataclass(frozen=True, slots=True)
class AuditedTable:
    """The columns that are compared, at the source and in the Iceberg table, in one order.

    `key`: places of the key's columns, () for a table without a key: its rows are compared as a
    whole. `condition`: SQL of the Iceberg rows that hold. `left`: column -> why it is not compared.
    """

    columns: tuple[ColumnShape, ...]
    fields: tuple[Field, ...]
    key: tuple[int, ...]
    condition: str
    left: dict[str, str] = field(default_factory=dict)


def never_judged(
    settings: TablesSettings, shaping: ShapingSettings, name: str, state: State | None
) -> str:
    """Return why no audit can judge a table, "" where one can; `state`: None without a table."""
    if is_sums(name):
        return "a table of sums has no source table of its own; audit the table that it sums"
    schema, table = schema_and_table(name)
    if rule_of(settings, schema, table).kind == "changelog":
        return CHANGELOG
    if any(table_matches(pattern, schema, table) for pattern in shaping.skip):
        return "shaping.skip leaves out operations on it"
    if Naming("", shaping).filtered(schema, table):
        return "shaping.filters leaves out rows of it by an expression"
    return ""


def not_now(state: State, lsn: int) -> str:
    """Return why a table can't be judged as of `lsn` now, "" where it can."""
    if state.note.rebuild is not None:
        return "it waits for its rebuild"
    if state.note.parked is not None:
        return PARKED
    if state.replaced is not None:
        return "its source table was made anew, and the rows are not replaced yet"
    if state.seen_lsn > lsn:
        return "a snapshot brought rows that show later changes than the audit's LSN"
    return ""


def audited(
    settings: TablesSettings, naming: Naming, shape: Shape, source: Sequence[ColumnShape]
) -> AuditedTable | str:
    """Return what is compared of a table whose columns at the source are `source`; or why not."""
    layout = layout_of(settings, shape)
    there = {column.name: column for column in source}
    computed = naming.computed(shape.schema, shape.table)
    left = {}
    columns: list[ColumnShape] = []
    fields: list[Field] = []
    key: list[int] = []
    for one in layout.fields:
        column = shape.columns[one.source_index]
        found = there.get(column.name)
        if column.name in computed:
            left[column.name] = "an expression computes it, and the source does not have it"
        elif naming.masks(shape.schema, shape.table, column.name):
            left[column.name] = "a mask replaces its values"
        elif not column.key and naming.changes_values(
            shape.schema, shape.table, column.name, column.type
        ):
            left[column.name] = "its large values are cut or stored elsewhere"
        elif found is None:
            left[column.name] = "the source does not have it any more"
        elif found.data_type != column.data_type:
            left[column.name] = f"it is {found.type} at the source, {column.type} in its last event"
        else:
            if column.key:
                key.append(len(columns))
            columns.append(column)
            fields.append(one)
    left |= {name: NO_EVENT for name in there if name not in shape.names}
    if len(key) < len(shape.key):
        return f"its key can't be compared: {left}"
    if not columns:
        return "not a single column can be compared"
    condition = "_valid_to IS NULL" if layout.kind == "history" else "true"
    return AuditedTable(tuple(columns), tuple(fields), tuple(key), condition, left)
