"""How long a snapshot holds up the stream: the size and rate of chunks, what is awaited. Pure."""

import contextlib
from collections.abc import Iterator
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


class RateLimit:
    """When the next chunk may be read, so that no more than `rows_per_second` are; None: at once.

    Times are those of time.monotonic.
    """

    def __init__(self, rows_per_second: int | None) -> None:
        self._rows_per_second = rows_per_second
        self.due = 0.0

    @property
    def limits(self) -> bool:
        """Whether there is a limit."""
        return self._rows_per_second is not None

    def bound(self, rows: int) -> int:
        """Return how many rows a chunk of `rows` may have: at most those of one second."""
        return min(rows, self._rows_per_second or rows)

    def learn(self, rows: int, began: float) -> None:
        """Note that a chunk of `rows` rows was read, from `began` on."""
        if self._rows_per_second is not None:
            self.due = max(self.due, began) + rows / self._rows_per_second


class Patience:
    """How long the stream stands still for what a chunk needs, before it goes on without the chunk.

    Twice as long after each time in vain, half as long after another, so that a snapshot comes to
    its end also where commits or standbys always take longer than the first time.
    """

    LONGEST_S: Final = 5.0

    def __init__(self, first_s: float, longest_s: float = LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.seconds = first_s

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Note how the wait ended: with an error, it was in vain."""
        try:
            yield
        except BaseException:
            self.lost()
            raise
        self.met()

    def lost(self) -> None:
        """Note that it was in vain."""
        self.seconds = min(2 * self.seconds, max(self._first_s, self._longest_s))

    def met(self) -> None:
        """Note that it has come in time."""
        self.seconds = max(self._first_s, self.seconds / 2)
