"""Reads types from the database's catalog. Source: PostgreSQL documentation, pg_type."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from services.bridge.pgoutput.type_names import PgType
from services.postgres.server import Connection


def read_types(
    connection: Connection, oids: Collection[int], names: Mapping[int, str] | None = None
) -> list[PgType]:
    """Read the types of `oids` and the types that these consist of.

    `names`: oid -> the `schema.type` that the stream gives, for a domain that of its base type
    (pgoutput: logicalrep_write_typ). A type that was dropped since is a domain over the type of
    that name, whose modifier nobody knows any more; without a name it is left out.
    """
    names = names or {}
    rows = connection.execute(
        """
        WITH RECURSIVE part AS (
            SELECT t.oid FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
             WHERE t.oid = ANY (%s::oid[]) OR n.nspname || '.' || t.typname = ANY (%s)
            UNION
            SELECT next.oid FROM part JOIN pg_type t USING (oid),
                   LATERAL (VALUES (t.typbasetype), (t.typelem)) AS next (oid)
             WHERE next.oid <> 0
        )
        SELECT t.oid::bigint, n.nspname::text, t.typname::text, t.typtype::text,
               t.typbasetype::bigint, t.typtypmod,
               CASE WHEN t.typsubscript = 'pg_catalog.array_subscript_handler'::regproc
                    THEN t.typelem ELSE 0 END::bigint,
               t.typdelim::text, coalesce(e.extname, '')::text,
               ARRAY(SELECT enumlabel::text FROM pg_enum
                      WHERE enumtypid = t.oid ORDER BY enumsortorder)
          FROM part JOIN pg_type t USING (oid) JOIN pg_namespace n ON n.oid = t.typnamespace
          LEFT JOIN pg_depend d ON d.classid = 'pg_type'::regclass AND d.objid = t.oid
               AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
          LEFT JOIN pg_extension e ON e.oid = d.refobjid
        """,
        [[*oids], [*names.values()]],
    ).fetchall()
    found = [replace(PgType(*row), labels=tuple(labels)) for *row, labels in rows]
    bases = {f"{one.schema}.{one.name}": one for one in found}
    lost = {*oids}.intersection(names).difference(one.oid for one in found)
    of = ((oid, bases[names[oid]]) for oid in lost if names[oid] in bases)
    return found + [PgType(oid, one.schema, one.name, "d", one.oid) for oid, one in of]


def money_digits(connection: Connection) -> int:
    """Return how many digits follow the decimal point of money, by the locale lc_monetary."""
    row = connection.execute("SELECT regexp_replace(0::money::text, '[^0-9]', '', 'g')").fetchone()
    return len(row[0]) - 1 if row is not None else 0
