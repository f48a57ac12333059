"""The work for which a session's snapshot waits: the published tables, or a chunk's mark."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from services.bridge.snapshot.progress import SnapshotPlan
from services.bridge.snapshot.reader import Inspection
from services.bridge.snapshot.visibility import PublishedXids


class Inspecting(NamedTuple):
    """The published tables are being read; `published`: what the stream has brought meanwhile."""

    published: PublishedXids
    inspection: Future[Inspection]


class AwaitedMark(NamedTuple):
    """A mark that the stream will bring; `written`: when the server has it in its WAL."""

    token: str
    written: Future[int] | None = None


@dataclass(slots=True)
class Reading:
    """Tables whose rows are being read. `published`: whom the next chunk's rows must show."""

    plan: SnapshotPlan
    published: PublishedXids
    rows_estimates: dict[str, int]
    awaited: AwaitedMark | None = None
