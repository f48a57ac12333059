"""A change to its events: topic, key, value, headers. Pure; one encoder is built per relation.

    change                       events                             numbers
    insert                       c                                  1
    update                       u                                  1; 2 with an old row
    update of the key, or of     d + tombstone (seq n), c (n+1)     2
    what chooses the partition
    delete                       d + tombstone (seq n)              1
    truncate                     t for each relation,               1 for each relation
                                 a copy in every partition
    logical message              m                                  1
    begin, end                   BEGIN, END: transaction topic      none
    what settings leave out      none                               as above

Numbers depend on the change alone, never on settings: resuming in the middle of a transaction by
its numbers is right also after the settings have changed. `total_order` and the counts of END are
of the events that are sent.
"""

from collections.abc import Mapping
from json.encoder import encode_basestring as quoted
from typing import Any, Final, Literal

from schemas.events import message_topic, transaction_topic
from schemas.shaping import FlatSettings
from services.bridge import compiled
from services.bridge.compiled import Messages
from services.bridge.events.description import Describe
from services.bridge.events.errors import (
    DescriptionOutdated,
    HiddenByPartition,
    OldRowHidden,
    RowRefused,
    delete_without_key,
    updated_outbox,
)
from services.bridge.events.event import EVENT_OVERHEAD_BYTES, Ended, Event, Stamp
from services.bridge.events.fields import Fields
from services.bridge.events.leaf_identities import leaf_identities
from services.bridge.events.rows import Table, Writer
from services.bridge.events.sent_relations import SentRelations
from services.bridge.events.shaping.outbox import Headers, OutboxMessages, OutboxTable
from services.bridge.events.transaction_texts import Counter, TransactionTexts
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.messages import (
    Delete,
    Insert,
    Message,
    Relation,
    Row,
    Truncate,
    Update,
)

NEW_KEY_HEADER: Final = "__debezium.newkey"
OLD_KEY_HEADER: Final = "__debezium.oldkey"
_NO_LIMIT: Final = 2**62


class Envelope:
    """Encodes one connection's changes. `name` is the topic prefix, `database` the source's."""

    def __init__(
        self,
        name: str,
        database: str,
        timeline: int,
        describe: Describe,
        *,
        tombstones: bool,
        transaction_metadata: bool,
        encoders: Encoders | None = None,
        flat: FlatSettings | None = None,
        snapshot: str = "false",
        outbox_messages: OutboxMessages | None = None,
        dead_rows: bool = False,
    ) -> None:
        """`dead_rows`: a row that is refused (RowRefused) is a dead letter, not an error."""
        self._outbox_messages = outbox_messages
        self._dead_rows = dead_rows
        self._encoders = encoders or Encoders()
        self._name = name
        self._describe = describe
        self._shapes: list[Event] = []
        self._unsettled: list[int] = []
        self._tombstones = tombstones
        self._metadata = transaction_metadata
        self.tables: dict[int, tuple[Relation, Table]] = {}
        self.sent = SentRelations()
        self._judged = 0, 0
        self._counters: dict[str, Counter] = {}
        self._touched: list[Counter] = []
        self._messages = 0
        self.total = 0
        """Events of the current transaction so far, tombstones left out."""
        whose = (name, database, timeline)
        self._fields = None
        if flat is not None:
            self._fields = Fields(flat, *whose, metadata=transaction_metadata, snapshot=snapshot)
        self._texts = TransactionTexts(
            *whose, metadata=transaction_metadata, snapshot=snapshot, fields=self._fields
        )
        self._boundary_topic = transaction_topic(name)
        self._transactions: Any = None
        if compiled.engine is not None and transaction_metadata:
            parts = (self._texts.source, self._texts.source_db, self._texts.source_timeline)
            flat_parts = () if self._fields is None else self._fields.transaction
            self._transactions = compiled.engine.transactions.Transactions(
                Event, Stamp, Ended, self._boundary_topic, *parts, flat_parts, EVENT_OVERHEAD_BYTES
            )

    def begin(self, stamp: Stamp, counts: Mapping[str, int] | None = None) -> None:
        """Prepare the parts that the events of the transaction `stamp` have in common.

        `counts`: what `counts` said at the point where the transaction is resumed.
        """
        self._texts.begin(stamp)
        self._reset(counts)
        while self._unsettled:
            self.tables.pop(self._unsettled.pop(), None)

    def _reset(self, counts: Mapping[str, int] | None) -> None:
        """Begin a transaction's counts anew, or go on from the `counts` of its published part."""
        for counter in self._touched:
            counter.events = 0
        self._touched.clear()
        counts = counts or {}
        self.total, self._messages = sum(counts.values()), counts.get("", 0)
        for name, events in counts.items():
            if name:
                counter = self._counter(name)
                counter.events = events
                self._touched.append(counter)

    def counts(self) -> dict[str, int]:
        """Count the current transaction's events by table, logical messages under ``""``."""
        result = {counter.table: counter.events for counter in self._touched}
        return result | {"": self._messages} if self._messages else result

    def take_shapes(self) -> list[Event]:
        """Return the schema events that belong before the events made last, and forget them."""
        shapes, self._shapes = self._shapes, []
        return shapes

    def boundary(self, status: Literal["BEGIN", "END"]) -> list[Event]:
        """Return the BEGIN of the current transaction, or its END with the counts so far."""
        if not self._metadata:
            return []
        return [
            Event(self._boundary_topic, *self._texts.boundary(status, self.total, self._touched))
        ]

    def writer(self, change: Insert | Update) -> Writer | None:
        """Return the encoder of rows like this change, encoded just now; None without one.

        It is valid until the server describes the relation anew.
        """
        relation = change.relation
        known, table = self.tables.get(relation.oid, (None, None))
        if known is not relation or table is None or relation.oid in self._unsettled:
            return None
        op = "c" if isinstance(change, Insert) else "u"
        old = isinstance(change, Update) and change.old is not None
        write = table.writer(Event, op, len(relation.columns), metadata=self._metadata, old=old)
        return None if write is None else Writer(write, table.counter, 2 if old else 1)

    def rows(
        self,
        messages: Messages,
        index: int,
        at: int,
        writers: dict[bytes, Writer],
        events: list[Event],
        seq: int,
        room_bytes: int = _NO_LIMIT,
        *,
        end: int = _NO_LIMIT,
        lsn: int = 0,
    ) -> tuple[int, int, int]:
        """Append the events of rows from `index` on, values at `at`, to `events` (compiled).

        Stop at the first message that is not such a row, at `end`, or when the events have more
        than `room_bytes`. Return the index there, the next seq, and the events' bytes.
        `lsn`: that of all events; 0: each has its message's.
        """
        if compiled.engine is None:
            return index, seq, 0
        texts = self._texts
        index, seq, self.total, size = compiled.engine.transactions.take_rows(
            messages,
            index,
            end,
            at,
            writers,
            events,
            self._touched,
            lsn,
            seq,
            self.total,
            room_bytes,
            EVENT_OVERHEAD_BYTES,
            texts.head,
            texts.order,
            texts.tail,
            texts.flat,
        )
        return index, seq, size

    def transactions(
        self,
        messages: Messages,
        index: int,
        at: int,
        writers: dict[bytes, Writer],
        previous_lsn: int,
        floor_lsn: int,
        now_us: int,
        room_bytes: int,
        bytes_max: int,
    ) -> tuple[int, list[Event], list[Ended], int]:
        """Return the events of whole transactions from `index` on, BEGIN and END too (compiled).

        As `rows` does, while the transactions commit at `floor_lsn` or after and have no more than
        `bytes_max` each; `previous_lsn`: the commit before the first. Return the index of the first
        message that is not taken, all events, where each transaction ends, and their bytes.
        """
        if self._transactions is None or self._unsettled:
            return index, [], [], 0
        self._reset(None)
        found: tuple[int, list[Event], list[Ended], int] = self._transactions.take(
            messages, index, at, writers, previous_lsn, floor_lsn, now_us, room_bytes, bytes_max
        )
        return found

    def events_of(
        self, change: Insert | Update | Delete | Truncate, lsn: int, seq: int
    ) -> list[Event]:
        """Return the events of a change, as the settings have it."""
        if isinstance(change, Truncate):
            return self.truncate(change, lsn, seq)
        table = self._table(change.relation, seq)
        change = table.with_old_kind(change)
        try:
            published = table.published(change)
        except RowRefused as error:
            if isinstance(error, HiddenByPartition):
                self._require_current(change.relation, {leaf.oid for leaf in error.leaves}, seq)
            row = change.old if isinstance(change, Delete) else change.new
            return [self._unpublished(table, row, error, lsn, seq)]
        if published is None:
            return []
        change = published
        try:
            if isinstance(change, Insert):
                return self.insert(change, lsn, seq)
            if isinstance(change, Update):
                return self.update(change, lsn, seq)
            return self.delete(change, lsn, seq)
        except OldRowHidden as error:
            self._require_current(change.relation, {leaf.oid for leaf in error.leaves}, seq)
            raise

    def _require_current(self, relation: Relation, suspects: set[int], seq: int) -> None:
        """Raise DescriptionOutdated where the catalog differs from what the stream said before."""
        judged = relation.oid, self._texts.stamp.commit_lsn
        if judged == self._judged or not all(map(self.sent.former, suspects)):
            return  # where one is certain, a new session would refuse the change too
        self._judged = judged
        del self.tables[relation.oid]  # made again, with the partitions as they are now
        for leaf in self._table(relation, seq).leaves:
            if leaf.outdated and leaf.oid in suspects:
                raise DescriptionOutdated(leaf, f"{relation.schema}.{relation.table}")

    def _unpublished(self, table: Table, row: Row, error: RowRefused, lsn: int, seq: int) -> Event:
        if not self._dead_rows:
            raise error
        self._count(table.counter)
        return table.unpublished(row, str(error), seq, lsn)

    def insert(self, change: Insert, lsn: int, seq: int) -> list[Event]:
        """Return the event of an insert; for an outbox's row, the message that the row holds."""
        table = self._table(change.relation, seq)
        if "c" in table.skipped:
            return []
        if table.outbox is not None:
            return self._outbox_message(table, table.outbox, change.new, lsn, seq)
        table.require_identified(change, lsn)
        after, headers = table.encoded(change.new)
        value = self._value(table, "null", after, "c", lsn, seq)
        return [table.event("c", table.key(change.new), value, headers, seq, lsn)]

    def update(self, change: Update, lsn: int, seq: int) -> list[Event]:
        """Return the event of an update, or the three of one that changes key or partition."""
        table = self._table(change.relation, seq)
        if "u" in table.skipped or table.unchanged(change):
            return []
        if table.outbox is not None:
            raise updated_outbox(table.name, lsn)
        old, new = change.old, change.present_values
        table.require_identified(change, lsn)
        (after, row_headers), key = table.encoded(new), table.key(new)
        if old is not None and (old_key := table.key(old)) != key:
            headers = key.as_header(NEW_KEY_HEADER)
            events = self._removal(table, old, headers, lsn, seq)
            added = self._value(table, "null", after, "c", lsn, seq + 1)
            headers = [*(old_key.as_header(OLD_KEY_HEADER) or ()), *(row_headers or ())]
            events.append(table.event("c", key, added, headers, seq + 1, lsn))
            return events
        before = "null" if old is None or table.fields is not None else table.row(old)
        value = self._value(table, before, after, "u", lsn, seq)
        return [table.event("u", key, value, row_headers, seq, lsn)]

    def delete(self, change: Delete, lsn: int, seq: int) -> list[Event]:
        """Return the event of a delete and its tombstone."""
        table = self._table(change.relation, seq)
        if "d" in table.skipped or table.outbox is not None:
            return []
        table.require_identified(change, lsn)
        return self._removal(table, change.old, None, lsn, seq)

    def _removal(
        self, table: Table, old: Row, headers: Headers | None, lsn: int, seq: int
    ) -> list[Event]:
        """Return the events of a row that is gone. Raise BadInput where a flat row has no key."""
        key = table.key(old)
        if table.fields is not None and not table.fields.rewrites:
            if key.data is None:
                raise delete_without_key(table.name, lsn)
            self._count(table.counter)
            position = table.fields.position("d", self._texts.stamp.commit_lsn, seq)
            return [table.event("d", key, None, [*(headers or ()), *position], seq, lsn)]
        value = self._value(table, table.row(old), "null", "d", lsn, seq)
        events = [table.event("d", key, value, headers, seq, lsn)]
        if self._tombstones and key.data is not None:
            events.append(table.event("", key, None, headers, seq, lsn))
        return events

    def truncate(self, change: Truncate, lsn: int, seq: int) -> list[Event]:
        """Return one event for each emptied table, numbered from `seq`."""
        events = []
        for number, relation in enumerate(change.relations, seq):
            table = self._table(relation, number)
            if "t" in table.skipped or table.outbox is not None:
                continue
            value = self._value(table, "null", "null", "t", lsn, number)
            place = table.name, number, lsn
            events.append(Event(table.topic, None, value, None, True, *place, op="t"))
        return events

    def message(self, change: Message, seq: int) -> list[Event]:
        """Return the event of a logical message; of an outbox's message, what it holds."""
        self.total += 1
        self._messages += 1
        outbox = self._outbox_messages
        if outbox is not None and change.prefix == outbox.prefix:
            parts = outbox.message(change.content, self._texts.stamp.commit_lsn, seq)
            return [Event(*parts[:4], False, "", seq, change.lsn, parts[4])]
        key = f'{{"prefix":{quoted(change.prefix)}}}'.encode()
        value = self._texts.message(change, self._encoders.binary(change.content), seq)
        return [Event(message_topic(self._name), key, value, None, False, "", seq, change.lsn)]

    def _outbox_message(
        self, table: Table, outbox: OutboxTable, row: Row, lsn: int, seq: int
    ) -> list[Event]:
        self._count(table.counter)
        parts = outbox.message(row, self._texts.stamp.commit_lsn, seq)
        return [Event(*parts[:4], False, table.name, seq, lsn, parts[4], "c")]

    def _table(self, relation: Relation, seq: int) -> Table:
        """Return the relation's encoder. Make it when the server has described the relation anew.

        `seq`: the number of the change that needs it, which a new shape's event gets.
        """
        known = self.tables.get(relation.oid)
        if known is None or known[0] is not relation:
            described = self._describe(relation, self._texts.stamp, seq)
            if described.shape is not None:
                self._shapes.append(described.shape)
            if not described.settled:
                self._unsettled.append(relation.oid)
            counter = self._counter(f"{relation.schema}.{relation.table}")
            fields = self._fields if described.plan.flat else None
            leaves = leaf_identities(relation, described.partitions, self.sent)
            made = (described.plan, counter, self._encoders, described.form, fields)
            known = self.tables[relation.oid] = relation, Table(*made, leaves=leaves)
        return known[1]

    def _counter(self, table: str) -> Counter:
        return self._counters.setdefault(table, Counter(table, quoted(table)))

    def _value(self, table: Table, before: str, after: str, op: str, lsn: int, seq: int) -> bytes:
        self._count(table.counter)
        return table.value(before, after, op, lsn, seq, self._texts, self.total)

    def _count(self, counter: Counter) -> None:
        if not counter.events:
            self._touched.append(counter)
        counter.events += 1
        self.total += 1
