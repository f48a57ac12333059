"""Whether a database snapshot sees every transaction that was published. Pure.

    stream    … T1   T2   T3 | W4   W5 …        | where a chunk of rows is put into the stream
    snapshot    sees T1 … T3, not W4; of later ones it may see some

Rows are put where all transactions before are seen by the snapshot that they were read under: a
transaction before that it did not see would be taken back by older rows. Later ones that it sees
come again as changes, which changes nothing in the end: changes of one row are seen in the order of
their commits, as the second waits for the first one's lock.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

_XIDS: Final = 2**32


class Sight(NamedTuple):
    """A database snapshot: xids with epoch, as pg_current_snapshot has them.

    A committed transaction is seen if its top-level xid is below `xmax` and not in `running`.
    """

    xmin: int
    xmax: int
    running: frozenset[int]

    def sees(self, xid: int) -> bool:
        """Tell whether the snapshot sees the committed transaction `xid` (without epoch)."""
        full = with_epoch(xid, self.xmax)
        return full < self.xmin or (full < self.xmax and full not in self.running)


def parse_sight(text: str) -> Sight:
    """Read the snapshot of `xmin:xmax:xip,…`. Raise ValueError for other texts.

    A new slot's snapshot may have an xmin above its xmax, which is one above the last decoded
    commit. It sees all below xmin. Source: snapbuild.c, SnapBuildProcessRunningXacts;
    XidInMVCCSnapshot.
    """
    xmin, xmax, running = text.split(":")
    open_xids = frozenset(map(int, filter(None, running.split(","))))
    return Sight(int(xmin), max(int(xmin), int(xmax)), open_xids)


def with_epoch(xid: int, near: int) -> int:
    """Return the 32-bit `xid` with the epoch that brings it nearest to `near`, which has one."""
    ahead = (xid - near) % _XIDS
    return near + ahead - (_XIDS if ahead >= _XIDS // 2 else 0)


class PublishedXids:
    """The xids of transactions that were published and that no snapshot is known to see yet.

    Begin to `add` before `floor` is taken from the server: every transaction that was published
    earlier has an xid below.
    """

    def __init__(self) -> None:
        self.floor = 0
        """An xid that was assigned after the first `add`. A snapshot's xmax does not do: it is
        one above the last transaction that has ended, and published ones may still be above."""
        self._xids: set[int] = set()

    def add(self, xids: Iterable[int]) -> None:
        """Note transactions, xids without epoch; 0 is none."""
        self._xids.update(xids)
        self._xids.discard(0)

    def seen_by(self, sight: Sight) -> bool:
        """Tell whether `sight` sees all that was published; those that it sees are forgotten.

        Of transactions before `floor` it is not known which were published: all must have ended.
        """
        self._xids = {xid for xid in self._xids if not sight.sees(xid)}
        return not self._xids and sight.xmin >= self.floor
