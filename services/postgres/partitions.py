"""The partitions of partitioned tables, and which old values each of them tells."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import LiteralString

from services.postgres.published_tables import IS_IDENTITY
from services.postgres.server import Connection


@dataclass(frozen=True, slots=True)
class Partition:
    """A table that holds rows of a partitioned one.

    `replica_identity`: d, n, f or i; `identity`: its columns, whose old values the server sends.
    `lacks`: the columns of its root's identity that are not among them.
    """

    oid: int
    schema: str
    table: str
    replica_identity: str
    identity: frozenset[str]
    lacks: frozenset[str] = frozenset()

    @property
    def full_name(self) -> str:
        """Return the name as `schema.table`."""
        return f"{self.schema}.{self.table}"


def partitions(connection: Connection, roots: Collection[int]) -> dict[int, tuple[Partition, ...]]:
    """Return the partitions of each partitioned table of `roots` (oids), of all levels.

    Read from the catalogs alone, so that nobody's lock is waited for.
    """
    if not roots:
        return {}
    found: dict[int, list[Partition]] = {}
    rows = connection.execute(_PARTITIONS, [[*roots]]).fetchall()
    of_roots = {root: frozenset(identity) for root, oid, *_, identity in rows if root == oid}
    for root, oid, schema, table, kind, identity in rows:
        below = found.setdefault(root, [])
        if root != oid:
            lacks = of_roots[root] - {*identity}
            below.append(Partition(oid, schema, table, kind, frozenset(identity), lacks))
    return {root: tuple(below) for root, below in found.items()}


_PARTITIONS: LiteralString = (
    """
    WITH RECURSIVE below (root, relid) AS (
      SELECT oid, oid FROM pg_class WHERE oid = ANY (%s::bigint[]::oid[])
       UNION ALL
      SELECT b.root, i.inhrelid FROM below b
        JOIN pg_class parent ON parent.oid = b.relid AND parent.relkind = 'p'
        JOIN pg_inherits i ON i.inhparent = b.relid
    )
    SELECT b.root::bigint, c.oid::bigint, n.nspname::text, c.relname::text, c.relreplident::text,
           ARRAY(SELECT a.attname::text FROM pg_attribute a
                  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                    AND (c.relreplident = 'f' OR EXISTS (
                         SELECT FROM pg_index i
                          WHERE i.indrelid = c.oid
                            AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
                            AND """  # noqa: S608 - our own words
    + IS_IDENTITY
    + """)))
      FROM below b JOIN pg_class c ON c.oid = b.relid JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind = CASE b.relid WHEN b.root THEN 'p'::"char" ELSE 'r' END
     ORDER BY b.root, n.nspname, c.relname
"""
)
