"""Tables without a key: which rows are from before the slot, read in the order of their places.

    inserted before the slot's beginning     op r, once       its xmin is seen there
    inserted later                           op c, once       the slot decodes its transaction
    a version that an update made later      op u, once       the same

A row version never moves, and says which transaction has made it: so chunks may be read under
database snapshots of their own, by any session, on any copy of the server. Pure.

Sources: snapbuild.c, SnapBuildInitialSnapshot (every xid between xmin and xmax that has not
committed there is listed, also of subtransactions); heap_freeze keeps a row's xmin.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from schemas.snapshot import SlotBeginning
from services.bridge.snapshot.tables import TableShape
from services.bridge.snapshot.visibility import Sight, parse_sight

_XIDS: Final = 2**32
_NORMAL: Final = 3
"""transam.h, FirstNormalTransactionId."""
WINDOW_MAX: Final = 2**31
"""How many xids may be given out since the slot's beginning."""
_ROWS_PER_BLOCK: Final = 50.0
"""Of a table that was not looked at yet."""


class Place(NamedTuple):
    """Where a table's rows lie now: its relfilenode, and whether it was made after the slot.

    `kept`: the same publications have published it, unchanged, since the slot began.
    """

    file: int
    new: bool
    kept: bool


class RowsBefore(NamedTuple):
    """Which rows of a table without a key are read: those that `sight` sees, in the file `file`."""

    sight: Sight
    file: int


class Beginning(NamedTuple):
    """The slot's beginning as Kafka has it (SlotBeginning)."""

    sight: Sight
    all_tables: bool
    files: Mapping[int, int]

    def refusal(self, shape: TableShape, place: Place | None) -> str:
        """Say why the table's rows from before the slot can't be told apart; "" where they can."""
        if shape.partitioned:
            return "has no key, and is published as the root of its partitions"
        file = self.files.get(shape.relation.oid)
        if file is None:
            return (
                "has no key, and joined the publication after the slot was made, or was left out "
                "when `slotbridge recover` made it"
            )
        if place is None or place.file != file:
            return "has no key, and was truncated or rewritten since the slot was made"
        if not place.kept:
            return "has no key, and the publication, or its place in that, was changed since"
        return ""

    def rows(self, shape: TableShape) -> RowsBefore:
        """Return which rows of the table are read, where nothing refuses it."""
        return RowsBefore(self.sight, self.files.get(shape.relation.oid, 0))

    def covers(self, shape: TableShape, place: Place | None) -> bool:
        """Tell whether all rows of the table come as changes: it was made after the slot.

        With its first file alone: rows that SET LOGGED or a rewrite brings are not decoded.
        """
        oid = shape.relation.oid
        if not self.all_tables or shape.partitioned or oid in self.files or place is None:
            return False
        return place.new and place.kept and place.file == oid


def beginning_of(beginning: SlotBeginning) -> Beginning:
    """Read the slot's beginning from Kafka's record."""
    return Beginning(parse_sight(beginning.sight), beginning.all_tables, beginning.files)


def from_before(sight: Sight) -> str:
    """Make the SQL condition that holds for rows which `sight` sees the insertion of.

    Later xids are those between its xmax and the present one: all others are older, however old,
    as a row keeps the number when VACUUM freezes it.
    """
    raw, xmax = "xmin::text::bigint", sight.xmax % _XIDS
    given_out = f"pg_snapshot_xmax(pg_current_snapshot())::text::bigint - {sight.xmax}"
    older = f"(({raw} - {xmax}) & {_XIDS - 1}) >= {given_out}"
    condition = f"({raw} < {_NORMAL} OR {older})"
    if sight.running:
        running = ",".join(str(xid % _XIDS) for xid in sorted(sight.running))
        condition += f" AND {raw} <> ALL ('{{{running}}}'::bigint[])"
    return condition


def places_query(sight: Sight) -> bytes:
    """Make the SQL that reads (oid, *Place) of `oids` in `publication`.

    pg_attribute's row of ctid is written once, with the table; those of a publication when it, or
    its list of tables, is altered.
    """
    before = from_before(sight)
    return f"""
        SELECT c.oid::bigint, c.relfilenode::bigint,
               (SELECT NOT ({before}) FROM pg_attribute
                 WHERE attrelid = c.oid AND attname = 'ctid' AND attnum < 0),
               EXISTS (SELECT FROM pg_publication p WHERE pubname = %(publication)s AND {before}
                  AND (puballtables
                    OR EXISTS (SELECT FROM pg_publication_rel
                                WHERE prpubid = p.oid AND prrelid = ANY (above.oids) AND {before})
                    OR EXISTS (SELECT FROM pg_publication_namespace
                                WHERE pnpubid = p.oid AND {before} AND pnnspid IN (
                                      SELECT relnamespace FROM pg_class
                                       WHERE pg_class.oid = ANY (above.oids)))))
          FROM pg_class c,
               LATERAL (SELECT array_append(array_agg(relid::oid), c.oid) AS oids
                          FROM pg_partition_ancestors(c.oid)) above
         WHERE c.oid = ANY (%(oids)s::oid[])""".encode()  # noqa: S608


def block_of(place: str) -> int:
    """Return the block of a place in text form, as `(block,number)`."""
    return int(place.strip("()").split(",")[0])


class Blocks(NamedTuple):
    """The blocks from `first` on that are read next, below `until`; the table has `size`."""

    first: int
    until: int
    size: int

    def condition(self, before: Sight) -> str:
        """Make the SQL condition for rows in them that are from before the slot."""
        return f"ctid < '({self.until},0)'::tid AND {from_before(before)}"

    def bounds(self, count: int) -> list[list[str]]:
        """Return the places that part the blocks into `count` ranges, or fewer."""
        blocks = self.until - self.first
        starts = sorted({self.first + blocks * n // count for n in range(1, count)} - {self.first})
        return [[f"({block},0)"] for block in starts]

    def read(self, last: Sequence[str] | None, *, whole: bool) -> int:
        """Return how many were read, up to the place `last`, or as a whole."""
        until = self.until if whole or last is None else block_of(last[0]) + 1
        return until - self.first


class Density:
    """How many rows lie in a block of each table, to read as few blocks as a chunk needs."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    def blocks(self, oid: int, rows: int) -> int:
        """Return how many blocks have about `rows` rows."""
        return max(1, round(rows / self._known.get(oid, _ROWS_PER_BLOCK)))

    def learn(self, oid: int, rows: int, blocks: int) -> None:
        """Note that `blocks` blocks had `rows` rows."""
        if blocks > 0:
            self._known[oid] = max(0.1, rows / blocks)
