"""Deliberate mistakes in how a snapshot's rows are read, placed and counted, and in a repair."""

from collections.abc import Iterator
from typing import Any, Final

from services.bridge.repair.row_store import RowStore
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.snapshot import session_snapshot
from services.bridge.snapshot.progress import Known
from services.bridge.snapshot.row_reader import NotNow, RowReader
from services.bridge.snapshot.tables import Chunk
from services.bridge.snapshot.visibility import PublishedXids
from tests.torture.mistakes import mistake, put

_CALM: Final = "publication altered"
"""Chunks are read under the clients' load, and not only once it has ended."""
_KILLS: Final = "kill,failpoint,sigterm"


@mistake("a chunk is read before its mark", _CALM)
def _read_early() -> None:
    """Its rows are those that were read for the mark before."""
    read = RowReader.read
    early: dict[Any, Chunk] = {}

    def kept(
        self: RowReader, shape: Any, last: Any, where: str, *rest: Any, **limits: Any
    ) -> Chunk:
        place = (shape.name, tuple(last or ()), where)
        if place in early:
            return early.pop(place)
        early.clear()
        early[place] = read(self, shape, last, where, *rest, **limits)
        raise NotNow("it is published at a later mark")

    put(RowReader, "read", kept)


@mistake("a chunk's progress is in a Kafka transaction of its own, after its rows", _KILLS)
def _progress_apart() -> None:
    send = TransactionalProducer.send

    def apart(self: TransactionalProducer, events: Any, *rest: Any) -> None:
        events = [*events]
        if len(events) < 2 or not events[-1].topic.endswith(".snapshot"):
            send(self, events, *rest)
            return
        send(self, events[:-1], *rest)
        self._producer.commit_transaction(8)
        self.open = False
        send(self, events[-1:], *rest)

    put(TransactionalProducer, "send", apart)


@mistake("a chunk is read though not all that was published is visible", _CALM, commits_wait=True)
def _not_visible() -> None:
    """So that an older row may be published after a newer one."""

    def always(*_arguments: Any) -> bool:
        return True

    put(PublishedXids, "seen_by", always)


@mistake("the last chunk of a table is skipped", _CALM)
def _last_skipped() -> None:
    read = RowReader.read

    def short(self: RowReader, *arguments: Any, **limits: Any) -> Chunk:
        chunk = read(self, *arguments, **limits)
        return chunk._replace(parts=[]) if chunk.ends else chunk

    put(RowReader, "read", short)


@mistake("rows of a snapshot are read on from the beginning after a restart", _KILLS)
def _read_again() -> None:
    """As if Kafka had no progress of a table before it is done."""
    known = session_snapshot.read_known

    def forgetful(topics: Any) -> Known:
        found = known(topics)
        return found._replace(progress=[one for one in found.progress if one.done])

    put(session_snapshot, "read_known", forgetful)


@mistake("what a signal asks for is forgotten at a restart", _KILLS)
def _requests_forgotten() -> None:
    known = session_snapshot.read_known

    def forgetful(topics: Any) -> Known:
        return known(topics)._replace(requests=[])

    put(session_snapshot, "read_known", forgetful)


@mistake("deletes are left out of a repair", "slot lost")
def _no_deletes() -> None:
    found = RowStore.differences

    def some(self: RowStore) -> Iterator[Any]:
        return (one for one in found(self) if one.op != "d")

    put(RowStore, "differences", some)
