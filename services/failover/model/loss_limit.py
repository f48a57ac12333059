"""The last sighting of a primary, and how much of its WAL a new one may lack. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LossLimit:
    """failover.lag_bytes_max_on_failover and lag_seconds_max_on_failover (0: any)."""

    bytes_max: int = 16 * 2**20
    seconds_max: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """The last primary that took writes, as it was seen then: a lower bound of its WAL."""

    node: str
    timeline: int
    lsn: int
    age_s: float
    synchronous: str
    """Its synchronous_standby_names."""
    by: str = ""
    """Where it is remembered, if that is not beside our own journal's file."""
    failover_slots: frozenset[str] | None = None
    """Its failover slots; None where nobody noted them."""

    @property
    def position(self) -> tuple[int, int]:
        """The timeline and WAL position: the later of two sightings has more, by any clock."""
        return self.timeline, self.lsn

    def aged(self, age_s: float) -> Sighting:
        """Return the same sighting with the age `age_s`."""
        return replace(self, age_s=age_s)
