"""A table's rows and keys to JSON text, by its plan. Pure; made once per relation."""

from collections.abc import Sequence
from dataclasses import replace
from json.encoder import encode_basestring as quoted
from typing import Final, NamedTuple

from services.bridge import compiled
from services.bridge.events.errors import (
    EntersWithoutValue,
    HiddenByPartition,
    without_key,
    without_place,
)
from services.bridge.events.event import FIRST_PARTITION, REASON_HEADER, Event, placeholder_values
from services.bridge.events.fields import Fields
from services.bridge.events.formats.table_format import NO_KEY, PLAIN, Affixes, Key, TableFormat
from services.bridge.events.leaf_identities import LeafIdentity, hidden_by, hiding
from services.bridge.events.row_encoders import Column, Frame, Write, holds_placeholder, writer
from services.bridge.events.shaping.outbox import Headers
from services.bridge.events.shaping.row_rules import RowChange
from services.bridge.events.shaping.tables import TableShaping
from services.bridge.events.transaction_texts import NO_ORDER, Counter, TransactionTexts
from services.bridge.events.values.encoders import Encoder, Encoders
from services.bridge.events.values.plain import Encode
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    Delete,
    Insert,
    RelationColumn,
    Row,
    Unchanged,
    Update,
    Value,
)

WORTH_ROWS = 20
"""How many rows of a table come the long way before a RowWriter is made for it."""
Part = tuple[int, str, Encode, str]
"""A column of a key: where it stands in the server's rows, and as in `Table.columns`."""
_OPERATIONS: Final = {Insert: "c", Update: "u", Delete: "d"}


class Writer(NamedTuple):
    """A specialised row encoder of one relation; `numbers`: how many `seq` a row takes."""

    write: Write
    counter: Counter
    numbers: int


class Table:
    """The encoders of one relation's rows and keys, as planned."""

    def __init__(
        self,
        plan: TableShaping,
        counter: Counter,
        encoders: Encoders,
        form: TableFormat = PLAIN,
        fields: Fields | None = None,
        *,
        leaves: Sequence[LeafIdentity] = (),
    ) -> None:
        """`leaves`: as `leaf_identities` returns them."""
        relation = plan.relation
        self._format = form
        self.fields = fields
        """The fields of its flat rows, None where its events have an envelope."""
        self._relation = relation
        self._openings: dict[str, str] = {}
        self.counter = counter
        self.name = counter.table
        self.topic = plan.topic.name
        self.skipped = plan.skipped
        self.outbox = plan.outbox
        self.rules = plan.rules
        self._skips_unchanged = plan.skips_unchanged
        self._names = f'"schema":{quoted(relation.schema)},"table":{quoted(relation.table)},'
        self._rows = 0
        self.columns: list[tuple[str, Encode, str]] = []
        """Of each: its name as JSON with a colon, its encoder, what stands for a lacking value."""
        for column in relation.columns:
            encoder = encoder_of(plan, encoders, column)
            self.columns.append((f"{quoted(column.name)}:", *encoder))
        self._placeholders = {one for _, _, one in self.columns if holds_placeholder(one)}
        self._source_indexes = plan.source_indexes
        self._sources = plan.source_indexes or range(len(relation.columns))
        """Of each column, where it stands in the server's rows."""
        whole = replace(plan, limits={})
        parts = {
            column.name: (at, f"{quoted(column.name)}:", *encoder_of(whole, encoders, column))
            for at, column in zip(self._sources, relation.columns, strict=True)
            if column.name in plan.places
        }
        self._places: list[Part] = [parts[name] for name in plan.places]
        """The columns that choose the partition; none: the key, or there is one partition."""
        self._by_row = plan.by_row
        self._shows_moves = relation.replica_identity != "f" and plan.identity >= {*plan.places}
        """Whether an update without an old row leaves its row in the partition."""
        self._key: list[Part] = [
            (source_index, *encoder)
            for source_index, encoder, column in zip(
                self._sources, self.columns, relation.columns, strict=True
            )
            if column.key
        ]
        self.leaves = leaves
        self._partial = {leaf.indexes for leaf in leaves}
        keys = {source_index for source_index, *_ in self._key}
        places = {source_index for source_index, *_ in self._places}
        filtered = plan.rules.filter_columns if plan.rules else ()
        self._needed = keys.union(places, filtered)
        self._hiding_key = hiding(leaves, keys) if keys else tuple(leaves)
        """Partitions that do not tell the old row's key; without a key, the whole row is needed."""
        self._hiding_place = hiding(leaves, places)
        self._hiding_filter = hiding(leaves, filtered)

    def with_old_kind(self, change: RowChange) -> RowChange:
        """Return the change with kind K for an old row that may lack values.

        The server marks as whole (O) also the old row of a partition that tells only its own
        replica identity, with NULL in place of all other values.
        """
        if not self._partial or isinstance(change, Insert) or change.old_kind != "O":
            return change
        present = frozenset(at for at, value in enumerate(change.old or ()) if value is not None)
        return change._replace(old_kind="K") if present in self._partial else change

    def row(self, row: Row) -> str:
        """Encode a row as `{"column":value,…}`; a value that the WAL lacks is the placeholder."""
        if self._source_indexes is not None:
            row = [row[source_index] for source_index in self._source_indexes]
        return (
            "{"
            + ",".join(
                [
                    name
                    + (
                        "null"
                        if value is None
                        else unavailable
                        if value is UNCHANGED
                        else encode(value)  # type: ignore[arg-type]
                    )
                    for (name, encode, unavailable), value in zip(self.columns, row, strict=True)
                ]
            )
            + "}"
        )

    def encoded(self, row: Row) -> tuple[str, Headers | None]:
        """Encode a row as `row` does, and name the columns whose value is the placeholder's text.

        The headers are None where there are none, as in nearly all rows.
        """
        text = self.row(row)
        if not any(placeholder in text for placeholder in self._placeholders):
            return text, None
        return text, placeholder_values(
            name[:-1]
            for source_index, (name, encode, unavailable) in zip(
                self._sources, self.columns, strict=True
            )
            if unavailable in self._placeholders
            and isinstance(value := row[source_index], bytes)
            and encode(value) == unavailable
        )

    def writer(
        self, event: type, op: str, count: int, *, metadata: bool, old: bool
    ) -> Write | None:
        """Return the encoder of rows of `count` columns with `op` c, u or r, None without one.

        `old`: an update's old row, whole, is told. There is none without the C extension, for
        outboxes, for what is left out or may be left out as unchanged, for tables with filters,
        computed columns or columns that choose the partition, and before WORTH_ROWS rows have come;
        of a snapshot (r) many come at once.
        """
        if compiled.engine is None:
            return None
        self._rows += WORTH_ROWS if op == "r" else 1
        if self._rows < WORTH_ROWS or op in self.skipped or self.outbox is not None:
            return None
        if self.rules is not None or self._places or (old and self._skips_unchanged):
            return None
        if event is Update and (self._hiding_key or (old and self._partial)):
            return None
        keys = {source_index for source_index, *_ in self._key}
        columns = [
            Column(source_index, *encoder, source_index in keys)
            for source_index, encoder in zip(self._sources, self.columns, strict=True)
        ]
        form = self._format
        around = form.value_affixes or Affixes()
        around_key = form.key_affixes or Affixes()
        if self.fields is None:
            opening = f'{{"op":"{op}","before":' + ("{" if old else 'null,"after":{')
        else:
            opening = self._flat_opening(self.fields, op)
        frame = Frame(
            op,
            around.opening + opening,
            self._names,
            metadata,
            old,
            around.closing,
            *around_key,
            flat=None if self.fields is None else tuple(self.fields.row),
            placed_by=None if keys else FIRST_PARTITION,
            serialize_key=form.key if form.key_affixes is None else None,
            serialize_value=form.value if form.value_affixes is None else None,
            places_by_bytes=form.places_by_bytes,
        )
        return writer(event, self.topic, self.name, columns, count, frame)

    def value(
        self,
        before: str,
        after: str,
        op: str,
        lsn: int,
        seq: int,
        texts: TransactionTexts,
        total: int,
    ) -> bytes:
        """Return an event's value. `before`, `after`: rows, or null; `total`: its `total_order`."""
        events = self.counter.events
        if self.fields is not None:
            row = before if after == "null" else after
            numbers = {"seq": seq, "lsn": lsn, "total": total, "events": events}
            columns = "}" if row in ("null", "{}") else f",{row[1:]}"
            opening = self._flat_opening(self.fields, op)
            return self._format.value(
                f"{opening}{texts.flat}{self.fields.of_row(numbers)}{columns}"
            )
        order = texts.order
        if order != NO_ORDER:
            order = f'{order}{total},"data_collection_order":{events}}}'
        return self._format.value(
            f'{{"op":"{op}","before":{before},"after":{after},{texts.head}{lsn}\\"]",'
            f'{self._names}"lsn":{lsn},"seq":{seq}}},{order},{texts.tail}'
        )

    def _flat_opening(self, fields: Fields, op: str) -> str:
        """Return the JSON text with which flat rows of this operation begin, made once."""
        if op not in self._openings:
            self._openings[op] = fields.opening(op, self._relation.schema, self._relation.table)
        return self._openings[op]

    def skips(self, change: Insert | Update | Delete) -> bool:
        """Tell whether changes like this one are left out."""
        return _OPERATIONS[type(change)] in self.skipped

    def hides(self, leaf: LeafIdentity) -> bool:
        """Tell whether changes of the partition `leaf` would lack old values that events need."""
        hidden = not self._key or hiding((leaf,), self._needed)
        return self.outbox is None and bool(hidden)

    def published(self, change: RowChange) -> RowChange | None:
        """Return the change that filters and computed columns make of a change, None for nothing.

        Raise RowRefused for a row that an expression fails on, for one whose partition hides
        whether the old row fits, and for one that an update brings into a filter without a value
        that the WAL lacks.
        """
        if self.rules is None or self.skips(change):
            return change
        if leaves := hidden_by(self._hiding_filter, change):
            raise HiddenByPartition("columns of a filter", leaves)
        found = self.rules.apply(change)
        if isinstance(change, Update) and isinstance(found, Insert) and not self.skips(found):
            for source_index, column in zip(self._sources, self._relation.columns, strict=True):
                if found.new[source_index] is UNCHANGED:
                    raise EntersWithoutValue(column.name)
        return found

    def unpublished(self, row: Row, reason: str, seq: int, lsn: int) -> Event:
        """Return what stands for a row that can't be published: its key, and the reason.

        It has no topic, so that it becomes a dead letter.
        """
        headers: Headers = [(REASON_HEADER, reason)]
        return Event("", self._keyed(row).data, None, headers, False, self.name, seq, lsn)

    def unchanged(self, change: Update) -> bool:
        """Tell whether an update is left out: its old row is complete, and published the same."""
        old, new = change.old, change.new
        if not self._skips_unchanged or old is None or change.old_kind != "O":
            return False
        return all(
            _published_the_same(old[source_index], new[source_index], encode)
            for source_index, (_, encode, _) in zip(self._sources, self.columns, strict=True)
        )

    def require_identified(self, change: Insert | Update | Delete, lsn: int) -> None:
        """Raise BadInput for a change that does not tell the old row's key, or a partition."""
        leaves = hidden_by(self._hiding_key, change)
        if leaves or self._lacks_key(change):
            raise without_key(self.name, lsn, leaves)
        leaves = hidden_by(self._hiding_place, change)
        if leaves or self.unplaced(change):
            raise without_place(self.name, lsn, leaves)

    def _lacks_key(self, change: Insert | Update | Delete) -> bool:
        if isinstance(change, Insert) or change.old is None or change.old_kind == "O":
            return False
        return any(change.old[source_index] is None for source_index, *_ in self._key)

    def key(self, row: Row) -> Key:
        """Return the key of a row in the table's format; it has no data without a key column.

        Keys of rows in different partitions are different.
        """
        key = self._keyed(row)
        if not self._places:
            return key
        parts = self._places
        if self._by_row:  # a column that was added is NULL in the rows that were there
            parts = [part for part in parts if row[part[0]] is not None]
        return key._replace(placed_by=_joined(parts, row).encode())

    def _keyed(self, row: Row) -> Key:
        return self._format.keyed(_joined(self._key, row)) if self._key else NO_KEY

    def unplaced(self, change: Insert | Update | Delete) -> bool:
        """Tell whether the change does not tell which partition the old or the new row is in."""
        if not self._places:
            return False
        new = change.present_values if isinstance(change, Update) else getattr(change, "new", ())
        if new and any(new[source_index] is UNCHANGED for source_index, *_ in self._places):
            return True
        if isinstance(change, Insert):
            return False
        if change.old is None:  # then no column of the identity has changed
            return not self._shows_moves
        whole = change.old_kind == "O"
        return not whole and any(change.old[index] is None for index, *_ in self._places)

    def event(
        self,
        op: str,
        key: Key,
        value: bytes | None,
        headers: Headers | None,
        seq: int,
        lsn: int,
    ) -> Event:
        """Return the event of a row's change at `lsn`; `op`: see Event."""
        data, placed_by = key
        return Event(self.topic, data, value, headers, False, self.name, seq, lsn, placed_by, op)


def encoder_of(plan: TableShaping, encoders: Encoders, column: RelationColumn) -> Encoder:
    """Return how a column of a table is written: masked, and with large values, as planned."""
    encode, unavailable = encoders.of(column.type_oid, column.typmod)
    encode = plan.masks.get(column.name) or encode
    if column.name in plan.limits:
        encode = plan.limits[column.name](encode)
    return Encoder(encode, unavailable)


def _joined(parts: Sequence[Part], row: Row) -> str:
    """Return columns of a row as `{"column":value,…}`."""
    found = []
    for index, name, encode, unavailable in parts:
        value = row[index]
        if isinstance(value, Unchanged):
            found.append(name + unavailable)
        else:
            found.append(name + ("null" if value is None else encode(value)))
    return "{" + ",".join(found) + "}"


def _published_the_same(old: Value, new: Value, encode: Encode) -> bool:
    """Tell whether both values of a column have the same text in an event."""
    if isinstance(new, Unchanged) or old == new:
        return True
    if not (isinstance(old, bytes) and isinstance(new, bytes)):
        return False
    try:
        return encode(old) == encode(new)
    except ValueError:
        return False  # whoever encodes the row says what is wrong with it
