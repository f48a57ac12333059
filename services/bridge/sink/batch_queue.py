"""EventBatches that wait while Kafka commits, bounded by bytes. Pure.

Of batches in a row that bring nothing for Kafka (transactions of tables that are not published,
keepalives), only the last one's position counts: it replaces the others. Each that stays takes its
own bytes and PORTION_OVERHEAD_BYTES, so that the number of batches is bounded too.
"""

from collections import deque
from typing import Final

from services.bridge.transactions.assembler import EventBatch

PORTION_OVERHEAD_BYTES: Final = 512
"""Measured: a batch without events, with its position and stamp, takes 530 bytes."""


class Waiting:
    """EventBatches in the order in which they go to Kafka."""

    def __init__(self) -> None:
        self._batches: deque[EventBatch] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: EventBatch) -> EventBatch | None:
        """Append `batch`; return the batch that it replaces, which is not to be sent."""
        replaced = None
        if self._batches and _idle(self._batches[-1]) and _idle(batch):
            replaced = self._batches.pop()
            if batch.counts is None:
                batch = batch._replace(counts=replaced.counts)
            if batch.stamp is None:
                batch = batch._replace(stamp=replaced.stamp)
        else:
            self.bytes += batch.bytes + PORTION_OVERHEAD_BYTES
        self._batches.append(batch)
        return replaced

    def next(self) -> EventBatch:
        """Remove and return the first batch."""
        batch = self._batches.popleft()
        self.bytes -= batch.bytes + PORTION_OVERHEAD_BYTES
        return batch


def _idle(batch: EventBatch) -> bool:
    """Tell whether a batch only moves the position; a part of a large transaction does not."""
    return not (batch.events or batch.staging or batch.bytes or batch.position.seq)
