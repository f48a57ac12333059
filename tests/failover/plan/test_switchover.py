"""Switchover plans, walked in thought: every prefix goes on or back, and nothing is lost."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SettingsError, SetupError
from schemas.settings import MachineSettings
from services.failover.model.conninfo import Address
from services.failover.model.host_commands import machine_of
from services.failover.model.timelines import Feeding, Provenance
from services.failover.model.view import Reach, View
from services.failover.observe.addresses import require_own_slots
from services.failover.plan.failover import plan_failover
from services.failover.plan.rejoin import plan_rejoin, plan_repoint
from services.failover.plan.request import Plan, Request, after_step
from services.failover.plan.resume import Intent, choose
from services.failover.plan.steps.step import Action
from services.failover.plan.switchover import plan_rollback, plan_switchover
from services.failover.watch.assessment import assess
from services.postgres.server import SettingValue
from tests.promises.failover.views import RECEIVED, node, slot, state, subscriber, subscription
from tests.providers.tokens import Willing

HANDS = MachineSettings(stop="stop {node}", start="start {node}", rejoin="rejoin {node} {primary}")


def primary(*, fenced: bool = False, consumer: int = RECEIVED, pid: int | None = 7, **said: Any):  # type: ignore[no-untyped-def]
    """What the living primary `a` says."""
    feeds = slot("s1", synced=False, active_pid=pid, confirmed_flush_lsn=consumer)
    physical = slot("standby_1", slot_type="physical", synced=False, failover=False, active_pid=8)
    values: dict[str, Any] = {"synchronized": "standby_1", "standby": False, "fenced": fenced}
    return state(feeds, physical, **{**values, **said})


def pair(
    *,
    hands: bool = True,
    standby: dict[str, Any] | None = None,
    subscriptions: Any = None,
    **said: Any,
) -> View:
    """`a` lives, `b` streams from it and has s1 ready."""
    values: dict[str, Any] = {"streams": True, **(standby or {})}
    nodes = [node("a", primary(**said)), node("b", state(slot("s1"), **values))]
    if hands:
        nodes = [
            replace(n, machine=machine_of(n.name, HANDS, Address("db", "", "1"))) for n in nodes
        ]
    given = subscriptions if subscriptions is not None else [subscription("s1", remote_lsn=450)]
    return View(tuple(nodes), (subscriber("sub", *given),), "s1")


def actions(plan: Plan) -> list[str]:
    return [step.action.value for step in plan.steps]


BEFORE = ["checkpoint", "settle", "fence", "mark", "drain", "disable", "stop", "promote"]
AFTER = ["repoint", "enable", "flow", "bridge", "slot", "rejoin", "reset", "ready"]


@pytest.mark.parametrize("name", ["a", "b"])
def test_limits_that_a_node_does_not_tell_are_no_proof_that_they_suffice(name: str) -> None:
    view = pair()
    said = view.node(name).known_state
    less = {key: value for key, value in said.settings.items() if key != "max_connections"}
    nodes = tuple(
        replace(each, state=replace(said, settings=less)) if each.name == name else each
        for each in view.nodes
    )
    for plan, request in ((plan_switchover, Request()), (plan_failover, Request(fence=True))):
        with pytest.raises(OperatorNeeded) as caught:
            plan(replace(view, nodes=nodes), request)
        assert caught.value.exit_code is ExitCode.NOT_READY
        assert f"max_connections of {name}" in caught.value.message
        assert "nobody can tell" in caught.value.message


def test_the_standby_of_a_switchover_replays_also_where_a_paused_one_is_further() -> None:
    """Writes go on, so that standbys differ by some bytes; both get the rest before the end."""
    whole = pair()
    assert whole.nodes[1].state is not None
    said = whole.nodes[1].state.replication
    ahead = replace(said, received_lsn=RECEIVED + 8, replay_pause="paused")
    b = replace(whole.nodes[1], state=replace(whole.nodes[1].state, replication=ahead))
    c = node("c", state(slot("s1"), streams=True))
    plan = plan_switchover(replace(whole, nodes=(whole.nodes[0], b, c)), Request())
    assert plan.new_primary == "c"
    assert "b is not chosen: its replay is paused" in plan.notes


pairs = st.builds(
    pair,
    hands=st.booleans(),
    fenced=st.booleans(),
    consumer=st.sampled_from([0, 500, RECEIVED]),
    pid=st.sampled_from([None, 7]),
    early_sessions=st.sampled_from([0, 2]),
    subscriptions=st.lists(
        st.builds(
            lambda at, marked, enabled: subscription(
                "s1", at=at, marked=marked, enabled=enabled, remote_lsn=450
            ),
            st.sampled_from(["a", "b"]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=1,
    ),
)
requests = st.builds(
    Request,
    target=st.sampled_from(["", "b"]),
    rejoin=st.sampled_from([frozenset(), frozenset("a")]),
)


def test_the_whole_way_in_order() -> None:
    plan = plan_switchover(pair(), Request(rejoin=frozenset("a")))
    assert actions(plan) == BEFORE + AFTER
    assert plan.why == "a hands over to it"
    assert not plan.left
    stop = plan.steps[BEFORE.index("stop")]
    assert (stop.shown[-1], stop.command) == ("stop a", ("stop", "a"))
    assert "slot_name = 'standby_1'" in stop.shown[0]  # no other standby holds the stop up


def test_a_consumer_far_behind_is_waited_for_before_writes_are_fenced() -> None:
    view = pair(consumer=0, received=2**30, standby={"received": 2**30})
    assert actions(plan_switchover(view, Request()))[:3] == ["checkpoint", "settle", "fence"]


def test_a_consumer_that_no_standby_gets_is_waited_for_before_the_server_is_stopped() -> None:
    """Stopping in order waits for every walsender: one that does not drain is met before."""
    other = slot("other", failover=False, synced=False, active_pid=9, confirmed_flush_lsn=0)
    for hands in (True, False):
        view = pair(hands=hands)
        living = view.nodes[0]
        assert living.state is not None
        more = replace(living.state, slots=(*living.state.slots, other))
        view = replace(view, nodes=(replace(living, state=more), view.nodes[1]))
        drain = next(s for s in plan_switchover(view, Request()).steps if s.action is Action.DRAIN)
        assert ("other" in drain.slots) == hands


def test_without_commands_it_says_what_is_left() -> None:
    plan = plan_switchover(pair(hands=False), Request(rejoin=frozenset("a")))
    assert "stop" not in actions(plan)
    assert "rejoin" not in actions(plan)
    assert any("no `stop` command" in note for note in plan.notes)
    assert [left.subject for left in plan.left] == ["a"]


@given(pairs, requests, st.integers(0, 20))
def test_every_prefix_goes_on_to_the_same_end(view: View, request: Request, cut: int) -> None:
    """Cut anywhere, with what the run had learned forgotten, `resume` ends as the plan does."""
    with contextlib.suppress(OperatorNeeded, Retryable, SetupError):
        whole = plan_switchover(view, request)
        for step in whole.steps[:cut]:
            view = step.effect(view)
        intent = Intent("switchover", "b", request.rejoin)
        planner, again = choose(view, Request(), intent)
        for _ in range(60):
            plan = planner(view, again)
            if not plan.steps:
                break
            view = plan.steps[0].effect(view)
            again = after_step(again, plan.steps[0], view)
            assert plan.steps[0].holds(view)
        assert not plan.steps
        assert [n.name for n in view.writable] == ["b"]
        for where, found in view.ours():
            assert not where.usable or found.conninfo.leads_to(view.node("b").endpoints)
            assert not found.marked


@given(pairs, requests, st.integers(0, 20))
def test_every_prefix_before_the_promotion_goes_back(
    view: View, request: Request, cut: int
) -> None:
    with contextlib.suppress(OperatorNeeded, Retryable, SetupError):
        whole = plan_switchover(view, request)
        for step in whole.steps[:cut]:
            if step.action is Action.PROMOTE:
                break
            if step.action is Action.STOP:
                break  # what a start brings back is for servers to show
            view = step.effect(view)
        while (plan := plan_rollback(view, Request())).steps:
            view = plan.steps[0].effect(view)
        assert [n.name for n in view.writable] == ["a"]
        settled = [
            found for _, found in view.ours() if found.conninfo.leads_to(view.nodes[0].endpoints)
        ]
        assert not any(found.marked for found in settled)


@given(pairs, requests)
def test_nobody_is_promoted_beside_a_primary_that_takes_writes(
    view: View, request: Request
) -> None:
    with contextlib.suppress(OperatorNeeded, Retryable, SetupError):
        for step in plan_switchover(view, request).steps:
            if step.action is Action.PROMOTE:
                assert not view.writable
                assert step.lsn is None or view.node("b").received >= step.lsn
            view = step.effect(view)


@pytest.mark.parametrize(
    ("view", "code", "says"),
    [
        (pair(standby={"streams": False}), ExitCode.NOT_READY, "does not stream"),
        (pair(standby={"follows": "c"}), ExitCode.NOT_READY, "streams from elsewhere"),
        (pair(synchronized="standby_1, gone"), ExitCode.NOT_READY, "names gone"),
        (pair(standby={"standby": False}), ExitCode.SPLIT_BRAIN, "several nodes are writable"),
        (pair(standby={"system": "1"}), ExitCode.WRONG_DATABASE, "different clusters"),
        (
            pair(standby={"may_promote": False}),
            ExitCode.PRIVILEGE_MISSING,
            "privilege to promote on b",
        ),
    ],
)
def test_switchover_is_refused_before_anything_changes(
    view: View, code: ExitCode, says: str
) -> None:
    with pytest.raises((OperatorNeeded, SetupError)) as caught:
        plan_switchover(view, Request())
    assert caught.value.exit_code is code
    assert says in str(caught.value)


def test_a_standby_that_replays_late_on_purpose_is_not_switched_to() -> None:
    view = pair()
    below = view.node("b").known_state
    late = {"recovery_min_apply_delay": SettingValue("3600000", "configuration file")}
    delayed = replace(view.node("b"), state=replace(below, settings={**below.settings, **late}))
    with pytest.raises(OperatorNeeded) as caught:
        plan_switchover(replace(view, nodes=(view.nodes[0], delayed)), Request())
    assert caught.value.exit_code is ExitCode.NOT_READY
    assert "recovery_min_apply_delay = 3600000 ms" in str(caught.value)


def test_a_standby_that_streams_over_another_network_is_known_by_both_ends() -> None:
    """Its primary_conninfo has an address that the settings do not know."""
    view = pair(standby={"follows": "c"})
    above, below = (each.known_state for each in view.nodes)
    fed = replace(below.provenance, fed=Feeding("standby_1", "b", 1, "10.9.0.1", "5432"))
    feeds = replace(above.provenance, feeds=(Feeding("standby_1", "b"),))
    known = (
        replace(view.nodes[0], state=replace(above, provenance=feeds)),
        replace(view.nodes[1], state=replace(below, provenance=fed)),
    )
    seen = replace(view, nodes=known)
    assert plan_switchover(seen, Request()).new_primary == "b"
    assert assess(seen, Request()).forbidden == ""
    alone = replace(view, nodes=(view.nodes[0], known[1]))
    with pytest.raises(OperatorNeeded, match="streams from elsewhere"):
        plan_switchover(alone, Request())


def test_a_switchover_leaves_no_subscription_behind_where_none_may_be() -> None:
    view = pair()
    away = replace(view, subscribers=(*view.subscribers, subscriber("far", reach=Reach.SILENT)))
    everybody = Request(target="b", require_subscribers=True)
    assert "promote" in actions(plan_switchover(view, everybody))
    assert "promote" in actions(plan_switchover(away, Request(target="b")))
    with pytest.raises(OperatorNeeded) as refused:
        plan_switchover(away, everybody)
    assert (refused.value.exit_code, refused.value.subject) == (ExitCode.NOT_READY, "far")
    begun = Intent.of("switchover", {"target": "b", "system": "7000", "require_subscribers": True})
    assert choose(away, Request(), begun)[1].require_subscribers


def test_invalid_targets_are_refused() -> None:
    with pytest.raises(SettingsError, match="x is not a node"):
        plan_switchover(pair(), Request(target="x"))
    assert actions(plan_switchover(pair(), Request(target="a"))) == []
    gone = pair()
    gone = replace(gone, nodes=(gone.nodes[0], node("b", None)))
    with pytest.raises(Retryable, match="no standby answers"):
        plan_switchover(gone, Request())


def test_a_dead_primary_is_not_switched_over() -> None:
    dead = View((node("a", None), node("b", state(slot("s1")))), ())
    with pytest.raises(Retryable, match="no node answers as a primary"):
        plan_switchover(dead, Request())
    assert "promote" in actions(plan_switchover(dead, Request(final_lsn=RECEIVED)))


def test_fencing_a_primary_that_lives_or_may_live() -> None:
    armed = MachineSettings(fence="stonith {node} {port}")
    alive = pair(hands=False)
    plan = plan_failover(alive, Request(fence=True))
    assert actions(plan)[:4] == ["fence", "mark", "disable", "promote"]
    old = replace(alive.nodes[0], machine=machine_of("a", armed, Address("db", "", "1")))
    plan = plan_failover(replace(alive, nodes=(old, alive.nodes[1])), Request(fence=True))
    assert actions(plan)[:5] == ["fence", "mark", "disable", "shoot", "promote"]
    assert plan.steps[3].command == ("stonith", "a", "1")
    hidden = replace(old, state=None, reach=Reach.CLOSED)
    closed = replace(alive, nodes=(hidden, alive.nodes[1]))
    with pytest.raises(OperatorNeeded, match="may be writing"):
        plan_failover(closed, Request())
    assert "shoot" in actions(plan_failover(closed, Request(fence=True)))
    dead = replace(alive, nodes=(replace(old, state=None, reach=Reach.REFUSED), alive.nodes[1]))
    assert actions(plan_failover(dead, Request(fence=True)))[0] == "shoot"


def test_several_standbys_the_others_follow_and_one_that_is_ahead_must_rejoin() -> None:
    third = node("c", state(slot("s1"), streams=True, received=900))
    view = replace(pair(), nodes=(*pair().nodes, third))
    plan = plan_switchover(view, Request(rejoin=frozenset("a")))
    assert plan.new_primary == "b"
    assert "follow" in actions(plan)
    named = [s for s in plan.steps if s.subject == "synchronized_standby_slots"][-1]
    assert "slotfailover_a" in named.text
    assert "standby_1" in named.text
    promoted = state(slot("s1"), standby=False, timeline=2, switch_lsn=900)
    ahead = View((node("a", None), node("b", promoted), node("c", state(received=950))), ())
    assert [left.subject for left in plan_failover(ahead, Request()).left] == ["c"]


@pytest.mark.parametrize(
    ("timeline", "received", "diverged"),
    [(1, 500, False), (1, 501, True), (2, 900, False), (2, 901, True), (3, 2000, False)],
)
def test_a_standby_is_compared_with_every_switch_of_the_primarys_history(
    timeline: int, received: int, diverged: bool
) -> None:
    """Not only with the last: one that left two timelines back can't be made to follow."""
    promoted = state(standby=False, timeline=3, received=2000, switch_lsn=900)
    history = replace(promoted.provenance, history=((1, 500), (2, 900)))
    c = state(timeline=timeline, received=received)
    view = View((node("b", replace(promoted, provenance=history)), node("c", c)), ())
    plan = plan_switchover(view, Request(target="b", promoted="b"))
    assert ("follow" in actions(plan)) is not diverged
    assert [left.subject for left in plan.left] == (["c"] if diverged else [])


def test_repoint_touches_subscriptions_alone() -> None:
    promoted = state(slot("s1"), standby=False, timeline=2, synchronized="gone")
    view = View(
        (node("a", None), node("b", promoted), node("c", state())),
        (subscriber("sub", subscription("s1")),),
    )
    plan = plan_repoint(view, Request())
    assert actions(plan) == ["disable", "repoint", "enable", "flow"]
    assert any("names standbys that are not there" in note for note in plan.notes)


def test_a_bridge_whose_slot_is_gone_is_told_of_if_it_ever_ran() -> None:
    promoted = state(slot("s1"), standby=False, timeline=2)
    ran = replace(promoted, origins={"slotbridge_own": 400})
    lost = slot("own", invalidation_reason="wal_removed")
    for said, left in (
        (promoted, []),
        (ran, ["bridge"]),
        (replace(promoted, slots=(lost,)), ["bridge"]),
    ):
        view = View((node("a", None), node("b", said)), (), "own")
        plan = plan_repoint(view, Request())
        assert [item.subject for item in plan.left] == left
        assert "bridge" not in actions(plan)
        assert not plan_repoint(view, Request(Willing(slots={"own"}))).left


def test_rejoin_refuses_strangers_the_primary_and_pairs_without_one() -> None:
    with pytest.raises(SettingsError, match="x is not a node"):
        plan_rejoin(pair(), Request(rejoin=frozenset("x")))
    with pytest.raises(OperatorNeeded, match="a is the primary"):
        plan_rejoin(pair(), Request(rejoin=frozenset("a")))
    with pytest.raises(OperatorNeeded, match="takes writes"):
        plan_rejoin(View((node("a", None), node("b", state())), ()), Request(rejoin=frozenset("a")))


def test_resume_without_anything_begun() -> None:
    nothing = View((node("a", None), node("b", state(slot("s1")))), ())
    with pytest.raises(OperatorNeeded, match="no unfinished command to resume"):
        choose(nothing, Request(), None)
    planner, _ = choose(nothing, Request(), Intent("failover", "b"))
    assert planner is plan_failover
    marked = pair(subscriptions=[subscription("s1", marked=True)])
    planner, request = choose(marked, Request(), None)
    assert actions(planner(marked, request)) == ["enable"]


def test_commands_with_mistakes_are_named() -> None:
    with pytest.raises(SettingsError, match="KeyError 'hots'"):
        machine_of("a", MachineSettings(stop="ssh {hots} stop"), Address("db", "", "1"))
    with pytest.raises(SettingsError, match="No closing quotation"):
        machine_of("a", MachineSettings(stop="ssh 'x"), Address("db", "", "1"))


@pytest.mark.parametrize(
    ("one", "other"),
    [("PG-A", "pg_a"), (*(f"prod-eu-west-1-customer-orders-postgresql-{n}" for n in "01"),)],
)
def test_two_nodes_that_would_share_a_physical_slot_are_refused(one: str, other: str) -> None:
    require_own_slots(["a", one, "b"])
    with pytest.raises(SettingsError, match=f"{one} and {other} would share the physical slot"):
        require_own_slots(["a", one, "b", other])


@pytest.mark.parametrize("fed", [False, True])
def test_a_subscription_made_on_the_present_timeline_goes_on_once_a_switchover_is_given_up(
    fed: bool,
) -> None:
    """It has no position, and its slot was not synchronized: only the note of the run tells."""
    fresh = subscription("s1", remote_lsn=None, fed=fed)
    seen = pair(timeline=2, standby={"timeline": 2}, subscriptions=[fresh])
    provenance = Provenance(history=((1, 600),))
    states = [replace(each.known_state, provenance=provenance) for each in seen.nodes]
    nodes = (replace(n, state=told) for n, told in zip(seen.nodes, states, strict=True))
    seen = replace(seen, nodes=tuple(nodes))
    (disable,) = (s for s in plan_switchover(seen, Request()).steps if s.action is Action.DISABLE)
    half = disable.effect(seen)
    assert not half.ours()[0][1].enabled
    plan = plan_repoint(half, Request())
    assert actions(plan) == (["enable"] if fed else [])
    assert [left.exit_code for left in plan.left] == ([] if fed else [ExitCode.WITNESSES_DISAGREE])
