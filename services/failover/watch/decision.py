"""Decides when to act, from observations and the time. Pure.

verdict   because
rest      nothing is to be done
paused    somebody has paused it
passive   another replica leads, or acting by itself is off
forbid    what was seen forbids it, or is not the whole picture
wait      not yet seen often enough, long enough, or too soon after the last act
act       the last `quorum` observations agree, for `settle_s` seconds (`silence_s` with a silent
          node), none of them stale; the timeline is not older than one seen before
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from services.failover.watch.assessment import Assessment

if TYPE_CHECKING:
    from schemas.settings import WatchSettings

_DOUBLINGS_MAX = 6


class Verdict(StrEnum):
    """The act to perform now."""

    REST = "rest"
    PAUSED = "paused"
    PASSIVE = "passive"
    FORBID = "forbid"
    WAIT = "wait"
    ACT = "act"


@dataclass(frozen=True, slots=True)
class Decision:
    """The next act of `watch`, and its reason."""

    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Rules:
    """From the settings; times in seconds."""

    automatic: bool
    quorum: int
    settle_s: float
    silence_s: float
    cooldown_s: float
    stale_s: float
    """Observations further apart than this do not make a row."""
    first_s: float = 0.0
    """How long after its start watch does not act by what it sees alone: see `_unremembered`."""

    @classmethod
    def of(cls, settings: WatchSettings, longest_observation_s: float) -> Rules:
        """Return the rules from the settings; one observation may take `longest_observation_s`."""
        interval_s = settings.interval_ms / 1000
        return cls(
            automatic=settings.repoint,
            quorum=settings.quorum,
            settle_s=settings.settle_ms / 1000,
            silence_s=settings.silence_ms / 1000,
            cooldown_s=settings.cooldown_ms / 1000,
            stale_s=3 * interval_s + longest_observation_s,
            first_s=settings.first_ms / 1000,
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """The state between observations; times as given to `consider`."""

    assessment: Assessment = field(default_factory=Assessment)
    agreeing: int = 0
    """How many observations in a row say the same as the last."""
    since: float = 0.0
    """When the first of them was made."""
    seen: float = 0.0
    """When the last was made."""
    timeline_max: int = 0
    """The newest on which a primary was seen."""
    not_before: float = 0.0
    """No act before then."""
    failures: int = 0
    """Acts in a row that failed."""
    begun: float | None = None
    """When the first observation was made."""
    complete: bool = False
    """Every node has answered in one observation of this process."""


def remember(memory: Memory, assessment: Assessment, now: float, rules: Rules) -> Memory:
    """Return the memory with one more observation."""
    row = (
        assessment == memory.assessment
        and memory.agreeing > 0
        and now - memory.seen <= rules.stale_s
    )
    return replace(
        memory,
        assessment=assessment,
        agreeing=memory.agreeing + 1 if row else 1,
        since=memory.since if row else now,
        seen=now,
        timeline_max=max(memory.timeline_max, assessment.timeline if not assessment.partial else 0),
        begun=now if memory.begun is None else memory.begun,
        complete=memory.complete or assessment.complete,
    )


def decide(
    memory: Memory,
    now: float,
    rules: Rules,
    *,
    paused: bool,
    leading: bool,
    elsewhere: str = "",
) -> Decision:
    """Decide what to do about the last observation.

    `elsewhere`: why this replica may not even ask for the lock that the leader has.
    """
    assessment = memory.assessment
    aside = _forbidden(memory)
    if aside:
        return Decision(Verdict.FORBID, aside)
    if not assessment.pending:
        held = held_remark(assessment.held)
        rest = f"everything else leads there; {held}" if held else "everything leads there"
        return Decision(Verdict.REST, f"{assessment.primary} is the primary, and {rest}")
    if paused:
        return Decision(Verdict.PAUSED, f"paused; to do: {assessment.pending[0]}")
    if not rules.automatic:
        return Decision(Verdict.PASSIVE, "failover.watch.repoint is off: slotfailover repoint")
    if not leading:
        return Decision(Verdict.PASSIVE, elsewhere or "another replica of watch leads")
    missing = _not_yet(memory, now, rules)
    if missing:
        return Decision(Verdict.WAIT, missing)
    return Decision(Verdict.ACT, f"{assessment.primary} leads on timeline {assessment.timeline}")


def held_remark(held: tuple[str, ...]) -> str:
    """Return which subscriptions a run has disabled and nobody has enabled again, "" for none."""
    return f"held: {', '.join(held)} (slotfailover check tells why)" if held else ""


def acted(memory: Memory, now: float, rules: Rules, *, well: bool) -> Memory:
    """Return the memory after an act: observations from before it no longer count."""
    failures = 0 if well else memory.failures + 1
    wait_s = rules.cooldown_s * 2 ** min(failures, _DOUBLINGS_MAX)
    return replace(memory, agreeing=0, failures=failures, not_before=now + wait_s)


def _forbidden(memory: Memory) -> str:
    """Return why repointing must not be done whatever time passes, "" where it may."""
    assessment = memory.assessment
    if assessment.partial or assessment.forbidden:
        return "; ".join(filter(None, (assessment.forbidden, assessment.partial)))
    if assessment.pending and not assessment.primary:
        return "no node is the primary"
    if assessment.timeline < memory.timeline_max:
        return (
            f"{assessment.primary} is on timeline {assessment.timeline}, a primary was seen on "
            f"{memory.timeline_max}: an old one has come back"
        )
    return ""


def _unremembered(memory: Memory, now: float, rules: Rules) -> float:
    """Return for how many seconds to wait because an old primary may have come back.

    After a power cut, nodes and `watch` start in any order, the old primary perhaps first: watch
    can't tell it from a new one.
    """
    if memory.assessment.remembered or memory.complete or memory.begun is None:
        return 0.0
    return memory.begun + rules.first_s - now


def _not_yet(memory: Memory, now: float, rules: Rules) -> str:
    """Return why repointing has to wait, with the seconds left; "" when it may begin."""
    if memory.agreeing < rules.quorum:
        return f"{memory.agreeing} of {rules.quorum} observations agree"
    unremembered_s = _unremembered(memory, now, rules)
    if unremembered_s > 0:
        return (
            f"nothing tells which timeline is the newest, and not every node answers: "
            f"{unremembered_s:.0f} s more"
        )
    wait_s = max(rules.settle_s, rules.silence_s if memory.assessment.silent else 0)
    left_s = max(memory.since + wait_s, memory.not_before) - now
    if left_s > 0:
        why = (
            f"{', '.join(memory.assessment.silent)} is silent"
            if memory.assessment.silent
            else "settling"
        )
        return f"{left_s:.0f} s more ({why})"
    if now - memory.seen > rules.stale_s:
        return "the last observation is stale"
    return ""
