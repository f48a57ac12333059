"""What has to be done before a table's first event: its key, its topic, its schema event.

Not when the server describes it: that may be for a change that is rolled back, or for a partition
whose changes are published as its root's. pgoutput flags the columns of the replica identity; under
REPLICA IDENTITY FULL these are all, and under NOTHING none: see services.bridge.keys.
"""

from dataclasses import replace
from typing import Final

from schemas.errors import ExitCode, OperatorNeeded
from schemas.events import SchemaEvent, table_topic
from services.bridge.database import Primary
from services.bridge.envelope import Described, Stamp
from services.bridge.keys import key_columns, settled
from services.bridge.messages import Relation
from services.bridge.shapes import Shapes
from services.bridge.topics import Topics

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

    def describe(self, relation: Relation, stamp: Stamp, seq: int) -> Described:
        """Make the topic of a relation; find its key columns and its schema event.

        Raises OperatorNeeded when another table has the same topic.
        """
        certain = True
        if relation.replica_identity in _IDENTITIES_WITHOUT_KEY:
            relation, certain = self._with_primary_key(relation, stamp.xid)
        table = (relation.schema, relation.table)
        topic = table_topic(self._prefix, *table)
        owner = self._owners.setdefault(topic, table)
        if owner != table:
            raise OperatorNeeded(
                f"{'.'.join(table)} would share its topic with {'.'.join(owner)}",
                operation="describe a table",
                subject=f"topic {topic}",
                lsn=stamp.commit_lsn,
                hint="characters that Kafka forbids become _: rename one of the tables, or leave "
                "it out of the publication",
                exit_code=ExitCode.RECORD_REFUSED,
            )
        self._topics.partitions(topic)
        return Described(relation, self._shapes.change(relation, stamp, seq), certain)

    def _with_primary_key(self, relation: Relation, xid: int) -> tuple[Relation, bool]:
        found = self._primary.primary_key(relation.oid)
        names = [column.name for column in relation.columns]
        key = key_columns(names, xid, found, self._shapes.last_key(relation))
        columns = tuple(replace(column, key=column.name in key) for column in relation.columns)
        return replace(relation, columns=columns), settled(xid, found)
