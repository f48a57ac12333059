"""Who holds a Kubernetes Lease, judged as one candidate may judge it. Pure.

A candidate believes its own monotonic clock and the API server's resource versions, nothing else:
times in the object are for people, as another machine's clock may say anything.

holds      its own last accepted write was sent less than `deadline_s` ago
may take   what the object says has not changed for its duration since the candidate first saw it,
           or its holder gave it up

Each write names the version that it replaces, so that of two candidates one is refused. A holder
has stopped before another may take it, as the deadline is shorter than the duration and counts from
an earlier moment: the write was sent before it could be seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from schemas.watch_settings import LeaseSettings

_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
_RELEASED_S = 1
"""The duration in a lease that its holder has given up, as client-go writes it. No other lease of
ours has it: somebody else who empties the holder alone leaves the duration as it was.
Source: client-go, tools/leaderelection/leaderelection.go, release.
"""


@dataclass(frozen=True, slots=True)
class Rules:
    """From the settings; in seconds."""

    duration_s: float
    deadline_s: float
    retry_s: float

    @classmethod
    def of(cls, settings: LeaseSettings) -> Rules:
        """Return the rules that the settings give."""
        return cls(
            duration_s=settings.duration_ms / 1000,
            deadline_s=settings.renew_deadline_ms / 1000,
            retry_s=settings.retry_ms / 1000,
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """The Lease object; empty if it does not exist, or nobody has ever held it."""

    holder: str = ""
    duration_s: int = 0
    acquired: str = ""
    renewed: str = ""
    """RFC 3339 with microseconds, as `acquired`; for people, never compared with a clock."""
    transitions: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    """As the server gave it, with the resource version; {} where there is no object."""

    @classmethod
    def of(cls, document: dict[str, Any]) -> Lease:
        """Parse the API server's document."""
        spec = document.get("spec") or {}
        return cls(
            holder=spec.get("holderIdentity") or "",
            duration_s=spec.get("leaseDurationSeconds") or 0,
            acquired=spec.get("acquireTime") or "",
            renewed=spec.get("renewTime") or "",
            transitions=spec.get("leaseTransitions") or 0,
            metadata=document.get("metadata") or {},
        )

    @property
    def exists(self) -> bool:
        """There is an object."""
        return bool(self.metadata)

    @property
    def given_up(self) -> bool:
        """The last holder said that it stops; one without a holder alone does not say so."""
        return not self.holder and bool(self.renewed) and self.duration_s == _RELEASED_S

    def spec(self) -> dict[str, Any]:
        """Return it as the object's `spec`."""
        return {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": self.duration_s,
            "acquireTime": self.acquired,
            "renewTime": self.renewed,
            "leaseTransitions": self.transitions,
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica, and what it knows. `seen_s`, `sent_s`: by its own monotonic clock."""

    identity: str
    """Of this process alone: another process of the same pod is another candidate."""
    rules: Rules
    lease: Lease = field(default_factory=Lease)
    """As it was read or written last."""
    seen_s: float | None = None
    """When its content was first seen; None: it was never read."""
    current: bool = False
    """`lease` is what the server has, as far as is known."""
    sent_s: float | None = None
    """When the last accepted write was sent that made or kept us the holder; None: we are not."""

    def holds(self, now_s: float) -> bool:
        """Tell whether nobody else can hold it at `now_s`."""
        return self.sent_s is not None and now_s - self.sent_s < self.rules.deadline_s


def after_read(candidate: Candidate, lease: Lease, now_s: float) -> Candidate:
    """Return the candidate once it has read the object; `now_s`: when the answer was there."""
    changed = candidate.seen_s is None or lease != candidate.lease
    return replace(
        candidate,
        lease=lease,
        seen_s=now_s if changed else candidate.seen_s,
        current=True,
        sent_s=candidate.sent_s if lease.holder == candidate.identity else None,
    )


def after_write(candidate: Candidate, written: Lease, sent_s: float, now_s: float) -> Candidate:
    """Return the candidate once the server has taken its write, which was sent at `sent_s`."""
    ours = written.holder == candidate.identity
    return replace(
        candidate, lease=written, seen_s=now_s, current=True, sent_s=sent_s if ours else None
    )


def wanted(candidate: Candidate, now_s: float, clock: datetime) -> Lease | None:
    """Return the Lease to write over the one that was read, None while another holds it.

    `clock`: the wall clock's time, which is written into it for people to read.
    """
    lease, identity = candidate.lease, candidate.identity
    renewed = _timestamp(clock, lease.renewed)
    duration_s = max(math.ceil(candidate.rules.duration_s), _RELEASED_S + 1)
    if lease.holder == identity:
        return replace(lease, duration_s=duration_s, renewed=renewed)
    if not lease.given_up and not _expired(candidate, now_s):
        return None
    return Lease(identity, duration_s, renewed, renewed, lease.transitions + 1, lease.metadata)


class Election:
    """One candidate's attempts, without the requests themselves: `attempt` yields them.

    `now_s` is its monotonic clock, `clock` what it tells of the time.
    """

    def __init__(
        self,
        identity: str,
        rules: Rules,
        now_s: Callable[[], float],
        clock: Callable[[], datetime],
    ) -> None:
        self.candidate = Candidate(identity, rules)
        self._now_s = now_s
        self._clock = clock

    def holds(self) -> bool:
        """Tell whether nobody else can hold the Lease now."""
        return self.candidate.holds(self._now_s())

    def attempt(self) -> Generator[Lease | None, Lease, None]:
        """Yield what to ask of the server: None to read, else what to write; take the answers.

        Where one fails, call `failed` and begin another attempt later.
        """
        if self.candidate.sent_s is None or not self.candidate.current:
            found = yield None
            self.candidate = after_read(self.candidate, found, self._now_s())
        sent_s = self._now_s()
        wish = wanted(self.candidate, sent_s, self._clock())
        if wish is not None:
            written = yield wish
            self.candidate = after_write(self.candidate, written, sent_s, self._now_s())

    def failed(self) -> None:
        """Note that a request was refused, or that its answer was lost."""
        self.candidate = replace(self.candidate, current=False)

    def give_up(self) -> Lease | None:
        """Give the Lease up; return the Lease to write so that others know at once, or None."""
        lease, held = self.candidate.lease, self.candidate.sent_s is not None
        self.candidate = Candidate(self.candidate.identity, self.candidate.rules)
        if not held:
            return None
        return replace(
            lease,
            holder="",
            duration_s=_RELEASED_S,
            renewed=_timestamp(self._clock(), lease.renewed),
        )


def _expired(candidate: Candidate, now_s: float) -> bool:
    """Tell whether the object has stood still for as long as it or our settings say.

    An object that is missing or empty may have been taken from a holder that does not know yet.
    """
    if candidate.seen_s is None:
        return False
    duration_s = max(candidate.lease.duration_s, candidate.rules.duration_s)
    return now_s - candidate.seen_s >= duration_s


def _timestamp(clock: datetime, before: str) -> str:
    """Return the time to write: never the same again, as the server drops a write without change.

    Others would see no life in it.
    """
    text = clock.astimezone(UTC).strftime(_FORMAT)
    if text != before:
        return text
    return (clock.astimezone(UTC) + timedelta(microseconds=1)).strftime(_FORMAT)
