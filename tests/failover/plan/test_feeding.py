"""Who may feed a subscription: one judgement, by which every plan goes, forward and back."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SettingsError, SetupError
from services.failover.model.conninfo import Conninfo
from services.failover.model.destination import Destination
from services.failover.model.subscription import Subscription
from services.failover.model.timelines import Milestone, Provenance
from services.failover.model.view import View
from services.failover.plan.failover import plan_failover
from services.failover.plan.feeding import clings, judge
from services.failover.plan.rejoin import plan_repoint
from services.failover.plan.request import Plan, Request, after_step
from services.failover.plan.resume import choose, undo
from services.failover.plan.steps.step import Action
from services.failover.plan.switchover import plan_rollback, plan_switchover
from services.failover.watch.assessment import assess
from tests.failover.plan.test_switchover import actions, pair
from tests.promises.failover.views import (
    RECEIVED,
    SLOT_NAMES,
    dead_primary,
    node,
    slot,
    state,
    subscriber,
    subscription,
)
from tests.providers.tokens import Willing

SWITCH = 900
"""Where timeline 2 begins."""


def replaced(*subscriptions: Subscription, slots: Any = None, old: Any = None) -> View:
    """`b` has replaced `a` on timeline 2, which left timeline 1 at SWITCH."""
    there = slots if slots is not None else (slot("s1"),)
    said = state(*there, standby=False, timeline=2, switch_lsn=SWITCH)
    said = replace(said, provenance=Provenance(history=((1, SWITCH),)))
    return View((node("a", old), node("b", said)), (subscriber("sub", *subscriptions),))


def held(name: str = "s1", position: int | None = SWITCH + 50, led: str = "b") -> Subscription:
    """What a run has led to `b`, its primary, and has not enabled."""
    met = Milestone("7000", 2, SWITCH)
    note = Milestone("7000", 1, None, "db:5002").note
    to_b = Destination("7000", "b", met)
    mark = (to_b if led == "b" else Destination("7000", led, None, 2, SWITCH)).mark
    return subscription(
        name, at="b", enabled=False, remote_lsn=position, comment=f"mine {note} {mark}"
    )


@pytest.mark.parametrize(
    ("found", "slots"),
    [(held(), (slot("s1"),)), (held(position=450), ()), (held(led="a"), (slot("s1"),))],
    ids=["ahead of the primary", "without a slot", "marked anew for another"],
)
def test_the_way_back_enables_nothing_that_the_way_forward_would_not(
    found: Subscription, slots: Any
) -> None:
    """A subscriber with rows that the primary never had would get others of the same numbers."""
    standby = state(slot("s1"), timeline=2, follows="b", streams=True)
    view = replaced(found, slots=slots, old=standby)
    for planner in (plan_repoint, plan_rollback, choose(view, Request(), None)[0]):
        plan = planner(view, Request())
        assert "enable" not in actions(plan)
        assert [left.subject for left in plan.left if left.subject != "a"] == ["sub/s1"]
    dead = replace(view, nodes=(view.nodes[0], node("b", None)))
    plan = plan_rollback(dead, Request())
    assert actions(plan) == []
    assert "nothing proves that b, which does not answer, may feed it" in plan.left[0].reason


def test_nothing_is_undone_once_a_standby_is_promoted() -> None:
    for view in (replaced(held()), replaced(), replaced(slots=())):
        with pytest.raises(OperatorNeeded, match="b was promoted, and nothing goes back") as caught:
            undo(view, Request())
        assert caught.value.exit_code is ExitCode.SPLIT_BRAIN
    assert undo(pair(), Request())[0] is plan_rollback


@pytest.mark.parametrize("timeline", [1, 2])
def test_what_its_own_primary_has_fed_goes_on_with_it(timeline: int) -> None:
    """A slot is past the last transaction wherever nothing else was for its subscriber."""
    fed = subscription("s1", remote_lsn=450, fed=True)
    view = pair(timeline=timeline, standby={"timeline": timeline}, subscriptions=[fed])
    if timeline == 2:
        told = [
            replace(n, state=replace(n.known_state, provenance=Provenance(history=((1, 100),))))
            for n in view.nodes
        ]
        view = replace(view, nodes=tuple(told))
    for step in plan_switchover(view, Request()).steps:
        if step.action is Action.STOP:
            break
        view = step.effect(view)
    assert not view.ours()[0][1].enabled
    assert actions(plan_rollback(view, Request()))[-1] == "enable"


def fed_from_c(*, copy: bool = False, primary: bool = True) -> View:
    """`s1` is fed by the primary `a`, `s2` by a slot that was made on the standby `c`."""
    made = {"synced": copy, "failover": copy, "active_pid": 9}
    c = node("c", state(slot("s1"), slot("s2", **made), received=RECEIVED - 8, streams=True))
    view = pair(hands=False, subscriptions=[subscription("s1", fed=True)])
    nodes = (*view.nodes, c) if primary else (node("a", None), *_deaf(view.nodes[1:]), *_deaf((c,)))
    there = subscription("s2", at="c", fed=True, failover=False)
    unfed = subscription("s1", fed=primary)
    return replace(view, nodes=tuple(nodes), subscribers=(subscriber("sub", unfed, there),))


def _deaf(nodes: Any) -> Any:
    for each in nodes:
        receiver = replace(each.known_state.replication, receiver_streaming=False)
        yield replace(each, state=replace(each.known_state, replication=receiver))


def test_what_a_standby_feeds_stays_and_is_no_sign_of_a_primary() -> None:
    living = fed_from_c()
    assert "s2" not in " ".join(step.text for step in plan_repoint(living, Request()).steps)
    assert (assess(living, Request()).forbidden, assess(living, Request()).pending) == ("", ())
    for plan in (
        plan_switchover(living, Request(target="b")),
        plan_failover(fed_from_c(primary=False), Request(target="b")),
    ):
        assert "promote" in actions(plan)
        assert [s.text for s in plan.steps if s.subject == "s2"] == []
        assert [left.subject for left in plan.left if "s2" in left.subject] == []
    itself = plan_failover(fed_from_c(primary=False), Request(Willing(lacking=100), target="c"))
    assert [s.action.value for s in itself.steps if s.subject == "s2"] == []  # there already
    assert any("s2" in s.text for s in itself.steps if s.action is Action.FLOW)
    # A copy feeds nobody: what leads to one was led there while that was the primary.
    assert "s2" in " ".join(s.text for s in plan_repoint(fed_from_c(copy=True), Request()).steps)


def by_list(asks: str, **changes: Any) -> Subscription:
    """A subscription whose worker finds its primary by itself."""
    hosts = (("host", "db,db"), ("port", "5001,5002"), ("target_session_attrs", asks))
    values: dict[str, Any] = {"fed": True, "remote_lsn": 450, **changes}
    return replace(subscription("s1"), conninfo=Conninfo(hosts), **values)


@pytest.mark.parametrize("asks", ["read-write", "primary"])
def test_a_worker_leaves_a_fenced_primary_that_runs_on(asks: str) -> None:
    view = pair(hands=False, subscriptions=[by_list(asks)])
    plan = plan_switchover(view, Request())
    assert actions(plan).index("disable") < actions(plan).index("promote")
    later = ["repoint"] * (asks == "primary") + ["enable", "flow"]
    assert [a for a in actions(plan)[actions(plan).index("promote") :] if a in later] == later
    # Where a run has left it there, the next one leads it away, once.
    request = Request()
    for step in plan.steps:
        view, request = step.effect(view), after_step(request, step, view)
        if step.action is Action.PROMOTE:
            view = replace(view, subscribers=(subscriber("sub", by_list(asks)),))
            found = view.ours()[0][1]
            assert clings(view, found, view.node("b"))
            assert [a for a in actions(plan_repoint(view, Request())) if a in (*later, "disable")]
    assert plan_repoint(view, request).steps == ()
    conninfo = view.ours()[0][1].conninfo
    assert (conninfo.value("port"), conninfo.takes_any_primary) == ("5001,5002", False)


def test_a_switchover_gives_no_consumer_up_without_consent() -> None:
    """A subscription with failover = false has no slot on the standby."""
    alone = slot("s2", failover=False, synced=False, active_pid=8)
    view = pair(subscriptions=[subscription("s1"), subscription("s2", failover=False)])
    said = view.nodes[0].known_state
    old = replace(view.nodes[0], state=replace(said, slots=(*said.slots, alone)))
    view = replace(view, nodes=(old, view.nodes[1]))
    with pytest.raises(OperatorNeeded, match="behind: sub/s2: the slot s2 is not on b") as caught:
        plan_switchover(view, Request())
    assert caught.value.exit_code is ExitCode.NOT_READY
    assert "--accept lost-slot:s2:b@" in caught.value.hint
    plan = plan_switchover(view, Request(Willing(slots={"s2"})))
    assert "promote" in actions(plan)
    assert any("loss accepted: sub/s2" in note for note in plan.notes)


_marks = st.sampled_from(
    [
        "",
        Destination("7000", "b", Milestone("7000", 2, SWITCH)).mark,
        Destination("7000", "b", None, 1, 400).mark,
        Destination("7000", "a", None, 2, SWITCH).mark,
    ]
)
_notes = st.sampled_from(["", Milestone("7000", 1, None, "db:5001").note])
_lists = st.sampled_from([None, None, "read-write", "primary"])


@st.composite
def situations(draw: st.DrawFn) -> View:
    """A pair before or after a promotion, with subscriptions in any state of it."""
    copies: list[Any] = [{}, {}, {"synced": False}, {"invalidation_reason": "rows_removed"}, None]
    kinds = {name: draw(st.sampled_from(copies)) for name in SLOT_NAMES[:2]}
    slots = tuple(slot(name, **how) for name, how in kinds.items() if how is not None)
    found = []
    for name in SLOT_NAMES[:2]:
        mark = draw(_marks)
        position = draw(st.sampled_from([None, 450, 500, SWITCH, SWITCH + 50]))
        asks = draw(_lists)
        given = subscription(
            name,
            at=draw(st.sampled_from("ab")),
            enabled=not mark and draw(st.booleans()),
            remote_lsn=position,
            comment=f"mine {draw(_notes)} {mark}",
        )
        found.append(replace(given, conninfo=by_list(asks).conninfo) if asks else given)
    if draw(st.booleans()):
        old = draw(st.sampled_from([None, state(*slots, timeline=2, follows="b", streams=True)]))
        fenced = state(*(replace(s, active_pid=7) for s in slots), standby=False, fenced=True)
        return replaced(*found, slots=slots, old=draw(st.sampled_from([old, fenced])))
    view = pair(hands=draw(st.booleans()), fenced=draw(st.booleans()), subscriptions=found)
    if draw(st.booleans()):
        return replace(dead_primary(*view.subscribers, slots=slots))
    return view


PLANNERS: dict[str, Callable[[View, Request], Plan]] = {
    "failover": plan_failover,
    "switchover": lambda view, request: plan_switchover(view, replace(request, target="b")),
    "switchover back": lambda view, request: plan_switchover(view, replace(request, target="a")),
    "repoint": plan_repoint,
    "resume": lambda view, request: choose(view, request, None)[0](view, request),
    "rollback": plan_rollback,
}


@given(
    situations(),
    st.sets(st.sampled_from(SLOT_NAMES[:2])).map(frozenset),
    st.sampled_from(sorted(PLANNERS)),
    st.sampled_from(sorted(PLANNERS)),
    st.integers(0, 12),
    st.booleans(),
)
def test_no_plan_enables_what_the_judgement_forbids(
    view: View, accepted: frozenset[str], first: str, second: str, cut: int, same_run: bool
) -> None:
    """Forward and back, whole, interrupted anywhere, and gone on with by any command."""
    request = Request(Willing(slots=accepted))
    for name, steps in ((first, cut), (second, 40)):
        for _ in range(steps):
            plan = None
            with contextlib.suppress(OperatorNeeded, Retryable, SetupError, SettingsError):
                plan = PLANNERS[name](view, request)
            if plan is None or not plan.steps:
                break
            step = plan.steps[0]
            found = view.subscription(step.server, step.subject)
            if step.action in (Action.ENABLE, Action.REPOINT):
                assert found is not None
                there = view.node(step.node)
                verdict = judge(view, request, view.subscribers[0], found, there)
                assert verdict.may_feed if step.action is Action.ENABLE else verdict.may_lead
                if step.action is Action.ENABLE and there.state is not None:
                    fed = there.state.slot(found.slot_name or "")
                    assert fed is not None and fed.invalidation_reason is None
                    assert (found.remote_lsn or 0) <= (there.state.switch_lsn or RECEIVED)
            view = step.effect(view)
            request = after_step(request, step, view)
        request = request if same_run else Request(Willing(slots=accepted))
