"""The names that each table has had, so that no rename publishes what settings hide. Pure.

Settings name tables by schema and name; a table that is renamed or moved keeps its oid
(pg_class.oid). So each table is published with no less hidden than under any other name of its oid.
A session learns names that a later one must know: it notes them before it publishes anything.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, Protocol

from schemas.errors import ExitCode, OperatorNeeded
from schemas.naming import Naming
from schemas.schema_events import SchemaEvent
from services.bridge.pgoutput.messages import Relation

Name = tuple[str, str]
"""A table's schema and name."""
_ALL: Final = frozenset("cudt")


class NotedNames(Protocol):
    """The tables' names of earlier sessions, kept for later ones."""

    @property
    def noted(self) -> Collection[tuple[int, Name]]:
        """The names that were noted at the session's start, each (pg_class.oid, name)."""

    def note(self, names: Iterable[tuple[int, Name]]) -> None:
        """Keep these, too, before anything of the present Kafka transaction is visible."""

    def forget_dropped(self, present_oids: Collection[int], lsn: int) -> None:
        """Let go of tables that the catalog lacked before `lsn`, once all up to it is published."""


class RenamedTables:
    """The names of each table, by its oid.

    `known`: the last schema event of each name. `catalog`: oid -> the name at the session's start,
    also of tables without events. `noted`: (oid, name) of what former sessions knew. The stream
    tells the rest.
    """

    def __init__(
        self,
        naming: Naming,
        published_shapes: Mapping[Name, SchemaEvent],
        catalog: Mapping[int, Name],
        noted: Iterable[tuple[int, Name]] = (),
    ) -> None:
        self._naming = naming
        self._published = {*published_shapes}
        self._names: dict[int, set[Name]] = {}
        self._noted = {*noted}
        self._to_note: set[tuple[int, Name]] = set()
        of_events = ((event.oid, name) for name, event in published_shapes.items())
        for oid, name in (*self._noted, *of_events, *catalog.items()):
            self._learn(oid, name)

    def to_note(self) -> set[tuple[int, Name]]:
        """Return, once, (oid, name) of names under which something is hidden, and not yet noted."""
        found, self._to_note = self._to_note, set()
        self._noted |= found
        return found

    def _learn(self, oid: int, name: Name) -> None:
        self._names.setdefault(oid, set()).add(name)
        if (oid, name) not in self._noted and self._naming.hides_of(*name):
            self._to_note.add((oid, name))

    def require_hidden(self, relation: Relation, lsn: int) -> None:
        """Remember the name of a relation, as a change that commits at `lsn` has it.

        Raise OperatorNeeded if it would be published without a rule of another name of the table.
        """
        name = relation.schema, relation.table
        for other in sorted(self._names.get(relation.oid, set()) - {name}):
            if lost := self._lost(relation, name, other):
                raise _exposed(relation, other, lost, lsn)
        self._learn(relation.oid, name)
        if self._naming.included(*name):
            self._published.add(name)

    def _lost(self, relation: Relation, name: Name, other: Name) -> dict[str, list[str]]:
        """Return section -> what it hides under the other name alone: columns, operations."""
        naming = self._naming
        if not naming.included(*name) or naming.skips(*name) == _ALL:
            return {}
        if naming.may_be_renamed(*name):
            return {}
        lost = {
            "columns": self._columns_lost(relation, name, other),
            "masks": self._masks_lost(relation, name, other),
            "filters": sorted({*naming.filters(*other)} - {*naming.filters(*name)}),
            "skip": sorted(naming.skips(*other) - naming.skips(*name)),
        }
        if naming.filtered_by_name(*name):
            lost["filters"] = []
        found = {section: parts for section, parts in lost.items() if parts}
        # A name that had events before has rules of its own: another table may well take it.
        if not naming.included(*other) and name not in self._published:
            found["exclude" if naming.excluded(*other) else "include"] = []
        if naming.has_outbox(*other) and not naming.has_outbox(*name):
            found["outbox"] = []
        return found

    def _columns_lost(self, relation: Relation, name: Name, other: Name) -> list[str]:
        """Return the columns that are published under `name` and left out under `other`."""
        publishes = self._naming.publishes_column
        return [
            column.name
            for column in relation.columns
            if publishes(*name, column.name) and not publishes(*other, column.name)
        ]

    def _masks_lost(self, relation: Relation, name: Name, other: Name) -> list[str]:
        """Return the columns that are masked under `other` and not, or otherwise, under `name`."""
        mask = self._naming.mask
        return [
            column
            for column in self._published_columns(relation, name)
            if mask(*other, column) not in (None, mask(*name, column))
            and not self._naming.masks_by_name(*name, column)
        ]

    def _published_columns(self, relation: Relation, name: Name) -> Iterator[str]:
        for column in relation.columns:
            if self._naming.publishes_column(*name, column.name):
                yield column.name
        yield from sorted(self._naming.computed(*name))


def _exposed(
    relation: Relation, other: Name, lost: Mapping[str, Iterable[str]], lsn: int
) -> OperatorNeeded:
    """Return the error of a renamed table whose new name lacks settings that hide columns."""
    name, before = f"{relation.schema}.{relation.table}", ".".join(other)
    rules = [f"shaping.{one}" + _listed(one, parts) for one, parts in lost.items()]
    sections = " and ".join(_section(one) for one in lost)
    return OperatorNeeded(
        f"{name} and {before} are names of one table, which was renamed or moved: {name} would be "
        f"published without what the settings hide under the name {before}: {', '.join(rules)}",
        operation="publish a table",
        subject=f"table {name}, oid {relation.oid}",
        lsn=lsn,
        hint=f"name {name} in {sections}, too, and keep the rules of {before}, of which changes "
        f"may yet come; or, where nothing is to be hidden, name {name} in shaping.renames_allowed "
        "(docs/guides/shaping.md, Renamed tables)",
        exit_code=ExitCode.SETTINGS,
    )


def _section(section: str) -> str:
    """Return where a section's rule for the new name is to be, as a hint has it."""
    where = {"include": "exclude", "outbox": "exclude (or shaping.outbox.table)"}
    found = f"shaping.{where.get(section, section)}"
    return f"{found} (before the patterns that fit it)" if section == "masks" else found


def _listed(section: str, parts: Iterable[str]) -> str:
    """Return what a section hides, in parentheses; not the text of a filter, which may be long."""
    return f" ({', '.join(parts)})" if parts and section != "filters" else ""
