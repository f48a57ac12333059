"""Events without a key in topics that are compacted, where Kafka refuses them. Pure.

A TRUNCATE's event has no key: it is about a whole table. Events of a table without a key have none
either. A topic with cleanup.policy=compact takes records with a key alone (INVALID_RECORD).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from schemas.naming import Naming

COMPACT = "compact"
DELETE = "cleanup.policy=delete,retention.ms=-1"
"""The configuration that ends a topic's compaction and keeps all its records."""


class Compacted(NamedTuple):
    """A table whose events, or whose truncates alone (`keyed`), its compacted topic refuses."""

    table: str
    topic: str
    keyed: bool

    @property
    def evidence(self) -> str:
        """The policy of the topic, and why an event does not have a key."""
        what = "TRUNCATE is published" if self.keyed else "the table does not have a key"
        return f"topic {self.topic} has cleanup.policy={COMPACT}, and {what}"

    @property
    def consequence(self) -> str:
        """How the bridge fares at such an event."""
        what = "a TRUNCATE of" if self.keyed else "each change of"
        return f"{what} {self.table} stops the bridge (41), or becomes a dead letter"

    def change(self, delete: str) -> str:
        """Return what ends it; `delete`: the command that ends the topic's compaction."""
        if not self.keyed:
            return (
                f"ALTER TABLE {self.table} ADD PRIMARY KEY (…); or set shaping.keys: "
                f"{{{self.table}: [column]}}; or end the compaction: {delete}"
            )
        return (
            f"set shaping.skip: {{{self.table}: [t]}}, and empty the table by DELETE, which "
            f"consumers then see; or end the compaction: {delete}"
        )


def refused_by_compaction(
    tables: Iterable[tuple[str, str, bool]],
    naming: Naming,
    policy: Callable[[str], str],
    *,
    truncates: bool,
) -> Iterator[Compacted]:
    """Yield the tables whose topic is compacted and would refuse some of their events.

    `tables`: (schema, table, whether it has a key of its own); `policy`: topic -> cleanup.policy;
    `truncates`: whether the publication has TRUNCATE.
    """
    for schema, table, has_key in tables:
        if not naming.publishes(schema, table):
            continue
        topic = naming.table(schema, table).name
        if COMPACT not in policy(topic):
            continue
        keyed = has_key or bool(naming.key(schema, table))
        if not keyed or (truncates and "t" not in naming.skips(schema, table)):
            yield Compacted(f"{schema}.{table}", topic, keyed)
