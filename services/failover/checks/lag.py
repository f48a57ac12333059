"""How far the standby is behind: the loss if the primary dies now, and a promotion's duration.

Source: PostgreSQL documentation 27.2.4 pg_stat_replication, 9.28.4 Recovery Control Functions.
Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from schemas.lsn import format_lsn
from services.failover.checks import remedies
from services.failover.checks.model import Needs, Seen, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.failover.checks.facts import Facts

REPLAY_BYTES_MAX = 2**30
"""Received and not replayed: a promotion replays it first, at some 100 MB/s."""


@check(
    "standby-lag",
    group="standby",
    title="the standby is near the primary",
    consequence="commits that the standby has not received are lost with the primary, and a "
    "failover is refused; what it has received and not replayed makes the promotion take longer",
    needs=Needs.BOTH,
)
def standby_lag(facts: Facts) -> Iterator[Seen]:
    """Judge the standby's lag in bytes and seconds, of receiving and of replaying.

    All positions are read within one observation.
    """
    limit = facts.view.loss_limit
    for primary, above, standby, below in facts.both:
        written, replication = above.replication.written_lsn, below.replication
        if written is None or not standby.received:
            yield Seen(standby.name, "", unknown=f"how much WAL {standby.name} has is not known")
            continue
        behind = max(0, written - standby.received)
        replayed = replication.replayed_lsn
        waiting = max(0, standby.received - replayed) if replayed is not None else None
        age = replication.replayed_age_s
        heard = replication.heard_age_s
        evidence = (
            f"{primary.name} has written up to {format_lsn(written)}, {standby.name} lacks "
            f"{behind} bytes of it, and has "
            + ("an unknown part of it" if waiting is None else f"{waiting} bytes")
            + " to replay"
            + (f"; its newest commit is {age:.0f} s old" if age is not None else "")
            + (f", last message {heard:.0f} s ago" if heard is not None else ", and no sender")
        )
        what = ""
        if behind > limit.bytes_max:
            what = f"{standby.name} lacks {behind} bytes of WAL: a failover now loses those commits"
        late = behind > 0 and age is not None and limit.seconds_max > 0 and age > limit.seconds_max
        if late and not what:
            what = f"{standby.name} is {age:.0f} s behind: a failover now loses those commits"
        slow = waiting is not None and waiting > REPLAY_BYTES_MAX
        yield Seen(
            standby.name,
            evidence,
            what or (f"{standby.name} has {waiting} bytes to replay" if slow else ""),
            remedies.manual(
                f"see what slows {standby.name}: its log, network, disk, and queries that keep "
                "it from replaying",
                because="only the standby can catch up",
            ),
            None if what else Severity.WARNING,
        )
