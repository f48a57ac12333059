"""Compares the rule of a table with the one that its Iceberg table was made by. Pure.

A table keeps what it was made by: a changed rule would write values into other columns than the
rows have that are there, or none at all. Where it makes a difference, it is refused by name.

A rule names columns, which the source may rename. `rule_as_of` tells what it means for the columns
of an earlier time, `agreeing_rule` what it means while a table takes over several changes.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from schemas.errors import OperatorNeeded
from schemas.tables import TableRule, sort_field, transform
from spark_consumers.events.shape import Shape, survivors_of
from spark_consumers.iceberg.layout import METADATA, Layout, selects

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
    reads: dict[str, Callable[[str], tuple[object, ...]]]
    reads = {"partition": transform, "sort": sort_field}
    for key, read in reads.items():
        was, is_now = getattr(made_by, key), getattr(now, key)
        if [*map(read, was)] != [*map(read, is_now)]:
            return f"{key} is [{', '.join(is_now)}] and was [{', '.join(was)}]"
    return ""


def layout_as_of(rule: TableRule, shapes: Sequence[Shape], columns: Collection[str]) -> Layout:
    """Return the layout that a table had when its source had the first of `shapes`.

    `shapes`: that one, and all later ones, whose names the rule may use. `columns`: those of the
    Iceberg table then. Raise OperatorNeeded where the rule has two meanings for them, or none.
    """
    hint = "choose an epoch after the last change of names (slottables epochs)"
    layout = Layout(shapes[0], rule_as_of(rule, shapes, columns, hint))
    missing = [name for name in layout.names if name not in columns]
    if missing or not layout.fields:
        raise OperatorNeeded(
            f"the table's rule does not fit the columns that it had: {missing[0]} is not there"
            if missing
            else "the table's rule names no column that the table had",
            operation="read a table as of an epoch",
            subject=shapes[0].name,
            hint="correct the table's rule in tables.rules: it may name columns by their present "
            "names or by those of then",
        )
    return layout


def rule_as_of(
    rule: TableRule, shapes: Sequence[Shape], columns: Collection[str], hint: str
) -> TableRule:
    """Return a rule that names the columns of the first of `shapes` by their names in it.

    The rule may have the names of any of `shapes`. Take the names that fit the Iceberg table's
    `columns` at that time; among several, those that name most columns. Return the rule as it is
    if it needs no other names, or none fit. Raise OperatorNeeded, with `hint`, if it has two
    meanings.
    """
    meanings = [m for m in _meanings(rule, shapes) if set(m.fields.values()) <= set(columns)]
    if not meanings:
        return rule
    best = max((meaning.fields for meaning in meanings), key=len)
    for fields, _ in meanings:
        if not fields.items() <= best.items():
            other = next(name for name in fields if best.get(name) != fields[name])
            raise OperatorNeeded(
                "the table's rule has two meanings for the columns that it had, as names went from "
                f"one column to another: {other} may be meant or not",
                operation="read the table's rule",
                subject=shapes[0].name,
                hint=hint,
            )
    return _meant(meanings, best)


def agreeing_rule(rule: TableRule, shapes: Sequence[Shape], table: Layout) -> TableRule:
    """Return a rule that names the columns of the first of `shapes` by their names in it.

    The rule may have the names of any of `shapes`, which the table gets one after the other. Take
    the names by which the rule agrees best with `table` in the columns that its shape and the first
    of `shapes` share: above all, it should not admit a column that the table was made without.
    Among equals, take the last. Return the rule as it is if it needs no other names, or none fit.
    """
    meanings = [*_meanings(rule, shapes)]
    if not meanings:
        return rule
    first, names = shapes[0], _names(table.shape, table.rule)
    same = {name: name for name in first.names}
    kept = same if first is table.shape else survivors_of(table.shape, first)
    had = {after: names.get(before) for before, after in kept.items()}

    def disagreement(fields: Mapping[str, str]) -> tuple[int, int, int]:
        pairs = [(was, fields.get(column)) for column, was in had.items()]
        admitted = sum(was is None and now is not None for was, now in pairs)
        left_out = sum(was is not None and now is None for was, now in pairs)
        return admitted, left_out, sum(was != now for was, now in pairs)

    last_first = reversed([meaning.fields for meaning in meanings])
    return _meant(meanings, min(last_first, key=disagreement))


class _Meaning(NamedTuple):
    """A meaning of a rule for the first of some shapes, by the names that its columns have in one.

    `fields`: column -> its name in Iceberg. `rule`: the same rule by the names of the first shape.
    """

    fields: Mapping[str, str]
    rule: TableRule


def _meanings(rule: TableRule, shapes: Sequence[Shape]) -> Iterator[_Meaning]:
    """Yield what a rule may mean for the first of `shapes`, by the names in each in turn."""
    first = shapes[0]
    for names in _names_in(shapes):
        fields = {c: rule.rename.get(names[c], c) for c in first.names if selects(rule, names[c])}
        keyed = rule.kind == "changelog" or set(first.key) <= fields.keys()
        if keyed and len(set(fields.values())) == len(fields):
            yield _Meaning(fields, _renamed(rule, first, fields, names))


def _meant(meanings: Sequence[_Meaning], fields: Mapping[str, str]) -> TableRule:
    """Return the rule that means these fields, and whose partition and sort fit them if any."""
    meant = [translated for found, translated in meanings if found == fields]
    return next((one for one in meant if _is_written(one, fields)), meant[0])


def _names_in(shapes: Sequence[Shape]) -> Iterator[dict[str, str]]:
    """Yield the names that the first shape's columns have in each; the last ones of those gone."""
    names = alive = {name: name for name in shapes[0].names}
    yield names
    for before, after in pairwise(shapes):
        kept = survivors_of(before, after)
        alive = {column: kept[name] for column, name in alive.items() if name in kept}
        names = names | alive
        yield names


def _renamed(
    rule: TableRule, first: Shape, fields: Mapping[str, str], names: Mapping[str, str]
) -> TableRule:
    """Return a rule for the columns of `first`, each with its name in Iceberg.

    `names`: those by which the rule has them.
    """
    then = {rule.rename.get(names[c], names[c]): name for c, name in fields.items()}
    update: dict[str, object] = {}
    if [name for name in first.names if selects(rule, name)] != [*fields]:
        update |= {"include": tuple(fields), "exclude": ()}
    if any(rule.rename.get(c, c) != name for c, name in fields.items()):
        update["rename"] = {c: name for c, name in fields.items() if c != name}
    if any(column != name for column, name in then.items()):
        update["partition"] = tuple(_partition(text, then) for text in rule.partition)
        update["sort"] = tuple(_sort(text, then) for text in rule.sort)
    return rule.model_copy(update=update) if update else rule


def _is_written(rule: TableRule, fields: Mapping[str, str]) -> bool:
    """Tell whether a rule partitions and sorts by columns that there are."""
    asked = [transform(text).column for text in rule.partition]
    asked += [sort_field(text)[0] for text in rule.sort]
    return {*asked} <= {*fields.values(), *(name for name, _ in METADATA[rule.kind])}


def _partition(text: str, then: Mapping[str, str]) -> str:
    name, number, column = transform(text)
    column = then.get(column, column)
    return f"{name}({f'{number}, ' if number else ''}{column})" if name else column


def _sort(text: str, then: Mapping[str, str]) -> str:
    column, way = sort_field(text)
    return f"{then.get(column, column)} {way}"


def wrong_columns(layout: Layout, columns: Sequence[str]) -> str:
    """Name a column of an Iceberg table that somebody else has added or dropped, "" if none."""
    missing = [name for name in layout.names if name not in columns]
    if missing:
        return f"somebody has dropped its column {missing[0]}"
    unknown = [n for n in columns if n not in layout.names and n not in layout.kept]
    if unknown:
        return f"somebody has added its column {unknown[0]}, which would be NULL in new rows"
    return ""


def _names(shape: Shape, rule: TableRule) -> dict[str, str]:
    return {shape.names[field.source_index]: field.name for field in Layout(shape, rule).fields}
