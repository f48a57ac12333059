"""The descriptions that a prepared transaction is staged with, so that others can replay it. Pure.

Another session has them from Kafka alone. A change names its relation, which is described as the
server described it last. An update or delete of a root may be of any of its partitions, and its old
row comes by the partition's replica identity. So one partition of each identity that tells less
than the root's is described right behind the root, as the server describes partitions: whether an
old value is hidden depends on the identities, not on how many partitions have them.

A partition that was described before the block may have had another identity by then: the server
describes it anew before its own next change alone. Where such a description would refuse a change,
the session ends (DescriptionOutdated) before any of the block is staged: in the next one nothing
comes before the block, and it has only descriptions that are right for it.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Final

from services.bridge.events.errors import DescriptionOutdated
from services.bridge.events.leaf_identities import LeafIdentity, hidden_by, leaf_identity
from services.bridge.events.rows import Table
from services.bridge.events.sent_relations import SentRelations, identity_columns
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.errors import misplaced
from services.bridge.pgoutput.messages import Delete, Relation, Update

Tables = Mapping[int, tuple[Relation, Table]]
_RELATION, _TYPE = b"R"[0], b"Y"[0]
_CHANGES_OF_OLD_ROWS: Final = frozenset(b"UD")
_OID = struct.Struct("!I")
_OID_COUNT = struct.Struct("!IB")


class StagedDescriptions:
    """The descriptions of one open block after another, of what `decoder` and `sent` know.

    `tables`: those that have had events, by oid: what they need of old rows.
    """

    def __init__(self, decoder: Decoder, sent: SentRelations, tables: Tables) -> None:
        self._decoder = decoder
        self._sent = sent
        self._tables = tables
        self.begin()

    def begin(self) -> None:
        """Begin the next block, which has no descriptions yet."""
        self._sent.begin()
        self._staged: dict[int, tuple[bytes, ...]] = {}
        self._replayed = SentRelations()
        """The relations as the replay of the block will know them."""
        self.expire()

    def expire(self) -> None:
        """Note that the server has described something: what is staged may be of another shape."""
        self._current: set[int] = set()
        self._judged: set[int] = set()
        self._suspects: dict[int, tuple[LeafIdentity, ...]] = {}
        """By root: partitions that would hide old values, if they still are as described."""

    def before(self, payload: bytes, lsn: int) -> Iterator[bytes]:
        """Yield the descriptions that the change `payload` needs and that the block does not have.

        Raise DecodeError for a change of a relation that the server has not described, and
        DescriptionOutdated where the server is to describe a partition anew.
        """
        oids = _oids(payload, lsn)
        self._sent.settle(oids)
        own: tuple[bytes, ...] = ()
        for oid in oids:
            if oid not in self._current:
                own = self._own(oid, lsn)
                yield from own
        if payload[0] in _CHANGES_OF_OLD_ROWS:
            if oids[0] not in self._judged:
                for number, (root, partition) in enumerate(self._hiding(oids[0])):
                    if number or not own:
                        yield root
                    yield partition
            if oids[0] in self._suspects:
                self._require_current(payload, lsn)
        self._replayed.settle(oids)

    def _own(self, oid: int, lsn: int) -> tuple[bytes, ...]:
        """Return a relation's types and itself, if the block does not have them as they are."""
        relation = self._decoder.relations.get(oid)
        description = self._decoder.descriptions.get((_RELATION, oid))
        if relation is None or description is None:
            raise misplaced(f"a change of relation {oid}, which was not described,", lsn)
        types = [
            self._decoder.descriptions.get((_TYPE, column.type_oid)) for column in relation.columns
        ]
        found = (*filter(None, types), description)
        self._current.add(oid)
        if self._staged.get(oid) == found:
            return ()
        self._staged[oid] = found
        self._replayed.take(relation)
        return found

    def _hiding(self, oid: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield partitions by which the block's replay does not judge yet, each behind its root."""
        self._judged.add(oid)
        relations, descriptions = self._decoder.relations, self._decoder.descriptions
        root = relations[oid]
        needed = {
            column.name for column in root.columns if column.key or root.replica_identity == "n"
        }
        judged = {
            columns
            for columns, partition in self._replayed.identities(oid)
            if relations[partition.oid] == partition  # else another may replace it
        }
        for columns, known in self._sent.identities(oid):
            partition = relations.get(known.oid)
            if partition is None:  # the server has yet to describe it anew, before a change of it
                continue
            if partition is not known:
                columns = identity_columns(partition)
            if columns in judged or columns >= needed:
                continue
            judged.add(columns)
            if self._sent.former(known.oid):
                name, identity = f"{partition.schema}.{partition.table}", partition.replica_identity
                leaf = leaf_identity(root, name, identity, columns, partition.oid)
                if self._hides(root, leaf):
                    self._suspects[oid] = (*self._suspects.get(oid, ()), leaf)
                    continue
            self._replayed.take(root)
            self._replayed.take(partition)
            yield descriptions[_RELATION, oid], descriptions[_RELATION, partition.oid]

    def _hides(self, root: Relation, leaf: LeafIdentity) -> bool:
        """Tell whether a partition hides what is needed; also where that is not known yet."""
        relation, table = self._tables.get(root.oid, (None, None))
        return table is None or relation != root or table.hides(leaf)

    def _require_current(self, payload: bytes, lsn: int) -> None:
        """Raise DescriptionOutdated if old values of a change are hidden in a suspect partition."""
        change = self._decoder.decode(payload, lsn)
        assert isinstance(change, Update | Delete)
        root = change.relation
        if root.oid in self._tables and self._tables[root.oid][1].skips(change):
            return
        # The server marks the old row of a partition as whole where the root has FULL.
        hidden = hidden_by(self._suspects[root.oid], change._replace(old_kind="K"))
        if hidden:
            raise DescriptionOutdated(hidden[0], f"{root.schema}.{root.table}")


def _oids(payload: bytes, lsn: int) -> tuple[int, ...]:
    """Return the relations of a change outside of a streamed block."""
    try:
        if payload[:1] == b"M":
            return ()
        if payload[:1] == b"T":
            count, _flags = _OID_COUNT.unpack_from(payload, 1)
            return struct.unpack_from(f"!{count}I", payload, 1 + _OID_COUNT.size)
        return (_OID.unpack_from(payload, 1)[0],)
    except struct.error as error:
        raise misplaced(f"a truncated message {payload[:1]!r}", lsn) from error
