"""The statements that make a publication consist of `source.tables`. Pure.

source.tables    public.a, public.b      publication    public.a, public.c
                 -> ALTER PUBLICATION … ADD TABLE public.b, then … DROP TABLE public.c
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from psycopg import sql

from schemas.errors import ExitCode, SettingsError, SetupError
from services.postgres.publications import Members, TableFacts, publication_statement

OPERATION = "change the publication"
TableName = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that a publication needs; all names are (schema, table).

    `create`: there is no such publication. `identity_full`: tables that get REPLICA IDENTITY FULL.
    """

    publication: str
    add: tuple[TableName, ...] = ()
    leave_out: tuple[TableName, ...] = ()
    identity_full: tuple[TableName, ...] = ()
    create: bool = False

    def statements(self) -> Iterator[sql.Composed]:
        """Yield the statements, in order; all of them belong into one transaction."""
        for table in self.identity_full:
            statement = sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL")
            yield statement.format(sql.Identifier(*table))
        if self.create:
            yield publication_statement(self.publication, self.add)
            return
        for action, tables in (("ADD", self.add), ("DROP", self.leave_out)):
            if tables:
                yield sql.SQL("ALTER PUBLICATION {} {} TABLE {}").format(
                    sql.Identifier(self.publication),
                    sql.SQL(action),
                    sql.SQL(", ").join(sql.Identifier(*table) for table in tables),
                )


def changes(
    publication: str,
    wanted: Collection[TableName],
    found: Members | None,
    facts: Mapping[TableName, TableFacts],
    *,
    identity_full: bool,
) -> Changes:
    """Return the changes after which the publication consists of the `wanted` tables.

    `found`: what the publication has, None where there is none. `facts`: of the wanted tables that
    are there. `identity_full`: tables without a replica identity get one instead of being refused.
    Raises SettingsError or SetupError where that is not possible.
    """
    if not wanted:
        raise SettingsError(
            "source.tables is empty, which stands for all tables",
            operation=OPERATION,
            subject=f"publication {publication}",
            hint="list the tables in source.tables",
        )
    if found is not None and (found.all_tables or found.schemas):
        what = "all tables" if found.all_tables else f"whole schemas ({', '.join(found.schemas)})"
        raise _refused(
            f"the publication is for {what}, which source.tables can't change",
            publication,
            "make a publication for single tables under another name, and start with a new slot "
            "and topic prefix; or change this one by ALTER PUBLICATION",
        )
    if missing := sorted({*wanted} - facts.keys()):
        raise _refused(
            f"there is no table {_names(missing)}",
            publication,
            "create it, or correct source.tables (lower case, unless quoted when it was made)",
        )
    published = found.tables if found is not None else frozenset()
    add = tuple(sorted({*wanted} - published))
    lacking = tuple(sorted(leaf for table in add for leaf in facts[table].without_identity))
    if lacking and (found is None or found.publishes_old_rows) and not identity_full:
        raise _refused(
            f"UPDATE and DELETE would fail on {_names(lacking)}: they have neither a primary "
            "key, at least not one that is never deferred, nor another replica identity",
            publication,
            "add a primary key; or run this with --identity-full, which sets REPLICA IDENTITY FULL",
        )
    return Changes(
        publication,
        add,
        tuple(sorted(published - {*wanted})),
        lacking if identity_full else (),
        create=found is None,
    )


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
