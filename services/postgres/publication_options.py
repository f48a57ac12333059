"""Row filters and column lists of published tables, and the replica identities they depend on."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import LiteralString

import psycopg
from psycopg import sql

from services.postgres.server import Connection

TableName = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Of a published table: its row filter and its column list.

    `condition`: the filter in SQL, "" without one. `columns` None: all. `row_filter`: the condition
    as the server writes it, to be compared. `filter_columns`: those that it uses.
    """

    condition: str = ""
    columns: tuple[str, ...] | None = None
    row_filter: str = ""
    filter_columns: frozenset[str] = frozenset()

    def same_as(self, other: "TableOptions") -> bool:
        """Tell whether the server would publish the same rows and columns."""
        one, two = (None if x.columns is None else {*x.columns} for x in (self, other))
        return (self.row_filter, one) == (other.row_filter, two)


WHOLE = TableOptions()


def table_clause(table: TableName, options: TableOptions = WHOLE) -> sql.Composed:
    """Return the table as a list of tables in CREATE or ALTER PUBLICATION names it."""
    parts: list[sql.Composable] = [sql.Identifier(*table)]
    if options.columns is not None:
        names = sql.SQL(", ").join(map(sql.Identifier, options.columns))
        parts.append(sql.SQL("({})").format(names))
    if options.condition:
        parts.append(sql.SQL("WHERE ({})").format(_as_written(options.condition)))
    return sql.SQL(" ").join(parts)


def _as_written(condition: str) -> sql.SQL:
    return sql.SQL(condition)


def server_filter(
    connection: Connection, table: TableName, condition: str
) -> tuple[str, frozenset[str]]:
    """Return the condition as the server writes a row filter, and the columns that it uses.

    A CHECK of a temporary table of the same name and columns, rolled back, tells both: it takes no
    lock on `table` that anybody waits for, and needs SELECT instead of ownership.
    """
    copy = sql.Identifier("pg_temp", table[1])
    with connection.transaction(force_rollback=True):
        connection.execute(
            sql.SQL("CREATE TEMPORARY TABLE {} (LIKE {})").format(
                sql.Identifier(table[1]), sql.Identifier(*table)
            )
        )
        check = sql.SQL("ALTER TABLE {} ADD CONSTRAINT slotbridge_row_filter CHECK ({})")
        # Prepared, a string can't hold a second statement.
        connection.execute(check.format(copy, _as_written(condition)), prepare=True)
        row = connection.execute(
            "SELECT pg_get_expr(conbin, conrelid),"
            " ARRAY(SELECT attname::text FROM pg_attribute"
            " WHERE attrelid = conrelid AND attnum = ANY (conkey))"
            " FROM pg_constraint WHERE conname = 'slotbridge_row_filter'"
            " AND conrelid = (SELECT oid FROM pg_class"
            " WHERE relnamespace = pg_my_temp_schema() AND relname = %s)",
            [table[1]],
        ).fetchone()
        if row is None:
            raise psycopg.InternalError("the row filter that was just made is not there")
    return str(row[0]), frozenset(row[1])


def published_options(connection: Connection, publication: str) -> dict[TableName, TableOptions]:
    """Return the options of the single tables in the publication, without `filter_columns`."""
    rows = connection.execute(
        "SELECT nspname::text, relname::text, coalesce(pg_get_expr(prqual, prrelid), ''),"
        " CASE WHEN prattrs IS NOT NULL THEN ARRAY(SELECT attname::text FROM pg_attribute"
        " WHERE attrelid = prrelid AND attnum = ANY (prattrs::int2[]) ORDER BY attnum) END"
        " FROM pg_publication_rel r"
        " JOIN pg_publication p ON p.oid = prpubid JOIN pg_class c ON c.oid = prrelid"
        " JOIN pg_namespace n ON n.oid = relnamespace WHERE pubname = %s"
        " AND NOT coalesce(to_jsonb(r) ->> 'prexcept', 'false')::bool",  # EXCEPT of PostgreSQL 19
        [publication],
    ).fetchall()
    return {
        (schema, table): TableOptions(qual, None if names is None else tuple(names), qual)
        for schema, table, qual, names in rows
    }


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """The replica identity of a table: what UPDATE and DELETE tell of the old row.

    `kind`: full, default, nothing or `index NAME`. `indexes`: name -> columns of the indexes that
    could be the identity. `primary_key`: its columns, () if there is none or it is deferrable.
    `unsent`: generated columns that the publication leaves out, which no identity may have
    (PostgreSQL 18).
    """

    table: TableName
    partitioned: bool
    kind: str
    columns: tuple[str, ...]
    primary_key: tuple[str, ...] = ()
    indexes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unsent: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns of the identity; () for none."""
        if self.kind == "full":
            return self.columns
        if self.kind == "default":
            return self.primary_key
        return self.indexes.get(self.kind.removeprefix("index "), ())

    def as_kind(self, kind: str) -> "ReplicaIdentity":
        """Return the identity as it will be with another kind."""
        return replace(self, kind=kind)

    def statement(self) -> sql.Composed:
        """Return the statement that makes the table's identity this one."""
        kind: sql.Composable = sql.SQL(self.kind.upper())
        if self.kind.startswith("index "):
            name = sql.Identifier(self.kind.removeprefix("index "))
            kind = sql.SQL("USING INDEX {}").format(name)
        words = sql.SQL("ALTER TABLE {} REPLICA IDENTITY {}")
        return words.format(sql.Identifier(*self.table), kind)


def replica_identities(
    connection: Connection, publication: str, tables: Collection[TableName]
) -> dict[TableName, tuple[ReplicaIdentity, ...]]:
    """Return (schema, table) -> its identity; of a partitioned table, also of all partitions."""
    given = [publication, [schema for schema, _ in tables], [table for _, table in tables]]
    found: dict[TableName, list[ReplicaIdentity]] = {}
    for schema, table, *of, columns, unsent, key, indexes in connection.execute(_IDENTITIES, given):
        (of_schema, of_table, partitioned, kind) = of
        one = ReplicaIdentity(
            table=(of_schema, of_table),
            partitioned=partitioned,
            kind=kind,
            columns=tuple(columns),
            primary_key=tuple(key or ()),
            indexes={name: tuple(names) for name, names in (indexes or {}).items()},
            unsent=tuple(unsent),
        )
        found.setdefault((schema, table), []).append(one)
    return {table: tuple(ones) for table, ones in found.items()}


_KEY_COLUMNS: LiteralString = """
    ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = i.indrelid
             AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) ORDER BY a.attnum)
"""
_IDENTITIES: LiteralString = (
    """
    SELECT w.schema, w.name, n.nspname::text, c.relname::text, c.relkind = 'p',
           CASE c.relreplident WHEN 'f' THEN 'full' WHEN 'd' THEN 'default'
                WHEN 'i' THEN coalesce('index ' || (
                  SELECT x.relname FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
                   WHERE i.indrelid = c.oid AND i.indisreplident), 'nothing')
                ELSE 'nothing' END,
           ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0
                    AND NOT attisdropped ORDER BY attnum),
           ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid
                    AND current_setting('server_version_num')::int >= 180000
                    AND NOT attisdropped AND attgenerated <> '' AND NOT (attgenerated = 's'
                        AND EXISTS (SELECT FROM pg_publication p WHERE pubname = %s
                                       AND to_jsonb(p) ->> 'pubgencols' = 's'))),
           (SELECT """  # noqa: S608 - our own words
    + _KEY_COLUMNS
    + """ FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate
                AND i.indisvalid),
           (SELECT jsonb_object_agg(x.relname, """
    + _KEY_COLUMNS
    + """) FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
             WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indimmediate
               AND i.indpred IS NULL AND i.indexprs IS NULL
               AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid
                     AND NOT a.attnotnull
                     AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])))
      FROM unnest(%s::text[], %s::text[]) AS w (schema, name)
      JOIN pg_namespace m ON m.nspname = w.schema
      JOIN pg_class top ON top.relnamespace = m.oid AND top.relname = w.name
      JOIN pg_class c ON c.oid = top.oid OR c.oid IN (SELECT relid FROM pg_partition_tree(top.oid))
      JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE top.relkind IN ('r', 'p')
     ORDER BY w.schema, w.name, c.oid
"""
)
