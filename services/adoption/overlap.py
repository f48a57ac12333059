"""The changes that the slot decodes again, without those that Kafka has already. Pure.

    a key whose last record is still to come     left out
    that record's change                         left out; its tombstone, too, if that is there
    a key without a record to come               published
    a record without a key                       left out as often as it is there

Once everything is met, all is published: nothing of this is left in the bridge that goes on.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from schemas.shaping import field_name
from services.adoption.decoding import Decode, decode_json
from services.adoption.last_records import (
    Beyond,
    Keyless,
    Transaction,
    digest,
    row_of,
    unmatched,
)
from services.bridge.compiled import Messages
from services.bridge.events.envelope import Envelope
from services.bridge.events.event import Event
from services.bridge.events.rows import Writer
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.messages import Delete, Insert, Message, Relation, Truncate, Update
from services.bridge.progress.ledger import Position
from services.bridge.transactions.assembler import Assembler, EventBatch

_TABLELESS: Final = ""


class LeftOut:
    """Decides of each event, in the order in which the slot decodes them.

    `complete_lsn`: transactions that end here or before are whole in Kafka, Debezium says.
    `decode`: of the values' format.
    """

    def __init__(
        self,
        beyond: Beyond,
        transactions: Mapping[int, Transaction],
        complete_lsn: int,
        decode: Decode = decode_json,
    ) -> None:
        self._decode = decode
        self._last = dict(beyond.last)
        self._keyless = dict(beyond.keyless)
        self._met: set[Keyless] = set()
        self._messages = dict(beyond.messages)
        self._tombstones: dict[tuple[str, bytes], bool] = {}
        self._transactions = transactions
        self._complete_lsn = complete_lsn
        self.left_out: Counter[str] = Counter()
        """Records that Kafka has already, by topic."""
        self.lacking: Counter[str] = Counter()
        """Records that Kafka lacks though Debezium says that it has published them."""
        self.published: Counter[str] = Counter()

    def takes(self, event: Event, xid: int, lsn: int) -> bool:
        """Tell whether Kafka lacks this event of the change at `lsn`."""
        lacks = not self._has(event, xid, lsn)
        (self.published if lacks else self.left_out)[event.topic] += 1
        one = self._transactions.get(xid)
        if lacks and event.value is not None and one is not None:
            self.lacking[event.topic] += one.end_lsn <= self._complete_lsn
        return lacks

    def finish(self) -> None:
        """Raise OperatorNeeded where Kafka has something that was not met."""
        records = {one.where: one.lsn for one in self._last.values()}
        records |= {one.topic: one.lsn for one in self._keyless if one not in self._met}
        records |= {where: at[1] for at, where in self._messages.items()}
        if records:
            raise unmatched(records)

    def _has(self, event: Event, xid: int, lsn: int) -> bool:
        """Tell whether Kafka has a change's event, and count it as met."""
        if event.table == _TABLELESS:
            return self._messages.pop((event.topic, event.lsn), None) is not None
        if event.key is None:
            return self._has_keyless(event, xid, lsn)
        topic_key = (event.topic, event.key)
        last = self._last.get(topic_key)
        if event.value is None:
            return self._tombstones.pop(topic_key, last is not None)
        if last is not None and (last.xid, last.lsn) == (xid, lsn):
            del self._last[topic_key]
            if last.op == "d":
                self._tombstones[topic_key] = last.removed
        return last is not None

    def _has_keyless(self, event: Event, xid: int, lsn: int) -> bool:
        """Tell whether Kafka has one more event of these rows, of a table without a key."""
        if not self._keyless:
            return False
        document = self._decode(event.value or b"null")
        if field_name("op") in document:
            op, images = document[field_name("op")], digest(None, row_of(document))
        else:
            op, images = document["op"], digest(document.get("before"), document.get("after"))
        one = Keyless(event.topic, xid, lsn, op, images)
        count = self._keyless.get(one, 0)
        if count:
            self._met.add(one)
            self._keyless[one] = count - 1
        return count > 0


class OverlapEnvelope(Envelope):
    """An envelope that can take an event back, so that its transaction counts what is sent."""

    def _require_current(self, relation: Relation, suspects: set[int], seq: int) -> None:
        """Raise nothing: no other session begins behind the changes before, so it is refused."""

    def uncount(self, table: str) -> None:
        """Take the last event of `table` (``""``: a logical message) back."""
        self.total -= 1
        if table == _TABLELESS:
            self._messages -= 1
            return
        counter = self._counters[table]
        counter.events -= 1
        if not counter.events:
            self._touched.remove(counter)


class OverlapAssembler(Assembler):
    """An assembler that leaves out what `left_out` says. Every row goes the plain way."""

    def __init__(
        self,
        envelope: OverlapEnvelope,
        start: Position,
        transaction_bytes_max: int,
        left_out: LeftOut,
    ) -> None:
        super().__init__(envelope, start, transaction_bytes_max)
        self._counting = envelope
        self._left_out = left_out

    def transactions(
        self, messages: Messages, index: int, decoder: Decoder, now_us: int
    ) -> tuple[int, EventBatch | None]:
        """Take none at once."""
        return index, None

    def rows(self, messages: Messages, index: int, decoder: Decoder) -> int:
        """Take none at once."""
        return index

    def row(self, writer: Writer, payload: bytes, at: int, lsn: int) -> bool:
        """Take none without decoding it."""
        return False

    def _encoded(
        self, change: Insert | Update | Delete | Truncate, lsn: int, number: int
    ) -> list[Event]:
        return self._lacking(super()._encoded(change, lsn, number), lsn)

    def publishes(self, prefix: str) -> bool:
        """Publish all messages, as the connector did."""
        return True

    def _message_events(self, message: Message, seq: int) -> list[Event]:
        return self._lacking(super()._message_events(message, seq), message.lsn)

    def _lacking(self, events: list[Event], lsn: int) -> list[Event]:
        """Return the events that Kafka lacks, and take the others back from the counts."""
        xid = self._stamp.xid
        lacking = [event for event in events if self._left_out.takes(event, xid, lsn)]
        kept = {*map(id, lacking)}
        for event in events:
            if event.value is not None and id(event) not in kept:
                self._counting.uncount(event.table)
        return lacking
