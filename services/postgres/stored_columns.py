"""A table's columns in the catalog, with the values of rows that do not hold them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, LiteralString

from services.postgres.server import Connection


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column, also a dropped one; of a partitioned table, as its partitions have it.

    `changed_by`: the transactions (xids of 32 bits) that last changed its rows of pg_attribute.
    `missing`: the text form of its value in rows that were stored before it was added, None: they
    have NULL, or there are none. `mixed`: the partitions do not have the same one.
    """

    name: str
    attnum: int
    changed_by: Sequence[int]
    missing: str | None
    mixed: bool


@dataclass(frozen=True, slots=True)
class StoredPublication:
    """A publication's entry of one table.

    `changed_by`: the transactions that made or last changed the rows of the catalogs by which it
    has the table. `listed`: it has a list of the table's columns.
    """

    oid: int
    changed_by: Sequence[int]
    listed: bool


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """The columns of one table as the catalog has them now.

    `relfilenode`: of pg_class, 0 for a partitioned table; `rewritten`: the table, or one of its
    partitions, has had another file since it was made. `table_changed_by`: the transaction that
    last changed the row of pg_class; `next_xid` is not yet given out.
    """

    columns: Sequence[StoredColumn]
    relfilenode: int
    rewritten: bool
    table_changed_by: int
    next_xid: int
    publication: StoredPublication


_STORED: Final[LiteralString] = """
    WITH RECURSIVE part (oid, kind) AS (
      SELECT oid, relkind FROM pg_class WHERE oid = %(oid)s::oid
       UNION ALL
      SELECT c.oid, c.relkind FROM part p JOIN pg_inherits i ON i.inhparent = p.oid
        JOIN pg_class c ON c.oid = i.inhrelid WHERE p.kind = 'p'
    ), leaf AS (
      SELECT c.oid, c.relfilenode FROM part JOIN pg_class c USING (oid) WHERE part.kind = 'r'
    )
    SELECT t.relfilenode::bigint, t.xmin::text::bigint,
           coalesce((SELECT bool_or(relfilenode <> oid) FROM leaf), false),
           (pg_snapshot_xmax(pg_current_snapshot())::text::numeric %% 4294967296)::bigint,
           a.attname::text, a.attnum::int, a.xmin::text::bigint || stored.changed_by,
           CASE WHEN stored.forms = 1 THEN stored.missing END,
           stored.forms > 1 OR stored.forms = 1 AND NOT stored.everywhere
      FROM pg_class t JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum > 0
      CROSS JOIN LATERAL (
           SELECT coalesce(array_agg(DISTINCT l.xmin::text::bigint), '{}') AS changed_by,
                  count(DISTINCT array_to_string(l.attmissingval, '')) AS forms,
                  min(array_to_string(l.attmissingval, '')) AS missing,
                  bool_and(l.atthasmissing) AS everywhere
             FROM leaf JOIN pg_attribute l ON l.attrelid = leaf.oid
            WHERE l.attname = a.attname AND l.attnum > 0 AND NOT l.attisdropped) stored
     WHERE t.oid = %(oid)s::oid
"""
_PUBLISHED: Final[LiteralString] = """
    WITH own AS (SELECT oid, xmin FROM pg_publication WHERE pubname = %(publication)s),
    kin AS (
      SELECT %(oid)s::oid AS oid UNION SELECT relid::oid FROM pg_partition_ancestors(%(oid)s::oid)
    ), entry AS (
      SELECT xmin, prattrs IS NOT NULL AS listed FROM pg_publication_rel
       WHERE prpubid = (SELECT oid FROM own) AND prrelid IN (SELECT oid FROM kin)
       UNION ALL
      SELECT xmin, false FROM pg_publication_namespace
       WHERE pnpubid = (SELECT oid FROM own)
         AND pnnspid IN (SELECT relnamespace FROM pg_class JOIN kin USING (oid))
       UNION ALL
      SELECT xmin, false FROM own
    )
    SELECT coalesce((SELECT oid FROM own), 0)::bigint,
           coalesce(array_agg(xmin::text::bigint ORDER BY xmin::text::bigint), '{}'),
           coalesce(bool_or(listed), true)
      FROM entry
"""


def stored_columns(
    connection: Connection, relation_oid: int, publication: str
) -> StoredColumns | None:
    """Read a table's columns from the catalogs, None when there is no such table.

    No table is opened, so that nobody's lock is waited for. Source: heap.c, StoreAttrMissingVal
    (set by ADD COLUMN) and RelationClearMissing (a rewrite).
    """
    asked = {"oid": relation_oid, "publication": publication}
    rows = connection.execute(_STORED, asked).fetchall()
    published = connection.execute(_PUBLISHED, asked).fetchone()
    if not rows or published is None:
        return None
    relfilenode, changed_by, rewritten, next_xid = rows[0][:4]
    columns = tuple(StoredColumn(*row[4:]) for row in rows)
    found = StoredPublication(*published)
    return StoredColumns(columns, relfilenode, rewritten, changed_by, next_xid, found)
