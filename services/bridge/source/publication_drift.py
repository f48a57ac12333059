"""How the publication differs from what `source` and `shaping` say. Pure.

    source.tables              tables that it lacks, and that it has beyond them
    source.row_filters         another condition
    source.column_lists        other columns
    source.replica_identity    another replica identity of a table or of its partitions
    shaping.skip               operations that it does not publish, and that are not skipped
    shaping.topic, .routes     tables that have no topic, or would share one

Settings that are empty or unset say nothing of the publication, and are not judged.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from schemas.errors import SettingsError
from schemas.naming import Naming, TableTopic, table_matches
from schemas.settings import SourceSettings
from schemas.shaping import ShapingSettings
from services.postgres.identifiers import identifier
from services.postgres.publication_options import (
    WHOLE,
    ReplicaIdentity,
    TableName,
    TableOptions,
)
from services.postgres.publications import Members

NAMES: Final = (
    *("publication-lacks-tables", "publication-has-more-tables", "publication-row-filter"),
    *("publication-column-list", "publication-lacks-operations", "table-identity-differs"),
    "table-parked",
)
"""The names of all differences."""
LACKING: Final = ("publication-lacks-tables", "publication-lacks-operations", "table-parked")
"""The names of those by which changes that are wanted do not reach Kafka."""
_SHOWN_MAX: Final = 5
_LETTERS: Final = {"insert": "c", "update": "u", "delete": "d", "truncate": "t"}
_COMMAND: Final = "slotbridge publication (--dry-run shows the statements)"


@dataclass(frozen=True, slots=True)
class PublicationDifference:
    """One difference; `change`: the command, statement or setting that ends it."""

    name: str
    subject: str
    evidence: str
    consequence: str
    change: str


@dataclass(frozen=True, slots=True)
class PublicationSeen:
    """The publication, and the server's view of what the settings want of it.

    `tables`: all that are published. `unpublished`: operations that it leaves out. `there`: the
    tables in source.tables that exist; `options`: their wanted options; `identities`: their present
    identities; `wrong`: row filters that the server does not understand, with its reason.
    `unjudged`: (subject, why).
    """

    name: str
    members: Members
    tables: frozenset[TableName]
    unpublished: tuple[str, ...] = ()
    there: frozenset[TableName] = frozenset()
    options: Mapping[TableName, TableOptions] = field(default_factory=dict)
    identities: Mapping[TableName, tuple[ReplicaIdentity, ...]] = field(default_factory=dict)
    wrong: Mapping[TableName, str] = field(default_factory=dict)
    unjudged: tuple[tuple[str, str], ...] = ()


def publication_differences(
    source: SourceSettings, shaping: ShapingSettings, prefix: str, publication: PublicationSeen
) -> list[PublicationDifference]:
    """Return every difference between the publication and the settings."""
    return [
        *_lacking(source, publication),
        *_beyond(source, publication),
        *_options(publication),
        *_identities(source, publication),
        *_operations(shaping, publication),
        *_parked(Naming(prefix, shaping), publication),
    ]


def has_table(members: Members, table: TableName) -> bool:
    """Tell whether a publication contains a table, alone or with others."""
    if members.all_tables:
        return table not in members.excepted
    return table[0] in members.schemas or table in members.tables


def _lacking(
    source: SourceSettings, publication: PublicationSeen
) -> Iterator[PublicationDifference]:
    """Yield the difference of listed tables and schemas that the publication lacks."""
    of_all = publication.members.all_tables
    schemas = [] if of_all else sorted({*source.whole_schemas} - {*publication.members.schemas})
    lacking = sorted(one for one in source.single_tables if not has_table(publication.members, one))
    if not lacking and not schemas:
        return
    missing = [table for table in lacking if table not in publication.there]
    command = (
        f"ALTER PUBLICATION {identifier(publication.name)} SET ALL TABLES, with EXCEPT for others "
        "alone"
        if of_all
        else _COMMAND
    )
    create = f"create {_names(missing)}, or correct source.tables; then: " if missing else ""
    named = ", ".join(filter(None, (*(f"{one}.*" for one in schemas), _names(lacking))))
    yield PublicationDifference(
        "publication-lacks-tables",
        f"publication {publication.name}",
        f"source.tables lists {named}, which it does not have"
        + (f"; there is no table {_names(missing)}" if missing else ""),
        "changes of these tables do not reach Kafka",
        f"{create}{command}",
    )


def _beyond(
    source: SourceSettings, publication: PublicationSeen
) -> Iterator[PublicationDifference]:
    """Yield the difference of tables and schemas that source.tables does not list."""
    if not source.tables:
        return
    if publication.members.all_tables:
        evidence = f"it is FOR ALL TABLES, source.tables lists {len(source.tables)}"
        change = (
            "it can't be narrowed: set source.tables: [] and choose tables by shaping.include; or "
            "begin another slot, publication and topic prefix"
        )
    else:
        schemas = sorted({*publication.members.schemas} - {*source.whole_schemas})
        beyond = sorted(publication.members.tables.keys() - {*source.single_tables})
        if not beyond and not schemas:
            return
        named = ", ".join(filter(None, (*(f"{one}.*" for one in schemas), _names(beyond))))
        evidence = f"it has {named}, which source.tables does not list"
        change = f"{_COMMAND}; or add them to source.tables"
    yield PublicationDifference(
        "publication-has-more-tables",
        f"publication {publication.name}",
        evidence,
        "changes of tables beyond source.tables reach Kafka, too, unless shaping leaves them out",
        change,
    )


def _options(publication: PublicationSeen) -> Iterator[PublicationDifference]:
    """Yield the differences of row filters and column lists."""
    for table, reason in sorted(publication.wrong.items()):
        yield PublicationDifference(
            "publication-row-filter",
            ".".join(table),
            f"source.row_filters has a condition that the server does not understand: {reason}",
            "the publication filters rows by another condition, or by none",
            "correct source.row_filters, then: " + _COMMAND,
        )
    for table, wanted in sorted(publication.options.items()):
        found = publication.members.tables.get(table, WHOLE)
        if wanted.row_filter != found.row_filter:
            yield PublicationDifference(
                "publication-row-filter",
                ".".join(table),
                f"the publication has {_condition(found)}, source.row_filters {_condition(wanted)}",
                "the server sends other rows than the settings say",
                _COMMAND,
            )
        if _listed(wanted) != _listed(found):
            yield PublicationDifference(
                "publication-column-list",
                ".".join(table),
                f"the publication sends {_columns(found)}, source.column_lists names "
                f"{_columns(wanted)}",
                "the server sends other columns than the settings say",
                _COMMAND,
            )


def _identities(
    source: SourceSettings, publication: PublicationSeen
) -> Iterator[PublicationDifference]:
    """Yield the tables and partitions with another replica identity than is set."""
    for table, identities in sorted(publication.identities.items()):
        wanted = source.of_table(source.replica_identity, table)
        others = [one for one in identities if wanted is not None and one.kind != wanted]
        for one in others[:_SHOWN_MAX]:
            yield PublicationDifference(
                "table-identity-differs",
                ".".join(one.table),
                f"its REPLICA IDENTITY is {one.kind}, source.replica_identity says {wanted}",
                "updates and deletes tell other columns of the old row than the settings say",
                f"{_COMMAND}; or correct source.replica_identity",
            )


def _operations(
    shaping: ShapingSettings, publication: PublicationSeen
) -> Iterator[PublicationDifference]:
    """Yield the operations that are not published, unless the settings skip them."""
    lacking = [
        operation
        for operation in publication.unpublished
        if not all(_skips(shaping, table, _LETTERS[operation]) for table in publication.tables)
    ]
    if not lacking:
        return
    sent = [operation for operation in _LETTERS if operation not in publication.unpublished]
    letters = ", ".join(_LETTERS[operation] for operation in lacking)
    all_of_them = ", ".join(name for name in _LETTERS if name in sent or name in lacking)
    yield PublicationDifference(
        "publication-lacks-operations",
        f"publication {publication.name}",
        f"publish = '{', '.join(sent)}', and shaping.skip does not name the others for all tables",
        f"rows in Kafka stay as they are at {', '.join(name.upper() for name in lacking)}",
        f"ALTER PUBLICATION {identifier(publication.name)} SET (publish = '{all_of_them}'); or, "
        f'where they are not wanted, shaping.skip: {{"*.*": [{letters}]}}',
    )


def _parked(naming: Naming, publication: PublicationSeen) -> Iterator[PublicationDifference]:
    """Yield the tables without a topic of their own: parked at their first change."""
    sharing: dict[str, list[tuple[TableName, TableTopic]]] = {}
    for table in sorted(one for one in publication.tables if naming.publishes(*one)):
        try:
            topic = naming.table(*table)
        except SettingsError as error:
            yield _without_topic(".".join(table), error.message, error.hint)
        else:
            sharing.setdefault(topic.name, []).append((table, topic))
    for tables in sharing.values():
        if len(tables) > 1 and not all(topic.routed for _, topic in tables):
            yield _without_topic(
                _names([table for table, _ in tables]),
                "all would have one topic: the table that had events first has it",
                "rename the others, leave them out, or give them a route (shaping.routes); then "
                "start the bridge again, and `slotbridge snapshot start TABLE`",
            )


def _without_topic(subject: str, evidence: str, change: str) -> PublicationDifference:
    lost = "no changes and no rows of a table without a topic of its own reach Kafka"
    return PublicationDifference("table-parked", subject, evidence, lost, change)


def _skips(shaping: ShapingSettings, table: TableName, letter: str) -> bool:
    return any(
        letter in operations and table_matches(pattern, *table)
        for pattern, operations in shaping.skip.items()
    )


def _condition(options: TableOptions) -> str:
    return f"the row filter {options.row_filter}" if options.row_filter else "no row filter"


def _listed(options: TableOptions) -> frozenset[str] | None:
    return None if options.columns is None else frozenset(options.columns)


def _columns(options: TableOptions) -> str:
    return "all columns" if options.columns is None else ", ".join(options.columns)


def _names(tables: list[TableName]) -> str:
    shown = ", ".join(".".join(table) for table in tables[:_SHOWN_MAX])
    beyond = len(tables) - _SHOWN_MAX
    return f"{shown} and {beyond} more" if beyond > 0 else shown
