"""Relations as the stream has described them, and their partitions. Pure.

pgoutput describes the root, and right behind it the partition, before the first change of that
partition; the change then names the root alone (pgoutput.c, maybe_send_schema). A TRUNCATE is the
only other message before which it describes several relations, and it names all of them. So the
stream itself tells partitions, also of one that has been detached or dropped since.
"""

from collections.abc import Collection, Iterator

from services.bridge.pgoutput.messages import Relation


class SentRelations:
    """The relations of one connection as the server has described them last.

    `relations`: by oid, also partitions that are published as their root.
    """

    def __init__(self) -> None:
        self.relations: dict[int, Relation] = {}
        self._roots: dict[int, int] = {}
        self._above: int | None = None
        """The relation that was described just before; None behind a change or a partition."""

    def take(self, relation: Relation) -> None:
        """Take a description, which counts for changes from then on."""
        self.relations[relation.oid] = relation
        if self._above in (None, relation.oid):
            self._roots.pop(relation.oid, None)
            self._above = relation.oid
        else:
            self._roots[relation.oid] = self._above
            self._above = None

    def settle(self, named: Collection[int] = ()) -> None:
        """Note that a message has come which names these relations, as it names no partition.

        What is described next stands alone, or begins a pair.
        """
        self._above = None
        for oid in named:
            self._roots.pop(oid, None)

    def partitions(self, root: int) -> Iterator[Relation]:
        """Yield the partitions that were described right behind the relation `root` (oid)."""
        for oid, above in self._roots.items():
            if above == root:
                yield self.relations[oid]
