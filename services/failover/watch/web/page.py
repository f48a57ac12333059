"""The page of `watch`: one document, readable without its script and in a narrow window. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from schemas.lsn import format_lsn
from services.failover.execute.journal import BEGIN, DONE, END, SEEN
from services.failover.watch.web.lag_chart import bytes_text, curves
from services.failover.watch.web.markup import document, el, table
from services.failover.watch.web.topology import topology

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from schemas.findings import Finding
    from services.failover.checks.readiness import Readiness
    from services.failover.execute.journal import Entry
    from services.failover.watch.snapshot import Snapshot

_RUNS_MAX = 3
_EVENTS_MAX = 12


def page(snapshot: Snapshot, refresh_s: float) -> str:
    """Return the whole page as HTML."""
    seconds = max(1, round(refresh_s))
    name = snapshot.memory.assessment.primary
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("noscript", _refresh(seconds)),
        el("title", f"Slotbridge: {name or 'no primary'}"),
        el("link", rel="stylesheet", href="page.css"),
        el("script", src="page.js", defer=True),
    )
    body = el("body", _main(snapshot), data_seconds=seconds)
    return document(el("html", head, body, lang="en"))


def _refresh(seconds: int) -> Element:
    element = el("meta", content=str(seconds))
    element.set("http-equiv", "refresh")
    return element


def _main(snapshot: Snapshot) -> Element:
    """Return the page below its title: the verdict, and the sections."""
    parts: list[Element | None] = [_banner(snapshot)]
    if snapshot.view is not None:
        parts.append(
            el(
                "div",
                _section("Topology", topology(snapshot.view)),
                _section("Lag", curves(snapshot.points)),
                class_="pair",
            )
        )
    parts += [
        _slots(snapshot),
        _problems(snapshot),
        _work(snapshot),
        _events(snapshot),
        el(
            "footer",
            *(
                part
                for path in ("v1/status", "v1/checks", "v1/plan", "v1/history", "metrics")
                for part in (el("a", f"/{path}", href=path), " ")
            ),
        ),
    ]
    return el("main", *parts)


def _section(title: str, *children: Element | str | None) -> Element:
    return el("section", el("h2", title), *children)


def _banner(snapshot: Snapshot) -> Element:
    """Return the header: whether a failover is safe, and what the watch does."""
    checkup = snapshot.checkup
    if checkup is None:
        kind, headline = "bad", "Whether a failover is safe can't be judged"
        detail = snapshot.problem or "nothing has been observed yet"
    else:
        kinds = {Severity.OK: "good", Severity.CRITICAL: "bad"}
        kind = kinds.get(checkup.severity, "warn")
        ready = "A failover is safe now" if checkup.ready else "A failover would lose something"
        headline = ready
        detail = ". ".join(filter(None, (checkup.summary, checkup.outlook)))
        if checkup.ready and kind == "bad":
            headline = "A failover is safe now; something needs attention"
    return el(
        "header",
        el("h1", headline),
        el("p", detail),
        el(
            "dl",
            *_fact("primary", _primary(snapshot)),
            *_fact("seen", snapshot.at.replace("T", " ").split(".")[0] + " UTC"),
            *_fact("this watch", _own_state(snapshot)),
            *_lease(snapshot),
            *_fact("decision", f"{snapshot.decision.verdict}: {snapshot.decision.reason}"),
            *_fact("last drill", _drill(snapshot)),
        ),
        class_=kind,
    )


def _fact(name: str, value: str) -> tuple[Element, Element]:
    return el("dt", name), el("dd", value)


def _primary(snapshot: Snapshot) -> str:
    assessment = snapshot.memory.assessment
    return f"{assessment.primary}, timeline {assessment.timeline}" if assessment.primary else "none"


def _own_state(snapshot: Snapshot) -> str:
    """Return what this replica does: paused, observes, leads, or passive."""
    if snapshot.pause.paused:
        return f"paused by {snapshot.pause.by}"
    if not snapshot.automatic:
        return "observes only"
    if snapshot.leading:
        return "leads, repoints automatically"
    lease = snapshot.lease
    if lease is not None and not lease.held:
        return f"passive: {lease.elsewhere}"
    return "passive: another replica leads"


def _lease(snapshot: Snapshot) -> tuple[Element, ...]:
    lease = snapshot.lease
    if lease is None:
        return ()
    who = "this replica" if lease.held else lease.holder or "nobody yet"
    problem = f" ({lease.problem})" if lease.problem else ""
    return _fact("Lease", f"{lease.name}: {who}{problem}")


def _drill(snapshot: Snapshot) -> str:
    drilled = snapshot.drilled
    if drilled is None:
        return "never"
    hours = drilled.age_s / 3600
    age = f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours"
    return f"{age} ago: {'all slots usable' if drilled.well else drilled.outcome}"


def _slots(snapshot: Snapshot) -> Element | None:
    checkup = snapshot.checkup
    if checkup is None:
        return None
    if not checkup.slots:
        return _section("Slots", el("p", "No slot has to survive.", class_="quiet"))
    heads = ("slot", "state", "position", "consumers", "why not")
    return _section("Slots", table(heads, map(_slot, checkup.slots), class_="slots"))


def _slot(slot: Readiness) -> tuple[Element | str, ...]:
    """Return a slot's row of the table: name, state, position, consumers, reasons."""
    state = el(
        "span", "ready" if slot.ready else "not ready", class_="good" if slot.ready else "bad"
    )
    where = f" on {slot.standby}" if slot.standby else ""
    flushed = slot.confirmed_flush_lsn
    consumers = [
        el("div", f"{name} {format_lsn(lsn)}{_against(slot, lsn)}") for name, lsn in slot.consumers
    ]
    since = f"since {slot.since}" if slot.since else ""
    reasons = [
        el(
            "div",
            f"{reason.what} ({reason.evidence})",
            el("div", reason.remedy.full, class_="quiet"),
        )
        for reason in slot.reasons
    ]
    return (
        el("b", slot.slot),
        el("div", state, where, el("div", since, class_="quiet") if since else None),
        format_lsn(flushed) if flushed is not None else "–",
        el("div", *consumers) if consumers else "–",
        el("div", *reasons) if reasons else "–",
    )


def _against(slot: Readiness, lsn: int) -> str:
    if not slot.standby:
        return ""
    more = slot.received - lsn
    said = f"{slot.standby} has {bytes_text(more)} more"
    return f" ({said})" if more >= 0 else f" (ahead of {slot.standby} by {bytes_text(-more)})"


def _problems(snapshot: Snapshot) -> Element | None:
    checkup = snapshot.checkup
    if checkup is None:
        return None
    found = checkup.problems
    if not found:
        return _section("Checks", el("p", "No check has found a problem.", class_="quiet"))
    return _section("Checks", el("ul", *map(_problem, found), class_="problems"))


def _problem(finding: Finding) -> Element:
    """Return a finding as an item of the list, with consequence and remedy."""
    kind = "bad" if finding.severity is Severity.CRITICAL else "warn"
    since = f" since {finding.since}" if finding.since else ""
    return el(
        "li",
        el("span", str(finding.severity), class_=kind),
        el("code", finding.check),
        f" {finding.what} ({finding.evidence}){since}",
        el("div", f"At a failover: {finding.consequence}", class_="quiet"),
        el("div", f"Remedy: {finding.remedy.full}", class_="quiet"),
    )


def _work(snapshot: Snapshot) -> Element:
    """Return the section of the last runs of commands, the newest first."""
    runs: dict[str, list[Entry]] = {}
    for entry in snapshot.entries:
        if entry.step != SEEN:  # watch notes that beside what a run does
            runs.setdefault(entry.run, []).append(entry)
    shown = [_run(run, snapshot.at_work) for run in reversed([*runs.values()][-_RUNS_MAX:])]
    if not shown and not snapshot.at_work:
        return _section("Steps", el("p", "No command has run yet.", class_="quiet"))
    busy = el("p", f"At work: {snapshot.at_work}", class_="warn") if snapshot.at_work else None
    return _section("Steps", busy, *shown)


def _run(run: list[Entry], at_work: str) -> Element:
    """Return a run that can be unfolded: command, state, and steps with their times."""
    first, last = run[0], run[-1]
    ended = last.step == END
    well = ended and last.outcome == DONE
    state = "done" if well else "ended" if ended else "runs" if at_work else "broken off"
    steps = [
        el(
            "li",
            el("span", f"{entry.seconds:.1f} s", class_="time"),
            f"{entry.step}: {entry.outcome}",
        )
        for entry in run
        if entry.step not in (BEGIN, END)
    ]
    at = first.at.replace("T", " ").split(".")[0]
    return el(
        "details",
        el(
            "summary",
            el("span", state, class_="good" if well else "warn"),
            el("b", first.command),
            f" {at} UTC by {first.by}" + (f", {last.seconds:.1f} s" if ended else ""),
        ),
        el("p", last.outcome) if ended and not well else None,
        el("ol", *steps),
        open=not ended,
        data_run=first.run,
    )


def _events(snapshot: Snapshot) -> Element | None:
    if not snapshot.events:
        return None
    lines = [
        el("li", el("span", event.at[11:19], class_="time"), event.text)
        for event in reversed(snapshot.events[-_EVENTS_MAX:])
    ]
    return _section("Events of this replica", el("ul", *lines, class_="events"))
