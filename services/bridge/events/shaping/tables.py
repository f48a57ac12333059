"""How the settings publish a table: whether, which columns, in which form, to which topic. Pure.

relation, as the server describes it -> with_key -> plan: the relation as it is published
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from schemas.errors import SettingsError
from schemas.events import MARKER_PREFIX
from schemas.large_values import LargeValueRule
from schemas.naming import Naming, TableTopic, column_matches, table_matches
from schemas.schema_events import Column
from schemas.shaping import FlatSettings, MaskSettings, ShapingSettings, field_name
from services.bridge.events.fields import DELETED, chosen
from services.bridge.events.shaping.expressions import require_well_formed
from services.bridge.events.shaping.masks import mask
from services.bridge.events.shaping.outbox import OutboxMessages, OutboxTable
from services.bridge.events.shaping.row_rules import RowRules
from services.bridge.events.values.plain import Encode
from services.bridge.pgoutput.messages import Relation, RelationColumn

TEXT_OID: Final = 25
PARTITION_BY: Final = "shaping.partition_by"
_ALL: Final = frozenset("cudt")
Limit = Callable[[Encode], Encode]
"""Makes the encoder of a column with large values of its usual one."""


@dataclass(frozen=True, slots=True)
class TableShaping:
    """How one relation is published.

    `relation` has the published columns alone, masked ones as text; `source_indexes` tells where
    those stand in the server's rows, with the computed columns behind (`rules`), None when all are
    published; `masks`, `large_values` and, once types are known, `limits` are by column name.
    `places`: the columns that choose the partition, in place of the key. `identity`: the columns
    whose old values updates and deletes tell. `by_row`: the columns are those of the whole row.
    """

    relation: Relation
    topic: TableTopic
    source_indexes: tuple[int, ...] | None = None
    masks: Mapping[str, Encode] = field(default_factory=dict)
    skipped: frozenset[str] = frozenset()
    outbox: OutboxTable | None = None
    flat: FlatSettings | None = None
    skips_unchanged: bool = False
    rules: RowRules | None = None
    large_values: Mapping[str, LargeValueRule] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    identity: frozenset[str] = frozenset()
    by_row: bool = False

    def placed_otherwise(self, before: Sequence[Column], after: Sequence[Column]) -> bool:
        """Tell whether the same rows may be in other partitions when a table's shape changes."""
        if self.by_row and _types(before) != _types(after):
            return True
        chosen = bool(self.places) and not self.by_row
        return not chosen and _types(before, keys=True) != _types(after, keys=True)

    @property
    def published(self) -> bool:
        """Whether the table has a topic of its own."""
        return self.outbox is None and self.skipped != _ALL


def nothing_of(relation: Relation) -> TableShaping:
    """Return the plan of a relation of which nothing is published."""
    return TableShaping(relation, TableTopic("", False), skipped=_ALL)


class Shaping:
    """The settings, applied to one table after the other."""

    def __init__(self, settings: ShapingSettings, prefix: str) -> None:
        self._settings = settings
        self._salt = settings.salt.get_secret_value()
        self.naming = Naming(prefix, settings)
        self.flat = settings.flat
        self.annotations = settings.annotations
        self.outbox_messages: OutboxMessages | None = None
        """The reader of an outbox's logical messages, None if there is none."""
        if settings.outbox is not None and settings.outbox.message_prefix:
            self.outbox_messages = OutboxMessages(settings.outbox, self.naming)
        self.shapes_nothing = settings == ShapingSettings()
        """Whether everything is published as it is."""
        for key, text in self._expressions():
            require_well_formed(text, key)

    @property
    def message_prefixes(self) -> frozenset[str]:
        """The prefixes of the logical messages that are published: the settings', and ours."""
        chosen = (self._settings.outbox, self._settings.annotations)
        return frozenset((MARKER_PREFIX, *(one.message_prefix or "" for one in chosen if one)))

    def with_key(self, relation: Relation) -> Relation:
        """Return `relation` with the configured key in place of its replica identity's `key` flags.

        Raise SettingsError when updates and deletes would not tell the key's old values.
        """
        key = self.naming.key(relation.schema, relation.table)
        if not key:
            return relation
        names = {column.name for column in relation.columns}
        identity = {column.name for column in relation.columns if column.key}
        if missing := set(key) - names:
            raise _wrong(
                relation, f"has no column {min(missing)}", "correct shaping.keys", "shaping.keys"
            )
        if relation.replica_identity in "di" and identity and not set(key) <= identity:
            raise _wrong(
                relation,
                f"does not tell the old value of key column {min(set(key) - identity)}",
                "set REPLICA IDENTITY FULL on the table, or correct shaping.keys",
                "shaping.keys",
            )
        columns = tuple(replace(column, key=column.name in key) for column in relation.columns)
        return replace(relation, columns=columns)

    def plan(self, relation: Relation, identity: Collection[str] | None = None) -> TableShaping:
        """Return how `relation`, with its key, is published.

        `identity`: the columns whose old values updates and deletes tell, None: not judged. Raise
        SettingsError when a key column would be left out or would lose its identity, or for an
        expression that does not fit the relation.
        """
        schema, table = relation.schema, relation.table
        if not self.naming.included(schema, table):
            return nothing_of(relation)
        outbox = self._settings.outbox
        skipped = self.naming.skips(schema, table)
        if outbox is not None and self.naming.has_outbox(schema, table):
            reader = OutboxTable(outbox, self.naming, relation)
            self._check_outbox(relation)
            return TableShaping(relation, TableTopic("", False), skipped=skipped, outbox=reader)
        kept = self._kept(relation)
        needed = None if {"u", "d"} <= skipped else identity
        places = self._places(relation, kept, needed)
        rules = self._rules(relation, needed)
        if rules is not None:
            relation, kept = _with_computed(relation, kept, rules.columns)
        masks = {
            column.name: found
            for column in relation.columns
            if (found := self.naming.mask(schema, table, column.name)) is not None
        }
        _check_key(relation, kept, masks)
        flat = self._settings.flat if self.naming.flat(schema, table) else None
        columns = tuple(_masked(relation.columns[source_index], masks) for source_index in kept)
        if flat is not None:
            _check_fields(relation, columns, flat)
        return TableShaping(
            replace(relation, columns=columns),
            self.naming.table(schema, table),
            source_indexes=None if len(kept) == len(relation.columns) else kept,
            masks={name: mask(found, self._salt) for name, found in masks.items()},
            skipped=skipped,
            flat=flat,
            skips_unchanged=any(
                table_matches(p, schema, table) for p in self._settings.skip_unchanged
            ),
            rules=rules,
            places=places,
            identity=frozenset(identity or ()),
            by_row=bool(places) and self.naming.partition_by(schema, table) == "row",
            large_values={
                column.name: rule
                for column in columns
                if column.name not in masks
                and (rule := self.naming.large_values(schema, table, column.name)) is not None
            },
        )

    def check(self, relation: Relation) -> None:
        """Raise SettingsError where key, partition or expressions do not fit the relation.

        `relation`: as the server describes it.
        """
        schema, table = relation.schema, relation.table
        if not self.naming.included(schema, table):
            return
        if self.naming.has_outbox(schema, table):
            self._check_outbox(relation)
            return
        identity = [column.name for column in relation.columns if column.key]
        needed = None if {"u", "d"} <= self.naming.skips(schema, table) else identity
        kept = self._kept(relation)
        self._places(self.with_key(relation), kept, needed)
        rules = self._rules(relation, needed)
        if rules is not None:
            _with_computed(relation, kept, rules.columns)

    @property
    def has_rules(self) -> bool:
        """Whether the settings have keys, columns for partitions, filters or computed columns."""
        found = self._settings
        return bool(found.keys or found.partition_by or found.filters or found.computed)

    def _kept(self, relation: Relation) -> tuple[int, ...]:
        """Return the indexes of the columns that are published."""
        return tuple(
            source_index
            for source_index, column in enumerate(relation.columns)
            if self.naming.publishes_column(relation.schema, relation.table, column.name)
        )

    def _rules(self, relation: Relation, identity: Collection[str] | None) -> RowRules | None:
        """Return the filters and computed columns of a relation, None if it has none."""
        schema, table = relation.schema, relation.table
        filters = [
            (f"shaping.filters.{pattern}", text)
            for pattern, text in self._settings.filters.items()
            if table_matches(pattern, schema, table)
        ]
        computed = {
            name: (f"shaping.computed.{pattern}.{name}", text)
            for pattern, columns in self._settings.computed.items()
            if table_matches(pattern, schema, table)
            for name, text in columns.items()
        }
        return RowRules(relation, filters, computed, identity) if filters or computed else None

    def _places(
        self, relation: Relation, kept: Collection[int], identity: Collection[str] | None
    ) -> tuple[str, ...]:
        """Return the columns that choose the partition, () where the key does, if there is one.

        Raise SettingsError for columns that are not published, or whose old values updates and
        deletes do not tell: a row could go to another partition unseen.
        """
        names = [relation.columns[index].name for index in kept]
        chosen = self.naming.partition_by(relation.schema, relation.table)
        if isinstance(chosen, str):
            keyed = any(column.key for column in relation.columns)
            return () if keyed else tuple(names)
        named = f"{relation.schema}.{relation.table}"
        for column in chosen:
            if column in names:
                continue
            if any(column == one.name for one in relation.columns):
                what, hint = f"does not publish column {column}", "correct shaping.columns"
            else:
                near = difflib.get_close_matches(column, names, n=1)
                what = f"has no published column {column}"
                hint = (f"did you mean {near[0]}? " if near else "") + (
                    f"where {named} has it, add it to the publication's column list"
                )
            what += ", which is to choose the partition"
            raise _wrong(relation, what, f"{hint}; or correct {PARTITION_BY}", PARTITION_BY)
        if identity and (hidden := {*chosen} - {*identity}):
            raise _wrong(
                relation,
                f"does not tell the old value of {min(hidden)}, which is to choose the partition",
                f"ALTER TABLE {named} REPLICA IDENTITY FULL, or an index that has it; or skip the "
                "table's updates and deletes (shaping.skip)",
                PARTITION_BY,
            )
        return chosen

    def _expressions(self) -> Iterator[tuple[str, str]]:
        """Yield (key, expression) of all expressions in the settings."""
        for pattern, text in self._settings.filters.items():
            yield f"shaping.filters.{pattern}", text
        for pattern, columns in self._settings.computed.items():
            for name, text in columns.items():
                yield f"shaping.computed.{pattern}.{name}", text

    def _check_outbox(self, relation: Relation) -> None:
        """Raise SettingsError where an outbox has a filter or computed columns."""
        for pattern in (*self._settings.filters, *self._settings.computed):
            if table_matches(pattern, relation.schema, relation.table):
                raise _wrong(
                    relation,
                    "is an outbox, whose messages have neither filter nor computed columns",
                    f"choose a pattern that does not match it instead of {pattern} in "
                    "shaping.filters and shaping.computed",
                )

    def unmatched(self, tables: Mapping[tuple[str, str], Iterable[str]]) -> Iterator[str]:
        """Yield the patterns that fit none of `tables`, as `key: …`.

        `tables`: (schema, table) -> columns.
        """
        settings = self._settings
        named = [("include", p) for p in settings.include]
        named += [("exclude", p) for p in settings.exclude]
        named += [("keys", p) for p in settings.keys] + [("skip", p) for p in settings.skip]
        named += [("partition_by", p) for p in settings.partition_by]
        named += [("skip_unchanged", p) for p in settings.skip_unchanged]
        named += [("filters", p) for p in settings.filters]
        named += [("computed", p) for p in settings.computed]
        named += [("flat.tables", p) for p in settings.flat.tables] if settings.flat else []
        if settings.outbox is not None and settings.outbox.table is not None:
            named.append(("outbox.table", settings.outbox.table))
        for key, pattern in named:
            if not any(table_matches(pattern, *table) for table in tables):
                yield f"{key}: {pattern}"
        of_columns = [("masks", p, c) for p, masks in settings.masks.items() for c in masks]
        of_columns += [
            ("large_values", p, c) for p, found in settings.large_values.items() for c in found
        ]
        of_columns += [
            ("columns", p, c) for p, s in settings.columns.items() for c in s.include + s.exclude
        ]
        for key, pattern, of_column in of_columns:
            if not any(
                table_matches(pattern, *table)
                and any(column_matches(of_column, c) for c in columns)
                for table, columns in tables.items()
            ):
                yield f"{key}: {pattern}: {of_column}"


def _types(columns: Iterable[Column], *, keys: bool = False) -> dict[str, tuple[int, int]]:
    """Return the types of columns by name; `keys`: of those of the key alone."""
    return {one.name: (one.type_oid, one.typmod) for one in columns if one.key or not keys}


def _masked(column: RelationColumn, masks: Mapping[str, MaskSettings]) -> RelationColumn:
    if column.name not in masks:
        return column
    return RelationColumn(column.name, TEXT_OID, -1, column.key)


def _with_computed(
    relation: Relation, kept: tuple[int, ...], computed: tuple[RelationColumn, ...]
) -> tuple[Relation, tuple[int, ...]]:
    """Return the relation with computed columns behind its own, and all that is published.

    Raise SettingsError where a computed column has the name of one of its own.
    """
    names = {relation.columns[index].name for index in kept}
    if taken := names & {column.name for column in computed}:
        raise _wrong(
            relation,
            f"has a column {min(taken)} itself, as is the name of a computed one",
            "leave the table's column out (shaping.columns), or choose another name in "
            "shaping.computed",
        )
    count = len(relation.columns)
    columns = (*relation.columns, *computed)
    return replace(relation, columns=columns), (*kept, *range(count, len(columns)))


def _check_key(
    relation: Relation, kept: tuple[int, ...], masks: Mapping[str, MaskSettings]
) -> None:
    """Raise SettingsError where a key column is left out, or masked otherwise than by hash."""
    for source_index, column in enumerate(relation.columns):
        if not column.key:
            continue
        if source_index not in kept:
            raise _wrong(
                relation,
                f"would lose its key column {column.name}",
                "publish it, hash it, or choose another key in shaping.keys",
            )
        if column.name in masks and masks[column.name].hash is None:
            raise _wrong(
                relation,
                f"would have rows with equal keys: its key column {column.name} is masked",
                "mask it by hash, which keeps different values different",
            )


def _check_fields(
    relation: Relation, columns: Iterable[RelationColumn], flat: FlatSettings
) -> None:
    """Raise SettingsError where a column is named as a field of flat rows."""
    taken = {DELETED, *map(field_name, chosen(flat))} & {column.name for column in columns}
    if taken:
        raise _wrong(
            relation,
            f"has a column {min(taken)}, as is the name of a field of flat rows",
            "leave the column out (shaping.columns), or the table (shaping.flat.tables)",
        )


def _wrong(relation: Relation, what: str, hint: str, setting: str = "") -> SettingsError:
    return SettingsError(
        f"{relation.schema}.{relation.table} {what}",
        operation="shape a table",
        subject=setting,
        hint=hint,
    )
