"""The names under which settings hide something of a table, noted in Kafka for later sessions.

Such a table may have no events, so that nothing else in Kafka tells its oid.

    note             in the session's thread, while a relation is described
    write            at the session's start, before the stream
    require_noted    before each commit to Kafka, in its thread
    pending          while a name waits for that, the slot is not confirmed further

The records are outside of Kafka transactions: they hold whatever becomes of the changes around
them. Where the topic ends is noted in the progress record as of all others, so that a start tells
when it has lost records, or was made again (`partition_ends`).
"""

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

import structlog

from schemas.errors import Retryable
from schemas.events import table_names_topic
from schemas.naming import Naming
from schemas.schema_events import TableName
from services.bridge.sink.offsets import Partition, PartitionEnd, answers
from services.bridge.sink.partition_ends import NOTED_EVERY_S
from services.bridge.sink.topics import Topics
from services.kafka.delivery import deliver
from services.kafka.records import READ_DEADLINE_S, parse_record
from services.postgres.server import Server
from services.waiter import Waiter

logger = structlog.get_logger(__name__)

Noted = tuple[int, tuple[str, str]]
"""pg_class.oid, and a table's schema and name."""
_HINT: Final = "see that Kafka runs, and that the bridge may write to this topic"


def noted_names(
    topics: Topics, naming: Naming, server: Server, *, make: bool = False
) -> "TableNames | None":
    """Return the noted names; None where the settings hide nothing, so that no name matters.

    `make`: make the topic where it is missing, to note more. Raise Retryable where Kafka can't be
    read, OperatorNeeded for a record of somebody else.
    """
    if not naming.hides:
        return None
    topic = table_names_topic(topics.prefix)
    if make and not topics.has(topic):
        logger.info(
            "not judged: whether tables were renamed earlier that settings hide something of; "
            "their names are noted from now on",
            topic=topic,
        )
        topics.prepare_late(table_names_topic, compacted=True)
    return TableNames(topics, topic, server.system_identifier)


class TableNames:
    """The names in `<prefix>.table_names`.

    Names of another cluster are not among them: its oids tell nothing of this one's.
    """

    def __init__(self, topics: Topics, topic: str, system_identifier: str) -> None:
        """Read the topic, if it is there."""
        self._topics = topics
        self._topic = topic
        self._system_identifier = system_identifier
        self._pending: deque[Noted] = deque()
        self._ends: dict[Partition, PartitionEnd] = {}
        self._dropped: list[bytes] = []
        self._dropped_lsn = 0
        self._due = 0.0
        self._foreign: list[bytes] = []
        self._cancelled = threading.Event()
        self._keys: dict[Noted, bytes] = {}
        """Name -> the key of its record."""
        if topics.has(topic):
            self._read()
        if self._foreign:
            logger.warning(
                "not judged: whether tables were renamed that settings hide something of, as "
                "another cluster noted their names; they are noted anew",
                topic=topic,
                names=len(self._foreign),
            )

    def _read(self) -> None:
        """Read the names that are noted in Kafka; those of another cluster are kept apart."""
        known: dict[bytes, TableName] = {}
        with self._topics.reader(self._topic) as reader:
            low, end = reader.bounds()
            deadline = time.monotonic() + READ_DEADLINE_S
            for offset, key, value in reader.between(low, end, deadline):
                name = key.encode() if isinstance(key, str) else key or b""
                if value is None:
                    known.pop(name, None)
                else:
                    known[name] = parse_record(TableName, self._topic, offset, value)
        for name, one in known.items():
            if one.system_identifier == self._system_identifier:
                self._keys[one.oid, (one.schema_, one.table)] = name
            else:
                self._foreign.append(name)

    @property
    def noted(self) -> Collection[Noted]:
        """The names that were noted at the session's start."""
        return self._keys.keys()

    def note(self, names: Iterable[Noted]) -> None:
        """Keep these, too, from the next Kafka transaction on."""
        self._pending.extend(names)

    @property
    def pending(self) -> bool:
        """Whether a name waits for the next commit to Kafka."""
        return bool(self._pending)

    def cancel(self) -> None:
        """Let a write in another thread give up soon."""
        self._cancelled.set()

    def forget_dropped(self, present_oids: Collection[int], lsn: int) -> None:
        """Let go of all tables but `present_oids` once all before `lsn` is published.

        `present_oids`: the catalog's, as it was before `lsn`, and of what was being made then.
        """
        self._dropped = [key for (oid, _), key in self._keys.items() if oid not in present_oids]
        self._dropped_lsn = lsn

    def write(self, end_lsn: int) -> bool:
        """Write what is to be noted or forgotten up to `end_lsn`; tell whether anything was.

        Raise Retryable until Kafka has it, SlotbridgeError for what Kafka refuses.
        """
        records: dict[bytes, bytes | None] = dict.fromkeys(self._foreign)
        self._foreign = []
        if end_lsn >= self._dropped_lsn:
            records |= dict.fromkeys(self._dropped)
            self._dropped = []
        while self._pending:
            oid, (schema, table) = self._pending.popleft()
            name = TableName(
                system_identifier=self._system_identifier, oid=oid, schema=schema, table=table
            )
            record = name.model_dump_json(by_alias=True).encode()
            records[record] = record
        if records:
            operation = "note the names of tables"
            deliver(
                self._topics.settings,
                self._topic,
                records,
                operation=operation,
                hint=_HINT,
                waiter=Waiter(self._require_going_on),
            )
        return bool(records)

    def _require_going_on(self) -> None:
        if self._cancelled.is_set():
            raise Retryable(
                "the session ends",
                operation="note the names of tables",
                subject=self._topic,
                hint="nothing to do: the next session notes them",
            )

    def require_noted(self, end_lsn: int) -> dict[Partition, PartitionEnd]:
        """Write as `write`; return where the topic ends. `end_lsn`: of the commit.

        {} where that was told a second ago: it is told again and again, as only the partitions that
        were learnt last are noted.
        """
        if self.write(end_lsn) or not self._ends:
            self._ends = answers(self._topics.ask_ends([(self._topic, 0)], committed=False))
        elif time.monotonic() < self._due:
            return {}
        self._due = time.monotonic() + NOTED_EVERY_S
        return self._ends
