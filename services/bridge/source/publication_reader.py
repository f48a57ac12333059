"""Reads what `publication_drift` compares with the settings.

The server opens tables to write their row filters (pg_get_expr, and a temporary table for a wanted
one). Who has locked a table may wait for the bridge (synchronous_standby_names), so that all is
asked by `without_waiting`. What can't be read is not judged.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

import psycopg
import structlog

from schemas.errors import SettingsError, SetupError
from schemas.settings import SourceSettings
from schemas.shaping import ShapingSettings
from services.bridge.source.publication_drift import (
    PublicationSeen,
    has_table,
    publication_differences,
)
from services.bridge.source.table_options import wanted_options
from services.postgres.publication_options import (
    TableName,
    TableOptions,
    replica_identities,
)
from services.postgres.publications import (
    members,
    published_columns,
    schema_tables,
    table_facts,
    unpublished_changes,
)
from services.postgres.server import Connection

logger = structlog.get_logger(__name__)

Answer = TypeVar("Answer")
Question = Callable[[Connection], Answer]
_UNJUDGED_MAX: Final = 3
"""The number of tables that could not be read, after which no other is waited for."""
_OPTIONS_S: Final = 3.0
"""How long a start compares row filters and column lists, table by table."""


def without_waiting(connection: Connection, question: Question[Answer]) -> Answer | None:
    """Return the answer to a question; None where the server refuses it or somebody locks a table.

    The transaction is rolled back: its commit, too, could wait for the bridge.
    """
    try:
        with connection.transaction(force_rollback=True):
            connection.execute("SET LOCAL lock_timeout = '500ms'")
            connection.execute("SET LOCAL statement_timeout = '5s'")
            return question(connection)
    except psycopg.Error as error:
        if connection.closed:
            raise
        reason = error.diag.message_primary or str(error)
        logger.info("not judged: the server did not answer", reason=reason, sqlstate=error.sqlstate)
        return None


def read_publication(connection: Connection, source: SourceSettings) -> PublicationSeen | None:
    """Read the publication, and what the server makes of the settings; None without one."""
    found = members(connection, source.publication)
    if found is None:
        return None
    listed = [*source.single_tables]
    there = frozenset(table_facts(connection, listed))
    judged = sorted(table for table in there if has_table(found, table))
    whole = itertools.chain(*schema_tables(connection, source.whole_schemas).values())
    identified = [
        table for table in (*judged, *whole) if source.of_table(source.replica_identity, table)
    ]
    options, wrong, unjudged = _options(connection, source, judged, found.tables)
    return PublicationSeen(
        source.publication,
        found,
        tables=frozenset(published_columns(connection, source.publication)),
        unpublished=unpublished_changes(connection, source.publication) or (),
        there=there,
        options=options,
        identities=replica_identities(connection, source.publication, identified),
        wrong=wrong,
        unjudged=tuple(unjudged),
    )


def _options(
    connection: Connection,
    source: SourceSettings,
    tables: Iterable[TableName],
    published: Mapping[TableName, TableOptions],
) -> tuple[dict[TableName, TableOptions], dict[TableName, str], list[tuple[str, str]]]:
    """Return the wanted options of tables, the reasons of wrong filters, and what is unjudged."""
    options: dict[TableName, TableOptions] = {}
    wrong: dict[TableName, str] = {}
    unjudged: list[tuple[str, str]] = []
    if source.row_filters is None and source.column_lists is None:
        return options, wrong, unjudged
    since = time.monotonic()
    for table in tables:
        if len(unjudged) >= _UNJUDGED_MAX:
            unjudged.append((".".join(table), "not asked: others could not be read either"))
            continue
        if time.monotonic() - since > _OPTIONS_S:
            unjudged.append(("the other tables", f"not asked: {_OPTIONS_S:.0f} s were not enough"))
            break
        try:
            with connection.transaction():
                options |= wanted_options(connection, source, [table], published)
        except SettingsError as error:
            wrong[table] = error.message
        except SetupError as error:
            unjudged.append((".".join(table), f"{error.message}; {error.hint}"))
        except psycopg.Error as error:
            if connection.closed:
                raise
            reason = error.diag.message_primary or str(error)
            unjudged.append((".".join(table), f"the row filter can't be compared: {reason}"))
    return options, wrong, unjudged


def warn_of_differences(
    connection: Connection,
    source: SourceSettings,
    shaping: ShapingSettings,
    prefix: str,
    logged: set[object],
) -> bool:
    """Log each difference between the publication and the settings; return True.

    `logged`: what the last call has logged, which is not logged again. Ask it by
    `without_waiting`, which returns None where the publication can't be read.
    """
    seen = read_publication(connection, source)
    if seen is None:
        return True
    before, now = {*logged}, publication_differences(source, shaping, prefix, seen)
    logged.clear()
    logged.update(now, seen.unjudged)
    for one in (one for one in now if one not in before):
        logger.warning(
            "the publication differs from the settings",
            finding=one.name,
            subject=one.subject,
            seen=one.evidence,
            consequence=one.consequence,
            hint=one.change,
        )
    for subject, why in (one for one in seen.unjudged if one not in before):
        logger.info("not judged: the publication's row filter", table=subject, reason=why)
    return True
