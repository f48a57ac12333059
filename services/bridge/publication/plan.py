"""The statements that make a publication what the settings of `source` say. Pure.

source.tables    public.a, public.b      publication    public.a, public.c
                 -> ALTER PUBLICATION … DROP TABLE public.c, then … ADD TABLE public.b

A whole schema (public.*) is added and dropped as TABLES IN SCHEMA. A table whose row filter or
column list is another one is dropped and added in one transaction, which changes no other table:
readers of the catalog, pgoutput among them, see one step.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from psycopg import sql

from schemas.errors import ExitCode, SettingsError, SetupError
from services.bridge.source.table_options import require_covered
from services.postgres.publication_options import (
    WHOLE,
    ReplicaIdentity,
    TableName,
    TableOptions,
    table_clause,
)
from services.postgres.publications import Members, TableFacts, publication_statement

OPERATION = "change the publication"
Identities = Mapping[TableName, Collection[ReplicaIdentity]]


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that a publication needs; all names are (schema, table).

    `create`: there is no such publication. `options`: of the tables in `add` and `replace`, which
    get other row filters or column lists. `add_schemas`, `leave_out_schemas`: with all their
    tables. `unfiltered`: tables that lose their row filter, as their whole schema is published.
    `identity_full`: tables without an identity that get REPLICA IDENTITY FULL. `identities`: the
    identities that the settings name, of tables that have another one.
    """

    publication: str
    add: tuple[TableName, ...] = ()
    leave_out: tuple[TableName, ...] = ()
    replace: tuple[TableName, ...] = ()
    identity_full: tuple[TableName, ...] = ()
    identities: tuple[ReplicaIdentity, ...] = ()
    options: Mapping[TableName, TableOptions] = field(default_factory=dict)
    create: bool = False
    add_schemas: tuple[str, ...] = ()
    leave_out_schemas: tuple[str, ...] = ()
    unfiltered: tuple[TableName, ...] = ()

    @property
    def selected_anew(self) -> tuple[TableName, ...]:
        """Tables of which the server may let rows or columns through that it kept back before."""
        return tuple(sorted((*self.replace, *self.unfiltered)))

    def statements(self) -> Iterator[sql.Composed]:
        """Yield the statements, in order; all of them belong into one transaction."""
        for table in self.identity_full:
            statement = sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL")
            yield statement.format(sql.Identifier(*table))
        for identity in self.identities:
            yield identity.statement()
        added = {table: self.options.get(table, WHOLE) for table in (*self.add, *self.replace)}
        if self.create:
            yield publication_statement(self.publication, added, self.add_schemas)
            return
        dropped = [sql.Identifier(*table) for table in (*self.leave_out, *self.replace)]
        clauses = [table_clause(*table) for table in added.items()]
        out, into = ([*map(sql.Identifier, x)] for x in (self.leave_out_schemas, self.add_schemas))
        for action, kind, members in (
            ("DROP", "TABLES IN SCHEMA", out),
            ("DROP", "TABLE", dropped),
            ("ADD", "TABLES IN SCHEMA", into),
            ("ADD", "TABLE", clauses),
        ):
            if members:
                yield sql.SQL("ALTER PUBLICATION {} {} {} {}").format(
                    sql.Identifier(self.publication),
                    sql.SQL(action),
                    sql.SQL(kind),
                    sql.SQL(", ").join(members),
                )


def changes(
    publication: str,
    wanted: Collection[TableName],
    members: Members | None,
    facts: Mapping[TableName, TableFacts],
    *,
    identity_full: bool,
    options: Mapping[TableName, TableOptions] | None = None,
    present: Identities | None = None,
    identities_wanted: Mapping[TableName, str] | None = None,
    schemas: Mapping[str, Collection[TableName]] | None = None,
) -> Changes:
    """Return the changes after which the publication is what the settings say.

    `wanted`: its tables, `options`: what of them, `identities_wanted`: the kinds of replica
    identity that they are to have. `schemas`: those to publish whole, with their tables now.
    `members`: what the publication has, None without one. `facts`, `present`: of the wanted tables,
    also those in schemas. `identity_full`: tables without an identity get one instead of being
    refused. Raise SettingsError or SetupError where that is not possible.
    """
    schemas = schemas or {}
    options, present = options or {}, present or {}
    _require_changeable(publication, wanted, schemas, members, options)
    if missing := sorted({*wanted} - facts.keys()):
        raise _refused(
            f"there is no table {_names(missing)}",
            publication,
            "create it, or correct source.tables (lower case, unless quoted when it was made)",
        )
    published = members.tables if members is not None else {}
    set_to = _set_identities(publication, present, identities_wanted or {})
    add = tuple(sorted({*wanted} - published.keys()))
    whole = {*(members.schemas if members is not None else ())}
    add_schemas = tuple(sorted(schemas.keys() - whole))
    joining = (*add, *(table for schema in add_schemas for table in schemas[schema]))
    without = _without_identity(joining, facts, set_to.values())
    chosen = {one.table for table in identities_wanted or {} for one in present[table]}
    lacking = tuple(sorted(without))
    full = {*lacking} - chosen if identity_full else set()
    if members is None or members.publishes_old_rows:
        if {*lacking} - full:
            raise _refused(
                f"UPDATE and DELETE would fail on {_names(lacking)}: they have neither a primary "
                "key, at least not one that is never deferred, nor another replica identity",
                publication,
                "add a primary key, or set source.replica_identity to full; or run this with "
                "--identity-full, which sets REPLICA IDENTITY FULL where no setting speaks of it",
            )
        require_covered(publication, options, _after(present, full, set_to))
    replace = (t for t in options if t in published and not options[t].same_as(published[t]))
    leave_out = tuple(sorted(published.keys() - {*wanted}))
    unfiltered = (t for t in leave_out if t[0] in add_schemas and not published[t].same_as(WHOLE))
    return Changes(
        publication,
        add,
        leave_out,
        tuple(sorted(replace)),
        tuple(sorted(full)),
        tuple(set_to[table] for table in sorted(set_to)),
        options,
        create=members is None,
        add_schemas=add_schemas,
        leave_out_schemas=tuple(sorted(whole - schemas.keys())),
        unfiltered=tuple(unfiltered),
    )


def _after(
    present: Identities, full: Collection[TableName], set_to: Mapping[TableName, ReplicaIdentity]
) -> Identities:
    """Return the identities as they will be, with those in `full` and `set_to`."""
    return {
        table: [
            one.as_kind("full") if one.table in full else set_to.get(one.table, one) for one in ones
        ]
        for table, ones in present.items()
    }


def _without_identity(
    joining: Iterable[TableName],
    facts: Mapping[TableName, TableFacts],
    set_to: Iterable[ReplicaIdentity],
) -> set[TableName]:
    """Return the tables without a replica identity, once the identities in `set_to` are set."""
    without = {leaf for one in joining if one in facts for leaf in facts[one].without_identity}
    for one in set_to:
        if not one.partitioned:
            without.discard(one.table)
            without |= {one.table} if not one.identity else set()
    return without


def _require_changeable(
    publication: str,
    wanted: Collection[TableName],
    schemas: Mapping[str, Collection[TableName]],
    members: Members | None,
    options: Mapping[TableName, TableOptions],
) -> None:
    """Raise where PostgreSQL can't change the publication to what source.tables lists."""
    if not wanted and not schemas:
        raise SettingsError(
            "source.tables is empty, which stands for all tables",
            operation=OPERATION,
            subject=f"publication {publication}",
            hint="list the tables in source.tables",
        )
    if members is not None and members.all_tables:
        raise _refused(
            "the publication is for all tables, which source.tables can't change",
            publication,
            "make a publication for single tables under another name, and start with a new slot "
            "and topic prefix; or leave tables out by shaping.exclude",
        )
    stay = {} if members is None else {t: members.tables[t] for t in wanted if t in members.tables}
    listed = [t for t, one in stay.items() if options.get(t, one).columns is not None]
    if schemas and listed:
        raise _refused(
            f"{_names(sorted(listed))} has a column list, beside which PostgreSQL publishes no "
            "whole schema",
            publication,
            "set source.column_lists to {}, which takes the column lists away",
        )


def _set_identities(
    publication: str, present: Identities, identities_wanted: Mapping[TableName, str]
) -> dict[TableName, ReplicaIdentity]:
    """Return the identities that change, by their own table: of partitions, one for each.

    Raise SetupError where a table has no such key or index.
    """
    found = {}
    for table, kind in identities_wanted.items():
        for one in present[table]:
            if kind.startswith("index ") and (
                one.partitioned or kind.removeprefix("index ") not in one.indexes
            ):
                raise _refused(
                    f"{kind} can't be the replica identity of {_names([one.table])}",
                    publication,
                    "name a valid unique index of the table itself, not partial, not deferrable, "
                    "of NOT NULL columns; a partitioned table can have full, default or nothing",
                )
            if one.kind != kind:
                found[one.table] = one.as_kind(kind)
    return found


def _names(tables: Collection[TableName]) -> str:
    return ", ".join(".".join(table) for table in tables)


def _refused(message: str, publication: str, hint: str) -> SetupError:
    return SetupError(
        message,
        operation=OPERATION,
        subject=f"publication {publication}",
        hint=hint,
        exit_code=ExitCode.SERVER_SETTING,
    )
