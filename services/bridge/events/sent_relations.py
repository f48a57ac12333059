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
        self._described_in: dict[int, int] = {}
        self._transaction = 0
        self._above: int | None = None
        """The relation that was described just before; None behind a change or a partition."""

    def begin(self) -> None:
        """Begin the next transaction that is published."""
        self._transaction += 1
        self.settle()

    def take(self, relation: Relation) -> None:
        """Take a description, which counts for changes from then on."""
        self.relations[relation.oid] = relation
        self._described_in[relation.oid] = self._transaction
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

    def former(self, oid: int) -> bool:
        """Tell whether a relation was described last in an earlier transaction.

        It may be another since: the server describes it anew before its next change alone.
        """
        return self._described_in.get(oid, self._transaction) < self._transaction

    def partitions(self, root: int) -> Iterator[Relation]:
        """Yield the partitions that were described right behind the relation `root` (oid)."""
        for oid, above in self._roots.items():
            if above == root:
                yield self.relations[oid]
