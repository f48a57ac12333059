"""Portions that wait while Kafka commits, bounded by bytes. Pure.

Of portions in a row that bring nothing for Kafka (transactions of tables that are not published,
keepalives), only the last one's position counts: it replaces the others. Each that stays takes its
own bytes and PORTION_OVERHEAD_BYTES, so that the number of portions is bounded too.
"""

from collections import deque
from typing import Final

from services.bridge.transactions.assembler import Portion

PORTION_OVERHEAD_BYTES: Final = 512
"""Measured: a portion without events, with its position and stamp, takes 530 bytes."""


class Waiting:
    """Portions in the order in which they go to Kafka."""

    def __init__(self) -> None:
        self._portions: deque[Portion] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._portions)

    def add(self, portion: Portion) -> Portion | None:
        """Append `portion`; return the one that it replaces, which is not sent any more."""
        replaced = None
        if self._portions and _idle(self._portions[-1]) and _idle(portion):
            replaced = self._portions.pop()
            if portion.counts is None:
                portion = portion._replace(counts=replaced.counts)
            if portion.stamp is None:
                portion = portion._replace(stamp=replaced.stamp)
        else:
            self.bytes += portion.bytes + PORTION_OVERHEAD_BYTES
        self._portions.append(portion)
        return replaced

    def next(self) -> Portion:
        """Take out the first one."""
        portion = self._portions.popleft()
        self.bytes -= portion.bytes + PORTION_OVERHEAD_BYTES
        return portion


def _idle(portion: Portion) -> bool:
    """Tell whether a portion only moves the position; a part of a large transaction does not."""
    return not (portion.events or portion.staging or portion.bytes or portion.position.seq)
