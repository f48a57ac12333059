"""Whether filters, computed columns, keys and `partition_by` fit the tables as they are.

Asked at a start. New settings that do not fit are refused. Those of the last progress record have
fitted: a table may have changed since, behind changes that the stream has yet to bring and that
they still fit. So these are told, and judged at the first change with another shape.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import structlog

from schemas.errors import SettingsError
from schemas.naming import Naming, schema_and_table
from schemas.shaping import ShapingSettings
from schemas.source import SourceSettings
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.messages import Relation, RelationColumn
from services.bridge.recovery.placement import refitted
from services.postgres.partitions import Partition

logger = structlog.get_logger(__name__)

Partitions = Mapping[int, Iterable[Partition]]
"""The partitions of partitioned tables that are published as their root, by its oid."""


def unfit(
    shaping: Shaping, relations: Iterable[Relation], partitions: Partitions
) -> Iterator[SettingsError]:
    """Yield the error of each relation that a setting does not fit, or of one of its partitions."""
    if not shaping.has_rules:
        return
    for relation in relations:
        try:
            shaping.check(relation)
        except SettingsError as error:
            yield error
            continue
        for partition in partitions.get(relation.oid, ()):
            try:
                shaping.check(_as_sent(relation, partition))
            except SettingsError as error:
                yield _of_partition(error, partition)
                break


def named_relations(
    shaping: ShapingSettings, column_lists: Mapping[str, Sequence[str]]
) -> Iterator[Relation]:
    """Yield the tables that `partition_by` names in full, with the columns that it needs of them.

    Columns that `column_lists` leave out of the publication are left out.
    """
    for name, chosen in shaping.partition_by.items():
        if "*" in name or isinstance(chosen, str):
            continue
        table = schema_and_table(name)
        listed = SourceSettings.of_table(column_lists, table)
        key = Naming("", shaping).key(*table)
        names = {*chosen} if listed is None else {*listed}
        columns = (RelationColumn(column, 0, -1, True) for column in sorted(names | {*key}))
        yield Relation(0, *table, "f", tuple(columns))


def require_fitting(
    errors: Iterable[SettingsError], then: Mapping[str, str] | None, now: Mapping[str, str]
) -> None:
    """Raise the first of `errors` where settings are new; warn of each where they are known.

    `then`, `now`: the digests of the last progress record, None without one, and of the settings.
    """
    errors = [*errors]
    if errors and (then is None or refitted(then, now)):
        raise errors[0]
    for error in errors:
        logger.warning(
            "a setting does not fit its table any more: the bridge stops at the first change "
            "of the table as it is now",
            setting=error.subject,
            reason=error.message,
            hint=error.hint,
        )


def _as_sent(relation: Relation, partition: Partition) -> Relation:
    """Return the relation with the replica identity of one of its partitions."""
    columns = tuple(
        replace(column, key=column.name in partition.identity) for column in relation.columns
    )
    return replace(relation, replica_identity=partition.replica_identity, columns=columns)


def _of_partition(error: SettingsError, partition: Partition) -> SettingsError:
    """Return the error of a root's settings that one of its partitions does not fit."""
    name = partition.full_name
    return SettingsError(
        f"{error.message}, in its partition {name}, whose replica identity is another than its "
        "root's",
        operation=error.operation,
        subject=error.subject,
        hint=f"ALTER TABLE {name} REPLICA IDENTITY FULL, or that of its root",
    )
