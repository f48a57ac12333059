"""The PostgreSQL database that tables are restored into: its tables made, filled and checked.

All is one transaction: the database has all tables, or none.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, LiteralString

import psycopg
from psycopg import sql

from schemas.errors import SettingsError, SetupError
from services.postgres.sessions import Session, names_as_meant
from spark_consumers.events.columns import ColumnShape
from spark_consumers.iceberg.layout import Layout
from spark_consumers.restore.values import input_text
from spark_consumers.verify import postgres
from spark_consumers.verify.forms import Layer

OPERATION: Final = "restore tables"
_TIMEOUT_S: Final = 10
_DOMAIN: Final = "pg_catalog"
"""The schema of a column's type in the events, where the column is of a domain; else it is left
out: pgoutput names a domain's base type."""
_RELATION: Final = """
    SELECT c.relkind::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s
"""
_PUBLISHED: Final = """
    SELECT pubname FROM pg_publication_tables WHERE schemaname = %s AND tablename = %s
"""
_TYPE: Final = """
    SELECT format_type(t.oid, %s) FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
    WHERE n.nspname = %s AND t.typname = %s
"""


class Target:
    """A connection to the target, with one transaction."""

    def __init__(self, connection: Session) -> None:
        self.connection = connection

    def require_another_database(self, publication: str) -> None:
        """Raise SettingsError where the target is the source: its changes would come back."""
        if self._finds("SELECT FROM pg_publication WHERE pubname = %s", publication):
            raise _refused(
                f"the target has the bridge's publication {publication}: it is the source",
                self.connection.info.dbname,
                "restore into a database of its own",
            )

    def require_unpublished(self, schema: str, table: str) -> None:
        """Raise SettingsError where a publication of the target has a table of it."""
        found = self.connection.execute(_PUBLISHED, [schema, table]).fetchone()
        if found is not None:
            raise _refused(
                f"the target's publication {found[0]} would publish the restored rows",
                f"{schema}.{table}",
                "leave the table out of the publication, or restore into another database",
            )

    def require_empty(self, names: Iterable[tuple[str, str]]) -> None:
        """Raise SettingsError where something in the target has the name of a table, with rows."""
        taken = []
        for schema, table in names:
            found = self.connection.execute(_RELATION, [schema, table]).fetchone()
            if found is not None and (found[0] not in "rp" or self._has_rows(schema, table)):
                taken.append(f"{schema}.{table}")
        if taken:
            raise _refused(
                "the target has these tables already, with rows",
                ", ".join(taken),
                "drop or empty them, or restore into another database",
            )

    def make(self, layout: Layout) -> tuple[dict[str, str], list[str]]:
        """Make a table as its source was, but for constraints; take an empty one that is there.

        Return the columns with their types, and those that are text because the target does not
        have their type. Raise SettingsError where the empty table has other columns.
        """
        shape = layout.shape
        columns = [shape.columns[field.source_index] for field in layout.fields]
        if self._finds(_RELATION, shape.schema, shape.table):
            self._lock(shape.schema, shape.table)
        else:
            self._create(layout)
        there = postgres.source_columns(self.connection, shape.schema, shape.table)
        made = {column.name: column for column in there}
        wrong = [c.name for c in columns if c.name not in made or not _fits(made[c.name], c)]
        if wrong:
            raise _refused(
                f"the target's table does not have column {wrong[0]} with the type of the source",
                shape.name,
                "drop it: it is made as the source's table was",
            )
        types = {c.name: self._type_of(made[c.name]) for c in columns}
        texts = ("text", f"{_DOMAIN}.text")
        return types, [c.name for c in columns if types[c.name] == "text" and c.type not in texts]

    def fill(self, layout: Layout, rows: Iterable[Sequence[str | None]]) -> Iterator[int]:
        """Copy rows of JSON forms into a table; yield how many rows are there."""
        shape = layout.shape
        table = sql.Identifier(shape.schema, shape.table)
        names = [shape.columns[field.source_index].name for field in layout.fields]
        layers = self._layers(layout)
        parts = [layers[name] for name in names]
        count = 0
        query = sql.SQL("COPY {} ({}) FROM STDIN").format(table, _listed(names))
        cursor = self.connection.cursor()
        with names_as_meant(self.connection), cursor, cursor.copy(query) as copy:
            for row in rows:
                values = zip(row, parts, strict=True)
                copy.write_row([None if v is None else input_text(v, part) for v, part in values])
                count += 1
                yield count

    def settle(self, layouts: Iterable[Layout]) -> None:
        """Let what waits for the commit happen now, then add the keys of tables without one."""
        with names_as_meant(self.connection):  # triggers are the user's SQL
            self.connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        for shape in (layout.shape for layout in layouts):
            if shape.key and not self._has_key(shape.schema, shape.table):
                add = sql.SQL("ALTER TABLE {} ADD PRIMARY KEY ({})")
                table = sql.Identifier(shape.schema, shape.table)
                self.connection.execute(add.format(table, _listed(shape.key)))

    def export(self, layout: Layout, folder: Path) -> tuple[ColumnShape, ...]:
        """Write a table's rows to files, in the forms of an Iceberg table; return its columns."""
        shape = layout.shape
        columns = tuple(shape.columns[field.source_index] for field in layout.fields)
        place, layers = (shape.schema, shape.table), self._layers(layout)
        postgres.export(self.connection, place, columns, None, folder, layers)
        return columns

    def _layers(self, layout: Layout) -> dict[str, list[Layer]]:
        """Return what each column's type consists of, told by the target.

        Iceberg has a JSON form of what was of a domain or another type of the source's own.
        """
        shape = layout.shape
        found = postgres.column_layers(self.connection, (shape.schema, shape.table))
        own = {column.name for column in shape.columns if "." in column.type}
        return {n: [Layer("", domain=True), *v] if n in own else v for n, v in found.items()}

    def _create(self, layout: Layout) -> None:
        """Create a table and its schema, with columns of the source's types or text."""
        shape = layout.shape
        if not self._finds("SELECT FROM pg_namespace WHERE nspname = %s", shape.schema):
            make = sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(shape.schema))
            self.connection.execute(make)
        columns = []
        for field in layout.fields:
            column = shape.columns[field.source_index]
            known = sql.SQL(self._type_of(column) or "text")
            columns.append(sql.SQL("{} {}").format(sql.Identifier(column.name), known))
        self.connection.execute(
            sql.SQL("CREATE TABLE {} ({})").format(
                sql.Identifier(shape.schema, shape.table), sql.SQL(", ").join(columns)
            )
        )

    def _type_of(self, column: ColumnShape) -> str:
        """Return SQL of a column's type, as the target's catalog has it; "" for an unknown one.

        Of a domain the events tell the base type, but not how many digits of a second it has.
        """
        schema, _, name = column.type.rpartition(".")
        if schema == _DOMAIN and name.endswith("timestamptz"):
            return ""
        arguments = [column.typmod, schema or "pg_catalog", name]
        found = self.connection.execute(_TYPE, arguments).fetchone()
        return "" if found is None else str(found[0])

    def _lock(self, schema: str, table: str) -> None:
        lock = sql.SQL("LOCK TABLE {} IN EXCLUSIVE MODE").format(sql.Identifier(schema, table))
        self.connection.execute(lock)
        self.require_empty([(schema, table)])

    def _has_rows(self, schema: str, table: str) -> bool:
        query = sql.SQL("SELECT FROM {} LIMIT 1").format(sql.Identifier(schema, table))
        return self.connection.execute(query).fetchone() is not None

    def _has_key(self, schema: str, table: str) -> bool:
        query = (
            "SELECT FROM pg_constraint c JOIN pg_class t ON t.oid = c.conrelid"
            " JOIN pg_namespace n ON n.oid = t.relnamespace"
            " WHERE c.contype = 'p' AND n.nspname = %s AND t.relname = %s"
        )
        return self._finds(query, schema, table)

    def _finds(self, query: LiteralString, *arguments: str) -> bool:
        return self.connection.execute(query, arguments).fetchone() is not None


@contextlib.contextmanager
def opened(conninfo: str, *, keep: bool) -> Iterator[Target]:
    """Connect to the target; commit at the end if `keep`, and never after an error.

    Raise Retryable, SetupError or SettingsError for a target that can't be used.
    """
    try:
        with postgres.connected(
            conninfo,
            "the target",
            OPERATION,
            hint="check --into and that the server accepts connections",
            grant="let the role of --into create schemas and tables, or make the schemas first",
            timeout_s=_TIMEOUT_S,
        ) as connection:
            yield Target(connection)
            if not keep:
                connection.rollback()
    except psycopg.ProgrammingError as error:  # of conninfo itself: before any server is asked
        if error.sqlstate is None:
            raise _refused(
                "--into is not a connection string", "", 'write --into "host=… dbname=… user=…"'
            ) from None
        raise _failed(error) from error
    except psycopg.Error as error:
        raise _failed(error) from error


def _fits(made: ColumnShape, column: ColumnShape) -> bool:
    """Tell whether a column of the target can have a source column's values. Pure."""
    return "." in column.type or made.data_type == column.data_type


def _failed(error: psycopg.Error) -> SetupError:
    where = ", ".join(filter(None, (error.diag.table_name, error.diag.column_name)))
    return SetupError(
        f"the target refused a statement with {type(error).__name__}",
        operation=OPERATION,
        subject=where,
        hint="the log of the target's server has the statement; nothing was restored",
    )


def _refused(message: str, subject: str, hint: str) -> SettingsError:
    return SettingsError(message, operation=OPERATION, subject=subject, hint=hint)


def _listed(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))
