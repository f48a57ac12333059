"""Opens the connections of a start, for commands that need a stopped bridge: recover, adopt."""

import contextlib
from collections.abc import Iterator
from typing import Final

from schemas.settings import Settings, require
from services.bridge.recovery.start_check import StartCheck
from services.bridge.sink.topics import Topics
from services.bridge.source.candidates import require_one_writable
from services.bridge.source.database import Primary
from services.bridge.source.replication_connection import ReplicationConnection
from services.kafka.schema_registry import SchemaRegistry
from services.waiter import Waiter

_ORIGIN_IDLE_MS: Final = 24 * 3_600_000
"""The origin is owned as long as topics are read, so that no bridge starts meanwhile."""


@contextlib.contextmanager
def open_stopped(
    settings: Settings, operation: str, waiter: Waiter | None = None
) -> Iterator[tuple[Primary, Topics, StartCheck]]:
    """Connect as a start of the bridge does, own the origin, and close all at the end.

    Raise SlotbridgeError where a bridge runs, or two hosts accept writes; `operation` names the
    command in it.
    """
    source, kafka = require(settings.source, "source"), require(settings.kafka, "kafka")
    require_one_writable(source, operation)
    bridge = settings.bridge
    with contextlib.ExitStack() as stack:
        primary = Primary(
            source, waiter, sql_deadline_ms=bridge.sql_deadline_ms, idle_timeout_ms=_ORIGIN_IDLE_MS
        )
        stack.callback(primary.close)
        primary.prepare()
        primary.require_free_slot(operation)
        topics = Topics(kafka, settings.shaping, waiter)
        if settings.registry is not None:
            registry = SchemaRegistry(settings.registry, waiter)
            stack.callback(registry.close)
            topics.schema_text = registry.schema_text
        topics.prepare()
        topics.check_clocks(primary.clock_ms())
        connection = ReplicationConnection(
            primary.conninfo,
            source.slot,
            wal_sender_timeout_ms=bridge.wal_sender_timeout_ms,
            sql_deadline_ms=bridge.sql_deadline_ms,
        )
        stack.callback(connection.close)
        yield primary, topics, StartCheck(primary, connection, topics, source.slot, bridge)
