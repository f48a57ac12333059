"""Deliberate small mistakes in the bridge, one at a time: the rig must find each.

`commit(name)` makes it in this process, before the bridge runs. `control` changes nothing that
matters: nothing may be found.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaException

from schemas.errors import SlotbridgeError
from schemas.events import PreparedRecord
from schemas.progress import ProgressRecord
from services.bridge.events.event import Event
from services.bridge.pgoutput.messages import Begin
from services.bridge.progress import consistency, ledger
from services.bridge.progress.ledger import Ledger, Position
from services.bridge.progress.wal_commit import NO_COMMIT
from services.bridge.recovery import start_check
from services.bridge.recovery.resume_record import Records
from services.bridge.session import start as session_start
from services.bridge.sink import options, transactional_producer
from services.bridge.sink.group_commit import GroupCommit
from services.bridge.sink.options import producer_options
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.source.replication_connection import ReplicationConnection
from services.bridge.transactions.assembler import Assembler, EventBatch
from services.bridge.transactions.prepared import Prepared
from services.bridge.transactions.spool import Spool
from services.bridge.transactions.streams import Streams
from tests.torture import snapshot_sabotage, start_sabotage
from tests.torture.mistakes import (
    commit,
    commits_wait,
    drill_of,
    mistake,
    names,
    put,
    telling,
)

CONTROL: Final = "control: the server is asked for more than is needed"


@mistake(CONTROL)
def _control() -> None:
    """From the slot's own position on: what Kafka has comes again, and is dropped."""
    start = ReplicationConnection.start

    def from_the_slot(self: ReplicationConnection, _lsn: int, *rest: Any, **options: Any) -> None:
        start(self, 0, *rest, **options)

    put(ReplicationConnection, "start", from_the_slot)


@mistake("the filter of what Kafka has is dropped")
def _no_filter() -> None:
    _control()
    opened = Assembler._open
    closed = Assembler._close

    def without_filter(self: Assembler, *arguments: Any) -> None:
        opened(self, *arguments)
        if self._skip_below == 2**63:
            self._skip_below = 0
            self._announced = False

    def always(self: Assembler, *arguments: Any) -> EventBatch | None:
        start = self._start
        self._start = start._replace(end_lsn=0)
        try:
            return closed(self, *arguments)
        finally:
            self._start = start

    put(Assembler, "_open", without_filter)
    put(Assembler, "_close", always)


@mistake("the slot is confirmed before Kafka has committed")
def _confirm_early() -> None:
    def report(self: Ledger, *, follow: bool = False) -> int:
        self.flushed = max(self.flushed, self.published.end_lsn)
        return self.flushed

    put(Ledger, "report", report)


@mistake("the origin is moved ahead of Kafka")
def _origin_early() -> None:
    def mark_origin(self: Ledger) -> int:
        self.origin = max(self.origin, self.published.end_lsn)
        return self.origin

    put(Ledger, "mark_origin", mark_origin)


@mistake("the progress record is in a Kafka transaction of its own, after the events")
def _progress_after() -> None:
    commit_both = TransactionalProducer.commit

    def commit_apart(self: TransactionalProducer, record: ProgressRecord) -> None:
        if self.open:
            self._producer.commit_transaction(8)
            self.open = False
        commit_both(self, record)

    put(TransactionalProducer, "commit", commit_apart)


@mistake("the progress record is written before the events, by another producer")
def _progress_before() -> None:
    send = GroupCommit._send
    commit_both = TransactionalProducer.commit

    def announce(self: GroupCommit, batch: EventBatch) -> None:
        if not self._producer.open:
            commit_both(self._producer, self._record_of(batch.position, self._counts, NO_COMMIT))
        send(self, batch)

    put(GroupCommit, "_send", announce)


@mistake("a failed commit is taken for a good one")
def _commit_unchecked() -> None:
    commit_both = TransactionalProducer.commit

    def unchecked(self: TransactionalProducer, record: ProgressRecord) -> None:
        try:
            commit_both(self, record)
        except (SlotbridgeError, KafkaException):
            self.open = False

    put(TransactionalProducer, "commit", unchecked)


@mistake("a new session goes on from memory, not from Kafka's record")
def _from_memory() -> None:
    """What was published last, whether or not Kafka has committed it."""
    memory: list[ProgressRecord] = []
    record = Records.at
    read = Topics.last_progress

    def remembered(self: Records, position: Position, *rest: Any) -> ProgressRecord:
        memory[:] = [record(self, position, *rest)]
        return memory[0]

    def last(self: Topics, slot: str) -> ProgressRecord | None:
        return memory[0] if memory else read(self, slot)

    put(Records, "at", remembered)
    put(Topics, "last_progress", last)


@mistake("the events already sent of a large transaction are forgotten")
def _seq_forgotten() -> None:
    resume = ledger.resume_at

    def resume_at(*arguments: Any) -> Position:
        return resume(*arguments)._replace(seq=0)

    put(session_start, "resume_at", resume_at)


@mistake("the number of the first event of the next part is one too high")
def _seq_too_high() -> None:
    part = Assembler._part

    def wrong(self: Assembler, begin: Begin) -> EventBatch:
        batch = part(self, begin)
        return batch._replace(position=batch.position._replace(seq=batch.position.seq + 1))

    put(Assembler, "_part", wrong)


@mistake("a keepalive makes the record forget a part", drill="part forgotten")
def _reached_forgets() -> None:
    def reached(_self: Assembler, position: Position) -> Position:
        return position

    put(Assembler, "_reached", reached)


@mistake("every transaction may be divided")
def _divided() -> None:
    change = Assembler._change

    def small(self: Assembler, *arguments: Any) -> EventBatch | None:
        if self._bytes_max > 2**12:
            self._bytes_max = 2**12
        return change(self, *arguments)

    put(Assembler, "_change", small)


@mistake("the end of a transaction is confirmed with its first part")
def _part_confirms_all() -> None:
    """As if the commit's end were the resume point of a part."""
    part = Assembler._part

    def wrong(self: Assembler, begin: Begin) -> EventBatch:
        batch = part(self, begin)
        past = begin.commit_lsn + 64
        return batch._replace(position=batch.position._replace(end_lsn=past))

    put(Assembler, "_part", wrong)


@mistake("a keepalive within a transaction confirms it")
def _keepalive_inside() -> None:
    """The position is that of what the server has sent, whatever is still in the bridge."""

    def advance(self: Assembler, lsn: int) -> EventBatch | None:
        lsn += 4096
        if lsn <= self._last.end_lsn:
            return None
        self._last = Position(self._last.commit_lsn, lsn, 0)
        return EventBatch([], self._reached(self._last), 0, 0)

    put(Assembler, "advance", advance)


@mistake("subtransactions that were rolled back are published")
def _aborts_ignored() -> None:
    abort = Streams._abort

    def ignored(self: Streams, xid: int, subxid: int, lsn: int) -> None:
        if subxid == xid:
            abort(self, xid, subxid, lsn)

    put(Streams, "_abort", ignored)


@mistake("the spool of a killed bridge is not emptied")
def _spool_kept() -> None:
    made = Spool.__init__

    def kept(self: Spool, folder: Path, **options: Any) -> None:
        files = {path: path.read_bytes() for path in folder.glob("*.spool")}
        made(self, folder, **options)
        for path, content in files.items():
            path.write_bytes(content)

    put(Spool, "__init__", kept)


@mistake("staged transactions are lost at a restart")
def _staging_lost() -> None:
    def nothing(*_arguments: Any) -> list[PreparedRecord]:
        return []

    put(session_start, "load_staged", nothing)


@mistake("staging does not leave out subtransactions that were rolled back")
def _staged_aborts() -> None:
    original = Prepared._stage

    def whole(self: Prepared, prepare: Any, _aborted: Any, *, streamed: bool) -> Iterator[Any]:
        return original(self, prepare, frozenset(), streamed=streamed)

    put(Prepared, "_stage", whole)


@mistake("a decided transaction stays staged")
def _staging_stays() -> None:
    batch = Prepared._batch

    def without_tombstones(self: Prepared, staging: list[Event]) -> EventBatch:
        return batch(self, [event for event in staging if event.value is not None])

    put(Prepared, "_batch", without_tombstones)


@mistake("the progress passes a PREPARE before it is staged")
def _prepare_passed() -> None:
    """Its records are left to the next Kafka transaction."""
    original = Prepared._stage
    late: list[EventBatch] = []

    def lagging(self: Prepared, *arguments: Any, **options: Any) -> Iterator[Any]:
        yield from flushed(self)
        for batch in original(self, *arguments, **options):
            if batch is None:
                yield None
            else:
                late.append(batch)
                yield batch._replace(staging=())

    def flushed(self: Prepared) -> Iterator[Any]:
        for batch in late:
            yield batch._replace(position=self._assembler.position)
        late.clear()

    def decided(self: Prepared, *arguments: Any) -> Iterator[Any]:
        yield from flushed(self)
        yield from decide(self, *arguments)

    decide = Prepared._commit
    put(Prepared, "_stage", lagging)
    put(Prepared, "_commit", decided)


@mistake("the timeline is ignored")
def _timeline_ignored() -> None:
    def fine(*_arguments: Any) -> None:
        return

    put(consistency, "check_timeline", fine)
    put(start_check, "check_timeline", fine)
    put(consistency, "_check_branch", fine)


@mistake("another bridge is not fenced")
def _not_fenced() -> None:
    """Each process has a transactional.id of its own."""

    def own(*arguments: Any) -> dict[str, Any]:
        return producer_options(*arguments) | {"transactional.id": f"own-{os.getpid()}"}

    put(transactional_producer, "producer_options", own)


@mistake("a truncate reaches one partition only")
def _truncate_once() -> None:
    send = TransactionalProducer.send

    def once(self: TransactionalProducer, events: Any, *rest: Any) -> None:
        send(self, [event._replace(broadcast=False) for event in events], *rest)

    put(TransactionalProducer, "send", once)


@mistake("the Kafka transaction is closed between events and END")
def _closed_early() -> None:
    send = TransactionalProducer.send

    def in_two(self: TransactionalProducer, events: Any, *rest: Any) -> None:
        if len(events) < 20:
            send(self, events, *rest)
            return
        send(self, events[:-1], *rest)
        self._producer.commit_transaction(8)
        self.open = False
        send(self, events[-1:], *rest)

    put(TransactionalProducer, "send", in_two)


@mistake("several requests of the producer are under way")
def _several_under_way() -> None:
    put(options, "IN_FLIGHT", 5)


__all__ = [
    "CONTROL",
    "commit",
    "commits_wait",
    "drill_of",
    "names",
    "snapshot_sabotage",
    "start_sabotage",
    "telling",
]
