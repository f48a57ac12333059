"""Which old values the partitions of a table tell, where they are published as their root. Pure.

pgoutput describes the root, and beside it the partition that a change is of; the change itself
names the root alone. Its old row comes by the replica identity of the partition, which does not
inherit its root's. A partition counts by what the stream has said of it, as that was so at the
change, also where the catalog does not have it any more; one that the stream has not described,
by the catalog, if it differs from its root there.
"""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from services.bridge.events.sent_relations import SentRelations, identity_columns
from services.bridge.pgoutput.messages import Delete, Insert, Relation, Update
from services.postgres.partitions import Partition

_KINDS: Final = {"d": "DEFAULT", "i": "USING INDEX"}


class LeafIdentity(NamedTuple):
    """The replica identity of a partition that does not tell whole old rows.

    `replica_identity`: d or i. `indexes`: its `columns`, as indexes of the root's relation. `oid`:
    the partition's, where the stream has told the identity; 0 where the catalog has. `outdated`:
    the catalog has another identity of it now, or does not have it.
    """

    partition: str
    replica_identity: str
    columns: tuple[str, ...]
    indexes: frozenset[int]
    oid: int = 0
    outdated: bool = False

    def __str__(self) -> str:
        kind = _KINDS.get(self.replica_identity, self.replica_identity)
        return f"{self.partition} has REPLICA IDENTITY {kind} ({', '.join(self.columns)})"


def leaf_identities(
    relation: Relation, partitions: Iterable[Partition], sent: SentRelations
) -> tuple[LeafIdentity, ...]:
    """Return the replica identities of partitions that tell no whole old rows, ordered by name.

    `relation`: their root. `partitions`: as the catalog has them now; `sent`: what the stream has
    described. Under a root with REPLICA IDENTITY FULL the catalog counts also for a partition that
    the stream has described.
    """
    found: dict[tuple[str, str, frozenset[str]], tuple[int, bool]] = {}
    described = {one.oid: one for one in sent.partitions(relation.oid)}
    full = relation.replica_identity == "f"
    known = {partition.oid: partition for partition in partitions}
    for partition in known.values():
        then = sent.relations.get(partition.oid)
        if full or (then is None and partition.lacks):
            found[partition.full_name, partition.replica_identity, partition.identity] = (0, False)
        if then is not None:
            described[then.oid] = then
    for then in described.values():
        one, now = (then.replica_identity, identity_columns(then)), known.get(then.oid)
        outdated = now is None or (now.replica_identity, now.identity) != one
        found.setdefault((f"{then.schema}.{then.table}", *one), (then.oid, outdated))
    return tuple(
        sorted(
            leaf_identity(relation, name, replica_identity, columns, *source)
            for (name, replica_identity, columns), source in found.items()
            if replica_identity != "f" and columns  # without any the server refuses the change
        )
    )


def leaf_identity(
    root: Relation,
    partition: str,
    replica_identity: str,
    columns: frozenset[str],
    oid: int,
    outdated: bool = False,
) -> LeafIdentity:
    """Return the replica identity of a partition of `root`, of the `columns` named."""
    indexes = frozenset(at for at, column in enumerate(root.columns) if column.name in columns)
    return LeafIdentity(partition, replica_identity, tuple(sorted(columns)), indexes, oid, outdated)


def hiding(leaves: Iterable[LeafIdentity], needed: Collection[int]) -> tuple[LeafIdentity, ...]:
    """Return the partitions that do not tell all old values of the columns `needed`."""
    return tuple(leaf for leaf in leaves if not leaf.indexes.issuperset(needed))


def hidden_by(
    leaves: tuple[LeafIdentity, ...], change: Insert | Update | Delete
) -> tuple[LeafIdentity, ...]:
    """Return the partitions of `leaves` that an update or delete may be of, () for none.

    An update without an old row may be of any: it tells only that no column of the partition's
    identity has changed. The columns of an identity are never NULL.
    """
    if not leaves or isinstance(change, Insert) or change.old_kind == "O":
        return ()
    if change.old is None:
        return leaves
    present = frozenset(index for index, value in enumerate(change.old) if value is not None)
    return tuple(leaf for leaf in leaves if leaf.indexes == present)
