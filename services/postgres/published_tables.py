"""The tables of a publication as pgoutput describes them, with the key to read them by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

from services.postgres.server import Connection

IS_IDENTITY: LiteralString = """
    i.indisvalid AND CASE c.relreplident WHEN 'd' THEN i.indisprimary AND i.indimmediate
                                         WHEN 'i' THEN i.indisreplident ELSE false END
"""
"""SQL: whether the index i (pg_index) is the replica identity of its table c (pg_class). Source:
relcache.c, RelationGetIndexList."""


IS_EXCEPTED: LiteralString = "coalesce(to_jsonb(r) ->> 'prexcept', 'false')::bool"
"""SQL: whether the row r of pg_publication_rel names a table of FOR ALL TABLES EXCEPT (PostgreSQL
19; older servers have no such column)."""
EXCEPTED: LiteralString = (
    """
      SELECT r.prrelid FROM pg_publication_rel r JOIN chosen p ON p.oid = prpubid
       WHERE """  # noqa: S608 - our own words
    + IS_EXCEPTED
    + """
       UNION
      SELECT i.inhrelid FROM excepted e
        JOIN pg_class parent ON parent.oid = e.relid AND parent.relkind = 'p'
        JOIN pg_inherits i ON i.inhparent = e.relid
"""
)
"""SQL of a recursive query `excepted (relid)`: tables of EXCEPT, with their partitions. It needs
`chosen (oid)`."""


@dataclass(frozen=True, slots=True)
class PublishedColumn:
    """A published column.

    `type_name`: `schema.name` of a type that is not built in, of a domain's base type. `identity`:
    part of the replica identity.
    """

    name: str
    type_oid: int
    typmod: int
    type_name: str
    identity: bool


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table, or the root of partitions that are published as it.

    `key`: (column, type in SQL, schema of its operators) of the primary key, else of the replica
    identity's index; () for neither. The type is that below a domain, and has no length: a text
    that is cast to it is not cut, and is compared by the column's collation. `rows_estimate` -1:
    not known.
    """

    oid: int
    schema: str
    table: str
    partitioned: bool
    replica_identity: str
    row_filter: str
    columns: tuple[PublishedColumn, ...]
    key: tuple[tuple[str, str, str], ...]
    rows_estimate: int


def published_tables(
    connection: Connection, publication: str, oids: Sequence[int] | None = None
) -> list[PublishedTable]:
    """Read the tables of the publication, or those of `oids` alone, from the catalogs.

    A table is opened only where it has a row filter, which pg_get_expr writes: it waits for who has
    locked the table, up to lock_timeout.

    Sources: pg_publication.c, pg_get_publication_tables; relcache.c, RelationGetIndexList;
    proto.c, logicalrep_write_typ.
    """
    given = None if oids is None else [*oids]
    rows = connection.execute(_TABLES, [publication, given]).fetchall()
    return [_table(*row) for row in rows]


def _table(*row: Any) -> PublishedTable:
    """Return a published table of a row of the query."""
    oid, schema, table, kind, identity, row_filter, columns, key, estimate = row
    return PublishedTable(
        oid=oid,
        schema=schema,
        table=table,
        partitioned=kind == "p",
        replica_identity=identity,
        row_filter=row_filter or "",
        columns=tuple(PublishedColumn(*column) for column in columns or ()),
        key=tuple((name, kind, schema) for name, kind, schema in key or ()),
        rows_estimate=estimate,
    )


_TABLES: LiteralString = (
    """
    WITH RECURSIVE chosen AS (
      SELECT oid, puballtables, pubviaroot,
             coalesce(to_jsonb(p) ->> 'pubgencols', 'n') = 's' AS generated
        FROM pg_publication p WHERE pubname = %s
    ), excepted (relid) AS ("""  # noqa: S608 - our own words
    + EXCEPTED
    + """), listed (relid, columns, qual) AS (
      SELECT r.prrelid, r.prattrs::int2[], pg_get_expr(r.prqual, r.prrelid)
        FROM pg_publication_rel r JOIN chosen p ON p.oid = prpubid
       WHERE NOT """
    + IS_EXCEPTED
    + """
       UNION ALL
      SELECT c.oid, NULL, NULL FROM chosen p JOIN pg_publication_namespace n ON n.pnpubid = p.oid
        JOIN pg_class c ON c.relnamespace = n.pnnspid
       UNION ALL
      SELECT c.oid, NULL, NULL FROM chosen p JOIN pg_class c ON p.puballtables
       WHERE c.oid NOT IN (SELECT relid FROM excepted)
    ), below (relid, columns, qual, root) AS (
      SELECT relid, columns, qual, relid FROM listed
       UNION ALL
      SELECT i.inhrelid, b.columns, NULL, b.root FROM below b
        JOIN pg_class parent ON parent.oid = b.relid AND parent.relkind = 'p'
        JOIN pg_inherits i ON i.inhparent = b.relid
    )
    SELECT DISTINCT ON (c.oid) c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text,
           c.relreplident::text, b.qual,
           (SELECT jsonb_agg(jsonb_build_array(a.attname, a.atttypid::bigint, a.atttypmod,
                     CASE WHEN a.atttypid < 10000 THEN '' ELSE named.name END,
                     c.relreplident = 'f' OR coalesce(a.attnum = ANY (identity.attnums), false))
                   ORDER BY a.attnum)
              FROM pg_attribute a LEFT JOIN LATERAL (
                   WITH RECURSIVE down AS (
                     SELECT t.oid, t.typbasetype, t.typname, t.typnamespace
                       FROM pg_type t WHERE t.oid = a.atttypid
                      UNION ALL
                     SELECT t.oid, t.typbasetype, t.typname, t.typnamespace
                       FROM down d JOIN pg_type t ON t.oid = d.typbasetype
                   ) SELECT tn.nspname || '.' || d.typname AS name
                       FROM down d JOIN pg_namespace tn ON tn.oid = d.typnamespace
                      WHERE d.typbasetype = 0) named ON true
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
               AND CASE WHEN b.columns IS NOT NULL THEN a.attnum = ANY (b.columns)
                        ELSE a.attgenerated = '' OR p.generated AND a.attgenerated = 's' END),
           (SELECT jsonb_agg(jsonb_build_array(a.attname, format_type(pg_basetype(a.atttypid), -1),
                     coalesce((SELECT o.oprnamespace::regnamespace::text
                        FROM pg_opclass k JOIN pg_amop m ON m.amopfamily = k.opcfamily
                             AND m.amoplefttype = k.opcintype AND m.amoprighttype = k.opcintype
                        JOIN pg_operator o ON o.oid = m.amopopr AND o.oprname = '>'
                       WHERE k.oid = reading.classes[part.number - 1]), 'pg_catalog'))
                             ORDER BY part.number)
              FROM unnest(reading.attnums) WITH ORDINALITY part (attnum, number)
              JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = part.attnum),
           CASE WHEN c.relkind = 'r'
                THEN greatest(c.reltuples, nullif(pg_stat_get_live_tuples(c.oid), 0))::bigint
                ELSE greatest(c.reltuples, -1)::bigint END
      FROM chosen p, below b JOIN pg_class c ON c.oid = b.relid
      JOIN pg_namespace n ON n.oid = c.relnamespace
      LEFT JOIN LATERAL (
           SELECT (i.indkey::int2[])[0:i.indnkeyatts - 1] AS attnums FROM pg_index i
            WHERE i.indrelid = c.oid AND """
    + IS_IDENTITY
    + """) identity
           ON true
      LEFT JOIN LATERAL (
           SELECT (i.indkey::int2[])[0:i.indnkeyatts - 1] AS attnums,
                  i.indclass::oid[] AS classes FROM pg_index i
            WHERE i.indrelid = c.oid AND i.indisvalid
              AND (i.indisprimary AND i.indimmediate OR i.indisreplident)
            ORDER BY i.indisprimary DESC LIMIT 1) reading ON true
     WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
       AND c.oid = ANY (coalesce(%s::bigint[]::oid[], ARRAY[c.oid]))
       AND CASE WHEN p.pubviaroot THEN NOT EXISTS (
                     SELECT FROM below other WHERE other.relid = c.oid AND other.root <> c.oid)
                ELSE c.relkind = 'r' END
     ORDER BY c.oid, b.root <> c.oid
"""
)
