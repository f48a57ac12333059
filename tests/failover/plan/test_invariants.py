"""What is not known, is stale or is somebody else's never enables a promotion (properties)."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from schemas.acceptance import Kind
from schemas.errors import OperatorNeeded, Retryable, SetupError
from services.failover.model.subscription import Subscription
from services.failover.model.view import Node, NodeState, Reach, View
from services.failover.plan.failover import plan_failover
from services.failover.plan.request import Plan, Request
from services.failover.plan.resume import Intent, choose
from services.failover.plan.steps.step import Action
from tests.promises.failover.views import views
from tests.promises.failover.weakenings import WEAKENINGS, missing, weaker, well_known
from tests.providers.tokens import Willing

OFF = Kind.IS_OFF
SLOTS = ("s1", "s2", "s3", "s4", "gone")


def _requests(slots: st.SearchStrategy[frozenset[str]]) -> st.SearchStrategy[Request]:
    kinds = st.sampled_from([(), (OFF,)])
    bytes_ = st.sampled_from([None, 0, 10**9])
    accept = st.builds(lambda k, s, n: Willing(*k, slots=s, lacking=n), kinds, slots, bytes_)
    return st.builds(Request, accept=accept, fence=st.booleans(), require_subscribers=st.booleans())


requests = _requests(st.sets(st.sampled_from(SLOTS)).map(frozenset))
willing = _requests(st.sampled_from([frozenset((*SLOTS, "kept"))] * 3 + [frozenset()]))
"""Who accepts that slots are lost: so that many of these views are promoted in."""


def is_off(request: Request) -> bool:
    assert isinstance(request.accept, Willing)
    return OFF in request.accept.kinds


def losing(request: Request) -> Willing:
    """What the request accepts, and the loss of any WAL."""
    assert isinstance(request.accept, Willing)
    return Willing(*request.accept.kinds, slots=request.accept.slots, lacking=10**9)


def _unanswered(node: Node, reach: Reach) -> Node:
    return replace(node, state=None, reach=reach, detail="weakened")


def _stated(node: Node, **changes: object) -> Node:
    if node.state is None:
        return node
    return replace(node, state=replace(node.state, **changes))  # type: ignore[arg-type]


def _heard(state: NodeState) -> NodeState:
    receiver = replace(state.replication, receiver_streaming=True, heard_age_s=None)
    return replace(state, replication=receiver)


NODES: dict[str, Callable[[Node], Node]] = {
    "gives no answer": lambda node: _unanswered(node, Reach.SILENT),
    "listens and lets nobody in": lambda node: _unanswered(node, Reach.CLOSED),
    "shows our role too little": lambda node: _unanswered(node, Reach.BARRED),
    "hides primary_conninfo": lambda node: _stated(node, upstream=None),
    "may still be receiving": lambda node: (
        replace(node, state=_heard(node.state)) if node.state is not None else node
    ),
    "hides its slots": lambda node: _stated(node, slots=()),
    "has a fence of another timeline": lambda node: _stated(node, fence_mark="timeline 99 by x"),
}
"""What may be missing or stale of a node."""


def _weak(subscription: Subscription) -> Subscription:
    return replace(subscription, fed=True, heard_age_s=None)


def promotes(view: View, request: Request) -> Plan | None:
    """The plan, if it promotes; None where it is refused, or where nothing is to be promoted."""
    with contextlib.suppress(OperatorNeeded, Retryable, SetupError):
        plan = plan_failover(view, request)
        if any(step.action is Action.PROMOTE for step in plan.steps):
            return plan
    return None


@given(views(), requests, st.sampled_from(sorted(NODES)), st.sampled_from("abc"))
def test_a_weakened_node_never_enables_a_promotion(
    view: View, request: Request, how: str, name: str
) -> None:
    """What was refused stays refused, for the same candidate, once less is known."""
    weaker = replace(view, nodes=tuple(NODES[how](n) if n.name == name else n for n in view.nodes))
    plan = promotes(weaker, request)
    if plan is None:
        return
    if f"not judged: how much WAL {name} has" in "; ".join(plan.notes):
        # What it has counts as lost while it answers; silent, the plan says that nobody knows.
        request = replace(request, accept=losing(request))
    before = promotes(view, replace(request, target=plan.new_primary))
    others = [n for n in view.nodes if n.name != plan.new_primary]
    if any(n.leading or n.reach is Reach.CLOSED for n in others):
        # It fell silent: then somebody has to vouch for that.
        assert is_off(request) or request.fence
    elif name != plan.new_primary and how != "hides its slots":
        assert before is not None


def test_every_field_of_what_is_observed_has_been_thought_about() -> None:
    """Whoever adds a field to the model says what it has where nobody knows it."""
    assert missing() == set()


@given(well_known(), willing, st.sampled_from(WEAKENINGS), st.sampled_from("abc"))
def test_a_field_that_is_not_known_never_enables_a_promotion_in_silence(
    view: View, request: Request, weakening: tuple[type, str, Any, bool], name: str
) -> None:
    owner, field, value, said = weakening
    plan = promotes(weaker(view, owner, field, value, name), request)
    if plan is None or promotes(view, replace(request, target=plan.new_primary)) is not None:
        return
    assert said, f"without {owner.__name__}.{field} it is promoted"
    notes = "; ".join(plan.notes)
    assert "not judged" in notes or "what came after the last contact" in notes


@given(views(), requests)
def test_a_subscription_that_may_be_fed_by_another_server_forbids_it(
    view: View, request: Request
) -> None:
    weaker = replace(
        view,
        subscribers=tuple(
            replace(each, subscriptions=tuple(map(_weak, each.subscriptions)))
            for each in view.subscribers
        ),
    )
    plan = promotes(weaker, request)
    if plan is None:
        return
    new = view.node(plan.new_primary)
    drained = any(step.action is Action.MARK for step in plan.steps)
    elsewhere = [
        found
        for _, found in weaker.ours()
        if found.enabled and not found.conninfo.leads_to(new.endpoints)
    ]
    assert not elsewhere or drained


@given(views(), requests)
def test_a_standby_that_may_still_receive_is_asked_or_forbids_it(
    view: View, request: Request
) -> None:
    receives = NODES["may still be receiving"]
    nodes = tuple(receives(node) if node.standby else node for node in view.nodes)
    weaker = replace(view, nodes=nodes)
    plan = promotes(weaker, request)
    if plan is None:
        return
    asked = {step.server for step in plan.steps if step.action is Action.ASK}
    drained = any(step.action is Action.MARK for step in plan.steps)
    assert drained or asked == {node.name for node in weaker.standbys}
    assert drained or is_off(request) or request.fence


@given(views(), requests)
def test_a_promotion_is_ordered_only_on_proof(view: View, request: Request) -> None:
    """Whatever is planned, at the order nobody else leads, hides, or feeds anybody."""
    plan = promotes(view, request)
    if plan is None:
        return
    shot = {step.server for step in plan.steps if step.action is Action.SHOOT}
    fenced = {step.server for step in plan.steps if step.action is Action.MARK}
    for node in view.nodes:
        if node.name == plan.new_primary or node.standby:
            continue
        assert node.reach is not Reach.CLOSED or node.name in shot
        assert not node.leading or node.name in shot | fenced
    for step in plan.steps:
        if step.action is Action.PROMOTE:
            break
        view = step.effect(view)
    for node in view.standbys:
        assert node.state is not None
        assert not node.state.replication.receiver_streaming or fenced


@given(views(), st.floats(0, 10**7), st.integers(0, 4), st.sampled_from(["7000", "9"]))
def test_an_intent_of_another_day_cluster_or_timeline_is_not_taken_up(
    view: View, age_s: float, timeline: int, system: str
) -> None:
    intent = Intent("failover", "b", frozenset("a"), system, timeline, age_s)
    with contextlib.suppress(OperatorNeeded, Retryable, SetupError):
        _, request = choose(view, Request(), intent)
        assert not request.accept.tokens
        if age_s > 86_400 or system == "9":
            assert not request.rejoin
