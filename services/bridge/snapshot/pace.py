"""How long the stream is held up for a snapshot: the size of chunks, and what is awaited. Pure."""

from typing import Final


class ChunkSize:
    """How many rows the next chunk has: as many as were read in `hold_s`, within bounds."""

    def __init__(self, rows_max: int, hold_s: float) -> None:
        self._rows_max = rows_max
        self._hold_s = hold_s
        self.rows = min(rows_max, 1_000)

    def learn(self, rows: int, took_s: float) -> None:
        """Note that `rows` rows held the stream for `took_s`: at most twice as many come next."""
        if rows:
            fit = int(rows * self._hold_s / max(took_s, 1e-4))
            self.rows = max(1, min(self._rows_max, 2 * self.rows, fit))

    def shrink(self) -> None:
        """Note that a chunk took too long to be read at all."""
        self.rows = max(1, self.rows // 4)


class Patience:
    """How long the stream stands still for what a chunk needs, before it goes on without the chunk.

    Twice as long after each time in vain, so that a snapshot comes to its end also where commits or
    standbys always take longer than the first time.
    """

    LONGEST_S: Final = 5.0

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self.seconds = first_s

    def lost(self) -> None:
        """Note that it was in vain."""
        self.seconds = min(2 * self.seconds, max(self._first_s, self.LONGEST_S))

    def met(self) -> None:
        """Note that it has come in time."""
        self.seconds = self._first_s
