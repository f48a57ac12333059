"""Relations as the stream has described them, and their partitions. Pure.

pgoutput describes the root, and right behind it the partition, before the first change of that
partition; the change then names the root alone (pgoutput.c, maybe_send_schema). A TRUNCATE is the
only other message before which it describes several relations, and it names all of them. So the
stream itself tells partitions, also of one that has been detached or dropped since.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from services.bridge.pgoutput.messages import Relation


class SentRelations:
    """The relations of one connection as the server has described them last.

    `relations`: by oid, also partitions that are published as their root.
    """

    def __init__(self) -> None:
        self.relations: dict[int, Relation] = {}
        self._roots: dict[int, tuple[int, frozenset[str]]] = {}
        """By partition, described last at the end: its root, the columns of its identity."""
        self._described_in: dict[int, int] = {}
        self._transaction = 0
        self._above: int | None = None
        """The relation that was described just before; None behind a change or a partition."""

    def begin(self) -> None:
        """Begin the next transaction, or block of a prepared one."""
        self._transaction += 1
        self.settle()

    def take(self, relation: Relation) -> None:
        """Take a description, which counts for changes from then on."""
        self.relations[relation.oid] = relation
        self._described_in[relation.oid] = self._transaction
        self._roots.pop(relation.oid, None)
        if self._above is None or self._above == relation.oid:
            self._above = relation.oid
        else:
            self._roots[relation.oid] = self._above, identity_columns(relation)
            self._above = None

    def settle(self, named: Collection[int] = ()) -> None:
        """Note a message about these relations, which names no partition of them.

        The next description stands alone, or begins a pair of root and partition.
        """
        self._above = None
        for oid in named:
            self._roots.pop(oid, None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let the descriptions that are taken within this context count within it alone.

        They are those that a prepared transaction was staged with, and may be older than what the
        server has sent since, and does not repeat.
        """
        kept = dict(self.relations), dict(self._roots), dict(self._described_in)
        try:
            yield
        finally:
            self.relations, self._roots, self._described_in = kept

    def former(self, oid: int) -> bool:
        """Tell whether a relation was described last in an earlier transaction.

        It may be another since: the server describes it anew before its next change alone.
        """
        return self._described_in.get(oid, self._transaction) < self._transaction

    def partitions(self, root: int) -> Iterator[Relation]:
        """Yield the partitions that were described right behind the relation `root` (oid)."""
        for _, partition in self.identities(root):
            yield partition

    def identities(self, root: int) -> Iterator[tuple[frozenset[str], Relation]]:
        """Yield the columns of the replica identity of each such partition, and the partition.

        The partition that was described last comes first.
        """
        for oid, (above, columns) in reversed(self._roots.items()):
            if above == root:
                yield columns, self.relations[oid]


def identity_columns(relation: Relation) -> frozenset[str]:
    """Return the columns of a relation's replica identity by name: those that an old row tells."""
    return frozenset(column.name for column in relation.columns if column.key)
