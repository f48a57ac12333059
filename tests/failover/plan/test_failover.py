"""Plans, walked in thought: each prefix leads to the goal, and no step is ever dangerous."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.acceptance import Kind
from schemas.errors import ExitCode, OperatorNeeded, Retryable, SetupError, SlotbridgeError
from services.failover.checks.blockers import fault_of
from services.failover.checks.readiness import candidate, judge_all
from services.failover.model.destination import Destination
from services.failover.model.kafka_progress import KafkaProgress
from services.failover.model.standby_settings import why_fixed
from services.failover.model.timelines import Feeding, Milestone, Provenance
from services.failover.model.view import FENCE, NodeState, Reach, View
from services.failover.plan.failover import plan_failover
from services.failover.plan.rejoin import plan_repoint
from services.failover.plan.request import Plan, Request
from services.failover.plan.steps.step import Action, with_state
from services.failover.plan.switchover import plan_switchover
from services.postgres.server import SettingValue
from tests.failover.plan.test_switchover import pair
from tests.promises.failover.views import (
    RECEIVED,
    SLOT_NAMES,
    dead_primary,
    node,
    slot,
    state,
    subscriber,
    subscription,
    views,
)
from tests.providers.tokens import Willing

requests = st.builds(
    Request,
    st.sets(st.sampled_from((*SLOT_NAMES, "gone"))).map(lambda slots: Willing(slots=slots)),
    require_subscribers=st.booleans(),
)


def planned(view: View, request: Request) -> Plan | None:
    """The plan, or None if the failover is refused; a bug is no refusal."""
    with contextlib.suppress(OperatorNeeded, Retryable, SetupError):
        return plan_failover(view, request)
    return None


def refusal(view: View, request: Request | None = None) -> SlotbridgeError:
    with pytest.raises(SlotbridgeError) as caught:
        plan_failover(view, request or Request())
    return caught.value


def actions(plan: Plan) -> list[str]:
    return [step.action.value for step in plan.steps]


@given(views(), requests)
def test_plans_resumed_from_every_interrupted_prefix_reach_the_goal(
    view: View, request: Request
) -> None:
    whole = planned(view, request)
    if whole is None:
        return
    for step in (None, *whole.steps):
        view = view if step is None else step.effect(view)
        here = view
        for _ in range(50):
            plan = plan_failover(here, request)
            if not plan.steps:
                break
            here = plan.steps[0].effect(here)
            assert plan.steps[0].holds(here)
        assert not plan.steps
        assert plan.new_primary == whole.new_primary
        assert here.primary is not None
        assert plan.left == whole.left
        for where, found in here.ours():
            assert not where.usable or found.conninfo.leads_to(here.primary.endpoints)


@given(views(), requests)
def test_no_plan_promotes_what_would_lose_a_slot_or_split_the_pair(
    view: View, request: Request
) -> None:
    plan = planned(view, request)
    if plan is None or Action.PROMOTE not in [step.action for step in plan.steps]:
        return
    chosen = view.node(plan.new_primary)
    assert not view.writable
    assert all(n.reach is not Reach.CLOSED for n in view.nodes)
    lost = {verdict.slot for verdict in judge_all(view, chosen) if not verdict.ready}
    assert isinstance(request.accept, Willing)
    assert lost <= request.accept.slots
    assert chosen.received == max(n.received for n in view.standbys)


@given(views(), requests)
def test_subscriptions_are_disabled_before_the_promotion(view: View, request: Request) -> None:
    plan = planned(view, request)
    if plan is None or Action.PROMOTE not in [step.action for step in plan.steps]:
        return
    for step in plan.steps:
        if step.action is Action.PROMOTE:
            break
        view = step.effect(view)
    new = view.node(plan.new_primary)
    for where, found in view.ours():
        fed_by_old = found.enabled and not found.conninfo.leads_to(new.endpoints)
        assert not (where.usable and fed_by_old)


@given(views(), requests)
def test_an_old_primary_that_comes_back_before_the_promotion_stops_it(
    view: View, request: Request
) -> None:
    plan = planned(view, request)
    if plan is None:
        return
    for step in plan.steps:
        if step.action is Action.PROMOTE:
            back = node("a", state(slot("s1", synced=False), standby=False))
            revived = replace(view, nodes=(back, *view.nodes[1:]))
            assert refusal(revived, request).exit_code is ExitCode.SPLIT_BRAIN
        view = step.effect(view)


def test_the_steps_are_in_order_and_show_no_password() -> None:
    secret = subscription("s1")
    secret = replace(
        secret,
        conninfo=replace(
            secret.conninfo, pairs=(*secret.conninfo.pairs, ("password", "hush ' \\ hush"))
        ),
    )
    plan = plan_failover(
        dead_primary(
            subscriber("sub", secret),
            slots=(slot("s1"),),
            synchronized="standby_1",
            synchronous="x",
        ),
        Request(),
    )
    expected = [
        *("reset", "reset", "disable", "cut", "promote"),
        *("repoint", "enable", "flow", "reconnect"),
    ]
    assert actions(plan) == expected
    assert "hush" not in repr(plan)
    assert "hush" in plan.steps[5].sql[0]
    assert plan.why == "b is the only standby that answers"


def test_a_living_primary_is_never_replaced() -> None:
    view = View((node("a", state(slot("s1", synced=False), standby=False)), node("b", state())), ())
    assert refusal(view).exit_code is ExitCode.SPLIT_BRAIN
    alone = View((view.nodes[0], node("b", None)), ())
    assert refusal(alone).exit_code is ExitCode.SPLIT_BRAIN


def test_two_writable_nodes_are_a_split_brain() -> None:
    both = tuple(node(name, state(slot("s1"), standby=False, timeline=2)) for name in "ab")
    assert refusal(View(both, ())).exit_code is ExitCode.SPLIT_BRAIN


def test_a_promoted_primary_that_feeds_every_other_node_has_nothing_to_take_over() -> None:
    new = node("b", state(slot("s1"), standby=False, timeline=2))
    view = View(
        (node("a", state(slot("s1"), follows="b")), new),
        (subscriber("sub", subscription("s1", at="b")),),
    )
    assert refusal(view).exit_code is ExitCode.SPLIT_BRAIN
    assert new.state is not None
    sends = replace(new.state.provenance, feeds=(Feeding("slotfailover_a", "slotfailover_a"),))
    telling = replace(new, state=replace(new.state, provenance=sends))
    unseen = replace(view, nodes=(node("a", None, Reach.SILENT), telling))
    assert refusal(unseen).exit_code is ExitCode.SPLIT_BRAIN
    gone = replace(view, nodes=(node("a", None), new))
    assert actions(plan_failover(gone, Request())) == ["flow"]


def test_a_promotion_made_by_a_person_is_completed() -> None:
    view = dead_primary(
        subscriber("sub", subscription("s1")), slots=(slot("s1"),), standby=False, timeline=2
    )
    assert actions(plan_failover(view, Request())) == ["disable", "repoint", "enable", "flow"]


def test_a_subscription_that_a_person_disabled_stays_so_but_follows() -> None:
    view = dead_primary(subscriber("sub", subscription("s1", enabled=False)), slots=(slot("s1"),))
    plan = plan_failover(view, Request())
    assert actions(plan) == ["cut", "promote", "repoint", "reconnect"]
    assert any("stays so" in note for note in plan.notes)


def test_the_standby_with_the_most_wal_is_chosen_even_if_its_slots_refuse_it() -> None:
    view = View(
        (
            node("a", None),
            node("b", state(slot("s1", temporary=True), received=2000)),
            node("c", state(slot("s1"), received=1999)),
        ),
        (),
    )
    assert refusal(view).exit_code is ExitCode.NOT_READY
    assert plan_failover(view, Request(Willing(slots={"s1"}))).new_primary == "b"
    same = replace(view, nodes=(*view.nodes[:2], node("c", state(slot("s1"), received=2000))))
    assert plan_failover(same, Request()).new_primary == "c"


def paused(said: NodeState) -> NodeState:
    return replace(said, replication=replace(said.replication, replay_pause="paused"))


def test_among_equals_a_standby_that_replays_is_promoted_instead_of_a_paused_one() -> None:
    b, c = node("b", paused(state(slot("s1")))), node("c", state(slot("s1")))
    plan = plan_failover(View((node("a", None), b, c), ()), Request())
    assert plan.new_primary == "c"
    assert "b is not chosen: its replay is paused" in plan.notes
    named = plan_failover(View((node("a", None), b, c), ()), Request(target="c"))
    assert not any("not chosen" in note for note in named.notes)


@pytest.mark.parametrize(("streams", "chosen"), [(True, "c"), (False, "b")])
def test_beside_a_primary_only_a_standby_that_streams_gets_the_rest(
    streams: bool, chosen: str
) -> None:
    whole = node("b", paused(state(slot("s1"), received=RECEIVED + 8, streams=True)))
    behind = node("c", state(slot("s1"), streams=streams))
    found = candidate(View((node("a", state(standby=False)), whole, behind), ()))
    assert found is not None and found.name == chosen


def test_a_paused_standby_with_more_wal_is_resumed_and_not_passed_over() -> None:
    ahead = node("b", paused(state(slot("s1"), received=RECEIVED + 8)))
    refused = refusal(View((node("a", None), ahead, node("c", state(slot("s1")))), ()))
    assert refused.exit_code is ExitCode.NOT_READY
    assert "replay is paused on b" in refused.message
    assert "pg_wal_replay_resume() on b" in refused.hint
    assert "(slotfailover failover --to); other standbys now: c" in refused.hint


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"temporary": True}, ExitCode.NOT_READY),
        ({"synced": False}, ExitCode.NOT_READY),
        ({"invalidation_reason": "wal_removed"}, ExitCode.NOT_READY),
    ],
)
def test_a_slot_that_would_be_lost_refuses(changes: dict[str, object], code: ExitCode) -> None:
    view = dead_primary(subscriber("sub", subscription("s1")), slots=(slot("s1", **changes),))
    error = refusal(view)
    assert error.exit_code is code
    assert "--accept lost-slot:s1:b@" in error.hint


def test_a_consumer_ahead_of_the_standby_refuses_and_once_accepted_is_not_fed() -> None:
    ahead = subscription("s1", remote_lsn=1001)
    view = dead_primary(subscriber("sub", ahead), slots=(slot("s1"),))
    assert refusal(view).exit_code is ExitCode.NOT_READY
    plan = plan_failover(view, Request(Willing(slots={"s1"})))
    assert actions(plan) == ["disable", "cut", "promote", "repoint", "reconnect"]
    assert any(note.startswith("loss accepted") for note in plan.notes)


def test_a_slot_made_after_the_failover_is_a_gap_that_can_be_accepted() -> None:
    view = dead_primary(
        subscriber("sub", subscription("s1", marked=True)),
        slots=(slot("s1", synced=False), slot("kept")),
        standby=False,
        timeline=2,
    )
    new = replace(view.nodes[1].known_state, provenance=Provenance(history=((1, RECEIVED),)))
    view = replace(view, nodes=(view.nodes[0], replace(view.nodes[1], state=new)))
    plan = plan_failover(view, Request())
    assert actions(plan) == ["repoint"]
    assert [left.exit_code for left in plan.left] == [ExitCode.WITNESSES_DISAGREE]
    accepted = plan_failover(view, Request(Willing(slots={"s1"})))
    assert actions(accepted) == ["repoint", "enable", "flow"]


@pytest.mark.parametrize(
    ("met", "goes_on"),
    [
        (None, False),
        (Milestone("7000", 0, None, "db:5001"), False),
        (Milestone("7000", 1, None, "db:5001"), False),
        (Milestone("7001", 2, RECEIVED, "db:5002"), False),
        (Milestone("7000", 2, RECEIVED, "db:5002"), True),
    ],
)
def test_without_a_position_only_a_slot_of_a_timeline_that_fed_the_subscription_feeds_it(
    met: Milestone | None, goes_on: bool
) -> None:
    """Nothing else tells whether it lacks what was committed before the slot was made by hand."""
    found = subscription("s1", marked=True, remote_lsn=None)
    note = met.note if met is not None else ""
    found = replace(found, comment=f"mine {note} {Destination('7000', 'b', None, 1).mark}")

    def plan_of(timeline: int, *, synced: bool = False, accepted: str = "") -> Plan:
        seen = dead_primary(
            subscriber("sub", found),
            slots=(slot("s1", synced=synced), slot("kept")),
            standby=False,
            timeline=timeline,
        )
        a, b = seen.nodes
        history = ((1, RECEIVED),) if timeline > 1 else ()
        new = replace(b.known_state, provenance=Provenance(history=history))
        seen = replace(seen, nodes=(a, replace(b, state=new)))
        request = Request(Willing(Kind.NOT_PROMOTED, slots={accepted}))
        return plan_repoint(seen, request)

    assert actions(plan_of(2, synced=True)) == ["repoint", "enable", "flow"]
    plan = plan_of(2)
    if goes_on:
        assert (actions(plan), plan.left) == (["repoint", "enable", "flow"], ())
        return
    assert actions(plan) == ["repoint"]
    (left,) = plan.left
    assert left.exit_code is ExitCode.WITNESSES_DISAGREE
    assert "it has no position" in left.reason and "the slot s1 on b" in left.reason
    assert "--accept lost-slot:s1:b@" in left.hint and "load its tables anew" in left.hint
    assert actions(plan_of(2, accepted="s1")) == ["repoint", "enable", "flow"]
    if met is None or met.timeline < 2:
        assert actions(plan_of(1)) == ["repoint", "enable", "flow"]


def test_without_a_position_an_unreadable_history_proves_nothing() -> None:
    note = Milestone("7000", 2, RECEIVED, "db:5002").note
    found = subscription("s1", remote_lsn=None, enabled=False)
    found = replace(found, comment=f"{note} {Destination('7000', 'b', None, 1).mark}")
    told = state(slot("s1", synced=False), standby=False, timeline=2)
    unread = replace(told, provenance=Provenance(history=None))
    where = subscriber("sub", found)
    fault = fault_of(where, found, node("b", unread), positions=True)
    assert fault is not None and fault.exit_code is ExitCode.PRIVILEGE_MISSING
    read = replace(told, provenance=Provenance(history=((1, RECEIVED),)))
    assert fault_of(where, found, node("b", read), positions=True) is None


def test_a_synchronized_slot_past_the_last_applied_transaction_is_no_gap() -> None:
    """A subscriber confirms WAL in which nothing was for it; measured on real servers too."""
    view = dead_primary(
        subscriber("sub", subscription("s1", remote_lsn=450)),
        slots=(slot("s1", confirmed_flush_lsn=500),),
    )
    assert "enable" in actions(plan_failover(view, Request()))


def test_an_unreachable_subscriber_is_left_for_another_run() -> None:
    view = dead_primary(
        subscriber("near", subscription("s1")),
        subscriber("far", reach=Reach.SILENT),
        slots=(slot("s1"),),
    )
    plan = plan_failover(view, Request())
    assert [left.subject for left in plan.left] == ["far"]
    assert "promote" in actions(plan)


def test_subscriptions_that_would_be_left_behind_refuse_where_none_may_be() -> None:
    """One that gives no answer, one that nobody knows, one that is given no address."""
    everybody = Request(require_subscribers=True)
    far = subscriber("far", reach=Reach.SILENT)
    unknown = subscriber("near", subscription("s1", at="6432"))
    behind = {
        "far": dead_primary(subscriber("near", subscription("s1")), far, slots=(slot("s1"),)),
        "near/s1": dead_primary(unknown, slots=(slot("s1"),)),
    }
    a, b = dead_primary(slots=(slot("s1"),)).nodes
    private = View((a, replace(b, private=True)), (subscriber("near", subscription("s1")),))
    for subject, view in {**behind, "near/s1 ": private}.items():
        assert "promote" in actions(plan_failover(view, Request()))
        refused = refusal(view, everybody)
        assert (refused.exit_code, refused.subject) == (ExitCode.NOT_READY, subject.strip())
        assert "promote without --require-subscribers" in refused.hint
    whole = dead_primary(subscriber("near", subscription("s1")), slots=(slot("s1"),))
    steps = plan_failover(whole, everybody).steps
    assert "promote" in [step.action for step in steps]
    promoted = replace(
        behind["far"], nodes=(a, node("b", state(slot("s1"), standby=False, timeline=2)))
    )
    assert [left.subject for left in plan_failover(promoted, everybody).left] == ["far"]


def test_events_that_kafka_has_and_the_standby_lacks_refuse() -> None:
    """The bridge's slot looks ready: only its progress record tells."""
    view = replace(dead_primary(slots=(slot("s1"),)), bridge_slot="s1")
    assert "promote" in actions(plan_failover(view, Request()))
    ahead = replace(view, published=KafkaProgress(RECEIVED + 1, RECEIVED + 1, "7000", 1))
    refused = refusal(ahead)
    assert refused.exit_code is ExitCode.NOT_READY
    assert "its consumer is ahead of b by 1 bytes" in refused.message


def test_missing_privileges_are_found_before_anything_is_changed() -> None:
    view = dead_primary(may_promote=False)
    assert refusal(view).exit_code is ExitCode.PRIVILEGE_MISSING
    view = dead_primary(may_configure=False, synchronous="x")
    assert refusal(view).exit_code is ExitCode.PRIVILEGE_MISSING


def test_nodes_of_different_clusters_and_nodes_that_hide_are_refused() -> None:
    strangers = View((node("a", state(system="1")), node("b", state(system="2"))), ())
    assert refusal(strangers).exit_code is ExitCode.WRONG_DATABASE
    hidden = View((node("a", None, Reach.CLOSED), node("b", state())), ())
    assert refusal(hidden).exit_code is ExitCode.SPLIT_BRAIN
    assert isinstance(refusal(View((node("a", None), node("b", None)), ())), Retryable)


def test_a_setting_from_the_command_line_is_left_to_the_operator() -> None:
    plan = plan_failover(dead_primary(synchronous="x", source="command line"), Request())
    assert actions(plan) == ["cut", "promote", "reconnect"]
    assert "command line" in plan.left[0].reason


@pytest.mark.parametrize("setting", [FENCE, "primary_conninfo"])
def test_what_the_command_line_fixes_is_refused_before_anything_is_done(setting: str) -> None:
    """A fence, or a standby's upstream, that ALTER SYSTEM does not change."""
    fixed = {setting: SettingValue("", "command line")}

    def at(view: View, name: str) -> View:
        return with_state(view, name, lambda s: replace(s, settings={**s.settings, **fixed}))

    dead = dead_primary(slots=(slot("s1"),))
    for plan, view in ((plan_switchover, at(pair(), "a")), (plan_failover, at(dead, "b"))):
        with pytest.raises(SetupError, match=f"command line sets {setting}") as caught:
            plan(view, Request())
        assert caught.value.exit_code is ExitCode.SERVER_SETTING
    assert why_fixed(at(dead, "b").nodes[1].known_state)
    assert not why_fixed(dead.nodes[1].known_state)


def test_a_subscription_of_another_cluster_is_left_alone() -> None:
    foreign = subscription("s1", at="proxy", foreign_system="9")
    ours = subscription("s2", at="proxy", identified=True)
    unknown = subscription("s3", at="proxy")
    slots = (slot("s1"), slot("s2"), slot("s3"))
    view = dead_primary(subscriber("sub", foreign, ours, unknown), slots=slots)
    plan = plan_failover(view, Request())
    assert {step.subject for step in plan.steps} == {"", "s2"}
    assert [found.name for _, found in view.strangers()] == ["s1"]
    assert [found.name for _, found in view.unidentified()] == ["s3"]
    assert [(left.subject, "the publisher is unknown" in left.reason) for left in plan.left] == [
        ("sub/s3", True)
    ]
