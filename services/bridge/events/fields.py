"""Fields of an event that flat rows have beside the columns, as JSON text and as schemas. Pure.

    {"__op":"c","__deleted":"false", …   of the table and operation      made once per relation
    ,"__commit_lsn":5,"__timeline":1 …   of the transaction              made once per transaction
    ,"__seq":0,"__lsn":7 …               of the row
    ,"id":1,"name":"x"}                  the row's columns

Names are those of Debezium's ExtractNewRecordState: `__`, and `_` for a dot.
"""

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring as quoted
from typing import Final, NamedTuple

from schemas.shaping import POSITION, FlatSettings, field_name
from schemas.version import version
from services.bridge.events.event import Stamp
from services.bridge.events.formats import connect
from services.bridge.events.formats.connect import Schema
from services.bridge.events.shaping.outbox import Headers

DELETED: Final = "__deleted"
_TRANSACTION: Final = {
    "commit_lsn": "commit_lsn",
    "txId": "xid",
    "source.ts_ms": "commit_ms",
    "source.ts_us": "commit_us",
    "source.ts_ns": "commit_ns",
    "ts_ms": "encoded_ms",
    "transaction.id": "id",
}
_ROW: Final = {
    "seq": "seq",
    "lsn": "lsn",
    "transaction.total_order": "total",
    "transaction.data_collection_order": "events",
}


class Part(NamedTuple):
    """A field with its comma, `,"__seq":`, and which number follows; `kind` "": none."""

    text: str
    kind: str


class Fields:
    """The chosen fields of one connection's flat rows. `snapshot`: what `snapshot` is of its rows.

    `transaction` and `row`: the parts that a transaction and a row have. Without `metadata` the
    fields of `transaction` are null.
    """

    def __init__(
        self,
        settings: FlatSettings,
        name: str,
        database: str,
        timeline: int,
        *,
        metadata: bool,
        snapshot: str = "false",
    ) -> None:
        self.rewrites = settings.deletes == "rewrite"
        self._timeline = timeline
        constants = {
            "timeline": str(timeline),
            "db": quoted(database),
            "name": quoted(name),
            "version": quoted(version()),
            "connector": '"postgresql"',
            "snapshot": quoted(snapshot),
        }
        self._of_table: list[tuple[str, str]] = []
        transaction, row = [], []
        for field in chosen(settings)[1:]:
            times = field.startswith("source.ts_")
            source_field = field if times else field.removeprefix("source.")
            head = f',"{field_name(field)}":'
            if field.startswith("transaction.") and not metadata:
                transaction.append(Part(f"{head}null", ""))
            elif source_field in constants:
                transaction.append(Part(head + constants[source_field], ""))
            elif source_field in _TRANSACTION:
                transaction.append(Part(head, _TRANSACTION[source_field]))
            elif source_field in _ROW:
                row.append(Part(head, _ROW[source_field]))
            else:
                self._of_table.append((head, source_field))
        self.transaction: Sequence[Part] = transaction
        self.row: Sequence[Part] = row

    def opening(self, op: str, schema: str, table: str) -> str:
        """Return the JSON text with which a table's flat rows of one operation begin."""
        names = {"schema": quoted(schema), "table": quoted(table), "op": quoted(op)}
        deleted = f',"{DELETED}":"{"true" if op == "d" else "false"}"' if self.rewrites else ""
        return f'{{"__op":"{op}"{deleted}' + "".join(
            [head + names[name] for head, name in self._of_table]
        )

    def of_transaction(self, stamp: Stamp) -> str:
        """Return the fields that all rows of a transaction have."""
        time_us, now_us = stamp.commit_time_us, stamp.encoded_us
        values = {
            "": "",
            "commit_lsn": stamp.commit_lsn,
            "xid": stamp.xid,
            "commit_ms": time_us // 1000,
            "commit_us": time_us,
            "commit_ns": time_us * 1000,
            "encoded_ms": now_us // 1000,
            "id": f'"{stamp.xid}:{stamp.commit_lsn}"',
        }
        return "".join([f"{text}{values[kind]}" for text, kind in self.transaction])

    def of_row(self, numbers: Mapping[str, int]) -> str:
        """Return the JSON text of a row's own fields; `numbers`: kind -> number."""
        return "".join([f"{text}{numbers[kind]}" for text, kind in self.row])

    def position(self, op: str, commit_lsn: int, seq: int) -> Headers:
        """Return the headers with the position of a record that has no value."""
        values = (op, str(commit_lsn), str(seq), str(self._timeline))
        return [(field_name(name), value) for name, value in zip(POSITION, values, strict=True)]


def chosen(settings: FlatSettings) -> Sequence[str]:
    """Return the fields of a flat row, those of POSITION first."""
    return tuple(dict.fromkeys((*POSITION, *settings.fields)))


_NUMBERS: Final = frozenset(
    (
        *("commit_lsn", "seq", "timeline", "lsn", "txId", "ts_ms", "ts_us", "ts_ns"),
        *("total_order", "data_collection_order"),
    )
)

_SNAPSHOT: Final = {name: text for name, text in connect.SNAPSHOT.items() if name != "default"}


def schemas(settings: FlatSettings) -> Mapping[str, Schema]:
    """Return the schemas of a flat row's fields by name, POSITION first, as in any table's rows."""
    found = {}
    for field in chosen(settings):
        name = field.rpartition(".")[2]
        plain = connect.plain("int64" if name in _NUMBERS else "string")
        found[field_name(field)] = _SNAPSHOT if name == "snapshot" else plain
    return found | ({DELETED: connect.STRING} if settings.deletes == "rewrite" else {})
