"""Prepares a table's first event: its key, its topic, its schema event.

Not when the server describes it: that may be for a change that is rolled back, or for a partition
whose changes are published as its root's. pgoutput flags the columns of the replica identity; under
REPLICA IDENTITY FULL these are all, and under NOTHING none: see services.bridge.events.keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

import structlog

from schemas.errors import OperatorNeeded, SettingsError
from schemas.schema_events import Column, SchemaEvent
from services.bridge.events.description import Described
from services.bridge.events.errors import FOR_LATER_CHANGES
from services.bridge.events.event import Stamp
from services.bridge.events.formats.table_format import PLAIN, Formats
from services.bridge.events.keys import key_columns, require_distinct_keys, settled
from services.bridge.events.missing_values import MissingValues, missing_values, renumbered
from services.bridge.events.renamed_tables import NotedNames, RenamedTables
from services.bridge.events.rows import encoder_of
from services.bridge.events.schema_events import Shapes
from services.bridge.events.shaping.large_values import Deposit, limits
from services.bridge.events.shaping.tables import Shaping, TableShaping, nothing_of
from services.bridge.events.topic_owners import TopicOwners
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.messages import Relation
from services.bridge.source.database import Primary
from services.postgres.partitions import Partition
from services.postgres.publications import TableCatalog, table_catalog

logger = structlog.get_logger(__name__)

_IDENTITIES_WITHOUT_KEY: Final = ("f", "n")
_MISSING_BYTES_MAX: Final = 64 * 1024
"""Of the values of one schema event: Kafka must take it, as the bridge can't go on without it."""


class Relations:
    """Describes tables for one session. `known` is what the schema topic had at its start."""

    def __init__(
        self,
        prefix: str,
        primary: Primary,
        published_shapes: dict[tuple[str, str], SchemaEvent],
        shaping: Shaping,
        encoders: Encoders,
        formats: Formats | None = None,
        *,
        owners: TopicOwners | None = None,
        deposit: Deposit | None = None,
        table_names: NotedNames | None = None,
    ) -> None:
        self._deposit = deposit
        self._awaited_xid = 0
        self._visible = True
        self._encoders = encoders
        self._formats = formats
        self._text_types: set[int] = set()
        self._not_partitioned: set[int] = set()
        self._primary = primary
        self._shaping = shaping
        self._shapes = Shapes(prefix, published_shapes)
        self._owners = owners or TopicOwners(shaping.naming, published_shapes)
        self._table_names = table_names
        catalog, noted = _catalog(shaping, primary), table_names.noted if table_names else ()
        names = catalog.names if catalog else {}
        self._renamed = RenamedTables(shaping.naming, published_shapes, names, noted)
        if catalog and table_names is not None:
            table_names.forget_dropped(names.keys() | catalog.locked, catalog.lsn)
        self._note_names()

    def describe(self, relation: Relation, stamp: Stamp, seq: int) -> Described:
        """Find a relation's plan, with its key, and its schema event.

        Raise OperatorNeeded when a renamed table would lose what hides its rows, SettingsError for
        one that can't be published as configured. One that is parked has no events.
        """
        self._renamed.require_hidden(relation, stamp.commit_lsn)
        self._note_names()
        if reason := self.parked(relation):
            table = f"{relation.schema}.{relation.table}"
            logger.warning(
                "a table is parked: its changes are not published",
                table=table,
                reason=reason,
                hint=f"then start the bridge again, and `slotbridge snapshot start {table}`",
            )
            return Described(nothing_of(relation))
        certain = True
        identity = [column.name for column in relation.columns if column.key]
        served = {column.name for column in relation.columns}
        try:
            if self._shaping.naming.key(relation.schema, relation.table):
                relation = self._shaping.with_key(relation)
            elif relation.replica_identity in _IDENTITIES_WITHOUT_KEY:
                relation, certain = self._with_primary_key(relation, stamp.xid)
            plan = self._shaping.plan(relation, identity)
            if not plan.published:
                return Described(plan, None, certain)
            below = self._partitions_of(relation, stamp.xid)
            certain = self._learn_types(plan.relation, stamp.xid) and certain
            require_distinct_keys(plan.relation, self._encoders)
            if plan.large_values:
                found = limits(plan, self._encoders, self._deposit)
                plan = replace(plan, limits=found)
        except SettingsError as error:
            error.lsn = stamp.commit_lsn
            if "REPLICA IDENTITY" in error.hint:
                error.hint += f". A new identity is {FOR_LATER_CHANGES}"
            raise
        form = PLAIN if self._formats is None else self._formats.of(plan)
        missing_of = partial(self._missing_of, plan, served, stamp.xid)
        left_out = served - {column.name for column in plan.relation.columns}
        differs = partial(self._differs, plan.relation.oid, stamp.xid)
        if self._shapes.former_oid(plan.relation) not in (0, plan.relation.oid):
            logger.warning(
                "another table has this name now: the former table's rows stay in Kafka",
                table=f"{plan.relation.schema}.{plan.relation.table}",
                hint="`slotbridge recover --force` removes them",
            )
        event = self._shapes.change(
            plan.relation, stamp, seq, missing_of, left_out=left_out, differs=differs
        )
        return Described(plan, event, certain, form, below)

    def without_partitions(self, oid: int) -> None:
        """Note that a table is not partitioned: it never will be."""
        self._not_partitioned.add(oid)

    def parked(self, relation: Relation) -> str:
        """Return why a table can't have its topic, which is another's; "" where it can.

        The others go on: anybody who may create a table could stop them all otherwise.
        """
        table = relation.schema, relation.table
        if not self._shaping.naming.publishes(*table):
            return ""
        try:
            topic = self._shaping.naming.table(*table)
            self._owners.claim(table, topic, partial(self._is_gone, relation.oid))
        except (SettingsError, OperatorNeeded) as error:
            return f"{error.message}: {error.hint}"
        return ""

    def _is_gone(self, oid: int, owner: tuple[str, str]) -> bool:
        """Tell whether a topic's owner was dropped, or is the table `oid` under its former name."""
        return self._primary.table_oid(*owner) in (0, oid)

    def _note_names(self) -> None:
        """Let later sessions know the names under which settings hide something."""
        found = self._renamed.to_note()
        if found and self._table_names is not None:
            self._table_names.note(found)

    def _partitions_of(self, relation: Relation, xid: int) -> Sequence[Partition]:
        """Return a table's partitions as the catalog has them now, () for a table without.

        The server describes the root anew before the first change of each partition, which the
        transaction being published may have made. Of a table that is not partitioned, the catalog
        is asked once in a session.
        """
        if relation.oid in self._not_partitioned:
            return ()
        visible = self._await_catalog(xid)
        found = self._primary.partitions(relation.oid)
        if found is None and visible:
            self._not_partitioned.add(relation.oid)
        return found or ()

    def _differs(self, oid: int, xid: int, before: SchemaEvent) -> bool:
        """Tell whether the catalog has another column under a name of the last schema event."""
        return before.attnums != [] and renumbered(before, self._primary.stored_columns(oid), xid)

    def _missing_of(
        self,
        plan: TableShaping,
        served: set[str],
        xid: int,
        before: SchemaEvent | None,
        after: Sequence[Column],
    ) -> MissingValues:
        """Return what a changed shape says of older rows; log where an operator must act."""
        if before is not None and plan.placed_otherwise(before.after, after):
            logger.warning(
                "a table's key, or the columns of its rows, have changed: its rows may go to other "
                "partitions than before (docs/guides/shaping.md, Placement)",
                table=f"{plan.relation.schema}.{plan.relation.table}",
            )
        self._await_catalog(xid)
        stored = self._primary.stored_columns(plan.relation.oid)
        # What an event would store elsewhere is not told: its value is not stored with the event.
        limited = replace(plan, limits=limits(plan, self._encoders, _refuse))
        columns = {column.name: column for column in plan.relation.columns}
        bytes_left = _MISSING_BYTES_MAX

        def encode(name: str, value: bytes) -> str | None:
            nonlocal bytes_left
            try:
                text = encoder_of(limited, self._encoders, columns[name]).encode(value)
            except ValueError:
                return None
            size = len(text.encode())
            if size > bytes_left:
                return None
            bytes_left -= size
            return text

        found = missing_values(before, after, served, stored, xid, encode)
        if found.unsent:
            table = f"{plan.relation.schema}.{plan.relation.table}"
            logger.warning(
                "a table was changed whose older rows may have values that are in no event",
                table=table,
                columns=found.unsent,
                hint=f"`slotbridge snapshot start {table}` sends all of its rows, unless the "
                "columns have NULL there (docs/guides/tables.md)",
            )
        return found

    def _learn_types(self, relation: Relation, xid: int) -> bool:
        """Look up the types that are new to the encoders; log once which of them are sent as text.

        False when the catalog lacks one: where commits wait for the bridge, it may come yet.
        """
        oids = [column.type_oid for column in relation.columns]
        unknown = self._encoders.unknown(oids)
        if not unknown:
            return True
        given = {one.type_oid: one.type_name for one in relation.columns if one.type_name}
        names = given if self._await_catalog(xid) else {}
        found = self._primary.types(unknown, names)
        self._encoders.learn(found)
        dropped = {one.oid for one in found if names.get(one.oid) == f"{one.schema}.{one.name}"}
        if gone := [one.name for one in relation.columns if one.type_oid in dropped]:
            logger.warning(
                "domains of columns were dropped: values have the form of the base type, without "
                "the modifier that the domain may have had",
                table=f"{relation.schema}.{relation.table}",
                columns=gone,
            )
        for column in relation.columns:
            oid = column.type_oid
            if oid in unknown - self._text_types and not self._encoders.understood(oid):
                self._text_types.add(oid)
                logger.warning(
                    "types without an encoder: their values are sent as PostgreSQL's text",
                    type=column.type_name,
                    oid=oid,
                )
        return not self._encoders.unknown(oids)

    def _await_catalog(self, xid: int) -> bool:
        """Wait until the catalog shows what the transaction being published has changed in it.

        Return False where it does not show it yet, because commits wait for the bridge.
        """
        if xid != self._awaited_xid:
            self._awaited_xid = xid
            self._visible = self._primary.await_visible(xid)
        return self._visible

    def _with_primary_key(self, relation: Relation, xid: int) -> tuple[Relation, bool]:
        """Return the relation with its primary key as the message key, and whether that is sure."""
        self._await_catalog(xid)
        found = self._primary.primary_key(relation.oid)
        names = [column.name for column in relation.columns]
        key = key_columns(names, xid, found, self._shapes.last_key(relation))
        columns = tuple(replace(column, key=column.name in key) for column in relation.columns)
        return replace(relation, columns=columns), settled(xid, found)


def _catalog(shaping: Shaping, primary: Primary) -> TableCatalog | None:
    """Return the names of all tables, where settings hide something of some."""
    if not shaping.naming.hides:
        return None
    found = primary.ask("read the names of the tables", table_catalog)
    if found is None:
        logger.info("not judged: whether a table without events in Kafka has been renamed")
    return found


def _refuse(_value: bytes) -> NoReturn:
    raise ValueError("the value is stored elsewhere")


def warn_of_unmatched(shaping: Shaping, primary: Primary) -> None:
    """Log every pattern of the settings that fits nothing in the publication as it is now."""
    if shaping.shapes_nothing:
        return
    for pattern in shaping.unmatched(primary.published()):
        logger.warning("a pattern of shaping matches no published table", pattern=pattern)
