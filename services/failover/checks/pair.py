"""The nodes themselves: who is primary, who answers, and whether other standbys are ready. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from services.failover.checks import remedies
from services.failover.checks.model import Needs, Seen, check
from services.failover.checks.readiness import judge_all
from services.failover.model.statements import UNFENCED
from services.failover.model.topology import keep_off, replaced_by
from services.failover.model.view import FENCE
from services.postgres.server import untried_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.failover.checks.facts import Facts

GROUP = "nodes"
SLOTSYNC_BLOCKS = range(180000, 180004)
"""In these the slotsync worker can keep a promotion waiting. Source: release notes of 18.4."""


@check(
    "primary-answers",
    group=GROUP,
    title="a primary answers",
    consequence="checks of the primary's state are not judged; slotfailover failover makes the "
    "standby the primary",
    severity=Severity.WARNING,
)
def primary_answers(facts: Facts) -> Iterator[Seen]:
    primary = facts.view.primary
    if primary is not None and primary.state is not None:
        timeline = primary.state.server.timeline
        yield Seen(primary.name, f"{primary.name} is writable, on timeline {timeline}")
    else:
        yield Seen(
            "",
            "; ".join(f"{node.name}: {node.detail or 'a standby'}" for node in facts.view.nodes),
            "no node answers as a primary",
            remedies.manual(
                "start the primary, or fail over: slotfailover failover",
                because="which of the two is a decision",
            ),
        )


@check(
    "primary-fenced",
    group=GROUP,
    title="the primary takes writes",
    consequence="every write fails with 'cannot execute … in a read-only transaction', now",
    needs=Needs.PRIMARY,
)
def primary_fenced(facts: Facts) -> Iterator[Seen]:
    """Look for a fence of the primary, whose mark has who set it and since when.

    Only slotfailover's own fence has such a mark.
    """
    for primary, state in facts.above:
        read_only = state.details.read_only if state.details is not None else None
        if read_only is None and not primary.fenced:
            why = f"whether {primary.name} is read-only for others was not seen"
            yield Seen(primary.name, "", unknown=why)
            continue
        if not (read_only or primary.fenced):
            yield Seen(primary.name, f"{FENCE} is off on {primary.name}")
            continue
        by = "slotfailover" if primary.fenced else "a setting that slotfailover did not make"
        mark = f": {state.fence_mark}" if primary.fenced else ""
        yield Seen(
            primary.name,
            f"{FENCE} is on on {primary.name}{mark}",
            f"{primary.name} is fenced by {by}: ordinary transactions can't write",
            remedies.run_statements(
                "slotfailover resume completes the interrupted command, slotfailover resume "
                "--rollback lets writes in again; if no run of slotfailover set the fence",
                remedies.order(primary.name, *UNFENCED),
                by_hand="somebody may be in the middle of a switchover",
            ),
        )


@check(
    "node-answers",
    group=GROUP,
    title="every node answers",
    consequence="the node can't take over, and its state is unknown",
    severity=Severity.WARNING,
)
def node_answers(facts: Facts) -> Iterator[Seen]:
    for node in facts.view.nodes:
        promoted = replaced_by(facts.view, node)
        since = f", and {promoted} was promoted in its place" if promoted else ""
        yield Seen(
            node.name,
            f"{node.name}: {node.reach}" + (f", {node.detail}" if node.detail else ""),
            "" if node.state is not None else f"{node.name} does not answer{since}",
            remedies.manual(
                keep_off(facts.view, node)
                or "start the node, or correct its conninfo in failover.nodes",
                because=f"{node.name} would take writes beside {promoted}"
                if promoted
                else "a server must be started",
            ),
        )


@check(
    "server-version",
    group=GROUP,
    title="slotfailover was tried on the servers' versions",
    consequence="it may wait, or meet what has changed in PostgreSQL: try a failover on a copy "
    "first (slotfailover drill)",
    severity=Severity.WARNING,
)
def server_version(facts: Facts) -> Iterator[Seen]:
    for node in facts.view.nodes:
        if node.state is None:
            continue
        version = node.state.server.version
        evidence = f"server_version_num = {version} on {node.name}"
        untried = untried_version(version)
        wrong = f"{untried}: {node.name}" if untried else ""
        remedy = remedies.manual(
            "update slotfailover, or rehearse a failover with slotfailover drill",
            because="only a newer release knows more",
        )
        if version in SLOTSYNC_BLOCKS:
            wrong = f"the slotsync worker of {node.name} can keep its promotion waiting"
            remedy = remedies.manual(
                f"update {node.name} to PostgreSQL 18.4 or newer",
                because="the server must be restarted",
            )
        yield Seen(node.name, evidence, wrong, remedy)


@check(
    "other-standbys",
    group=GROUP,
    title="every other standby has all slots ready too",
    consequence="a failover to it would lose those slots",
    severity=Severity.WARNING,
)
def other_standbys(facts: Facts) -> Iterator[Seen]:
    judged = facts.standby.name if facts.standby is not None else ""
    for node in facts.view.nodes:
        if node.state is None:
            yield Seen(node.name, "", unknown=f"{node.name} does not answer")
    for node in facts.view.standbys:
        if node.name == judged:
            continue
        lost = [slot.slot for slot in judge_all(facts.view, node) if not slot.ready]
        yield Seen(
            node.name,
            f"{node.name}: {len(lost)} of {len(facts.required)} slots not ready",
            f"{node.name} does not have ready: {', '.join(lost)}" if lost else "",
            remedies.manual(
                f"slotfailover check --standby {node.name} says why",
                because="each standby has its own findings",
            ),
        )
