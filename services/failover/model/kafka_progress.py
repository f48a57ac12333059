"""How far Kafka is, as the bridge's progress record tells. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.failover.model.timelines import Milestone


@dataclass(frozen=True, slots=True)
class KafkaProgress:
    """The progress of Kafka by its last progress record; all fields are empty without one."""

    lsn: int | None = None
    """Read before the servers were."""
    latest: int | None = None
    """Read after them, where that matters."""
    system_identifier: str = ""
    timeline: int = 0
    problem: str = ""
    """Why it can't be read."""
    began: int | None = None
    """Where that timeline left its parent; None where the record does not tell."""
    origin: int | None = None
    """How far the bridge was known to be before the reading began."""
    late: bool = False
    """`latest` was not read in time: whether Kafka has what the bridge published is not known."""

    @property
    def milestone(self) -> Milestone | None:
        """The timeline that Kafka has met; None where there is no record."""
        if not self.system_identifier:
            return None
        return Milestone(self.system_identifier, self.timeline, self.began)
