"""What has to be done when the server describes a table: its key, its topic, its schema event.

pgoutput flags the columns of the replica identity. Under REPLICA IDENTITY FULL these are all, and
under NOTHING none, so that the primary key comes from the catalog then.
"""

import time
from dataclasses import replace
from typing import Final

import structlog

from schemas.errors import ExitCode, OperatorNeeded
from schemas.events import SchemaEvent, table_topic
from services.bridge.database import Primary
from services.bridge.envelope import Event
from services.bridge.messages import Relation, Type
from services.bridge.shapes import Shapes
from services.bridge.topics import Topics

logger = structlog.get_logger(__name__)

_IDENTITIES_WITHOUT_KEY: Final = ("f", "n")


class Relations:
    """Describes tables for one session. `known` is what the schema topic had at its start."""

    def __init__(
        self,
        prefix: str,
        topics: Topics,
        primary: Primary,
        known: dict[tuple[str, str], SchemaEvent],
    ) -> None:
        self._prefix = prefix
        self._topics = topics
        self._primary = primary
        self._shapes = Shapes(prefix, known)
        self._owners = {table_topic(prefix, *table): table for table in known}
        self._pending: list[Event] = []

    def describe(self, relation: Relation, types: dict[int, Type], commit_lsn: int) -> Relation:
        """Make the topic and note the schema event; return `relation` with its key columns.

        Raises OperatorNeeded when another table has the same topic.
        """
        if relation.replica_identity in _IDENTITIES_WITHOUT_KEY:
            relation = self._with_primary_key(relation)
        table = (relation.schema, relation.table)
        topic = table_topic(self._prefix, *table)
        owner = self._owners.setdefault(topic, table)
        if owner != table:
            raise OperatorNeeded(
                f"{'.'.join(table)} would share its topic with {'.'.join(owner)}",
                operation="describe a table",
                subject=f"topic {topic}",
                lsn=commit_lsn,
                hint="characters that Kafka forbids become _: rename one of the tables, or leave "
                "it out of the publication",
                exit_code=ExitCode.RECORD_REFUSED,
            )
        self._topics.partitions(topic)
        event = self._shapes.change(relation, types, commit_lsn, time.time_ns() // 1000)
        if event is not None:
            self._pending.append(event)
        return relation

    def take_pending(self) -> list[Event]:
        """The schema events that are to be published before the next rows."""
        pending, self._pending = self._pending, []
        return pending

    def _with_primary_key(self, relation: Relation) -> Relation:
        key = self._primary.primary_key(relation.oid)
        columns = tuple(replace(column, key=column.name in key) for column in relation.columns)
        return replace(relation, columns=columns)
