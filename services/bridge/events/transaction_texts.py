"""The JSON text that the records of one transaction have in common. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from json.encoder import encode_basestring as quoted
from typing import Final, Literal

from schemas.version import version
from services.bridge.events.event import Stamp
from services.bridge.events.fields import Fields
from services.bridge.pgoutput.messages import Message

VERSION: Final = version()
NO_ORDER: Final = '"transaction":null'


@dataclass(slots=True)
class Counter:
    """Counts a table's events in the current transaction; `name`: the table's name as JSON text."""

    table: str
    name: str
    events: int = 0


class TransactionTexts:
    """The texts of the transaction that `begin` was called with last.

    `head`: `source` up to the change's own LSN; `order`: `transaction` up to the event's own
    numbers, or whole without `metadata`; `tail`: the times of encoding; `flat`: of flat rows.
    """

    def __init__(
        self,
        name: str,
        database: str,
        timeline: int,
        *,
        metadata: bool,
        snapshot: str = "false",
        fields: Fields | None = None,
    ) -> None:
        self.source = (
            f'"source":{{"version":"{VERSION}","connector":"postgresql",'
            f'"name":{quoted(name)},"ts_ms":'
        )
        self.source_db = f',"snapshot":"{snapshot}","db":{quoted(database)},"txId":'
        self.source_timeline = f',"timeline":{timeline},"sequence":"[\\"'
        self._metadata = metadata
        self._fields = fields
        self._encoded_us = -1
        self.head = self.tail = self.order = self.flat = self.id = ""

    def begin(self, stamp: Stamp) -> None:
        """Make the texts of the transaction `stamp`."""
        self.stamp = stamp
        xid, commit_lsn, time_us, previous_lsn, now_us = stamp
        self.head = (
            f'{self.source}{time_us // 1000},"ts_us":{time_us},"ts_ns":{time_us * 1000}'
            f'{self.source_db}{xid},"xmin":null,"commit_lsn":{commit_lsn}{self.source_timeline}'
            f'{previous_lsn}\\",\\"'
        )
        self.id = f"{xid}:{commit_lsn}"
        if now_us != self._encoded_us:
            self._encoded_us = now_us
            self.tail = f'"ts_ms":{now_us // 1000},"ts_us":{now_us},"ts_ns":{now_us * 1000}}}'
        self.order = NO_ORDER
        if self._metadata:
            self.order = f'"transaction":{{"id":"{self.id}","total_order":'
        if self._fields is not None:
            self.flat = self._fields.of_transaction(stamp)

    def boundary(
        self, status: Literal["BEGIN", "END"], total: int, counters: Iterable[Counter]
    ) -> tuple[bytes, bytes]:
        """Return key and value of BEGIN, or of END with `total` events, by table `counters`."""
        if status == "END":
            counts = ",".join(
                [
                    f'{{"data_collection":{counter.name},"event_count":{counter.events}}}'
                    for counter in counters
                ]
            )
            end = f'"event_count":{total},"data_collections":[{counts}]}}'
        else:
            end = '"event_count":null,"data_collections":null}'
        stamp = self.stamp
        value = (
            f'{{"status":"{status}","id":"{self.id}","ts_ms":{stamp.commit_time_us // 1000},'
            f'"commit_lsn":{stamp.commit_lsn},{end}'
        )
        return f'{{"id":"{self.id}"}}'.encode(), value.encode()

    def message(self, change: Message, content: str, seq: int) -> bytes:
        """Return the event of a logical message, whose content is given as JSON."""
        return (
            f'{{"op":"m","message":{{"prefix":{quoted(change.prefix)},"content":{content}}},'
            f'{self.head}{change.lsn}\\"]","schema":"","table":"","lsn":{change.lsn},"seq":{seq}}},'
            f'"transaction":null,{self.tail}'
        ).encode()
