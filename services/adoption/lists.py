"""Debezium's lists of tables and columns as patterns with `*`, where these say the same. Pure.

Debezium's are regular expressions for the whole of `schema.table` or `schema.table.column`, in
either case. Source: Predicates.includes, Strings.setOfRegex.

    public\\.accounts, public.accounts    public.accounts
    public\\.pgbench_.*                   public.pgbench_*
    public.*                             public*.*
    public\\.(a|b)                        no counterpart
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from schemas.naming import column_matches, table_matches
from schemas.shaping import ShapingSettings

_PARTS: Final = re.compile(r"\\[^A-Za-z0-9]|\.\*|[A-Za-z0-9_-]|\.")
_MORE: Final = "is more than * can say"
_TABLE_DOTS: Final = 1
_COLUMN_DOTS: Final = 2


def shaping_of(own: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return `include`, `exclude` and `columns` of the settings, and what has no counterpart."""
    refusals = [
        f"{kind}.include.list together with {kind}.exclude.list"
        for kind in ("schema", "table", "column")
        if own.get(f"{kind}.include.list") and own.get(f"{kind}.exclude.list")
    ]
    found: dict[str, Any] = {}
    for which in ("include", "exclude"):
        patterns = [*_tables(own, which, refusals)]
        if own.get(f"schema.{which}.list") and own.get(f"table.{which}.list"):
            refusals.append(f"schema.{which}.list together with table.{which}.list")
        if patterns and which == "include":  # of its tables for signals Debezium publishes changes
            patterns += split(own.get("signal.data.collection", ""))
        if patterns:
            found[which] = patterns
    for which in ("include", "exclude"):
        columns: dict[str, dict[str, list[str]]] = {}
        for table, column in _columns(own, which, refusals):
            columns.setdefault(table, {}).setdefault(which, []).append(column)
        if columns:
            found["columns"] = columns
        if which == "include" and columns and not refusals:
            refusals += _of_other_tables(columns, found.get("include", []))
    return found, refusals


def _tables(own: Mapping[str, str], which: str, refusals: list[str]) -> Iterator[str]:
    """Yield a list's schemas and tables as patterns; add those that are none to `refusals`."""
    for one in split(own.get(f"schema.{which}.list", "")):
        pattern = _pattern(one, 0)
        if pattern is None:
            refusals.append(f"schema.{which}.list: {one} {_MORE}")
        else:
            yield f"{pattern}.*"
    for one in split(own.get(f"table.{which}.list", "")):
        pattern = _pattern(one, _TABLE_DOTS)
        whole_schemas = _pattern(one, 0) or ""
        if pattern is None and whole_schemas.endswith("*"):
            pattern = f"{whole_schemas}.*"
        if pattern is None:
            refusals.append(f"table.{which}.list: {one} {_MORE}")
        else:
            yield pattern


def _columns(own: Mapping[str, str], which: str, refusals: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (table, column) patterns of a list; add those that are none to `refusals`."""
    for one in split(own.get(f"column.{which}.list", "")):
        pattern = _pattern(one, _COLUMN_DOTS)
        if pattern is None:
            refusals.append(f"column.{which}.list: {one} {_MORE}")
        else:
            table, _, column = pattern.rpartition(".")
            yield table, column


def _of_other_tables(columns: Iterable[str], included: Iterable[str]) -> Iterator[str]:
    """Yield why columns can't be included: Debezium publishes none of a table without a match."""
    tables = {*columns}
    if tables != {*included} or (len(tables) > 1 and any("*" in table for table in tables)):
        yield (
            "column.include.list: name the same tables in table.include.list, each by its whole "
            "name; of others Debezium publishes no column, the bridge would publish all"
        )


def _pattern(expression: str, dots: int) -> str | None:
    """Return the pattern with `*` of a regular expression, None where it says something else.

    `dots`: how many part it, where an unescaped one is meant as a dot, though it is any character.
    """
    parts = _PARTS.findall(expression)
    if "".join(parts) != expression or sum(part in (".", r"\.") for part in parts) != dots:
        return None
    if r"\*" in parts:
        return None
    return "".join("*" if part == ".*" else part.removeprefix("\\") for part in parts)


def split(value: str) -> list[str]:
    """Return the members of a list."""
    return [one.strip() for one in value.split(",") if one.strip()]


def of_other_case(
    shaping: ShapingSettings, tables: Mapping[tuple[str, str], Iterable[str]]
) -> Iterator[str]:
    """Yield the tables and columns that a pattern means for Debezium, but not for the bridge.

    `tables`: (schema, table) -> columns. Debezium's lists are for upper and lower case alike.
    """
    for schema, table in tables:
        for pattern in {*shaping.include, *shaping.exclude, *shaping.columns}:
            lower = table_matches(pattern.lower(), schema.lower(), table.lower())
            if lower and not table_matches(pattern, schema, table):
                yield f"{schema}.{table}"
        for pattern, columns in shaping.columns.items():
            if not table_matches(pattern, schema, table):
                continue
            for one in (*columns.include, *columns.exclude):
                yield from (
                    f"{schema}.{table}.{name}"
                    for name in tables[schema, table]
                    if column_matches(one.lower(), name.lower()) and not column_matches(one, name)
                )
