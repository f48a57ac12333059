"""Whether two servers put the rows of a table in one order, and find the same ones.

A standby has the primary's indexes, in the order of the primary's libraries. With another version
of a library it may descend the wrong way, and leave out rows.
"""

import re
from typing import Final, LiteralString, NamedTuple

from services.bridge.snapshot.tables import TableShape, filtered
from services.postgres.sessions import Session, names_as_meant

_NAMED: LiteralString = """
    SELECT name, pg_catalog.to_regcollation(name)::pg_catalog.oid
      FROM pg_catalog.unnest(%s::pg_catalog.text[]) name
"""
_VERSIONS: LiteralString = """
    SELECT DISTINCT used.name, used.version
      FROM (SELECT coalesce(nullif(a.attcollation, 0), r.rngcollation)
              FROM pg_attribute a LEFT JOIN pg_range r ON r.rngtypid = a.atttypid
             WHERE a.attrelid = %(table)s::oid AND a.attnum > 0 AND a.attname = ANY (%(columns)s)
             UNION SELECT unnest(%(named)s::oid[])) needed (oid)
      JOIN pg_database d ON d.datname = current_database()
      JOIN LATERAL (
           SELECT format('%%I.%%I', n.nspname, c.collname),
                  CASE c.collprovider WHEN 'd' THEN d.datlocprovider ELSE c.collprovider END,
                  CASE c.collprovider WHEN 'd' THEN d.datcollate ELSE c.collcollate END,
                  CASE c.collprovider WHEN 'd' THEN pg_database_collation_actual_version(d.oid)
                       ELSE pg_collation_actual_version(c.oid) END
             FROM pg_collation c JOIN pg_namespace n ON n.oid = c.collnamespace
            WHERE c.oid = needed.oid
           ) used (name, provider, locale, version)
           ON used.provider = 'i'
              OR used.provider = 'c' AND used.locale !~* '^(c|posix|c\\..*)$'
"""
"""Source: pg_locale_libc.c, get_collation_actual_version_libc: C and POSIX have no version."""

_NAME: Final = r'(?:"(?:[^"]|"")+"|[^\W\d][\w$]*)'
_COLLATE: Final = re.compile(rf"\bCOLLATE\b(?:\s*({_NAME}(?:\s*\.\s*{_NAME})*))?", re.IGNORECASE)

Versions = dict[str, str | None]
"""The version of the library behind each collation; None: the server can't tell."""


class OrderDifference(NamedTuple):
    """Collations that two servers may order otherwise, and those of which neither can tell."""

    different: str
    not_judged: str


def order_versions(session: Session, shape: TableShape, where: str) -> Versions:
    """Read the versions that the order of a chunk depends on, and which of its rows are wanted.

    In a transaction. Only the names of collations are found as a condition finds them.
    """
    names = [column.name for column in shape.key]
    if filtered(shape, where):
        names += [column.name for column in shape.relation.columns]
    with names_as_meant(session):
        condition = f"{shape.row_filter}\n{where}"
        named = session.execute(_NAMED, [named_collations(condition)]).fetchall()
    oids = [oid for _, oid in named if oid is not None]
    given = {"table": shape.relation.oid, "columns": names, "named": oids}
    unknown: Versions = {name: None for name, oid in named if oid is None}
    return unknown | dict(session.execute(_VERSIONS, given).fetchall())


def named_collations(condition: str) -> list[str]:
    """Return the names, as SQL writes them, that follow COLLATE in a condition.

    `"COLLATE"` stands for one that can't be read. A server knows no such collation: not judged. One
    in a literal or a comment does no harm: its version is compared, too.
    """
    return [found.group(1) or '"COLLATE"' for found in _COLLATE.finditer(condition)]


def order_difference(primary: Versions, standby: Versions) -> OrderDifference:
    """Compare the versions of the same collations on two servers. Pure."""
    different, not_judged = [], []
    for name in sorted(primary.keys() | standby.keys()):
        here, there = primary.get(name), standby.get(name)
        if here != there:
            different.append(f"{name} (primary {here or 'unknown'}, standby {there or 'unknown'})")
        elif here is None:
            not_judged.append(name)
    return OrderDifference(", ".join(different), ", ".join(not_judged))
