"""The state of a table in a snapshot, by its progress and the signals for it. Pure."""

from collections.abc import Iterable
from typing import Final

from schemas.snapshot import SnapshotProgress, SnapshotRequest
from services.bridge.snapshot.requests import asked_of

FINISHED: Final = ("done", "stopped")
"""States of a table of which no more rows are read, unless somebody asks for them."""


def state(one: SnapshotProgress, asked: Iterable[SnapshotRequest]) -> str:
    """Return the state of a table whose progress is `one`."""
    request, paused = asked_of(one.schema_, one.table, asked)
    if request is not None and request.type == "stop":
        return "done" if one.done else "stopped"
    if paused and not one.done:
        return "paused"
    if request is not None and one.commit_lsn < request.commit_lsn:
        return "asked for"
    return "done" if one.done else "being read"
