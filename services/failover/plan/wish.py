"""What is asked for, and what comes of it: a wish and a plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.failover.effects.step import Step
    from services.failover.readiness import Readiness
    from services.failover.verdicts import Left

OPERATION = "fail over"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the operator asked for."""

    accept_loss_of: frozenset[str] = frozenset()
    promoted: str = ""
    """The node that this run has promoted, once it has."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to be done, why so, and what can't be done now."""

    new_primary: str
    why: str
    steps: tuple[Step, ...]
    slots: tuple[Readiness, ...]
    left: tuple[Left, ...] = ()
    notes: tuple[str, ...] = ()
