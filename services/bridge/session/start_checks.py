"""Whether the settings fit the published tables and topics, judged at a start."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import structlog

from schemas.naming import Naming
from schemas.progress import ProgressRecord
from services.bridge.events.shaping.tables import Shaping
from services.bridge.recovery.fit import require_fitting, unfit
from services.bridge.recovery.placement import spreads_keyless
from services.bridge.sink.compaction import DELETE, refused_by_compaction
from services.bridge.sink.topic_requirements import command
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.row_reader import shape_of
from services.bridge.snapshot.tables import TableShape
from services.bridge.source.database import Primary
from services.postgres.partitions import Partition, partitions
from services.postgres.publications import unpublished_changes
from services.postgres.published_tables import PublishedTable, published_tables
from services.postgres.server import Connection

logger = structlog.get_logger(__name__)


def check_settings(
    shaping: Shaping,
    primary: Primary,
    publication: str,
    topics: Topics,
    record: ProgressRecord | None,
    placement: Mapping[str, str],
) -> None:
    """Raise SettingsError where a new setting does not fit; warn of tables placed otherwise.

    `record`: the last progress record, `placement`: the digests of the settings.
    """
    upgraded = record is not None and spreads_keyless(record.settings.placement)
    if not (shaping.has_rules or upgraded):
        return
    found = primary.ask("read the published tables", partial(_read, publication=publication))
    if found is None:
        if shaping.has_rules:
            logger.info("not judged: whether shaping fits the tables")
        if upgraded:
            logger.info("not judged: whether tables without a key go to other partitions")
        return
    shapes, below = found
    then = None if record is None else record.settings.placement or {}
    errors = unfit(shaping, [shape.relation for shape in shapes], below)
    require_fitting(errors, then, placement)
    if not upgraded:
        return
    names = [*gathered(shapes, shaping.naming, lambda name: _partitions(topics, name))]
    if names:
        logger.warning(
            "tables without a key: all their events go to the first partition, before to any; "
            "their order is kept only within each (docs/guides/shaping.md, Placement)",
            tables=names,
        )


def warn_of_compacted(
    naming: Naming, primary: Primary, publication: str, topics: Topics, servers: str
) -> None:
    """Warn of tables whose compacted topics would refuse their truncates, or all their events."""
    if not topics.compacts:
        return

    def read(connection: Connection) -> tuple[list[PublishedTable], tuple[str, ...]]:
        unsent = unpublished_changes(connection, publication)
        return published_tables(connection, publication), unsent or ()

    found = primary.ask("read the published tables", read)
    if found is None:
        logger.info("not judged: whether compacted topics take all events of their tables")
        return
    tables = ((one.schema, one.table, bool(one.key)) for one in found[0])
    truncates, policy = "truncate" not in found[1], topics.cleanup_policy
    for one in refused_by_compaction(tables, naming, policy, truncates=truncates):
        logger.warning(
            "a compacted topic refuses events without a key",
            table=one.table,
            seen=one.evidence,
            consequence=one.consequence,
            hint=one.change(command(servers, one.topic, DELETE)),
        )


def gathered(
    shapes: Iterable[TableShape], naming: Naming, counts: Callable[[str], int]
) -> Iterator[str]:
    """Yield the tables without a key whose topics have several partitions, as `schema.table`.

    `counts`: how many partitions a topic has, 0 where there is none.
    """
    for shape in shapes:
        table = shape.relation.schema, shape.relation.table
        if shape.key or naming.key(*table) or not naming.publishes(*table):
            continue
        if not naming.partition_by(*table) and counts(naming.table(*table).name) > 1:
            yield shape.name


def _partitions(topics: Topics, name: str) -> int:
    return topics.partitions(name) if topics.has(name) else 0


def _read(
    connection: Connection, publication: str
) -> tuple[list[TableShape], dict[int, tuple[Partition, ...]]]:
    shapes = [shape_of(table) for table in published_tables(connection, publication)]
    roots = [shape.relation.oid for shape in shapes if shape.partitioned]
    return shapes, partitions(connection, roots)
