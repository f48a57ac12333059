"""Publications, their tables and keys, as typed rows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import LiteralString, NamedTuple

from psycopg import sql
from psycopg.rows import class_row

from services.postgres.publication_options import TableOptions, published_options, table_clause
from services.postgres.published_tables import EXCEPTED, IS_EXCEPTED, IS_IDENTITY
from services.postgres.server import Connection


@dataclass(frozen=True, slots=True)
class PrimaryKey:
    """A table's primary key as it is now, `columns` empty where there is none; xids of 32 bits.

    `made_by` has made its index, `table_made_by` the table, `next_xid` is not yet given out.
    """

    columns: Sequence[str]
    made_by: int
    table_made_by: int
    next_xid: int


def publication_oid(connection: Connection, publication: str) -> int | None:
    """Return the publication's oid, None without one; a recreated publication has another oid."""
    row = connection.execute(
        "SELECT oid::bigint FROM pg_publication WHERE pubname = %s", [publication]
    ).fetchone()
    return int(row[0]) if row is not None else None


def unpublished_changes(connection: Connection, publication: str) -> tuple[str, ...] | None:
    """Return the operations that the publication leaves out, None without such a publication."""
    row = connection.execute(
        "SELECT pubinsert, pubupdate, pubdelete, pubtruncate"
        " FROM pg_publication WHERE pubname = %s",
        [publication],
    ).fetchone()
    kinds = ("insert", "update", "delete", "truncate")
    return row and tuple(kind for kind, sent in zip(kinds, row, strict=True) if not sent)


def publishes_all_tables(connection: Connection, publication: str) -> bool:
    """Tell whether the publication is FOR ALL TABLES; one that does not exist is not."""
    row = connection.execute(
        "SELECT puballtables FROM pg_publication WHERE pubname = %s", [publication]
    ).fetchone()
    return row is not None and bool(row[0])


def publication_statement(
    publication: str,
    tables: Mapping[tuple[str, str], TableOptions],
    schemas: Sequence[str] = (),
) -> sql.Composed:
    """Return the statement that creates the publication for tables and whole schemas.

    Without any, it is for all tables.
    """
    name = sql.Identifier(publication)
    kinds: list[sql.Composable] = []
    if schemas:
        names = sql.SQL(", ").join(map(sql.Identifier, schemas))
        kinds.append(sql.SQL("TABLES IN SCHEMA {}").format(names))
    if tables:
        clauses = sql.SQL(", ").join(table_clause(*table) for table in tables.items())
        kinds.append(sql.SQL("TABLE {}").format(clauses))
    parts = sql.SQL(", ").join(kinds or [sql.SQL("ALL TABLES")])
    return sql.SQL("CREATE PUBLICATION {} FOR {}").format(name, parts)


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a publication: single tables, (schema, table) each, whole schemas, or all.

    `excepted`: tables that a publication for all tables leaves out (EXCEPT, PostgreSQL 19).
    `publishes_old_rows`: it publishes updates or deletes, which need a replica identity.
    """

    all_tables: bool
    tables: Mapping[tuple[str, str], TableOptions]
    schemas: tuple[str, ...]
    publishes_old_rows: bool
    excepted: frozenset[tuple[str, str]] = frozenset()


def members(connection: Connection, publication: str) -> Members | None:
    """Return the members of the publication, None if there is no such publication."""
    row = connection.execute(
        "SELECT puballtables, pubupdate OR pubdelete,"
        " ARRAY(SELECT nspname::text FROM pg_publication_namespace s"
        " JOIN pg_namespace n ON n.oid = pnnspid WHERE pnpubid = p.oid ORDER BY 1)"
        " FROM pg_publication p WHERE pubname = %s",
        [publication],
    ).fetchone()
    if row is None:
        return None
    tables = published_options(connection, publication)
    excepted = connection.execute(_EXCEPTED, [publication]).fetchall() if row[0] else []
    return Members(row[0], tables, tuple(row[2]), row[1], frozenset(excepted))


_EXCEPTED: LiteralString = (
    """
    WITH RECURSIVE chosen AS (
      SELECT oid FROM pg_publication WHERE pubname = %s
    ), excepted (relid) AS ("""  # noqa: S608 - our own words
    + EXCEPTED
    + """)
    SELECT n.nspname::text, c.relname::text
      FROM excepted JOIN pg_class c ON c.oid = relid JOIN pg_namespace n ON n.oid = c.relnamespace
"""
)


def schema_tables(
    connection: Connection, schemas: Sequence[str]
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return each of `schemas` that is there -> its tables that can be published."""
    rows = connection.execute(
        "SELECT nspname::text, ARRAY(SELECT relname::text FROM pg_class c"
        " WHERE relnamespace = n.oid AND relkind IN ('r', 'p') AND relpersistence = 'p' ORDER BY 1)"
        " FROM pg_namespace n WHERE nspname = ANY (%s)",
        [[*schemas]],
    ).fetchall()
    return {schema: tuple((schema, name) for name in names) for schema, names in rows}


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Of a table, or of a partitioned one: its tables that have no replica identity.

    Without one, the server refuses UPDATE and DELETE of a published table: without a primary key
    that is not deferrable, or the index that REPLICA IDENTITY names. Source: relcache.c,
    RelationGetIndexList. `keyed`: it has a primary key.
    """

    without_identity: tuple[tuple[str, str], ...]
    keyed: bool = True


def table_facts(
    connection: Connection, tables: Collection[tuple[str, str]]
) -> dict[tuple[str, str], TableFacts]:
    """Return (schema, table) -> TableFacts of those of `tables` that are there."""
    rows = connection.execute(
        _TABLE_FACTS, [[schema for schema, _ in tables], [table for _, table in tables]]
    ).fetchall()
    return {
        (schema, table): TableFacts(tuple((one, other) for one, other in lacking), keyed)
        for schema, table, lacking, keyed in rows
    }


_TABLE_FACTS: LiteralString = (
    """
    SELECT n.nspname::text, given.relname::text,
           ARRAY(SELECT ARRAY[m.nspname::text, c.relname::text]
                   FROM pg_class c JOIN pg_namespace m ON m.oid = c.relnamespace
                  WHERE c.relkind = 'r' AND c.relreplident <> 'f'
                    AND (c.oid = given.oid
                      OR c.oid IN (SELECT relid FROM pg_partition_tree(given.oid)))
                    AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND """  # noqa: S608 - our own words
    + IS_IDENTITY
    + """)
                  ORDER BY 1),
           EXISTS (SELECT FROM pg_index i WHERE i.indrelid = given.oid AND i.indisvalid
                      AND i.indisprimary AND i.indimmediate)
      FROM unnest(%s::text[], %s::text[]) AS wanted (schema, name)
      JOIN pg_namespace n ON n.nspname = wanted.schema
      JOIN pg_class given ON given.relnamespace = n.oid AND given.relname = wanted.name
     WHERE given.relkind IN ('r', 'p')
"""
)


class TableCatalog(NamedTuple):
    """The tables of a database, as a catalog shows them that has all up to before `lsn`."""

    names: dict[int, tuple[str, str]]
    """pg_class.oid -> (schema, table)."""
    locked: frozenset[int]
    """What transactions had locked for themselves just before (oid): a table that one has made
    which waits for a standby is not seen yet, though logical decoding sends it."""
    lsn: int


def table_catalog(connection: Connection) -> TableCatalog:
    """Return every table of the database, published or not. To be asked in a transaction."""
    connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    # By a statement before that of the tables, which sees who has let go of its locks by then. No
    # snapshot tells of all transactions: those newer than the last one that has ended are missing.
    locks = connection.execute(
        "SELECT DISTINCT relation::bigint FROM pg_locks"
        " WHERE locktype = 'relation' AND mode = 'AccessExclusiveLock' AND granted"
        "   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    ).fetchall()
    rows = connection.execute(
        "SELECT c.oid::bigint, n.nspname::text, c.relname::text"
        "  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND c.oid >= 16384"
    ).fetchall()
    lsn = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    assert lsn is not None
    names = {oid: (schema, table) for oid, schema, table in rows}
    return TableCatalog(names, frozenset(oid for (oid,) in locks), int(lsn[0]))


def table_oid(connection: Connection, schema: str, table: str) -> int:
    """Return the oid of a table, 0 where there is none."""
    row = connection.execute(
        "SELECT c.oid::bigint FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.relkind IN ('r', 'p') AND n.nspname = %s AND c.relname = %s",
        [schema, table],
    ).fetchone()
    return int(row[0]) if row is not None else 0


def published_columns(
    connection: Connection, publication: str
) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return (schema, table) -> its published columns, of every table in the publication.

    The result is that of pg_publication_tables, but read from the catalogs alone. That view opens
    every table, and so waits for whoever has locked one, who may wait for the bridge
    (synchronous_standby_names). Source: pg_publication.c, pg_get_publication_tables.
    """
    rows = connection.execute(_PUBLISHED, [publication]).fetchall()
    return {(schema, table): tuple(columns) for schema, table, columns in rows}


_PUBLISHED: LiteralString = (
    """
    WITH RECURSIVE chosen AS (
      SELECT oid, puballtables, pubviaroot,
             coalesce(to_jsonb(p) ->> 'pubgencols', 'n') = 's' AS generated
        FROM pg_publication p WHERE pubname = %s
    ), excepted (relid) AS ("""  # noqa: S608 - our own words
    + EXCEPTED
    + """), listed (relid, columns) AS (
      SELECT r.prrelid, r.prattrs::int2[] FROM pg_publication_rel r JOIN chosen p ON p.oid = prpubid
       WHERE NOT """
    + IS_EXCEPTED
    + """
       UNION ALL
      SELECT c.oid, NULL FROM chosen p JOIN pg_publication_namespace n ON n.pnpubid = p.oid
        JOIN pg_class c ON c.relnamespace = n.pnnspid
       UNION ALL
      SELECT c.oid, NULL FROM chosen p JOIN pg_class c ON p.puballtables
       WHERE c.oid NOT IN (SELECT relid FROM excepted)
    ), below (relid, columns, root) AS (
      SELECT relid, columns, relid FROM listed
       UNION ALL
      SELECT i.inhrelid, b.columns, b.root FROM below b
        JOIN pg_class parent ON parent.oid = b.relid AND parent.relkind = 'p'
        JOIN pg_inherits i ON i.inhparent = b.relid
    )
    SELECT DISTINCT ON (c.oid) n.nspname::text, c.relname::text,
           ARRAY(SELECT a.attname::text FROM pg_attribute a
                  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                    AND CASE WHEN b.columns IS NOT NULL THEN a.attnum = ANY (b.columns)
                             ELSE a.attgenerated = '' OR p.generated AND a.attgenerated = 's' END
                  ORDER BY a.attnum)
      FROM chosen p, below b JOIN pg_class c ON c.oid = b.relid
      JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
       AND CASE WHEN p.pubviaroot THEN NOT EXISTS (
                     SELECT FROM below other WHERE other.relid = c.oid AND other.root <> c.oid)
                ELSE c.relkind = 'r' END
     ORDER BY c.oid, b.root <> c.oid
"""
)


@dataclass(frozen=True, slots=True)
class RowsBefore:
    """How many rows the published tables have, by the server's estimates.

    `tables` have rows. Of `tables_unknown` the server has no estimate: they may have rows.
    """

    rows: int
    tables: int
    tables_unknown: int


def rows_before(connection: Connection, publication: str) -> RowsBefore:
    """Estimate the rows of all tables in the publication, without a lock on any.

    Source: pg_class.reltuples (-1: never analyzed) and the cumulative statistics, which a crash
    empties; the larger one counts.
    """
    tables = [*published_columns(connection, publication)]
    row = connection.execute(
        """
        WITH RECURSIVE listed (oid) AS (
          SELECT c.oid FROM unnest(%s::text[], %s::text[]) AS t (schema, name)
            JOIN pg_namespace n ON n.nspname = t.schema
            JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.name
           UNION
          SELECT i.inhrelid FROM listed l JOIN pg_inherits i ON i.inhparent = l.oid
        ), estimated AS (
          SELECT greatest(c.reltuples, nullif(pg_stat_get_live_tuples(c.oid), 0))::bigint AS rows
            FROM listed l JOIN pg_class c ON c.oid = l.oid AND c.relkind = 'r'
        )
        SELECT coalesce(sum(rows) FILTER (WHERE rows > 0), 0)::bigint,
               count(*) FILTER (WHERE rows > 0), count(*) FILTER (WHERE rows < 0)
          FROM estimated
        """,
        [[schema for schema, _ in tables], [name for _, name in tables]],
    ).fetchone()
    return RowsBefore(*(int(value) for value in row or (0, 0, 0)))


def primary_key(connection: Connection, relation_oid: int) -> PrimaryKey | None:
    """Return the primary key of a table as it is now, None when there is no such table.

    A DEFERRABLE key does not count: two rows may have it at a time, within a transaction.
    pg_attribute's rows of `ctid` and of an index's column are written once, with the relation.
    """
    with connection.cursor(row_factory=class_row(PrimaryKey)) as cursor:
        cursor.execute(
            """
            SELECT coalesce(k.columns, '{}') AS columns,
                   coalesce(made.xmin::text::bigint, 0) AS made_by,
                   born.xmin::text::bigint AS table_made_by,
                   (pg_snapshot_xmax(pg_current_snapshot())::text::numeric %% 4294967296)::bigint
                     AS next_xid
              FROM pg_attribute born
              LEFT JOIN pg_index i ON i.indrelid = born.attrelid AND i.indisprimary
                                  AND i.indimmediate
              LEFT JOIN pg_attribute made ON made.attrelid = i.indexrelid AND made.attnum = 1
              LEFT JOIN LATERAL (
                    SELECT array_agg(a.attname::text) AS columns
                      FROM pg_attribute a
                     WHERE a.attrelid = i.indrelid
                       AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])) k ON true
             WHERE born.attrelid = %s::oid AND born.attname = 'ctid' AND born.attnum < 0
            """,
            [relation_oid],
        )
        return cursor.fetchone()
