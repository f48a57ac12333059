"""Who may be newer than the present primary, and what vouches that nobody is, on made-up views."""

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from structlog.testing import capture_logs

from schemas.acceptance import Kind
from schemas.errors import ExitCode, OperatorNeeded
from services.failover.checks.facts import facts_of
from services.failover.checks.registry import run_checks
from services.failover.execute import promotion_order
from services.failover.execute.journal import BEGIN, DONE, END, Entry
from services.failover.execute.timeline_memory import recall
from services.failover.model.destination import MARK
from services.failover.model.timelines import Milestone, Provenance
from services.failover.model.view import Node, Reach, View
from services.failover.plan.failover import plan_failover
from services.failover.plan.rejoin import plan_rejoin, plan_repoint
from services.failover.plan.request import Request
from services.failover.plan.resume import Intent, choose
from services.failover.plan.steps.promotion import PROMOTES
from services.failover.plan.switchover import plan_rollback, plan_switchover
from services.failover.watch.assessment import assess
from tests.failover.checks.test_half_moved import (
    OVERRIDES,
    half_moved,
    led,
    refusal,
    remedies,
    third,
    trio,
)
from tests.failover.plan.test_resume import Fake, run_of, unanswered, with_machine
from tests.failover.plan.test_switchover import HANDS, actions
from tests.promises.failover.views import RECEIVED, slot, state, subscription
from tests.providers.tokens import Willing

if TYPE_CHECKING:
    from services.failover.observe.cluster import Cluster


def answering(view: View, name: str, **said: Any) -> View:
    """The view in which that node says so."""

    def changed(node: Node) -> Node:
        return replace(node, state=state(slot("s1"), slot("s2"), **said), reach=Reach.ANSWERS)

    return replace(view, nodes=tuple(changed(n) if n.name == name else n for n in view.nodes))


def commented(view: View, comment: str, **changes: Any) -> View:
    """The view in which s1 is disabled and has that comment."""
    where, found = view.ours()[0]
    changed = replace(found, enabled=False, comment=comment, **changes)
    others = where.subscriptions[1:]
    return replace(view, subscribers=(replace(where, subscriptions=(changed, *others)),))


def resumed(view: View, request: Request) -> Any:
    """What `resume` plans after a failover to b that was killed."""
    planner, found = choose(view, request, Intent("failover", "b", system="7000", timeline=1))
    return planner(view, found)


@pytest.mark.parametrize("target", ["", "c"])
def test_a_repoint_leaves_alone_what_waits_for_a_silent_node_in_every_round(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`watch` names no target; after its first step it has led something to c."""
    fake = Fake(led(half_moved(trio(subscription("s2"))), "c", 2, ((1, RECEIVED),)))
    run = run_of(fake, monkeypatch, lambda _view: None)
    with capture_logs():
        done = run.carry_out(fake.view, Request(target=target), plan_repoint)
    assert {p.step.subject for p in done.performed if p.step.server == "sub"} == {"s2"}
    assert [left.subject for left in done.left] == ["sub/s1"]
    assert done.exit_code is ExitCode.CHECK_FAILED


def test_a_rejoin_does_not_destroy_what_may_be_the_newer_primary() -> None:
    """b may have been promoted; a, c are on its parent, or on another branch."""
    old = with_machine(unanswered(half_moved(trio()), "b", Reach.REFUSED), "b", HANDS)
    branch = with_machine(led(half_moved(trio()), "c", 2, ((1, RECEIVED),)), "b", HANDS)
    for view in (old, branch):
        request = Request(rejoin=frozenset("b"))
        assert "nobody can ask b (no answer)" in refusal(plan_rejoin, view, request).message
        vouched = plan_rejoin(view, replace(request, accept=Willing(Kind.NOT_PROMOTED)))
        assert "rejoin" in actions(vouched)
        assert any("overridden by --accept not-promoted:b@" in note for note in vouched.notes)
    again = plan_switchover(branch, Request(target="c", rejoin=frozenset("b")))
    assert "rejoin" not in actions(again)
    assert {left.subject for left in again.left} == {"sub/s1", "b"}
    to_old = with_machine(unanswered(half_moved(trio()), "b", Reach.SILENT), "c", HANDS)
    refusal(plan_rejoin, to_old, Request(rejoin=frozenset("c")))


@pytest.mark.parametrize("planner", [plan_repoint, plan_rollback, resumed])
def test_who_answers_as_a_primary_does_not_vouch_that_it_was_not_promoted(planner: Any) -> None:
    promoted = {"standby": False, "timeline": 2, "fenced": True}
    view = answering(unanswered(half_moved(trio()), "c", Reach.SILENT), "b", **promoted)
    for request in (Request(), OVERRIDES):
        with pytest.raises(OperatorNeeded, match="b is a primary on timeline 2") as caught:
            planner(view, request)
        assert caught.value.exit_code is ExitCode.TIMELINE
    assert assess(view, Request()).forbidden


@pytest.mark.parametrize("planner", [plan_repoint, plan_switchover, plan_failover, resumed])
def test_no_plan_enables_at_a_primary_behind_a_standby(planner: Any) -> None:
    """b is a standby of a silent c on timeline 3; a, promoted before, is on timeline 2."""
    view = answering(trio(), "b", timeline=2)
    old = replace(view.nodes[0].known_state, provenance=Provenance(history=((1, 100),)))
    old = replace(
        old,
        server=replace(old.server, timeline=2),
        slots=tuple(replace(each, synced=each.slot_type == "logical") for each in old.slots),
    )
    view = replace(view, nodes=(replace(view.nodes[0], state=old), *view.nodes[1:]))
    view = answering(unanswered(half_moved(view), "c", Reach.SILENT), "b", timeline=3)
    request = Request(target="" if planner is plan_repoint else "a")
    with pytest.raises(OperatorNeeded, match="b is a standby on timeline 3, a a primary on 2"):
        planner(view, request)


def test_who_is_cut_off_to_be_promoted_does_not_vouch() -> None:
    """A rollback lets it stream again, and asks it whether it has an order."""
    view = answering(half_moved(trio()), "b", cut=True)
    assert "b is cut off from every primary" in refusal(plan_repoint, view).message
    assert assess(view, Request()).forbidden
    for planner in (plan_rollback, resumed):
        assert actions(planner(view, Request())) == ["reconnect", "enable"]


@pytest.mark.parametrize("ordered", [True, None, False])
@pytest.mark.parametrize("name", ["a", "c"])
def test_a_standby_with_an_order_to_promote_itself_does_not_vouch(
    name: str, ordered: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked before the first step at a subscription whose mark it vouches for."""
    asked: list[Any] = []

    def told(link: Any) -> bool | None:
        asked.append(link)
        return ordered

    monkeypatch.setattr(promotion_order, "promotion_ordered", told)
    view = half_moved(trio(subscription("s2")))
    if name == "c":
        view = answering(led(view, "c", 2, ((1, RECEIVED),)), "b")
    for planner in (plan_repoint, plan_rollback) if name == "a" else (plan_repoint,):
        fake = Fake(view)
        run = run_of(fake, monkeypatch, lambda _view: None)
        with capture_logs():
            done = run.carry_out(fake.view, Request(subscribers_may_stay=True), planner)
        assert asked == ["b"]
        asked.clear()
        waiting, other = (found for _, found in fake.view.ours())
        assert (waiting.enabled, other.enabled) == (ordered is False, True)
        assert other.conninfo.leads_to(fake.view.node(name).endpoints)
        if ordered is not False:
            assert "leads to b" in waiting.comment
            (left,) = [each for each in done.left if each.subject == "sub/s1"]
            assert left.exit_code is ExitCode.SPLIT_BRAIN
            assert ("b has been told to promote itself" in left.reason) is bool(ordered)
            continue
        fake = Fake(view)
        run = run_of(fake, monkeypatch, lambda _view: None)
        run.carry_out(fake.view, OVERRIDES, planner)
        assert not asked


def test_no_other_is_promoted_while_the_awaited_standby_has_an_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promotion_order, "promotion_ordered", lambda _link: True)
    fake = Fake(half_moved(trio()))
    run = run_of(fake, monkeypatch, lambda _view: None)
    with pytest.raises(OperatorNeeded, match="b has been told to promote itself"):
        run.carry_out(fake.view, Request(target="c"), plan_switchover, undo=True)
    assert "leads to b" in fake.view.ours()[0][1].comment
    assert fake.view.node("c").standby


def test_a_node_that_was_taken_out_of_the_settings_does_not_vouch() -> None:
    marked = half_moved(trio())
    view = replace(marked, nodes=(marked.nodes[0], marked.nodes[2]))
    for planner in (plan_repoint, plan_rollback):
        error = refusal(planner, view)
        assert "b is not in failover.nodes" in error.message
        assert "enable" in actions(planner(view, OVERRIDES))
    assert "b is not in failover.nodes" in assess(view, Request()).forbidden
    later = led(view, "c", 2, ((1, RECEIVED),))
    assert [left.subject for left in plan_repoint(later, Request()).left] == ["sub/s1"]
    fenced = unanswered(marked, "b", Reach.SILENT)
    fenced = replace(
        fenced,
        nodes=(
            replace(
                fenced.nodes[0],
                state=replace(fenced.nodes[0].known_state, fence_mark="timeline 1 by x"),
            ),
            *fenced.nodes[1:],
        ),
    )
    with pytest.raises(OperatorNeeded, match="b does not answer as a standby") as caught:
        plan_rollback(fenced, Request())
    assert "take it out of failover.nodes" in caught.value.hint


def test_a_mark_that_names_no_node_passes_over_no_silent_one() -> None:
    """Each node that is not the primary must answer."""
    view = commented(trio(), f"[slotfailover: system 7000, timeline 1, at db:5001] {MARK}")
    assert "enable" in actions(plan_repoint(view, Request()))
    assert "promote" in actions(plan_switchover(view, Request(target="c")))
    dead = unanswered(unanswered(view, "a", Reach.REFUSED), "b", Reach.REFUSED)
    dead = replace(dead, nodes=(*dead.nodes[:2], third(streams=False)))
    refusal(plan_failover, dead, Request(target="c"))
    assert "promote" in actions(plan_failover(dead, replace(OVERRIDES, target="c")))
    silent = unanswered(view, "b", Reach.REFUSED)
    refusal(plan_failover, silent, Request(target="c", fence=True))
    branch = led(view, "c", 2, ((1, 950),))
    (left,) = plan_repoint(branch, Request()).left
    assert left.subject == "sub/s1"
    assert "nobody can ask a (no answer) and nobody can ask b (no answer)" in left.reason
    assert "enable" in actions(plan_repoint(branch, OVERRIDES))


LED_TO_B = "mine [slotfailover leads to b: system 7000, {}] [disabled by slotfailover]"


@pytest.mark.parametrize(("began", "waits"), [("", True), (" from 0/3B6", False)])
def test_a_timelines_number_alone_is_no_proof_of_descent(began: str, waits: bool) -> None:
    """c's timeline 2 may be another than the timeline 2 of b."""
    view = commented(trio(), LED_TO_B.format(f"timeline 2{began}"))
    plan = plan_repoint(led(view, "c", 2, ((1, 950),)), Request())
    assert [left.subject for left in plan.left] == ["sub/s1"] * waits
    assert "enable" in actions(plan_repoint(led(view, "b", 2, ((1, 950),)), Request()))


@pytest.mark.parametrize("silent", [True, False])
def test_a_void_mark_is_told_with_whom_it_was_led_to(silent: bool) -> None:
    """Any ALTER SUBSCRIPTION makes it void, also one that neither enables nor disables."""
    marked = half_moved(trio())
    view = commented(marked, marked.ours()[0][1].comment, as_marked=False)
    view = unanswered(view, "b", Reach.SILENT) if silent else view
    (remedy,) = remedies(view, "subscription-enabled")
    assert not remedy.orders
    assert "to lead it to b, once it is the primary beyond 0/384 of timeline 1" in remedy.by_hand
    assert "made sure" in remedy.text
    assert assess(view, Request()).held == ("sub/s1",)
    for planner in (plan_repoint, plan_rollback):
        plan = planner(view, Request())
        assert "enable" not in actions(plan)
        (note,) = [note for note in plan.notes if "sub/s1" in note]
        assert "to lead it to b" in note


def test_our_mark_on_what_leads_to_another_cluster_is_told() -> None:
    """Its address answers as another cluster now: no run can go on with it."""
    marked = half_moved(trio())
    view = commented(marked, marked.ours()[0][1].comment, foreign_system="9000")
    assert assess(view, Request()).held == ("sub/s1",)
    for planner in (plan_repoint, plan_rollback):
        (left,) = planner(view, Request()).left
        assert left.subject == "sub/s1"
        assert "leads to another cluster (9000)" in left.reason
    found = run_checks(facts_of(view, None))
    assert "sub/s1" in [f.subject for f in found if f.check == "subscription-identified"]
    assert assess(replace(view, subscribers=trio().subscribers), Request()).held == ()


AT = "2026-11-26T10:00:00.000+00:00"
TO_B = Request(rejoin=frozenset("b"))


def test_a_void_mark_does_not_let_its_subscription_be_led_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A password was rotated since; b may be the newer primary, and c is of another branch."""
    marked = half_moved(trio(subscription("s2")))
    view = led(commented(marked, marked.ours()[0][1].comment, as_marked=False), "c", 2, ((1, 950),))
    fake = Fake(view)
    run = run_of(fake, monkeypatch, lambda _view: None)
    with capture_logs():
        done = run.carry_out(view, Request(), plan_repoint)
    assert fake.view.ours()[0][1] == view.ours()[0][1]
    assert {p.step.subject for p in done.performed if p.step.server == "sub"} == {"s2"}
    (left,) = [each for each in done.left if each.subject == "sub/s1"]
    assert "somebody has changed it since, and nobody can ask b" in left.reason
    assert done.exit_code is ExitCode.CHECK_FAILED
    assert assess(fake.view, Request()).held == ("sub/s1",)
    dead = unanswered(unanswered(marked, "b", Reach.REFUSED), "a", Reach.REFUSED)
    dead = replace(dead, nodes=(*dead.nodes[:2], third(streams=False)))
    dead = commented(dead, marked.ours()[0][1].comment, as_marked=False)
    plan = plan_failover(dead, Request(Willing(Kind.IS_OFF), target="c"))
    steps = [(step.action, step.subject) for step in plan.steps if step.server == "sub"]
    assert ("repoint", "s1") not in steps
    assert "sub/s1" in [each.subject for each in plan.left]


def test_whom_a_void_mark_was_led_to_is_asked_for_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion_order, "promotion_ordered", lambda _link: True)
    marked = half_moved(trio())
    view = commented(marked, marked.ours()[0][1].comment, as_marked=False)
    fake = Fake(answering(led(view, "c", 2, ((1, 950),)), "b"))
    run = run_of(fake, monkeypatch, lambda _view: None)
    with capture_logs():
        done = run.carry_out(fake.view, Request(), plan_repoint)
    assert fake.view.ours()[0][1] == view.ours()[0][1]
    assert "b has been told to promote itself" in done.left[0].reason


ELSEWHERE: list[dict[str, Any]] = [
    {"as_marked": False},
    {"foreign_system": "9000"},
    {"foreign_system": "9000", "as_marked": False},
    {"conninfo": subscription("s", at="elsewhere").conninfo},
]


@pytest.mark.parametrize("change", ELSEWHERE)
def test_a_node_is_not_rebuilt_whatever_became_of_the_mark_that_waits_for_it(
    change: dict[str, Any],
) -> None:
    marked = half_moved(trio())
    view = commented(marked, marked.ours()[0][1].comment, **change)
    view = with_machine(unanswered(view, "b", Reach.REFUSED), "b", HANDS)
    error = refusal(plan_rejoin, view, TO_B)
    assert "nobody can ask b (no answer)" in error.message
    assert "rejoin" in actions(plan_rejoin(view, replace(TO_B, accept=Willing(Kind.NOT_PROMOTED))))
    branch = led(view, "c", 2, ((1, RECEIVED),))
    error = refusal(plan_rejoin, with_machine(branch, "b", HANDS), TO_B)
    assert "on a branch that the primary does not descend from, say so" in error.hint
    assert assess(view, Request()).held == ("sub/s1",)


def test_a_node_that_was_told_to_promote_itself_last_is_not_rebuilt() -> None:
    """It gives no answer, and the primary does not descend from what came of that order."""
    dead = with_machine(unanswered(trio(), "b", Reach.REFUSED), "b", HANDS)
    ordered = replace(dead, promotions=(("b", AT),), promoted_from=1)
    branch = with_machine(led(ordered, "c", 2, ((1, 950),)), "b", HANDS)
    for view in (ordered, replace(ordered, promoted_from=0), branch):
        error = refusal(plan_rejoin, view, TO_B)
        assert f"an order of {AT} to promote b" in error.message
        assert "rejoin" in actions(
            plan_rejoin(view, replace(TO_B, accept=Willing(Kind.NOT_PROMOTED)))
        )
    later = with_machine(led(ordered, "c", 3, ((1, 950), (2, 2000))), "b", HANDS)
    handed_on = replace(ordered, promotions=(("b", AT), ("a", AT)))
    for view in (dead, later, handed_on):
        assert "rejoin" in actions(plan_rejoin(view, TO_B))
    earlier = replace(with_machine(trio(), "a", HANDS), promotions=(("a", AT),))
    assert "rejoin" in actions(plan_switchover(earlier, Request(target="b", rejoin=frozenset("a"))))


def test_a_rejoin_tells_whose_marks_nobody_can_read() -> None:
    view = with_machine(unanswered(trio(), "b", Reach.REFUSED), "b", HANDS)
    silent = tuple(replace(s, reach=Reach.SILENT, subscriptions=()) for s in view.subscribers)
    (note,) = plan_rejoin(replace(view, subscribers=silent), TO_B).notes
    assert note.startswith("not judged: whether a run was leading a subscription of sub to b")
    assert plan_rejoin(view, TO_B).notes == ()


@pytest.mark.parametrize("ordered", [True, None])
def test_nothing_is_led_to_an_old_primary_while_the_awaited_standby_has_an_order(
    ordered: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s2 leads to c, which is dead; a takes writes, and b is about to be the primary."""
    monkeypatch.setattr(promotion_order, "promotion_ordered", lambda _link: ordered)
    view = half_moved(trio(subscription("s2")))
    where, first = view.ours()[0]
    second = where.subscriptions[1]
    second = replace(second, conninfo=second.conninfo.at(view.node("c").address))
    view = replace(view, subscribers=(replace(where, subscriptions=(first, second)),))
    fake = Fake(unanswered(view, "c", Reach.REFUSED))
    run = run_of(fake, monkeypatch, lambda _view: None)
    with (
        capture_logs(),
        pytest.raises(
            OperatorNeeded, match=r"b (has been|may have been) told to promote"
        ) as caught,
    ):
        run.carry_out(fake.view, Request(), plan_repoint)
    assert caught.value.exit_code is ExitCode.SPLIT_BRAIN
    assert ("--accept not-promoted:b@" in caught.value.hint) is (ordered is None)
    assert [found for _, found in fake.view.ours()] == [first, second]


def test_the_journals_order_tells_which_timeline_its_promotion_leaves() -> None:
    cluster = SimpleNamespace(sightings=SimpleNamespace())
    run: dict[str, Any] = {"run": "r", "number": 1, "at": AT, "by": "x", "command": "failover"}
    begun = Entry(**run, step=BEGIN, intent={"timeline": 3})
    recall(cast("Cluster", cluster), [begun, Entry(**run, step=f"{PROMOTES}b", server="b")], None)
    assert (cluster.promotions, cluster.promoted_from) == ((("b", AT),), 3)
    dead = Entry(**run, step=BEGIN, intent={"timeline": 0})
    ended = Entry(
        **run, step=END, outcome=DONE, intent={"met": Milestone("7000", 5, 950, "db:1").note}
    )
    for entries, left in (([dead], 0), ([dead, ended], 4), ([dead, replace(ended, run="o")], 0)):
        order = Entry(**run, step=f"{PROMOTES}b", server="b")
        recall(cast("Cluster", cluster), [entries[0], order, *entries[1:]], None)
        assert cluster.promoted_from == left


@pytest.mark.parametrize("leads_to", ["a", "c"])
def test_a_standby_of_a_timeline_that_was_given_up_is_rebuilt_as_the_hint_says(
    leads_to: str,
) -> None:
    """c was promoted by mistake, and b followed it; c is off, and a takes writes."""
    view = unanswered(trio(), "c", Reach.REFUSED)
    ahead = replace(
        state(slot("s1"), slot("s2"), timeline=2), provenance=Provenance(history=((1, 950),))
    )
    assert ahead.upstream is not None
    ahead = replace(ahead, upstream=ahead.upstream.at(view.node(leads_to).address))
    nodes = tuple(replace(n, state=ahead) if n.name == "b" else n for n in view.nodes)
    view = with_machine(replace(view, nodes=nodes), "b", HANDS)
    with pytest.raises(OperatorNeeded, match="b is a standby on timeline 2") as caught:
        plan_repoint(view, Request())
    assert caught.value.hint.endswith("slotfailover rejoin b")
    plan = plan_rejoin(view, TO_B)
    assert "rejoin" in actions(plan) and "follow" not in actions(plan)
    (left,) = plan_rejoin(with_machine(view, "c", HANDS), Request(rejoin=frozenset("c"))).left
    assert (left.subject, left.hint) == ("b", "slotfailover rejoin b")
