"""Whether the settings fit the published tables and topics, judged at a start."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import structlog

from schemas.events import ProgressRecord
from schemas.naming import Naming
from services.bridge.events.shaping.tables import Shaping
from services.bridge.recovery.expressions import require_fitting
from services.bridge.recovery.placement import spreads_keyless
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.row_reader import shape_of
from services.bridge.snapshot.tables import TableShape
from services.bridge.source.database import Primary
from services.postgres.published_tables import published_tables

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
    upgraded = record is not None and spreads_keyless(record.placement)
    if not (shaping.has_expressions or upgraded):
        return
    tables = primary.ask(
        "read the published tables", lambda connection: published_tables(connection, publication)
    )
    if tables is None:
        if shaping.has_expressions:
            logger.info("not judged: whether expressions fit the tables")
        if upgraded:
            logger.info("not judged: whether tables without a key go to other partitions")
        return
    shapes = [shape_of(table) for table in tables]
    then = None if record is None else record.placement or {}
    require_fitting(shaping, [shape.relation for shape in shapes], then, placement)
    if not upgraded:
        return
    names = [*gathered(shapes, shaping.naming, lambda name: _partitions(topics, name))]
    if names:
        logger.warning(
            "tables without a key: all their events go to the first partition, formerly to any; "
            "their order is kept only within each (docs/SHAPING.md, Placement)",
            tables=names,
        )


def gathered(
    shapes: Iterable[TableShape], naming: Naming, partitions: Callable[[str], int]
) -> Iterator[str]:
    """Yield the tables without a key whose topics have several partitions, as `schema.table`.

    `partitions`: how many partitions a topic has, 0 where there is none.
    """
    for shape in shapes:
        table = shape.relation.schema, shape.relation.table
        if shape.key or naming.key(*table) or not naming.publishes(*table):
            continue
        if not naming.partition_by(*table) and partitions(naming.table(*table).name) > 1:
            yield shape.name


def _partitions(topics: Topics, name: str) -> int:
    return topics.partitions(name) if topics.has(name) else 0
