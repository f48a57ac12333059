"""Compares the rule of a table with the one that its Iceberg table was made by. Pure.

A table keeps what it was made by: a changed rule would write values into other columns than the
rows have that are there, or none at all. Where it makes a difference, it is refused by name.
"""

import json
from collections.abc import Collection, Sequence

from schemas.tables import Kind, TableRule
from spark_consumers.events.shape import Shape
from spark_consumers.iceberg.layout import Layout

_COMPARED = frozenset({"kind", "include", "exclude", "rename", "partition", "sort"})


def document(rule: TableRule) -> str:
    """Return the part of a rule that is kept with its table, as JSON.

    `properties` are left out: they apply to a new table alone.
    """
    return json.dumps(rule.model_dump(mode="json", include=set(_COMPARED)), sort_keys=True)


def from_document(text: str) -> TableRule:
    """Read a rule that `document` wrote."""
    return TableRule.model_validate_json(text)


def difference(shape: Shape, made_by: TableRule, now: TableRule) -> str:
    """Return how the rule `now` would treat a table of this shape otherwise, "" if it would not.

    The text names the key of the rule.
    """
    if made_by.kind != now.kind:
        return f"kind is {now.kind} and was {made_by.kind}"
    before, after = _names(shape, made_by), _names(shape, now)
    for column in shape.names:
        was, is_now = before.get(column), after.get(column)
        if was == is_now:
            continue
        if is_now is None:
            return f"include or exclude leaves out column {column}, which the table has as {was}"
        if was is None:
            return f"include or exclude admits column {column}, which the table was made without"
        return f"rename: column {column} is {is_now} and was {was}"
    for key in ("partition", "sort"):
        was, is_now = ", ".join(getattr(made_by, key)), ", ".join(getattr(now, key))
        if was != is_now:
            return f"{key} is [{is_now}] and was [{was}]"
    return ""


def difference_unrecorded(
    shape: Shape, kind: Kind | str, columns: Collection[str], now: TableRule
) -> str:
    """Return the `difference` for a table whose rule was not kept, by its kind and columns."""
    if kind and kind != now.kind:
        return f"kind is {now.kind} and was {kind}"
    layout = Layout(shape, now)
    missing = [name for name in layout.names if name not in columns]
    if missing:
        return f"include, exclude or rename: the Iceberg table has no column {missing[0]}"
    stale = [name for name in leftovers(layout, columns) if name in shape.names]
    if stale:
        return f"include, exclude or rename: nothing would fill column {stale[0]} any more"
    return ""


def leftovers(layout: Layout, columns: Collection[str]) -> tuple[str, ...]:
    """Return the columns of an Iceberg table that nothing fills."""
    return tuple(name for name in columns if name not in layout.names)


def wrong_columns(layout: Layout, columns: Sequence[str]) -> str:
    """Name a column of an Iceberg table that somebody else has added or dropped, "" if none."""
    missing = [name for name in layout.names if name not in columns]
    if missing:
        return f"somebody has dropped its column {missing[0]}"
    unknown = [name for name in leftovers(layout, columns) if name not in layout.kept]
    if unknown:
        return f"somebody has added its column {unknown[0]}, which would be NULL in new rows"
    return ""


def _names(shape: Shape, rule: TableRule) -> dict[str, str]:
    return {shape.names[field.source_index]: field.name for field in Layout(shape, rule).fields}
