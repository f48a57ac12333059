"""What proves that a primary is gone, and what only seems to: on views of three nodes."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.acceptance import Kind
from schemas.errors import ExitCode, OperatorNeeded, SlotbridgeError
from services.failover.model.conninfo import Conninfo
from services.failover.model.loss_limit import Sighting
from services.failover.model.subscription import Subscription
from services.failover.model.timelines import Feeding
from services.failover.model.view import Node, NodeState, Reach, View
from services.failover.plan.failover import plan_failover
from services.failover.plan.request import Plan, Request
from services.failover.plan.steps.step import Action
from services.failover.plan.switchover import plan_switchover
from tests.promises.failover.views import PORTS, node, slot, state, subscriber, subscription
from tests.providers.tokens import Willing

OFF = Request(Willing(Kind.IS_OFF))
NOW = Request()


def anywhere(names: str = "abc") -> Conninfo:
    """A connection string that lists these nodes, and takes the one that takes writes."""
    return Conninfo(
        (
            ("host", ",".join("db" for _ in names)),
            ("port", ",".join(PORTS[name] for name in names)),
            ("target_session_attrs", "read-write"),
        )
    )


def fed_by(said: NodeState, name: str, host: str = "db") -> NodeState:
    """The standby's receiver is connected to that node."""
    fed = Feeding("standby_1", "", 1, host, PORTS[name])
    return replace(said, provenance=replace(said.provenance, fed=fed))


def refusal(view: View, request: Request = NOW, planner: Any = plan_failover) -> SlotbridgeError:
    with pytest.raises(OperatorNeeded) as refused:
        planner(view, request)
    assert refused.value.exit_code is ExitCode.SPLIT_BRAIN
    return refused.value


def promotes(view: View, name: str, request: Request = NOW) -> Plan:
    plan = plan_failover(view, request)
    assert plan.new_primary == name
    assert Action.PROMOTE in [step.action for step in plan.steps]
    return plan


def silent(name: str) -> Node:
    return node(name, None, Reach.SILENT)


def trio(a: Node, b: Node, c: Node, *subscriptions: Subscription, **known: Any) -> View:
    there = (subscriber("sub", *subscriptions),) if subscriptions else ()
    return View((a, b, c), there, **known)


def test_a_standby_that_may_take_any_node_receives_from_a_primary() -> None:
    """Its list names a standby, too: that is no proof of what feeds it."""
    b = replace(state(streams=True, heard_age_s=0.1), upstream=anywhere())
    refused = refusal(trio(node("a", None), node("b", b), node("c", state(received=900))))
    assert "b receives from" in refused.message
    refused = refusal(
        trio(node("a", None), node("b", fed_by(b, "a")), node("c", state(received=900)))
    )
    assert "b receives from a " in refused.message
    unlisted = fed_by(b, "c", "vip")
    refused = refusal(trio(node("a", None), node("b", unlisted), node("c", state(received=900))))
    assert "b receives from a server that is not a node" in refused.message


def test_a_cascaded_standby_is_not_a_witness_of_a_primary() -> None:
    c = replace(state(received=900, streams=True, heard_age_s=0.1), upstream=anywhere())
    promotes(trio(node("a", None), node("b", state()), node("c", fed_by(c, "b"))), "b")
    single = state(received=900, streams=True, follows="b")
    promotes(trio(node("a", None), node("b", state()), node("c", single)), "b")


def test_a_subscription_that_may_take_any_node_is_fed_by_a_primary() -> None:
    fed: dict[str, Any] = {"conninfo": anywhere("ab"), "fed": True, "heard_age_s": 0.1}
    view = View(
        (node("a", None), node("b", state(slot("s1")))),
        (subscriber("sub", subscription("s1", **fed)),),
    )
    assert "sub/s1 is fed by a" in refusal(view).message
    copied = replace(view, nodes=(view.nodes[0], node("b", state(slot("s1", active_pid=7)))))
    assert "sub/s1 is fed by a" in refusal(copied).message  # the worker that copies it holds it
    unfed = replace(subscription("s1", **fed), fed=False)
    promotes(replace(view, subscribers=(subscriber("sub", unfed),)), "b")


def test_a_subscription_by_an_unknown_address_counts_where_the_standby_has_its_slot() -> None:
    found = subscription("s1", at="6432", fed=True, heard_age_s=0.1)
    view = View((node("a", None), node("b", state(slot("s1")))), (subscriber("sub", found),))
    assert "sub/s1 is fed by another server" in refusal(view).message
    other = replace(view, nodes=(view.nodes[0], node("b", state(slot("s2")))))
    promotes(other, "b")
    foreign = subscription("s1", at="6432", fed=True, foreign_system="9")
    promotes(replace(view, subscribers=(subscriber("sub", foreign),)), "b")
    quiet = replace(found, heard_age_s=9.0)
    dead = View((silent("a"), view.nodes[1]), (subscriber("sub", quiet),))
    promotes(dead, "b", OFF)


def test_a_drained_primary_that_feeds_by_an_unknown_address_is_known_by_its_slot() -> None:
    """A subscriber that is a standby: its subscription can't be disabled, and goes on."""
    found = subscription("s1", at="6432", fed=True, heard_age_s=0.1, identified=True)
    where = replace(subscriber("sub", found), in_recovery=True)
    b = node("b", state(slot("s1"), streams=True))
    request = Request(fence=True, target="b")
    for pid in (7, None):
        a = node("a", state(slot("s1", synced=False, active_pid=pid), standby=False))
        if pid is None:
            assert "sub/s1 is fed by" in refusal(View((a, b), (where,)), request).message
        else:
            promotes(View((a, b), (where,)), "b", request)


def test_a_silent_node_may_have_been_promoted() -> None:
    c = node("c", state(received=900))
    assert "b does not answer" in refusal(trio(node("a", None), silent("b"), c)).message
    promotes(trio(node("a", None), silent("b"), c), "c", OFF)
    # A switchover to b that was killed once it had given the order: a is fenced, b cut off.
    fenced = node("a", state(standby=False, fenced=True))
    streams = node("c", state(streams=True))
    request = Request(target="c", final_lsn=1000)
    for planner in (plan_failover, plan_switchover):
        refused = refusal(trio(fenced, silent("b"), streams), request, planner)
        assert "b does not answer" in refused.message
    # A primary that takes writes is handed over, whoever else is away.
    here = trio(node("a", state(standby=False)), silent("b"), streams, seen_writable="a")
    plan = plan_switchover(here, Request(target="c"))
    assert Action.PROMOTE in [step.action for step in plan.steps]
    begun = replace(here, promotions=(("b", "2026-01-01T00:00:00+00:00"),))
    assert "b does not answer" in refusal(begun, Request(target="c"), plan_switchover).message


def test_a_silent_former_standby_is_not_a_witness() -> None:
    c = node("c", state(received=1000))
    seen = Sighting("a", 1, 1000, 3.0, "")
    view = trio(node("a", None), silent("b"), c, sighting=seen, known_standbys=frozenset("b"))
    assert any("not judged: b does not answer" in note for note in promotes(view, "c").notes)
    newer = node("c", state(received=1000, timeline=2))
    assert "b does not" in refusal(trio(view.nodes[0], silent("b"), newer, sighting=seen)).message
    older = replace(view, nodes=(view.nodes[0], silent("b"), newer))
    assert "b does not answer" in refusal(older).message
    led = trio(silent("b"), node("a", None), node("c", state(follows="b")))
    assert "b does not answer" in refusal(replace(led, known_standbys=frozenset("b"))).message


def test_the_last_primary_that_is_silent_is_not_overridden_by_accepting_losses() -> None:
    seen = Sighting("c", 2, 1000, 3.0, "")
    view = trio(node("a", None), node("b", state()), silent("c"), sighting=seen)
    assert "c does not answer" in refusal(view, Request(Willing(lacking=0))).message


def test_a_third_node_that_was_a_standby_does_not_veto() -> None:
    closed = node("c", None, Reach.CLOSED)
    view = trio(node("a", None), node("b", state()), closed)
    assert "c listens on its port" in refusal(view).message
    known = replace(view, known_standbys=frozenset("c"))
    assert any("not judged: c" in note for note in promotes(known, "b").notes)
    for powers in ({"alter_system": "off"}, {"may_cut": False}):
        c = node("c", state(received=900, **powers))
        plan = promotes(trio(node("a", None), node("b", state()), c), "b")
        assert [s.server for s in plan.steps if s.action is Action.CUT] == ["b"]
        receives = node("c", state(received=900, streams=True, heard_age_s=9.0, **powers))
        with pytest.raises(SlotbridgeError) as refused:
            plan_failover(trio(silent("a"), node("b", state()), receives), OFF)
        assert refused.value.subject == "c"


def test_a_standby_that_was_copied_from_a_fenced_primary_is_let_write() -> None:
    copied = replace(state(), fence_mark="timeline 1 by x@y since then")
    plan = promotes(View((node("a", None), node("b", copied)), ()), "b")
    done = [step.action for step in plan.steps]
    (lift,) = [step for step in plan.steps if "default_transaction_read_only" in step.subject]
    assert plan.steps.index(lift) < done.index(Action.PROMOTE)
    assert "ALTER SYSTEM RESET slotfailover.fenced" in lift.sql
    after = lift.effect(View((node("a", None), node("b", copied)), ()))
    assert lift.holds(after)
    rights = replace(copied.replication, may_fence=False)
    with pytest.raises(SlotbridgeError) as refused:
        plan_failover(
            View((node("a", None), node("b", replace(copied, replication=rights))), ()), NOW
        )
    assert refused.value.exit_code is ExitCode.PRIVILEGE_MISSING
    assert "ALTER SYSTEM RESET default_transaction_read_only" in refused.value.hint
    living = View((node("a", state(standby=False)), node("b", replace(copied, replication=replace(
        copied.replication, receiver_streaming=True)))), ())  # fmt: skip
    switched = plan_switchover(living, Request(target="b"))
    assert any("default_transaction_read_only" in step.subject for step in switched.steps)


def test_a_standby_that_somebody_made_read_only_is_told() -> None:
    said = replace(state(), read_only=True)
    plan = promotes(View((node("a", None), node("b", said)), ()), "b")
    (left,) = [left for left in plan.left if "RESET default_transaction_read_only" in left.hint]
    assert left.subject == "b"
