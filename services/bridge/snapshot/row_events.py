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

from schemas.shaping import FlatSettings
from services.bridge.events.description import Describe
from services.bridge.events.envelope import Envelope
from services.bridge.events.errors import ExpressionFailed, not_encoded
from services.bridge.events.event import Event, Stamp
from services.bridge.events.rows import Table, Writer
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.messages import Relation, Row
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
    ) -> None:
        self._xid = 0
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

    def describe(self, relation: Relation, seq: int) -> tuple[list[Event], bool]:
        """Return the schema event of `relation`, and whether its key is certain.

        `seq`: the number of the table's first row.
        """
        self._table(relation, seq)
        return self.take_shapes(), relation.oid not in self._unsettled

    def read(
        self,
        relation: Relation,
        rows: Sequence[Row],
        kind: Callable[[int], Snapshot],
        lsn: int,
        first_seq: int,
    ) -> list[Event]:
        """Encode `rows`, numbered from `first_seq`; `kind`: `source.snapshot` of each, from 0.

        `lsn`: they show nothing that was committed after. Raise BadInput for a value that can't be
        encoded.
        """
        table = self._table(relation, 0)
        texts, width = self._texts, len(relation.columns)
        write = table.writer(Event, "r", width, metadata=self._metadata, old=False)
        writer = None if write is None else Writer(write, table.counter, 1)
        head, flat = texts.head, texts.flat
        events: list[Event] = []
        for seq, row in enumerate(rows, first_seq):
            said = kind(seq - first_seq)
            if said != "true":
                texts.head = head.replace('"snapshot":"true"', f'"snapshot":"{said}"', 1)
                texts.flat = flat.replace('snapshot":"true"', f'snapshot":"{said}"')
            row = row[:width]
            try:
                event = None
                if writer is not None:
                    event = self.row(writer, tuple_data(row), 0, lsn, seq)
                events += (event,) if event is not None else self._read(table, row, lsn, seq)
            except ValueError as error:
                raise not_encoded(error, table.name, lsn) from error
            texts.head, texts.flat = head, flat
        return events

    def _read(self, table: Table, row: Row, lsn: int, seq: int) -> list[Event]:
        """Encode a row the long way; none where a filter leaves it out."""
        if table.rules is not None:
            try:
                chosen = table.rules.chosen(row)
            except ExpressionFailed as error:
                return [self._unpublished(table, row, error, lsn, seq)]
            if chosen is None:
                return []
            row = chosen
        after, headers = table.encoded(row)
        value = self._value(table, "null", after, "r", lsn, seq)
        return [table.event("r", table.key(row), value, headers, seq, lsn)]


def tuple_data(row: Row) -> bytes:
    """Return a row's values as pgoutput writes them (protocol-logicalrep, TupleData)."""
    parts: list[bytes] = []
    for value in row:
        if isinstance(value, bytes):
            parts += (b"t", len(value).to_bytes(4, "big"), value)
        else:
            parts.append(b"n")
    return b"".join(parts)
