"""Chooses the epochs that stay readable: the older they are, the fewer. Pure.

Of a minute or an hour its last epoch stays. The last of an hour is also the last of its minute:
what stays now is therefore independent of when epochs were left out before.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from schemas.tables import TablesSettings

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS


class Retention(NamedTuple):
    """Up to which age all epochs stay, one of each minute, and one of each hour."""

    all_ms: int
    minutely_ms: int
    hourly_ms: int

    @classmethod
    def of(cls, settings: TablesSettings) -> "Retention":
        """Return what the settings say."""
        return cls(
            settings.epochs_kept_all_ms,
            settings.epochs_kept_minutely_ms,
            settings.epochs_kept_hourly_ms,
        )


def kept(times_ms: Sequence[int], now_ms: int, retention: Retention) -> list[int]:
    """Return the places of the epochs that stay; `times_ms`: when each came, in their order.

    The last epoch always stays, and so do those from a time that is still to come: a clock that was
    set back removes nothing.
    """
    minute = {time // MINUTE_MS: place for place, time in enumerate(times_ms)}
    hour = {time // HOUR_MS: place for place, time in enumerate(times_ms)}

    def stays(place: int, time: int) -> bool:
        age = now_ms - time
        return (
            age <= retention.all_ms
            or (age <= retention.minutely_ms and minute[time // MINUTE_MS] == place)
            or (age <= retention.hourly_ms and hour[time // HOUR_MS] == place)
            or place == len(times_ms) - 1
        )

    return [place for place, time in enumerate(times_ms) if stays(place, time)]
