"""`slotfailover status`: how the pair stands, on one screen. Pure but for the entries it is given.

PRIMARY   a        timeline 2, takes writes; promoted 2026-11-24T22:00:01Z by root@m 41
standby   b        lacks 0 bytes of a, 0 to replay; last message 0.3 s ago
down      c        connection refused
consumer  sub/s1   enabled, leads to a; slot s1 active, 120 bytes behind
failover  to b     ready; commits that may be lost: 0 bytes …
run       none unfinished; lock free
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from schemas.errors import ExitCode
from schemas.lsn import format_lsn
from services.failover.checks.loss import last_contact, losses, slots_not_judged
from services.failover.checks.readiness import candidate, judge_all
from services.failover.model.preconditions import outdated
from services.failover.model.topology import follows, keep_off

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.failover.execute.journal import Entry
    from services.failover.model.view import Node, View


@dataclass(frozen=True, slots=True)
class Line:
    """One thing and how it stands."""

    kind: str
    name: str
    text: str
    good: bool = True


@dataclass(frozen=True, slots=True)
class Status:
    """The lines of the screen, and the exit code that follows from them."""

    primary: str
    lines: tuple[Line, ...]
    exit_code: ExitCode

    def as_json(self) -> dict[str, object]:
        """Return the document for `--json`."""
        return {
            "primary": self.primary or None,
            "well": self.exit_code is ExitCode.OK,
            "lines": [asdict(line) for line in self.lines],
        }


def status_of(
    view: View, entries: Iterable[Entry], begun: Entry | None, holders: Iterable[str]
) -> Status:
    """Return the status that `slotfailover status` prints.

    `begun`: the run that did not come to its end. `holders`: who holds the lock, by node.
    """
    kept = list(entries)
    lines = [
        *(_node(view, node, kept) for node in sorted(view.nodes, key=lambda n: not n.leading)),
        *_consumers(view),
        *_outlook(view),
        _run(begun),
        _lock(list(holders)),
    ]
    leading = [node.name for node in view.nodes if node.leading]
    code = ExitCode.OK if all(line.good for line in lines) else ExitCode.CHECK_FAILED
    if len(view.writable) > 1:
        code = ExitCode.SPLIT_BRAIN
    return Status(leading[0] if len(leading) == 1 else "", tuple(lines), code)


def _node(view: View, node: Node, entries: list[Entry]) -> Line:
    """Return a node's line: unreachable, primary, or standby."""
    state = node.state
    if state is None:
        seen = view.sighting
        last = ""
        if seen is not None and seen.node == node.name:
            at = format_lsn(seen.lsn)
            last = f"; was the primary {seen.age_s:.0f} s ago, timeline {seen.timeline}, at {at}"
        off = keep_off(view, node)
        words = "; ".join(filter(None, (f"{node.detail}{last}", off)))
        return Line(str(node.reach), node.name, words, good=False)
    timeline = state.server.timeline
    if node.leading:
        alone = len([n for n in view.nodes if n.leading]) == 1
        since = _since(node, entries)
        if node.fenced:
            mark = state.fence_mark or "by slotfailover"
            text = f"timeline {timeline}, FENCED ({mark}): no writes; {since}"
        else:
            text = f"timeline {timeline}, takes writes; {since}"
        old = outdated(view, node)
        if old:
            text += f"; an OLD primary: {old}"
        return Line("PRIMARY", node.name, text, good=alone and not node.fenced and not old)
    primary = view.primary
    if primary is None or primary.state is None:
        at = format_lsn(node.received)
        return Line("standby", node.name, f"timeline {timeline}, has WAL up to {at}", good=False)
    return _standby(node, primary)


def _standby(node: Node, primary: Node) -> Line:
    """Return a standby's line: how far it is behind, and whether it streams."""
    replication = node.known_state.replication
    written = primary.known_state.replication.written_lsn
    behind = "?" if written is None else str(max(0, written - node.received))
    waiting = (
        "?" if replication.replayed_lsn is None else str(node.received - replication.replayed_lsn)
    )
    heard = replication.heard_age_s
    words = [f"lacks {behind} bytes of {primary.name}, {waiting} to replay"]
    words.append(f"last message {heard:.1f} s ago" if heard is not None else "receives nothing")
    streams = replication.receiver_streaming
    if not follows(node, primary):
        words.append(f"does not follow {primary.name}")
    return Line("standby", node.name, "; ".join(words), good=streams and follows(node, primary))


def _since(node: Node, entries: list[Entry]) -> str:
    found = [e for e in entries if e.step == f"promote {node.name}" and "not" not in e.outcome[:4]]
    if found:
        return f"promoted {found[-1].at} by {found[-1].by}"
    return f"promoted by nobody in the journal; its server is up since {_started(node)}"


def _started(node: Node) -> str:
    text = node.known_state.provenance.started
    try:
        return f"{datetime.fromtimestamp(float(text), UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return text or "?"


def _consumers(view: View) -> list[Line]:
    """Return a line for each subscription, and for each subscriber that can't be read."""
    primary = view.primary
    state = primary.state if primary is not None else None
    found = []
    by_standbys = view.fed_by_standbys()
    for subscriber, subscription in (*view.ours(), *view.marked_elsewhere(), *by_standbys):
        name = f"{subscriber.name}/{subscription.name}"
        led = [n for n in view.nodes if subscription.conninfo.leads_to(n.endpoints)]
        where = led[0].name if led else "elsewhere"
        if (subscriber, subscription) in by_standbys:
            state = led[0].state
        slot = state.slot(subscription.slot_name or "") if state is not None else None
        written = state.replication.written_lsn if state is not None else None
        words = ["enabled" if subscription.enabled else "DISABLED", f"leads to {where}"]
        if subscription.destination is not None:
            words[0] += f" by slotfailover, to lead it to {subscription.destination}"
        if slot is None:
            words.append(f"slot {subscription.slot_name} not seen")
        else:
            words.append(f"slot {slot.slot_name} {'active' if slot.active_pid else 'INACTIVE'}")
            if written is not None and slot.confirmed_flush_lsn is not None:
                words.append(f"{max(0, written - slot.confirmed_flush_lsn)} bytes behind")
        well = subscription.enabled and slot is not None and slot.active_pid is not None
        found.append(Line("consumer", name, ", ".join(words), good=well))
    for subscriber in view.subscribers:
        if not subscriber.usable:
            words = [str(subscriber.reach), subscriber.detail]
            found.append(Line("subscriber", subscriber.name, ": ".join(words), good=False))
    return found


def _outlook(view: View) -> list[Line]:
    """Return a line that says whether a failover would lose something now."""
    chosen = candidate(view)
    if chosen is None:
        return [Line("failover", "", "NOT READY: no standby answers that may be promoted", False)]
    readiness = judge_all(view, chosen)
    lost = [slot.slot for slot in readiness if not slot.ready]
    reasons = [f"slots {', '.join(lost)} (slotfailover check says why)"] if lost else []
    if chosen.replay_paused:
        reasons.append(f"replay is paused on {chosen.name}")
    if view.primary is None:
        reasons += [loss.reason for loss in losses(view, chosen)]
        word = f"NOT READY: {'; '.join(reasons)}" if reasons else "ready"
        text = f"{word}; {last_contact(view, chosen)}; {slots_not_judged(view)}"
        return [Line("failover", f"to {chosen.name}", text, good=not reasons)]
    word = f"NOT READY: {'; '.join(reasons)}" if reasons else f"slots ready: {len(readiness)}"
    return [Line("failover", f"to {chosen.name}", word, good=not reasons)]


def _run(begun: Entry | None) -> Line:
    if begun is None:
        return Line("run", "", "none unfinished")
    text = f"UNFINISHED: {begun.command}, begun {begun.at} by {begun.by}; slotfailover resume"
    return Line("run", "", text, good=False)


def _lock(holders: list[str]) -> Line:
    text = f"held {'; '.join(holders)}" if holders else "free"
    return Line("lock", "", text)
