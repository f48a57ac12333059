"""Subscriptions that a killed run has disabled: whom they may be led to, on made-up views."""

import contextlib
from dataclasses import replace
from io import StringIO
from typing import Any
from urllib.request import urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from structlog.testing import capture_logs

from schemas.acceptance import Acceptance, Kind, Token
from schemas.errors import ExitCode, OperatorNeeded, Retryable
from services.failover.checks.facts import facts_of
from services.failover.checks.readiness import candidate
from services.failover.checks.registry import run_checks
from services.failover.cli import output
from services.failover.execute.journal import BEGIN, Entry
from services.failover.model.destination import MARK
from services.failover.model.subscription import Subscription
from services.failover.model.timelines import History, Milestone, Provenance
from services.failover.model.view import Node, Reach, View
from services.failover.plan.failover import plan_failover
from services.failover.plan.rejoin import plan_repoint
from services.failover.plan.request import Request
from services.failover.plan.resume import choose, intent_of
from services.failover.plan.steps import subscriptions
from services.failover.plan.steps.step import Action
from services.failover.plan.switchover import plan_rollback, plan_switchover
from services.failover.watch.assessment import assess
from services.failover.watch.decision import Memory, Rules, decide, held_remark, remember
from services.failover.watch.snapshot import Snapshot
from services.failover.watch.web.metrics import registry_of
from services.runtime.process import Probes
from tests.failover.plan.test_resume import Fake, run_of, unanswered
from tests.failover.plan.test_switchover import actions, pair
from tests.promises.failover.views import RECEIVED, node, slot, state, subscriber, subscription
from tests.providers.tokens import Willing, tokens_of
from tests.providers.waiting import eventually

REPLAYED = 900
TOKEN = "not-promoted:b@7000:1"
OVERRIDES = Request(Willing(Kind.NOT_PROMOTED))
BY_TOKEN = Request(Acceptance([Token.parse(TOKEN)]))


def third(**said: Any) -> Node:
    """c, a standby of a."""
    return node("c", state(slot("s1"), slot("s2"), **{"streams": True, **said}))


def trio(*more: Subscription) -> View:
    """`a` lives, `b` and `c` stream from it, and have s1 ready."""
    view = pair(subscriptions=[subscription("s1"), *more], consumer=450)
    above, below = (each.known_state for each in view.nodes)
    above = replace(above, slots=(*above.slots, slot("s2", synced=False, active_pid=9)))
    replication = replace(below.replication, replayed_lsn=REPLAYED)
    below = replace(below, replication=replication, slots=(*below.slots, slot("s2")))
    nodes = (replace(view.nodes[0], state=above), replace(view.nodes[1], state=below), third())
    return replace(view, nodes=nodes)


def half_moved(view: View, to: str = "b") -> View:
    """The view once a run to promote that node has disabled s1, and was killed."""
    where, found = view.ours()[0]
    return subscriptions.disable(where, found, view.node(to)).effect(view)


def fed_by_a(view: View, history: History | None) -> View:
    """The view in which `a` is seen to feed s1, and tells that history."""
    above = view.nodes[0].known_state
    slots = tuple(replace(s, active_pid=7) if s.slot_name == "s1" else s for s in above.slots)
    above = replace(above, slots=slots, provenance=Provenance(history=history))
    fed = replace(view.ours()[0][1], fed=True)
    nodes = (replace(view.nodes[0], state=above), *view.nodes[1:])
    return replace(view, nodes=nodes, subscribers=(subscriber("sub", fed),))


def led(view: View, name: str, timeline: int, history: History) -> View:
    """The view in which that node alone answers, as the primary of a timeline of that history."""
    new = state(slot("s1"), slot("s2"), standby=False, timeline=timeline)
    new = replace(new, provenance=Provenance(history=history))
    nodes = tuple(
        replace(each, state=new if each.name == name else None, reach=Reach.ANSWERS)
        if each.name == name
        else node(each.name, None)
        for each in view.nodes
    )
    return replace(view, nodes=nodes)


def refusal(planner: Any, view: View, request: Request | None = None) -> OperatorNeeded:
    """Why it is refused: another node may be the newer primary."""
    with pytest.raises(OperatorNeeded) as caught:
        planner(view, request or Request())
    assert caught.value.exit_code is ExitCode.SPLIT_BRAIN
    assert "ENABLE" not in caught.value.hint
    assert all(token.startswith("not-promoted:") for token in tokens_of(caught.value.hint))
    return caught.value


def test_no_other_node_is_promoted_while_the_one_that_a_run_may_have_promoted_is_silent() -> None:
    seen = half_moved(trio())
    view = replace(unanswered(seen, "b", Reach.SILENT), known_standbys=frozenset("b"))
    dead = unanswered(unanswered(seen, "b", Reach.REFUSED), "a", Reach.REFUSED)
    dead = replace(dead, nodes=(*dead.nodes[:2], third(streams=False)))
    for planner, known in ((plan_switchover, view), (plan_failover, dead)):
        error = refusal(planner, known, Request(target="c"))
        assert "disabled sub/s1 to lead it to b, once it is the primary" in error.message
        assert "beyond 0/384 of timeline 1" in error.message
        assert "nobody can ask b (no answer)" in error.message
        plan = planner(known, replace(BY_TOKEN, target="c"))
        assert actions(plan).index("disable") < actions(plan).index("promote")
        assert any(f"overridden by --accept {TOKEN}" in note for note in plan.notes)


def test_a_run_that_promotes_another_marks_anew_what_a_killed_one_had_led_elsewhere() -> None:
    view = half_moved(trio())
    for step in plan_switchover(view, Request(target="c")).steps:
        if step.action is Action.PROMOTE:
            break
        view = step.effect(view)
        assert step.holds(view)
    assert "leads to c" in view.ours()[0][1].comment
    back = unanswered(view, "c", Reach.SILENT)
    old = replace(back.nodes[0], state=trio().nodes[0].state)
    refusal(plan_repoint, replace(back, nodes=(old, *back.nodes[1:])))


@pytest.mark.parametrize("history", [(), None])
def test_disabling_notes_the_cluster_also_where_the_feeders_history_is_unread(
    history: History | None,
) -> None:
    view = fed_by_a(trio(), history)
    (step,) = [s for s in plan_switchover(view, Request()).steps if s.action is Action.DISABLE]
    met = step.effect(view).ours()[0][1].milestone
    assert met is not None and (met.system, met.address) == ("7000", "db:5001")
    assert met.timeline == (0 if history is None else 1)
    # What an earlier run has noted is kept.
    noted = replace(view.ours()[0][1], comment=Milestone("7000", 1, None, "db:9").note)
    seen = replace(view, subscribers=(subscriber("sub", noted),))
    (step,) = [s for s in plan_switchover(seen, Request()).steps if s.action is Action.DISABLE]
    met = step.effect(seen).ours()[0][1].milestone
    assert met == Milestone("7000", 1, None, "db:9" if history is None else "db:5001")


def test_who_answers_as_a_standby_of_the_same_timeline_was_not_promoted() -> None:
    view = unanswered(half_moved(trio()), "c", Reach.SILENT)
    assert "enable" in actions(plan_repoint(view, Request()))
    assert "enable" in actions(plan_rollback(view, Request()))


@pytest.mark.parametrize("found_writable", [frozenset[str](), frozenset("a")])
def test_a_rollback_enables_what_leads_to_the_primary_by_another_name(
    found_writable: frozenset[str],
) -> None:
    """It was disabled and not moved: it leads where it did. What stays disabled is told."""
    alias = subscription("s1", at="proxy", identified=True)
    view = half_moved(pair(subscriptions=[alias]))
    request = Request(found_writable=found_writable, target="b")
    assert "enable" in actions(plan_rollback(view, request))
    older = replace(view.ours()[0][1], comment=MARK)
    view = replace(view, subscribers=(subscriber("sub", older),))
    plan = plan_rollback(view, request)
    assert not plan.steps
    assert "it stays disabled, as it leads to db:proxy" in plan.left[0].reason


def remedies(view: View, check: str) -> list[Any]:
    """The remedies of that check."""
    found = run_checks(facts_of(view, candidate(view)))
    return [f.remedy for f in found if f.check == check and f.wrong]


@pytest.mark.parametrize("silent", [True, False])
def test_no_hint_enables_by_hand_what_a_run_has_disabled(silent: bool) -> None:
    seen = half_moved(trio())
    view = unanswered(seen, "b", Reach.SILENT) if silent else seen
    (remedy,) = remedies(view, "subscription-enabled")
    assert not remedy.orders
    assert "ENABLE" not in remedy.full
    assert "slotfailover" in remedy.text
    assert "to lead it to b, once it is the primary beyond 0/384 of timeline 1" in remedy.by_hand
    assert ("nobody can ask b" in remedy.by_hand) is silent
    assert ("bring b back" in remedy.text) is silent
    with pytest.raises(OperatorNeeded, match="a is alive and writable") as caught:
        plan_failover(view, Request())
    assert "ENABLE" not in caught.value.hint
    assert ("bring b back" in caught.value.hint) is silent
    assert ("slotfailover resume" in caught.value.hint) is not silent
    by_hand = replace(view.ours()[0][1], as_marked=False)
    disabled = replace(view, subscribers=(subscriber("sub", by_hand),))
    (remedy,) = remedies(disabled, "subscription-enabled")
    assert "to lead it to b" in remedy.by_hand
    plain = replace(by_hand, comment="mine")
    (remedy,) = remedies(
        replace(view, subscribers=(subscriber("sub", plain),)), "subscription-enabled"
    )
    assert remedy.orders[0].sql == ('ALTER SUBSCRIPTION "s1" ENABLE',)


@pytest.mark.parametrize(
    ("name", "timeline", "history", "goes_on", "says"),
    [
        ("b", 2, ((1, REPLAYED),), True, ""),
        ("b", 7, ((1, RECEIVED),), True, ""),
        ("b", 7, ((1, RECEIVED), (6, 2000)), True, ""),
        ("a", 1, (), False, "a may be an old primary that came back: it is on timeline 1;"),
        ("b", 2, ((1, 300),), False, "on timeline 2, which left timeline 1 at 0/12C"),
        ("c", 2, ((1, 300),), False, "on timeline 2, which left timeline 1 at 0/12C"),
        ("c", 7, ((5, 950),), False, "c may be an old primary that came back: it is on timeline 7"),
    ],
)
def test_a_timelines_number_is_not_what_a_run_was_leading_to(
    name: str, timeline: int, history: History, goes_on: bool, says: str
) -> None:
    """The server takes the next number without a history file, and a branch may have the same."""
    view = led(half_moved(trio()), name, timeline, history)
    if goes_on:
        assert "enable" in actions(plan_repoint(view, Request()))
        assert assess(view, Request()).forbidden == ""
        return
    assert says in refusal(plan_repoint, view).message
    refusal(lambda v, r: choose(v, r, None), view)
    assert says in assess(view, Request()).forbidden
    assert assess(view, Request()).held == ("sub/s1",)
    assert "enable" in actions(plan_repoint(view, OVERRIDES))


histories = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2000)), max_size=3).map(
    lambda found: tuple(sorted(dict(found).items()))
)


@given(st.sampled_from("abc"), histories, st.sets(st.sampled_from("abc")))
def test_silence_never_enables_what_a_run_has_disabled(
    name: str, history: History, silent: set[str]
) -> None:
    """It goes on where the awaited node leads, or answers as a standby that was not promoted."""
    marked = half_moved(trio())
    timeline = history[-1][0] + 1 if history else 1
    known = led(marked, name, timeline, history)
    standby = state(slot("s1"), slot("s2"))
    nodes = [
        each if each.name == name else node(each.name, None if each.name in silent else standby)
        for each in known.nodes
    ]
    seen = replace(known, nodes=tuple(nodes))
    with contextlib.suppress(OperatorNeeded):
        if "enable" not in actions(plan_repoint(seen, Request())):
            return
        left = dict(history).get(1, 0)
        awaited = name == "b" and left >= REPLAYED
        assert awaited or ("b" not in silent if name != "b" else not silent - {"b"})


def test_a_later_primary_that_is_not_the_awaited_one_leaves_that_subscription_alone() -> None:
    """c was promoted from the same timeline, b may have been: only s1 waits."""
    view = led(half_moved(trio(subscription("s2"))), "c", 2, ((1, RECEIVED),))
    plan = plan_repoint(view, Request())
    assert {s.subject for s in plan.steps if s.server == "sub"} == {"s2"}
    (left,) = plan.left
    assert (left.subject, left.exit_code) == ("sub/s1", ExitCode.SPLIT_BRAIN)
    assert "to b, once it is the primary beyond 0/384 of timeline 1" in left.reason
    assert "c is on timeline 2, which left timeline 1 at 0/3E8" in left.reason
    assert {s.subject for s in plan_repoint(view, OVERRIDES).steps if s.server == "sub"} == {
        "s1",
        "s2",
    }
    for step in plan.steps:
        view = step.effect(view)
    found = assess(view, Request())
    assert (found.forbidden, found.pending, found.held) == ("", (), ("sub/s1",))
    rules = Rules(True, 1, 0.0, 0.0, 0.0, 10.0)
    memory = remember(Memory(), found, 0.0, rules)
    assert "held: sub/s1" in decide(memory, 0.0, rules, paused=False, leading=True).reason
    value = registry_of(lambda: Snapshot(view=view)).get_sample_value
    assert value("slotfailover_subscriptions_held") == 1


def test_the_mark_of_another_cluster_is_not_obeyed() -> None:
    """The same subscriber, the same slot name, another system identifier: not our run."""
    seen = half_moved(trio(subscription("s2", at="b")))
    view = led(seen, "b", 2, ((1, REPLAYED),))
    system = replace(view.nodes[1].known_state.server, system_identifier="8000")
    new = replace(view.nodes[1].known_state, server=system)
    nodes = (view.nodes[0], replace(view.nodes[1], state=new), view.nodes[2])
    foreign = replace(view, nodes=nodes)
    plan = plan_repoint(foreign, Request())
    assert not [step for step in plan.steps if step.subject == "s1" and step.server == "sub"]
    (left,) = plan.left
    assert left.subject == "sub/s1"
    assert "the system identifier 7000; that of this pair is 8000" in left.reason
    assert not plan_rollback(foreign, Request()).steps
    assert assess(foreign, Request()).held == ("sub/s1",)
    found = run_checks(facts_of(foreign, None))
    assert "sub/s1" in [f.subject for f in found if f.check == "subscription-identified"]


def test_who_enables_and_disables_by_hand_has_the_say() -> None:
    """The mark stays in the comment; the row was changed after it."""
    view = led(half_moved(trio()), "b", 2, ((1, REPLAYED),))
    assert "enable" in actions(plan_repoint(view, Request()))
    where, found = view.ours()[0]
    later = replace(view, subscribers=(replace(where, subscriptions=(_changed(found),)),))
    plan = plan_repoint(later, Request())
    assert "enable" not in actions(plan)
    assert any(note.startswith("sub/s1 was disabled, and stays so") for note in plan.notes)
    moved = plan.steps[0].effect(later)
    assert plan.steps[0].action is Action.REPOINT
    assert "disabled by slotfailover" not in moved.ours()[0][1].comment


def _changed(found: Subscription) -> Subscription:
    return replace(found, as_marked=False)


def test_each_release_knows_the_mark() -> None:
    """Earlier ones look for these words at the end; they enable nothing by what is before them."""
    comment = half_moved(trio()).ours()[0][1].comment
    assert comment.endswith(
        " [slotfailover leads to b: system 7000, beyond 0/384 of timeline 1]"
        " [disabled by slotfailover]"
    )


def test_readyz_names_what_is_held() -> None:
    remark = held_remark(("sub/s1",))
    with Probes(
        "127.0.0.1", 0, healthy=lambda: True, ready=lambda: True, remark=lambda: remark
    ) as p:

        def told() -> str:
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{p.port}/readyz") as seen:
                return str(seen.read().decode())
            return ""

        eventually(told, what="it serves")
        assert told() == "ok: held: sub/s1 (slotfailover check tells why)"


def test_who_overrides_the_doubt_is_in_the_journal_and_the_report() -> None:
    view = led(half_moved(trio()), "a", 1, ())
    told = StringIO()
    begun = Entry("r", 1, "now", "x@y 7", "repoint", BEGIN, intent=intent_of(BY_TOKEN, view))
    output.print_history(Console(file=told, width=200), [begun])
    assert f"repoint by x@y 7: accept {TOKEN}" in told.getvalue()
    (note,) = [n for n in plan_repoint(view, BY_TOKEN).notes if TOKEN in n]
    assert f"nobody can ask b (no answer): overridden by --accept {TOKEN}" in note


def test_after_a_lost_lease_the_next_holder_enables_what_was_disabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No replica leads while no API server answers: the metric tells of the subscription."""
    fake = Fake(led(trio(), "b", 2, ((1, REPLAYED),)))

    def hold(_view: View) -> None:
        if run.begun and run.begun[-1].action is Action.DISABLE:
            raise Retryable("the Lease is not held", exit_code=ExitCode.LOCKED)

    run = run_of(fake, monkeypatch, hold)
    with capture_logs(), pytest.raises(Retryable, match="the Lease is not held"):
        run.carry_out(fake.view, Request(), plan_repoint)
    assert assess(fake.view, Request()).held == ("sub/s1",)
    assert assess(fake.view, Request()).pending[-1] == "enable subscription s1 at sub"
    following = run_of(fake, monkeypatch, lambda _view: None)
    following.carry_out(fake.view, Request(), plan_repoint)
    _, found = fake.view.ours()[0]
    assert found.enabled
    assert found.conninfo.leads_to(fake.view.node("b").endpoints)
