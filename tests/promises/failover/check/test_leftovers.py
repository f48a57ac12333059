"""Slots that nobody will move again, on either node: seen with what they hold back, and dropped."""

from dataclasses import replace

import pytest

from schemas.findings import Severity
from services.failover.checks.facts import facts_of
from services.failover.checks.readiness import candidate
from services.failover.checks.registry import run_checks
from services.failover.model.view import Node, View
from services.failover.plan.rejoin import plan_rejoin
from services.failover.plan.request import Request
from services.postgres.server import SettingValue
from services.postgres.slots import Slot
from tests.promises.failover.check.examining import Examiner, reset_on, set_on
from tests.promises.failover.servers import ask, tell
from tests.promises.failover.views import node, slot, state

MAKE = "SELECT pg_create_physical_replication_slot('{}', true)"
THERE = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}'"


def test_a_physical_slot_that_no_standby_uses(sound: Examiner) -> None:
    tell(sound.trio.primary, MAKE.format("gone"))
    tell(sound.trio.primary, "SELECT pg_switch_wal()", "CREATE TABLE later ()", "DROP TABLE later")
    (finding,) = sound.expect("leftover-slot")["leftover-slot"]
    assert finding["severity"] == "warning"
    assert "bytes of WAL" in finding["evidence"]
    assert not finding["remedy"]["fix"]
    sound.carry_out(finding)


@pytest.mark.long
def test_the_slot_by_which_the_primary_once_streamed_is_dropped_by_fix(sound: Examiner) -> None:
    """As it stays on the old primary where another tool has switched over."""
    set_on(sound.trio.primary, primary_slot_name="'formerly'")
    tell(sound.trio.standby, MAKE.format("formerly"))
    (finding,) = sound.expect("leftover-slot")["leftover-slot"]
    assert finding["remedy"]["sql"] == [
        {"server": "b", "statement": "SELECT pg_drop_replication_slot('formerly')"}
    ]
    assert sound.fix().code == 0
    assert ask(sound.trio.standby, THERE.format("formerly")) == 0
    reset_on(sound.trio.primary, "primary_slot_name")


def physical(name: str, **changes: object) -> Slot:
    values = {"slot_type": "physical", "failover": False, "synced": False, "database": None}
    return slot(name, **{**values, **changes})


def using(found: Node, name: str) -> Node:
    """The node with a primary_slot_name."""
    assert found.state is not None
    value = SettingValue(name, "configuration file")
    settings = {**found.state.settings, "primary_slot_name": value}
    return replace(found, state=replace(found.state, settings=settings))


def test_slot_that_holds_back_vacuum_is_critical() -> None:
    left = physical("formerly", xmin_age=628)
    above = using(node("a", state(standby=False)), "formerly")
    view = View((above, node("b", state(left))), ())
    findings = run_checks(facts_of(view, candidate(view)))
    (found,) = [f for f in findings if f.check == "leftover-slot"]
    assert found.severity is Severity.CRITICAL
    assert "xmin is 628 transactions old" in found.evidence
    assert found.remedy.fixes


def test_a_slot_that_may_be_that_of_a_silent_node_is_not_judged() -> None:
    view = View(
        (
            node("a", state(physical("standby_c"), standby=False)),
            node("b", state()),
            node("c", None),
        ),
        (),
    )
    findings = run_checks(facts_of(view, candidate(view)))
    (found,) = [f for f in findings if f.check == "leftover-slot"]
    assert found.severity is Severity.NOT_JUDGED
    assert "c" in found.what


def test_a_cascade_is_left_alone_and_keeps_its_slot() -> None:
    """c streams from b, as the settings say; b and a have changed their roles."""
    above = state(physical("standby_1", active_pid=5), standby=False, synchronized="standby_1")
    middle = using(
        node("b", state(physical("cascade"), physical("slotfailover_a"), streams=True)), "standby_1"
    )
    below = using(node("c", state(follows="b", streams=False)), "cascade")
    for cascade in (replace(below, follows="b"), below):
        view = View((node("a", above), middle, cascade), ())
        plan = plan_rejoin(view, Request(rejoin=frozenset({"b"})))
        lines = [f"{step.action} {step.server} {step.subject}" for step in plan.steps]
        cleaned = "clean b slotfailover_a" if cascade.follows else "clean b cascade,slotfailover_a"
        assert cleaned in lines
        assert ("follow c cascade" in lines) is (not cascade.follows)
        listing = [step.sql[0] for step in plan.steps if step.action == "reset"]
        assert any("cascade" in sql for sql in listing) is (not cascade.follows)


def test_consumers_do_not_wait_for_a_standby_that_is_not_to_be_waited_for() -> None:
    above = state(physical("standby_1", active_pid=5), physical("far", active_pid=6), standby=False)
    near = using(node("b", state(streams=True)), "standby_1")
    far = replace(using(node("c", state(streams=True)), "far"), synchronized=False)
    plan = plan_rejoin(View((node("a", above), near, far), ()), Request(rejoin=frozenset({"b"})))
    (listing,) = [step.sql[0] for step in plan.steps if step.action == "reset"]
    assert "'standby_1'" in listing
    assert "far" not in listing
