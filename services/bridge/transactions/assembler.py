"""Messages to batches of events, in commit order, without what Kafka has already. Pure.

A source transaction is held until its Commit, so that a Kafka transaction only ever contains whole
ones; one larger than `transaction_bytes_max` leaves in several batches, numbered by seq:

    state      message             next       out
    outside    Begin               inside
    outside    Message             outside    batch (its own LSN is its commit)
    outside    mark of a snapshot  outside    batch with this mark, without events
    outside    keepalive           outside    batch without events
    inside     change, Message     inside     batch, when the held events exceed the limit
    inside     Commit              outside    batch (complete)
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from schemas.events import HEARTBEAT_PREFIX, MARKER_PREFIX
from schemas.snapshot import SNAPSHOT_PREFIX
from services.bridge.compiled import Messages
from services.bridge.events.envelope import Envelope
from services.bridge.events.errors import not_encoded
from services.bridge.events.event import Ended, Event, Stamp, size_of
from services.bridge.events.rows import Table
from services.bridge.events.sent_relations import SentRelations
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.errors import misplaced
from services.bridge.pgoutput.messages import (
    AnyMessage,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Origin,
    Relation,
    Truncate,
    Type,
    Update,
)
from services.bridge.progress.ledger import Position
from services.bridge.transactions.annotations import Annotations

EVENT_BATCH_BYTES = 2**18
"""Small transactions are put together into batches of about this size."""


class EventBatch(NamedTuple):
    """Events that go into one Kafka transaction together, and the position after them.

    `position.seq` > 0: the source transaction goes on, and has had `counts` events by table so far.
    `dropped`: numbers of events that Kafka has already. `stamp`: the source transaction.
    `staging`: records of prepared transactions, and of signals. `ended`: where there are several
    whole transactions, where each ends; position and stamp are then the last one's.
    `mark`: a chunk of a snapshot's rows belongs here; the text that its mark has.
    """

    events: list[Event]
    position: Position
    bytes: int
    dropped: int
    stamp: Stamp | None = None
    counts: Mapping[str, int] | None = None
    staging: Sequence[Event] = ()
    ended: Sequence[Ended] = ()
    mark: str = ""

    def transactions(self) -> Iterator[tuple[list[Event], Stamp]]:
        """Yield the events of each transaction in it, or of a part of one, with its stamp."""
        if not self.ended and self.stamp is not None:
            yield self.events, self.stamp
        start = 0
        for end, stamp, _ in self.ended:
            yield self.events[start:end], stamp
            start = end


class Assembler:
    """Assembles one connection's messages to batches, from the resume point `start` on.

    `counts`: where `start` is in the middle of a transaction, its events so far, by table.
    """

    def __init__(
        self,
        envelope: Envelope,
        start: Position,
        transaction_bytes_max: int,
        counts: Mapping[str, int] | None = None,
        shaping: Shaping | None = None,
    ) -> None:
        self._prefixes = shaping.message_prefixes if shaping else frozenset((MARKER_PREFIX,))
        self._annotations = Annotations(shaping.annotations if shaping else None)
        self._envelope = envelope
        self._start = start
        self._start_counts = counts
        self._bytes_max = transaction_bytes_max
        self._last = Position(start.commit_lsn, start.end_lsn, 0)
        self._begin: Begin | None = None
        self._events: list[Event] = []
        self._bytes = 0
        self._seq = 0
        self._skip_below = 0
        self._dropped = 0
        self._announced = False

    @property
    def inside(self) -> bool:
        """Whether a transaction is open: nothing after `last` may be confirmed."""
        return self._begin is not None

    @property
    def sent(self) -> SentRelations:
        """The server's descriptions of relations, those in kept transactions too."""
        return self._envelope.sent

    @property
    def tables(self) -> Mapping[int, tuple[Relation, Table]]:
        """The tables that have had events, by oid, each with its relation as it was then."""
        return self._envelope.tables

    @property
    def position(self) -> Position:
        """The position after the last whole transaction."""
        return self._reached(self._last)

    def take(self, decoder: Decoder, payload: bytes, lsn: int, now_us: int) -> EventBatch | None:
        """Take one message as it came, as `feed` does; `rows` may take the next one like it."""
        message = decoder.decode(payload, lsn)
        batch = self.feed(message, lsn, now_us)
        if isinstance(message, Insert) or (isinstance(message, Update) and message.old_kind != "K"):
            writer = self._envelope.writer(message) if self._seq > self._skip_below else None
            if writer is not None:
                decoder.writers[decoder.row_kind(payload)] = writer
        return batch

    def rows(self, messages: Messages, index: int, decoder: Decoder) -> int:
        """Take rows from `index` on; the index of the first message that needs another way.

        Rows of a transaction that is open, with known writers, until `full` has something.
        """
        if self._begin is None or self._seq < self._skip_below:
            return index
        at, writers, since = decoder.row_at, decoder.writers, len(self._events)
        room_bytes = self._bytes_max - self._bytes
        index, self._seq, size = self._envelope.rows(
            messages, index, at, writers, self._events, self._seq, room_bytes
        )
        self._bytes += size
        if self._annotations.headers:
            self._events[since:] = self._annotations.on(self._events[since:])
            self._bytes += self._annotations.bytes * (len(self._events) - since)
        return index

    def transactions(
        self, messages: Messages, index: int, decoder: Decoder, now_us: int
    ) -> tuple[int, EventBatch | None]:
        """Take whole transactions from `index` on; the next index, and their batch.

        None where there is no compiled way: they are taken message by message.
        """
        if self._begin is not None or self._last.commit_lsn < self._start.commit_lsn:
            return index, None
        floor_lsn = max(self._start.end_lsn, self._start.commit_lsn + 1)
        index, events, ended, size = self._envelope.transactions(
            messages,
            index,
            decoder.row_at,
            decoder.writers,
            self._last.commit_lsn,
            floor_lsn,
            now_us,
            min(EVENT_BATCH_BYTES, self._bytes_max),
            self._bytes_max,
        )
        if not ended:
            return index, None
        _, stamp, end_lsn = ended[-1]
        self._last = Position(stamp.commit_lsn, end_lsn, 0)
        return index, EventBatch(events, self._last, size, 0, stamp, ended=ended)

    def full(self) -> EventBatch | None:
        """Return a part of the open transaction if the held events exceed the limit, else None."""
        if self._begin is None or self._bytes <= self._bytes_max:
            return None
        return self._part(self._begin)

    def feed(self, message: AnyMessage, lsn: int, now_us: int) -> EventBatch | None:
        """Take one message that came at WAL position `lsn`; `now_us` since 1970.

        Return a batch when one is due. Raise DecodeError for a message out of place.
        """
        if isinstance(message, Begin):
            self._open(message, lsn, now_us)
            return None
        if isinstance(message, Commit):
            return self._close(message, lsn)
        if isinstance(message, (Insert, Update, Delete, Truncate)):
            return self._change(message, lsn)
        if isinstance(message, Message):
            return self._message(message, lsn, now_us)
        if isinstance(message, Relation):
            self.sent.take(message)
        elif not isinstance(message, (Type, Origin)):
            raise misplaced(f"{type(message).__name__}, which was not asked for,", lsn)
        return None

    def advance(self, lsn: int) -> EventBatch | None:
        """Move the position to `lsn`: a keepalive said that nothing before it is left to send.

        Return an empty batch that carries the position, None inside a transaction or without
        progress.
        """
        if self.inside or lsn <= self._last.end_lsn:
            return None
        self._last = Position(self._last.commit_lsn, lsn, 0)
        return EventBatch([], self._reached(self._last), 0, 0)

    def _reached(self, position: Position) -> Position:
        """Return `position`, with what Kafka has of a later transaction.

        `position` is after something whole. After a resumption inside a large transaction, other
        positions can pass before that comes again: its events that are in Kafka must not be
        forgotten.
        """
        if self._start.seq and position.end_lsn <= self._start.commit_lsn:
            return Position(self._start.commit_lsn, position.end_lsn, self._start.seq)
        return position

    def _open(self, begin: Begin, lsn: int, now_us: int) -> None:
        """Begin a transaction: skip what Kafka has of it, all or the first `seq` numbers."""
        if self._begin is not None:
            raise misplaced("a Begin inside a transaction", lsn)
        self._begin = begin
        self.sent.begin()
        self._seq = 0
        self._skip_below = 0
        counts = None
        if begin.commit_lsn < self._start.end_lsn:
            self._skip_below = 2**63
        elif begin.commit_lsn == self._start.commit_lsn:
            self._skip_below = self._start.seq
            counts = self._start_counts
        self._announced = self._skip_below > 0 and (counts is None or any(counts.values()))
        self._stamp = Stamp(
            begin.xid, begin.commit_lsn, begin.commit_time_us, self._last.commit_lsn, now_us
        )
        self._envelope.begin(self._stamp, counts)
        self._annotations.begin()

    def _change(self, change: Insert | Update | Delete | Truncate, lsn: int) -> EventBatch | None:
        """Add a change's events to the transaction; return a batch when it is full."""
        if self._begin is None:
            raise misplaced("a change outside a transaction", lsn)
        relations = change.relations if isinstance(change, Truncate) else (change.relation,)
        self.sent.settle([relation.oid for relation in relations])
        number = self._seq
        self._seq += numbers(change)
        if number < self._skip_below:
            self._dropped += self._seq - number
            return None
        try:
            events = self._encoded(change, lsn, number)
        except ValueError as error:
            table = f"{relations[0].schema}.{relations[0].table}"
            raise not_encoded(error, table, lsn) from error
        if shapes := self._envelope.take_shapes():
            self._events += shapes
            self._bytes += size_of(shapes)
        self._hold(events)
        return self.full()

    def _encoded(
        self, change: Insert | Update | Delete | Truncate, lsn: int, number: int
    ) -> list[Event]:
        return self._envelope.events_of(change, lsn, number)

    def _message(self, message: Message, lsn: int, now_us: int) -> EventBatch | None:
        """Add a logical message's event to its transaction; return a batch when it is full.

        A non-transactional message is a batch of its own; a snapshot's mark is one without events.
        """
        if message.transactional:
            if self._begin is None:
                raise misplaced("a transactional message outside a transaction", lsn)
            if message.prefix == HEARTBEAT_PREFIX:
                return None
            self._seq += 1
            if self._annotations.take(message, self._seq - 1) or not self.publishes(message.prefix):
                return None
            if self._seq <= self._skip_below:
                self._dropped += 1
                return None
            self._hold(self._message_events(message, self._seq - 1))
            return self.full()
        wanted = message.prefix == SNAPSHOT_PREFIX or self.publishes(message.prefix)
        if message.lsn <= self._start.end_lsn or not wanted:
            return None
        if self._begin is not None:
            raise misplaced("a non-transactional message inside a transaction", lsn)
        # Its LSN is the end of its record, where a commit record may begin: one less is its own.
        own_lsn = message.lsn - 1
        stamp = Stamp(0, own_lsn, now_us, self._last.commit_lsn, now_us)
        self._last = Position(own_lsn, message.lsn, 0)
        if message.prefix == SNAPSHOT_PREFIX:
            mark = message.content.decode(errors="replace")
            return EventBatch([], self._reached(self._last), 0, 0, stamp, mark=mark)
        self._stamp = stamp
        self._envelope.begin(stamp)
        events = self._message_events(message, 0)
        return EventBatch(events, self._reached(self._last), size_of(events), 0, stamp)

    def publishes(self, prefix: str) -> bool:
        """Tell whether logical messages with this prefix are published."""
        return prefix in self._prefixes

    def _message_events(self, message: Message, seq: int) -> list[Event]:
        return self._envelope.message(message, seq)

    def _hold(self, events: list[Event]) -> None:
        if self._annotations.headers:
            events = self._annotations.on(events)
            self._bytes += self._annotations.bytes * len(events)
        self._events += events
        self._bytes += size_of(events)

    def _part(self, begin: Begin) -> EventBatch:
        position = Position(begin.commit_lsn, self._last.end_lsn, self._seq)
        return self._release(self._announcement(), [], position)._replace(
            counts=self._envelope.counts()
        )

    def _announcement(self) -> list[Event]:
        """Return a BEGIN, unless the transaction already has one or has no events."""
        if self._announced or not self._envelope.total:
            return []
        self._announced = True
        return self._annotations.on(self._envelope.boundary("BEGIN"))

    def _close(self, commit: Commit, lsn: int) -> EventBatch | None:
        """End the transaction; return its last batch, None if Kafka has it."""
        if self._begin is None or commit.commit_lsn != self._begin.commit_lsn:
            raise misplaced("a Commit that no Begin announced", lsn)
        self._begin = None
        if commit.end_lsn <= self._start.end_lsn:
            self._dropped = 0
            return None
        self._last = Position(commit.commit_lsn, commit.end_lsn, 0)
        before = self._announcement()
        end = self._annotations.on(self._envelope.boundary("END")) if self._announced else []
        return self._release(before, end, self._reached(self._last))

    def _release(self, before: list[Event], after: list[Event], position: Position) -> EventBatch:
        """Return the held events as a batch, between `before` and `after`, and hold none."""
        events = [*before, *self._events, *after] if before or after else self._events
        batch = EventBatch(events, position, self._bytes, self._dropped, self._stamp)
        self._events = []
        self._bytes = 0
        self._dropped = 0
        return batch


def numbers(change: Insert | Update | Delete | Truncate) -> int:
    """Return how many numbers (seq) a change takes: as many as the events it may become.

    The count is the same under any settings.
    """
    if isinstance(change, Update):
        return 1 if change.old is None else 2
    return len(change.relations) if isinstance(change, Truncate) else 1
