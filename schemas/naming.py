"""A table's topic, by the settings: the one function that bridge and consumers share. Pure."""

import re
import string
from functools import lru_cache
from typing import Final, NamedTuple

from schemas.errors import SettingsError
from schemas.events import legal_topic, own_topics
from schemas.large_values import LargeValueRule, may_be_large
from schemas.shaping import MaskSettings, ShapingSettings

_ANY: Final = "[A-Za-z0-9._-]+"


class TableTopic(NamedTuple):
    """The topic of a table. `routed`: a route chose it, so that several tables may share it."""

    name: str
    routed: bool


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern with `*` as a regular expression."""
    first, *others = map(re.escape, pattern.split("*"))
    if not others:
        return re.compile(first)
    # Atomic, as what follows a `*` matches best where it comes first: no pattern takes long.
    between = (f"(?>.*?{part})" for part in others[:-1])
    return re.compile("".join([first, *between, ".*", others[-1]]), re.DOTALL)


def column_matches(pattern: str, column: str) -> bool:
    """Tell whether a name fits a pattern with `*`."""
    return _compiled(pattern).fullmatch(column) is not None


def schema_and_table(name: str) -> tuple[str, str]:
    """Return the two parts of `schema.table`; the first dot parts them."""
    schema, _, table = name.partition(".")
    return schema, table


def table_matches(pattern: str, schema: str, table: str) -> bool:
    """Tell whether a table fits `schema.table` with `*`."""
    of_schema, of_table = schema_and_table(pattern)
    return column_matches(of_schema, schema) and column_matches(of_table, table)


class Naming:
    """Which tables have a topic of their own, and which, under `prefix`."""

    def __init__(self, prefix: str, shaping: ShapingSettings) -> None:
        self._prefix = prefix
        self._shaping = shaping
        self._template = shaping.topic
        self._routes = [(re.compile(route.tables), route.topic) for route in shaping.routes]
        self._outbox = shaping.outbox.topic if shaping.outbox else ""
        self._own = own_topics(prefix)

    def included(self, schema: str, table: str) -> bool:
        """Tell whether anything of the table is published."""
        include = self._shaping.include
        if include and not any(table_matches(pattern, schema, table) for pattern in include):
            return False
        return not self.excluded(schema, table)

    def excluded(self, schema: str, table: str) -> bool:
        """Tell whether `exclude` leaves the table out."""
        return any(table_matches(pattern, schema, table) for pattern in self._shaping.exclude)

    def publishes(self, schema: str, table: str) -> bool:
        """Tell whether the table has a topic of its own: it is included, and not an outbox."""
        return self.included(schema, table) and not self.has_outbox(schema, table)

    def has_outbox(self, schema: str, table: str) -> bool:
        """Tell whether the table's rows are messages of an outbox."""
        outbox = self._shaping.outbox
        if outbox is None or outbox.table is None:
            return False
        return table_matches(outbox.table, schema, table)

    def skips(self, schema: str, table: str) -> frozenset[str]:
        """Return the operations of the table whose events are left out."""
        return frozenset(
            operation
            for pattern, operations in self._shaping.skip.items()
            if table_matches(pattern, schema, table)
            for operation in operations
        )

    def mask(self, schema: str, table: str, column: str) -> MaskSettings | None:
        """Return what replaces a column's values, the first match of the settings."""
        found = self._mask(schema, table, column)
        return found and found[1]

    def masks(self, schema: str, table: str, column: str) -> bool:
        """Tell whether a mask replaces a column's values."""
        return self._mask(schema, table, column) is not None

    def masks_by_name(self, schema: str, table: str, column: str) -> bool:
        """Tell whether the mask of a column is from an entry of just this table, not a pattern."""
        found = self._mask(schema, table, column)
        return found is not None and schema_and_table(found[0]) == (schema, table)

    def _mask(self, schema: str, table: str, column: str) -> tuple[str, MaskSettings] | None:
        """Return the pattern of tables and the mask of a column, None for an open one."""
        found = (
            (tables, mask)
            for tables, masks in self._shaping.masks.items()
            if table_matches(tables, schema, table)
            for columns, mask in masks.items()
            if column_matches(columns, column)
        )
        return next(found, None)

    def publishes_column(self, schema: str, table: str, column: str) -> bool:
        """Tell whether `columns` lets a column of the table through."""
        for pattern, columns in self._shaping.columns.items():
            if not table_matches(pattern, schema, table):
                continue
            if columns.include and not any(column_matches(p, column) for p in columns.include):
                return False
            if any(column_matches(p, column) for p in columns.exclude):
                return False
        return True

    def filtered(self, schema: str, table: str) -> bool:
        """Tell whether a filter leaves rows of the table out."""
        return bool(self.filters(schema, table))

    def filters(self, schema: str, table: str) -> tuple[str, ...]:
        """Return the expressions that a row of the table must fit to be published."""
        return tuple(
            expression
            for pattern, expression in self._shaping.filters.items()
            if table_matches(pattern, schema, table)
        )

    def filtered_by_name(self, schema: str, table: str) -> bool:
        """Tell whether a filter is of just this table, not of a pattern."""
        return any(schema_and_table(one) == (schema, table) for one in self._shaping.filters)

    @property
    def hides(self) -> bool:
        """Whether anything of some table is not published, or is masked."""
        found = self._shaping
        of_columns = found.columns or found.masks
        of_rows = found.include or found.exclude or found.filters or found.skip
        return bool(of_columns or of_rows or (found.outbox and found.outbox.table))

    def hides_of(self, schema: str, table: str) -> bool:
        """Tell whether something of this table is not published as it is."""
        by_pattern = self._shaping.columns, self._shaping.masks
        return (
            not self.publishes(schema, table)
            or bool(self.skips(schema, table))
            or self.filtered(schema, table)
            or any(table_matches(one, schema, table) for some in by_pattern for one in some)
        )

    def may_be_renamed(self, schema: str, table: str) -> bool:
        """Tell whether the table may have been hidden under another name."""
        allowed = self._shaping.renames_allowed
        return any(table_matches(pattern, schema, table) for pattern in allowed)

    def computed(self, schema: str, table: str) -> frozenset[str]:
        """Return the table's computed columns, which its source does not have."""
        return frozenset(
            name
            for pattern, columns in self._shaping.computed.items()
            if table_matches(pattern, schema, table)
            for name in columns
        )

    def large_values(self, schema: str, table: str, column: str) -> LargeValueRule | None:
        """Return how large values of a column are published, None for as they are."""
        for tables, columns in self._shaping.large_values.items():
            if not table_matches(tables, schema, table):
                continue
            for of_column, found in columns.items():
                if column_matches(of_column, column):
                    return LargeValueRule(found, "*" not in tables + of_column)
        return None

    def changes_values(self, schema: str, table: str, column: str, type_name: str) -> bool:
        """Tell whether a column's large values may be published otherwise than they are."""
        rule = self.large_values(schema, table, column)
        return rule is not None and may_be_large(type_name)

    def key(self, schema: str, table: str) -> tuple[str, ...]:
        """Return the configured columns of a table's message key, () for its primary key."""
        found = (
            key
            for pattern, key in self._shaping.keys.items()
            if table_matches(pattern, schema, table)
        )
        return next(found, ())

    def partition_by(self, schema: str, table: str) -> tuple[str, ...] | str:
        """Return what chooses the partition: columns, `row`, or () for the key."""
        found = (
            chosen
            for pattern, chosen in self._shaping.partition_by.items()
            if table_matches(pattern, schema, table)
        )
        return next(found, ())

    def flat(self, schema: str, table: str) -> bool:
        """Tell whether the table's records are flat rows, without an envelope."""
        flat = self._shaping.flat
        return flat is not None and any(table_matches(p, schema, table) for p in flat.tables)

    def table(self, schema: str, table: str) -> TableTopic:
        """Return the topic of a table. Raise SettingsError if the bridge uses that topic itself."""
        fields = {"prefix": self._prefix, "schema": schema, "table": table}
        found = TableTopic(legal_topic(self._template.format_map(fields)), False)
        for pattern, template in self._routes:
            match = pattern.fullmatch(f"{schema}.{table}")
            if match is not None:
                named = {name: value or "" for name, value in match.groupdict().items()}
                found = TableTopic(legal_topic(template.format_map(named | fields)), True)
                break
        if self._taken(found.name):
            raise SettingsError(
                f"the topic of {schema}.{table} would be {found.name}, which the bridge uses for "
                "other things",
                operation="name a topic",
                hint="correct shaping.topic, shaping.routes or shaping.outbox.topic",
            )
        return found

    def outbox(self, aggregate_type: str) -> str:
        """Return the topic of an outbox's rows of this type.

        Return "" if the bridge uses that topic itself.
        """
        fields = {"prefix": self._prefix, "type": aggregate_type}
        name = legal_topic(self._outbox.format_map(fields))
        return "" if name in self._own else name

    def _taken(self, topic: str) -> bool:
        if topic in self._own:
            return True
        return bool(self._outbox and re.fullmatch(_expression(self._outbox, self._prefix), topic))

    def pattern(self) -> str:
        """Return a regular expression (Python's and Java's) of all topics a table could have."""
        templates = [self._template, *(template for _, template in self._routes)]
        names = "|".join(_expression(template, self._prefix) for template in templates)
        others = [*map(re.escape, sorted(self._own))]
        if self._outbox:
            others.append(self.outbox_pattern())
        return f"(?!(?:{'|'.join(others)})$)(?:{names})"

    def outbox_pattern(self) -> str:
        """Return a regular expression of all topics that an outbox's rows could have."""
        return _expression(self._outbox, self._prefix) if self._outbox else r"(?!)"

    def outbox_is_ours(self) -> bool:
        """Tell whether no other prefix has the same outbox topics."""
        return "{prefix}" in self._outbox


def _expression(template: str, prefix: str) -> str:
    """Return a regular expression of all topics that the template can give."""
    parts = []
    for literal, field, _, _ in string.Formatter().parse(template):
        parts.append(re.escape(literal))
        if field is not None:
            parts.append(re.escape(prefix) if field == "prefix" else _ANY)
    return "".join(parts)
