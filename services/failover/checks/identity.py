"""Who is who: whose a subscription is, which timeline was met, who manages the pair. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from services.failover.checks import remedies
from services.failover.checks.blockers import unidentified
from services.failover.checks.model import Seen, check
from services.failover.model.managers import traces
from services.failover.model.preconditions import outdated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.failover.checks.facts import Facts

GROUP = "identity"


@check(
    "primary-timeline",
    group=GROUP,
    title="no newer timeline than the primary's was met",
    consequence="the primary is an old one that came back: consumers would get transactions that "
    "were discarded",
)
def primary_timeline(facts: Facts) -> Iterator[Seen]:
    primary = facts.view.primary
    if primary is None or primary.state is None:
        return
    met = max((m.timeline for _, m in facts.view.met()), default=0)
    yield Seen(
        primary.name,
        f"{primary.name} is on timeline {primary.state.server.timeline}, the newest met is "
        f"{met or 'not recorded'}",
        outdated(facts.view, primary),
        remedies.manual(
            "stop this node, and bring back the one with the newer timeline",
            because="two lines of history can't be joined by a program",
        ),
    )
    for why in facts.view.unread:
        yield Seen(primary.name, "", unknown=why)


@check(
    "timeline-history",
    group=GROUP,
    title="our role can read the history of timelines",
    consequence="after a promotion nobody can tell which consumers are past its start, so a "
    "failover is refused",
)
def timeline_history(facts: Facts) -> Iterator[Seen]:
    for node in facts.view.nodes:
        if node.state is None:
            continue
        may = node.state.provenance.may_read_history
        yield Seen(
            node.name,
            f"timeline {node.state.server.timeline}, history "
            + ("read" if node.state.provenance.history is not None else "unknown"),
            "" if may else f"our role can't read the history of timelines on {node.name}",
            remedies.manual(
                "run sql/roles.sql on the primary: it makes slotfailover.timeline_history()",
                because="only a superuser may",
            ),
        )


@check(
    "managed-by",
    group=GROUP,
    title="no manager that the settings do not name promotes this pair",
    consequence="a failover or switchover by slotfailover conflicts with the manager, which may "
    "undo it or leave two primaries",
    severity=Severity.WARNING,
)
def managed_by(facts: Facts) -> Iterator[Seen]:
    for node, manager in traces(facts.view):
        yield Seen(
            node,
            f"seen on {node}: {manager}",
            f"{node} seems to be managed by {manager}",
            remedies.manual(
                "set failover.managed_by to patroni or cloudnative-pg, or to none where that is "
                "wrong",
                because="only you know",
            ),
        )


@check(
    "subscription-identified",
    group=GROUP,
    title="every subscription is known to be fed by this pair or by another",
    consequence="a subscription of unknown origin is not moved, and stands still if this pair "
    "fed it",
    severity=Severity.WARNING,
)
def subscription_identified(facts: Facts) -> Iterator[Seen]:
    for left in unidentified(facts.view):
        yield Seen(
            left.subject,
            f"{left.subject}: address unknown, no server answers there, nothing is noted",
            left.reason,
            remedies.manual(left.hint, because="only you know whose address it is"),
        )
    for node in facts.view.nodes:
        for where, found in facts.view.ours() if node.private else ():
            if not where.local:
                name = f"{where.name}/{found.name}"
                yield Seen(
                    name,
                    f"the only known address of {node.name} is {node.address}",
                    f"{name} could not be led to {node.name}: {node.address} leads to another "
                    f"server on the machine of {where.name}",
                    remedies.manual(
                        f"set failover.advertised.{node.name} to the address by which {where.name} "
                        "reaches it",
                        because="only you know the address",
                    ),
                    Severity.CRITICAL,
                )
