"""The rows of a table by its topic: committed events, folded key by key.

c, r, u      the key has the row `after`
d            the key is gone
tombstone    the key is gone, if that partition has told its row and the topic is of one table
t            all keys of that partition are gone
a value that the WAL lacked       the one that the row had before; else the row is UNKNOWN

The placeholder's text stands for a value that the WAL lacked, unless the event's header
`slotbridge.placeholder_values` names the column: then the text is the column's value.
"""

import json
import time
from collections.abc import Collection, Mapping
from typing import Any, Final

from confluent_kafka import Message

from schemas.errors import ExitCode, OperatorNeeded
from schemas.events import PLACEHOLDER_VALUES_HEADER, UNAVAILABLE
from services.bridge.recovery.event_positions import AnyHeaders, position_in_headers
from services.bridge.repair.comparison import UNKNOWN
from services.bridge.repair.plain_event import PlainEvents
from services.bridge.repair.row_store import ITEMS_AT_ONCE, FoldedRow, RowStore
from services.bridge.sink.topics import Topics

_OPEN_S: Final = 120.0
"""How long another producer's transaction may stay open."""
_DEADLINE_S: Final = 7 * 86_400.0
_ROWS_AT_ONCE: Final = 2_000
OPERATION: Final = "fold the topic"
_CHANGES: Final = ("c", "r", "u", "d", "t")


class Fold:
    """Folds the topic of one table into `rows`; `commit_lsn`: the highest that was met.

    `placeholders`: column -> what its value is in an event when the WAL lacked it.
    """

    def __init__(
        self,
        topics: Topics,
        rows: RowStore,
        placeholders: Mapping[str, Any],
        *,
        shared: bool,
    ) -> None:
        """`shared`: other tables may have the topic too, whose keys may be equal."""
        self._topics = topics
        self._rows = rows
        self._placeholders = placeholders
        self._shared = shared
        self._waiting: dict[bytes, FoldedRow] = {}
        self.commit_lsn = 0
        self.events = 0

    def read(self, topic: str, schema: str, table: str) -> bool:
        """Fold the table's events. Return False where Kafka has removed the first ones of a topic.

        Then keys may be missing. Raise OperatorNeeded for a record that is not an event.
        """
        whole, plain = True, PlainEvents(schema, table, self._placeholders.values())
        if not self._topics.has(topic):
            return whole
        for partition in range(self._topics.partitions(topic)):
            with self._topics.reader(topic, partition) as reader:
                low, end = reader.bounds()
                whole = whole and low == 0
                for _ in reader.messages(max(low, end - 1), end, time.monotonic() + _OPEN_S):
                    pass  # nothing before is hidden by a transaction that is open
                messages = reader.messages(low, end, time.monotonic() + _DEADLINE_S)
                for message in self._topics.waiter.each(messages, ITEMS_AT_ONCE):
                    self._take(partition, message, (schema, table), topic, plain)
            self._flush(partition)
        return whole

    def _take(
        self,
        partition: int,
        message: Message,
        name: tuple[str, str],
        topic: str,
        plain: PlainEvents,
    ) -> None:
        """Apply a topic's record to the rows: keep the newest by position, erase, or empty.

        `name`: the table; events of others in the same topic are left alone.
        """
        key, value = message.key(), message.value()
        key = key.encode() if isinstance(key, str) else key
        if value is None:
            if key is None or self._shared:
                return
            if (waiting := self._waiting.get(key)) is not None:
                self._waiting[key] = waiting._replace(row=None)
            else:
                self._rows.erase(partition, key)
            return
        headers = message.headers()
        if key is not None and not headers:
            found = plain.read(value)
            if found is not None:
                self._keep(partition, FoldedRow(key, *found))
                return
        where = f"{topic}[{partition}]@{message.offset()}"
        event = event_of(value, headers, where)
        source = event["source"]
        if (source["schema"], source["table"]) != name:
            return
        position = source.get("commit_lsn", source["lsn"]), source.get("seq", 0)
        if event["op"] == "t" or key is None:
            self._count(position)
            if event["op"] == "t":
                self._flush(partition)
                self._rows.empty(partition)
            return
        row = None
        if event["op"] != "d":
            row = self._row(key, event["after"], _placeholder_values(headers, where))
        self._keep(partition, FoldedRow(key, row, position))

    def _keep(self, partition: int, folded: FoldedRow) -> None:
        self._count(folded.position)
        self._waiting[folded.key] = folded
        if len(self._waiting) >= _ROWS_AT_ONCE:
            self._flush(partition)

    def _count(self, position: tuple[int, int]) -> None:
        self.events += 1
        self.commit_lsn = max(self.commit_lsn, position[0])

    def _flush(self, partition: int) -> None:
        self._rows.take_folded(partition, self._waiting.values())
        self._waiting.clear()

    def _known(self, key: bytes) -> FoldedRow | None:
        return self._waiting.get(key) or self._rows.folded(key)

    def _row(self, key: bytes, after: dict[str, Any], literal: Collection[str]) -> bytes:
        """Return the row as JSON, with the values that the WAL lacked as they were before.

        `literal`: the columns whose value is the placeholder's text itself.
        """
        placeholders = self._placeholders
        lacking = [
            name
            for name, one in after.items()
            if one == placeholders.get(name, UNAVAILABLE) and name not in literal
        ]
        if lacking:
            known = self._known(key)
            before = json.loads(known.row) if known is not None and known.row else {}
            if not before.keys() >= {*lacking}:
                return UNKNOWN
            after |= {name: before[name] for name in lacking}
        return json.dumps(after, ensure_ascii=False, separators=(",", ":")).encode()


def event_of(value: bytes | str, headers: AnyHeaders, where: str) -> dict[str, Any]:
    """Return a table's event. Raise OperatorNeeded for a record, at `where`, that is not one."""
    try:
        event: dict[str, Any] = json.loads(value)
        source = event["source"]
        _ = event.get("after"), source["lsn"]  # Debezium's has no more
        _ = source["schema"], source["table"]
        known = event["op"] in _CHANGES and position_in_headers(headers) is None
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise _foreign(where)
    return event


def _placeholder_values(headers: AnyHeaders, where: str) -> Collection[str]:
    """Return the columns that the header of an event names, () without such a header.

    Raise OperatorNeeded for a record, at `where`, whose header is not a list of names.
    """
    header = dict(headers or []).get(PLACEHOLDER_VALUES_HEADER)
    if header is None:
        return ()
    try:
        names = json.loads(header)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _foreign(where)
    return names


def _foreign(where: str) -> OperatorNeeded:
    return OperatorNeeded(
        "the record is not an event of the bridge",
        operation=OPERATION,
        subject=where,
        hint="only the bridge may write to its topics; leave the table out of the repair",
        exit_code=ExitCode.RECORD_REFUSED,
    )
