"""Tells which tables have rows that a snapshot has yet to read, while no bridge runs."""

import contextlib
from collections.abc import Sequence

from schemas.errors import Retryable
from schemas.naming import table_matches
from schemas.settings import Settings, require
from schemas.snapshot import SnapshotSettings
from services.bridge.events.shaping.tables import Shaping
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.progress import Apart, Known, Owner, beginning_for, plan
from services.bridge.snapshot.readable import refuse_conditions, refuse_unfit
from services.bridge.snapshot.reader import Inspection, SnapshotReader
from services.bridge.snapshot.row_reader import NotNow
from services.bridge.snapshot.session_snapshot import look_for_known
from services.bridge.snapshot.table_state import FINISHED, state
from services.bridge.source.database import Primary


def unread_tables(
    settings: Settings,
    snapshot: SnapshotSettings,
    primary: Primary,
    topics: Topics,
    owner: Owner,
    operation: str,
) -> list[str]:
    """Return the published tables whose rows a snapshot has yet to bring to Kafka, sorted.

    These are the tables that a bridge would go on to read if it started now, the tables that it
    can't read, each with the reason, and the tables that other settings have begun. Tables in
    `snapshot.exclude` are left out: their rows are given up. `snapshot`: with the mode in effect.
    Raise SlotbridgeError.
    """
    known = look_for_known(topics)
    beginning = None
    if snapshot.reads_without_key:
        beginning = beginning_for(owner, known.beginnings)
    source = require(settings.source, "source")
    reader = SnapshotReader(
        primary.conninfo,
        source.publication,
        source.slot,
        primary.server,
        deadline_ms=settings.bridge.sql_deadline_ms,
    )
    with contextlib.closing(reader):
        try:
            seen = reader.inspect(beginning and beginning.sight)
        except NotNow as reason:
            raise Retryable(
                f"which rows Kafka lacks is not judged: {reason}",
                operation=operation,
                subject=f"slot {owner.slot}",
                hint=f"run `slotbridge {operation}` again once the server takes writes",
            ) from reason
    shaping = Shaping(settings.shaping, topics.prefix)
    apart = beginning and Apart(beginning, seen.places, seen.unpublished)
    found = plan(seen.shapes, known.progress, snapshot, shaping, owner, known.requests, apart)
    refuse_conditions(found)
    refuse_unfit(found, shaping)
    planned = [name for name, table in found.tables.items() if not table.done]
    refused = [f"{name} ({reason})" for name, reason in found.refused.items()]
    begun = _begun(known, seen, owner.slot, snapshot.exclude) - {*found.tables, *found.refused}
    return sorted([*planned, *refused, *begun])


def _begun(known: Known, seen: Inspection, slot: str, exclude: Sequence[str]) -> set[str]:
    """Return the published tables of whose rows Kafka has a part; none that `exclude` names."""
    published = {shape.name for shape in seen.shapes}
    requests = [one for one in known.requests if one.slot == slot]
    return published & {
        f"{one.schema_}.{one.table}"
        for one in known.progress
        if one.slot == slot and state(one, requests) not in FINISHED
        if not any(table_matches(pattern, one.schema_, one.table) for pattern in exclude)
    }
