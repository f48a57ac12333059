"""The names under which settings hide something of a table, noted in Kafka for later sessions.

Such a table may have no events, so that nothing else in Kafka tells its oid. A record is written
outside of Kafka transactions: what it says is true whatever becomes of the changes around it.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from schemas.events import table_names_topic
from schemas.naming import Naming
from schemas.schema_events import TableName
from services.bridge.sink.topics import Topics
from services.kafka.delivery import deliver
from services.kafka.records import READ_DEADLINE_S, parse_record

logger = structlog.get_logger(__name__)

_HINT: Final = "see that Kafka runs, and that the bridge may write to this topic"


def table_names(
    topics: Topics, naming: Naming, while_waiting: Callable[[], None] = lambda: None
) -> "TableNames | None":
    """Return the noted names; None where the settings hide nothing, and no name matters."""
    return TableNames(topics, while_waiting) if naming.hides else None


class TableNames:
    """The names in `<prefix>.table_names`, each (oid, (schema, table))."""

    def __init__(self, topics: Topics, while_waiting: Callable[[], None]) -> None:
        """Read the topic; make it where it is missing. Raise Retryable where Kafka can't be read.

        Raise OperatorNeeded for a record of somebody else.
        """
        self._kafka = topics.settings
        self._while_waiting = while_waiting
        if not topics.has(table_names_topic(topics.prefix)):
            logger.info(
                "not judged: whether tables were renamed earlier that settings hide something of; "
                "the names are noted from now on",
                topic=table_names_topic(topics.prefix),
            )
        self._topic = topics.prepare_late(table_names_topic, compacted=True)
        self.noted: set[tuple[int, tuple[str, str]]] = set()
        with topics.reader(self._topic) as reader:
            low, end = reader.bounds()
            deadline = time.monotonic() + READ_DEADLINE_S
            for offset, _key, value in reader.between(low, end, deadline):
                if value is not None:
                    found = parse_record(TableName, self._topic, offset, value)
                    self.noted.add((found.oid, (found.schema_, found.table)))

    def note(self, names: Iterable[tuple[int, tuple[str, str]]]) -> None:
        """Write names that are not noted yet. Raise Retryable until Kafka has them."""
        records = {
            TableName(oid=oid, schema=schema, table=table).model_dump_json(by_alias=True).encode()
            for oid, (schema, table) in names
        }
        if records:
            deliver(
                self._kafka,
                self._topic,
                {record: record for record in sorted(records)},
                operation="note the names of tables",
                hint=_HINT,
                while_waiting=self._while_waiting,
            )
