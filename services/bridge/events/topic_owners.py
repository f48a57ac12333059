"""Which table has which topic, so that no two tables share one that their settings do not share.

The table that has had events, or else asks first, keeps its topic while it exists under its name;
the other one is parked.
"""

from collections.abc import Callable, Iterable

from schemas.errors import ExitCode, OperatorNeeded
from schemas.naming import Naming, TableTopic

_APART = (
    "kafka.key_bytes: connect takes a key's schema from the topic's last key, which would be the "
    "other table's: give each of the two a route to a topic of its own, or begin anew with another "
    "prefix and key_bytes: own"
)
_TOGETHER = (
    "characters that Kafka forbids in topic names become _: rename one of the tables, leave it "
    "out, or give both one route (shaping.routes)"
)


class TopicOwners:
    """The first table of each topic.

    `known`: (schema, table) of the schema topic's tables, in the order of their last events.
    `apart`: no two tables may share a topic, not by a route either, as the keys of both would have
    to have one schema.
    """

    def __init__(
        self, naming: Naming, published_tables: Iterable[tuple[str, str]], *, apart: bool = False
    ) -> None:
        self._naming = naming
        self._apart = apart
        self._owners: dict[str, tuple[tuple[str, str], bool]] = {}
        for table in published_tables:
            if naming.publishes(*table):
                topic = naming.table(*table)
                self._owners[topic.name] = (table, topic.routed)

    def claim(
        self,
        table: tuple[str, str],
        topic: TableTopic,
        is_gone: Callable[[tuple[str, str]], bool] = lambda _owner: False,
    ) -> None:
        """Give a table its topic. Raise OperatorNeeded if it is another's that is not gone."""
        owner, shared = self._owners.setdefault(topic.name, (table, topic.routed))
        together = shared and topic.routed
        if owner == table or (together and not self._apart):
            return
        if is_gone(owner):
            self._owners[topic.name] = (table, topic.routed)
            return
        raise OperatorNeeded(
            f"{'.'.join(table)} would share its topic with {'.'.join(owner)}",
            operation="describe a table",
            subject=f"topic {topic.name}",
            hint=_APART if together else _TOGETHER,
            exit_code=ExitCode.RECORD_REFUSED,
        )

    def require_apart(self, tables: Iterable[tuple[str, str]]) -> None:
        """Raise OperatorNeeded if two published tables, (schema, table), share a topic.

        Where tables may share topics, their first events tell whether they do.
        """
        for table in tables if self._apart else ():
            if self._naming.publishes(*table):
                self.claim(table, self._naming.table(*table))
