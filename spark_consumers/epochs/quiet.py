"""When transactions that bring the tables nothing become an epoch of their own. Pure.

The record of epochs tells from which offset of `<prefix>.transaction` a start reads on. While other
tables are busy and ours are not, Kafka deletes that offset in the end, and nobody could tell then
what the deleted transactions brought. So an epoch is recorded of them from time to time: each has
been read, and counts no event of our tables, so that the tables are whole as of the last one.
After a stop for longer than Kafka keeps the topic, a start still refuses to go on.
"""

from collections.abc import Sequence
from typing import Final

QUIET_MS: Final = 3600_000
"""How old the last epoch is before one of transactions without events of the tables is recorded."""
_KEPT_MS: Final = 24 * 3600_000


def is_due(commit_ts_ms: int, recorded_ms: int, now_ms: int) -> bool:
    """Tell whether the last epoch is old enough, by the commit time of its transactions.

    `recorded_ms`: when this process has recorded an epoch, which may be of old transactions.
    """
    return now_ms - max(commit_ts_ms, recorded_ms) >= QUIET_MS


def with_news(tables: Sequence[object], times_ms: Sequence[int], now_ms: int) -> list[int]:
    """Return the places of the epochs that are not like the one before, of the last, and of a day.

    `tables`: what each of them has; `times_ms`: when each came. The others may be forgotten before
    their time: readers have the same rows by the epoch before.
    """
    last = len(tables) - 1
    return [
        place
        for place, found in enumerate(tables)
        if place in (0, last) or found != tables[place - 1] or now_ms - times_ms[place] < _KEPT_MS
    ]
