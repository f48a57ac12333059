"""Rows that were read from a table -> events with op `r`, as one transaction of the stream. Pure.

    BEGIN                      id 0:commit_lsn, in the transaction topic
    schema event               where Kafka does not know this shape yet, at seq 0
    op r, before null          one a row, seq 0, 1, …; values as streaming encodes them; none for a
                               row that a filter leaves out
    …                          of each table that is read at this place; seq goes on
    END

`commit_lsn` is where the chunk stands in the stream; no transaction of the server has it. `lsn` is
the bound of what its rows show: changes that commit before it may be in them already.
"""

from collections.abc import Callable, Sequence
from typing import cast

from schemas.shaping import FlatSettings
from services.bridge.compiled import Messages
from services.bridge.events.description import Describe
from services.bridge.events.envelope import Envelope
from services.bridge.events.errors import ExpressionFailed, not_encoded
from services.bridge.events.event import Event, Stamp, size_of
from services.bridge.events.rows import Table, Writer
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.messages import Insert, Relation, Row
from services.bridge.snapshot.copied_rows import ROW_AT, form_of
from services.bridge.snapshot.progress import Snapshot


class RowEvents(Envelope):
    """Encodes chunks. `describe` is the session's, so that each shape is announced once."""

    def __init__(
        self,
        name: str,
        database: str,
        timeline: int,
        describe: Describe,
        *,
        transaction_metadata: bool,
        encoders: Encoders,
        flat: FlatSettings | None = None,
        dead_rows: bool = False,
        without_partitions: Callable[[int], None] = lambda _oid: None,
    ) -> None:
        """`without_partitions`: takes the oid of a table that is not partitioned."""
        self._without_partitions = without_partitions
        self._xid = 0
        self._decoder = Decoder()
        super().__init__(
            name,
            database,
            timeline,
            lambda relation, stamp, seq: describe(relation, stamp._replace(xid=self._xid), seq),
            tombstones=False,
            transaction_metadata=transaction_metadata,
            encoders=encoders,
            flat=flat,
            snapshot="true",
            dead_rows=dead_rows,
        )

    def begin_chunks(self, stamp: Stamp, xid: int) -> None:
        """Begin the transaction `stamp`, with chunks of some tables.

        `xid`: of a transaction that every session sees, to tell what the catalog has made since.
        """
        self._xid = xid
        self.begin(stamp)

    def describe(
        self, relation: Relation, seq: int, *, partitioned: bool
    ) -> tuple[list[Event], bool]:
        """Return the schema event of `relation`, and whether its key is certain.

        `seq`: the number of the table's first row. `partitioned`: what the catalog says of it.
        """
        if not partitioned:
            self._without_partitions(relation.oid)
        self._table(relation, seq)
        return self.take_shapes(), relation.oid not in self._unsettled

    def read(
        self,
        relation: Relation,
        parts: Sequence[Messages],
        kind: Callable[[int], Snapshot],
        lsn: int,
        first_seq: int,
    ) -> tuple[list[Event], int]:
        """Encode rows, numbered from `first_seq`; return their events, and the bytes of these.

        `kind`: `source.snapshot` of each row, from 0; only that of the first and of the last one
        may be another than "true". `lsn`: they show nothing that was committed after. Raise
        BadInput for a value that can't be encoded.
        """
        texts, last = self._texts, first_seq + sum(map(len, parts)) - 1
        head, flat = texts.head, texts.flat
        table = self._table(relation, 0)
        writers = self._writers(relation, table)
        events: list[Event] = []
        seq, size = first_seq, 0
        for messages in parts:
            index = 0
            while index < len(messages):
                alone = seq in (first_seq, last)
                end = index + 1 if alone else min(len(messages), index + last - seq)
                row_kind = kind(seq - first_seq) if alone else "true"
                texts.head = head.replace('"snapshot":"true"', f'"snapshot":"{row_kind}"', 1)
                texts.flat = flat.replace('snapshot":"true"', f'snapshot":"{row_kind}"')
                while index < end:
                    index, seq, more = self.rows(
                        messages, index, ROW_AT, writers, events, seq, end=end, lsn=lsn
                    )
                    size += more
                    if index < end:  # it goes the long way, as in the stream
                        row = self._decoded(relation, messages[index][1])
                        added = self._read(table, row, lsn, seq)
                        events += added
                        size += size_of(added)
                        index, seq = index + 1, seq + 1
        texts.head, texts.flat = head, flat
        return events, size

    def _writers(self, relation: Relation, table: Table) -> dict[bytes, Writer]:
        """Return the table's encoder, by what its rows' messages begin with."""
        width = len(relation.columns)
        write = table.writer(Event, "r", width, metadata=self._metadata, old=False)
        return {} if write is None else {form_of(relation).head: Writer(write, table.counter, 1)}

    def _decoded(self, relation: Relation, message: bytes) -> Row:
        self._decoder.relations[relation.oid] = relation
        return cast("Insert", self._decoder.decode(message, 0)).new

    def _read(self, table: Table, row: Row, lsn: int, seq: int) -> list[Event]:
        """Encode a row the long way; none where a filter leaves it out."""
        try:
            chosen = row if table.rules is None else table.rules.chosen(row)
        except ExpressionFailed as error:
            return [self._unpublished(table, row, error, lsn, seq)]
        if chosen is None:
            return []
        try:
            after, headers = table.encoded(chosen)
            value = self._value(table, "null", after, "r", lsn, seq)
            return [table.event("r", table.key(chosen), value, headers, seq, lsn)]
        except ValueError as error:
            raise not_encoded(error, table.name, lsn) from error
