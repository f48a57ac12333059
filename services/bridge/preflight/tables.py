"""The published tables: what identifies a row, and what is sent in vain. Pure."""

from collections.abc import Iterator
from typing import Final

from schemas.findings import Finding, Severity
from services.bridge.preflight.facts import Facts, PartitionedTable, Table
from services.bridge.preflight.finding import advice

_NAMED_MAX: Final = 5


def tables(facts: Facts) -> Iterator[Finding]:
    """Yield findings about published tables, and about the publication as a whole."""
    publication = facts.primary.publication
    if publication is None:
        return
    changes = publication.updates or publication.deletes
    for table in facts.primary.tables:
        yield from _identity(table, changes=changes)
    if changes:
        for partitioned in facts.primary.partitioned:
            yield from _partitions(partitioned)
    yield from _left_out(facts)


def _identity(table: Table, *, changes: bool) -> Iterator[Finding]:
    """Warn where a table's replica identity is missing, is not a key, or is wider than needed."""
    name = table.full_name
    if changes and (table.identity == "n" or (table.identity == "d" and not table.primary_key)):
        yield advice(
            "table-without-identity",
            Severity.CRITICAL,
            name,
            f"relreplident = {table.identity}, no usable primary key, and updates or deletes are "
            "published",
            "UPDATE and DELETE of this table fail on the primary: it does not have a replica "
            "identity",
            f"ALTER TABLE {name} ADD PRIMARY KEY (…); or ALTER TABLE {name} REPLICA IDENTITY FULL;",
        )
    elif table.identity == "f" and not table.primary_key and not table.keyed:
        yield advice(
            "table-without-key",
            Severity.WARNING,
            name,
            "relreplident = f, and there is no primary key nor a key in shaping.keys",
            "its events have no key: all are in the first partition of its topic (or as "
            "shaping.partition_by says), which can't be compacted",
            f"ALTER TABLE {name} ADD PRIMARY KEY (…); or set shaping.keys: {{{name}: [column]}}",
        )
    elif table.identity == "f" and table.primary_key and not table.full_wanted:
        yield advice(
            "table-identity-full",
            Severity.NOTE,
            name,
            "relreplident = f beside a primary key",
            "each update and delete writes the whole old row into the WAL; it buys `before`",
            f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT; where nobody reads `before`",
        )


def _partitions(table: PartitionedTable) -> Iterator[Finding]:
    """Warn where partitions have a narrower replica identity than their root."""
    if not (hiding := table.hiding):
        return
    name = f"{table.relation.schema}.{table.relation.table}"
    more = f" and {len(hiding) - _NAMED_MAX} more" if len(hiding) > _NAMED_MAX else ""
    listed = ", ".join(one.full_name for one in hiding[:_NAMED_MAX])
    yield advice(
        "partition-identity-differs",
        Severity.WARNING,
        name,
        f"its replica identity ({table.relation.replica_identity}) has columns that those of its "
        f"partitions lack: {listed}{more}",
        "their updates and deletes tell NULL in place of these columns' old values; the bridge "
        "stops where key, partition or filter need them (exit code 40)",
        "\n".join(f"ALTER TABLE {one.full_name} REPLICA IDENTITY FULL;" for one in hiding)
        + " or the replica identity of the root; new partitions have DEFAULT",
    )


def _left_out(facts: Facts) -> Iterator[Finding]:
    """Warn where the server sends tables that the settings leave out."""
    publication, found = facts.primary.publication, facts.primary.tables
    out = [table.full_name for table in found if not table.included]
    if publication is None or not out:
        return
    kept = [table.full_name for table in found if table.included]
    more = f" and {len(out) - _NAMED_MAX} more" if len(out) > _NAMED_MAX else ""
    if not publication.all_tables:
        change = f"ALTER PUBLICATION {publication.name} DROP TABLE {', '.join(out)};"
    else:
        listed = ", ".join(kept) or "…"
        change = (
            "a publication for all tables can't be narrowed, and source.publication may not "
            f"change under a prefix: begin the next prefix with source.tables: [{listed}]"
        )
    yield advice(
        "publication-sends-too-much",
        Severity.WARNING,
        f"publication {publication.name}",
        f"{len(out)} of {len(found)} published tables are left out by the settings: "
        f"{', '.join(out[:_NAMED_MAX])}{more}",
        "the server decodes and sends every row of them, and the bridge drops it",
        change,
    )
