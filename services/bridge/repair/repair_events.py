"""Differences -> events c, u, d with `source.snapshot` repair, as one transaction. Pure.

As `snapshot.row_events`, with positions (commit_lsn, seq): `commit_lsn` is one byte before the new
slot begins. No transaction of the server has it, and all later ones have higher ones.
"""

import json
from typing import Final

from schemas.progress import ProgressPosition
from services.bridge.compiled import Messages
from services.bridge.events.errors import ExpressionFailed, not_encoded
from services.bridge.events.event import Event, Stamp, placeholder_values
from services.bridge.events.row_encoders import holds_placeholder
from services.bridge.events.rows import Table
from services.bridge.events.shaping.outbox import Headers
from services.bridge.pgoutput.messages import Relation, Truncate
from services.bridge.repair.comparison import Difference
from services.bridge.repair.plain_event import row_of
from services.bridge.snapshot.copied_rows import ROW_AT
from services.bridge.snapshot.row_events import RowEvents

_BEFORE_MAX: Final = 250_000
"""Characters. With a longer old row, an update may exceed what Kafka took of either row."""


class RepairEvents(RowEvents):
    """Encodes the rows of tables as streaming does, and what makes topics equal to them."""

    def begin_repair(self, stamp: Stamp, xid: int, *, tombstones: bool) -> None:
        """Begin the transaction `stamp`; `tombstones`: write them behind deletes.

        `xid`: of a transaction that every session sees, to tell what the catalog has made since.
        """
        self._xid = xid
        self._tombstones = tombstones
        texts = self._texts
        texts.source_db = texts.source_db.replace('"snapshot":"true"', '"snapshot":"repair"', 1)
        self.begin(stamp)

    def end_of(self, part: ProgressPosition) -> list[Event]:
        """Return the END of the transaction that Kafka has a part of, which ends there for good.

        It counts the events of that part. Call this before other events are made.
        """
        repair = self._texts.stamp
        stamp = Stamp(part.xid, part.commit_lsn, part.commit_time_us, 0, repair.encoded_us)
        self.begin(stamp, part.counts)
        end = self.boundary("END")
        self.begin(repair)
        return end

    def placeholders(self, relation: Relation) -> dict[str, object]:
        """Return column -> its value in an event where the WAL lacked it."""
        table = self._table(relation, 0)
        return {
            json.loads(name.removesuffix(":")): json.loads(unavailable)
            for name, _, unavailable in table.columns
        }

    def topic(self, relation: Relation) -> str:
        """Return the topic of a table."""
        return self._table(relation, 0).topic

    def encoded(
        self, relation: Relation, rows: Messages, lsn: int
    ) -> list[tuple[bytes | None, bytes]]:
        """Return the keys and the rows as streaming encodes them, without those of no filter.

        Raise BadInput for a row that an expression fails on, as it is at `lsn`.
        """
        table = self._table(relation, 0)
        writers = self._writers(relation, table)
        found: list[tuple[bytes | None, bytes]] = []
        index = 0
        while index < len(rows):
            events: list[Event] = []
            index, *_ = self.rows(rows, index, ROW_AT, writers, events, 0)
            found += [(event.key, row_of(event.value or b"")) for event in events]
            if index < len(rows):
                row = self._decoded(relation, rows[index][1])
                try:
                    chosen = row if table.rules is None else table.rules.chosen(row)
                except ExpressionFailed as error:
                    raise not_encoded(error, table.name, lsn) from error
                if chosen is not None:
                    found.append((table.key(chosen).data, table.row(chosen).encode()))
                index += 1
        return found

    def emptied(self, relation: Relation, lsn: int, seq: int) -> list[Event]:
        """Return the event that empties a table."""
        return self.truncate(Truncate((relation,), cascade=False, restart_identity=False), lsn, seq)

    def change(self, relation: Relation, difference: Difference, lsn: int, seq: int) -> list[Event]:
        """Return the event of a difference, and the tombstone behind a delete."""
        table = self._table(relation, seq)
        before = "null" if difference.before is None else _in_columns_of(table, difference.before)
        if difference.op == "u" and len(before) > _BEFORE_MAX:
            before = "null"
        if difference.op == "d" and difference.before is None:
            before = _in_columns_of(table, difference.key)
        after = "null" if difference.after is None else difference.after.decode()
        value = self._value(table, before, after, difference.op, lsn, seq)
        headers = None
        if holds_placeholder(after):
            headers = _placeholder_values(self.placeholders(relation), after)
        place = False, table.name, seq, lsn
        events = [Event(table.topic, difference.key, value, headers, *place, op=difference.op)]
        if difference.op == "d" and self._tombstones:
            events.append(Event(table.topic, difference.key, None, None, *place))
        return events


def _placeholder_values(placeholders: dict[str, object], row: str) -> Headers | None:
    """Name the columns whose value is the placeholder: the database has all of a repaired row."""
    names = [
        name
        for name, value in json.loads(row).items()
        if value is not None
        and value == placeholders.get(name)
        and holds_placeholder(json.dumps(value))
    ]
    return placeholder_values(json.dumps(name, ensure_ascii=False) for name in names)


def _in_columns_of(table: Table, row: bytes) -> str:
    """Write a row with the columns that the table has now; null for what it lacks."""
    values = json.loads(row)
    names = [json.loads(name.removesuffix(":")) for name, *_ in table.columns]
    shaped = {name: values.get(name) for name in names}
    return json.dumps(shaped, ensure_ascii=False, separators=(",", ":"))
