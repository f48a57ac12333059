"""synchronized_standby_slots and synchronous_standby_names: each wrong name caused and repaired."""

from dataclasses import replace

import pytest

from services.failover.checks.facts import facts_of
from services.failover.checks.readiness import candidate
from services.failover.checks.registry import run_checks
from services.failover.model.view import View
from tests.promises.failover.check.examining import Examiner, Finding, make_slot, reset_on, set_on
from tests.promises.failover.servers import ask, tell, write
from tests.promises.failover.views import node, state
from tests.providers.waiting import eventually


def test_list_names_a_missing_slot(sound: Examiner) -> None:
    """Breaker 14: decoding stands still until the name is gone."""
    trio = sound.trio
    set_on(trio.primary, synchronized_standby_slots="standby_1, nowhere")
    found = sound.expect("listed-slot-missing")
    assert "stands still" in found["listed-slot-missing"][0]["consequence"]
    tell(trio.primary, "INSERT INTO t VALUES (1401, 'x')", dbname=trio.dbname)
    copied = "SELECT count(*) FROM t WHERE id = 1401"
    assert ask(trio.subscriber, copied, trio.dbname) == 0
    assert sound.fix().code == 0
    eventually(
        lambda: ask(trio.subscriber, copied, trio.dbname) == 1,
        what="decoding goes on",
    )


def test_list_names_a_logical_slot(sound: Examiner) -> None:
    """Breaker 15."""
    set_on(sound.trio.primary, synchronized_standby_slots="standby_1, s1")
    found = sound.expect("listed-slot-logical")
    assert "slot_type = logical" in found["listed-slot-logical"][0]["evidence"]
    assert sound.fix().code == 0


def test_list_names_an_inactive_slot_that_never_reserved_wal(sound: Examiner) -> None:
    """Breakers 17 and 18."""
    primary = sound.trio.primary
    tell(primary, "SELECT pg_create_physical_replication_slot('away')")
    set_on(primary, synchronized_standby_slots="standby_1, away")
    found = sound.expect("listed-slot-inactive", "slot-reserves-wal")
    (finding,) = found["listed-slot-inactive"]
    assert finding["since"]
    sound.carry_out(found["slot-reserves-wal"][0])
    sound.expect("listed-slot-inactive")
    sound.carry_out(finding)
    sound.carry_out(sound.expect("leftover-slot")["leftover-slot"][0])


def test_empty_list_of_standby_slots_is_a_warning(sound: Examiner) -> None:
    """Breaker 13, before it happens."""
    set_on(sound.trio.primary, synchronized_standby_slots="")
    found = sound.expect("standby-slot-listed")
    assert found["standby-slot-listed"][0]["severity"] == "warning"
    assert sound.fix().code == 0


def test_commits_wait_for_a_standby_that_is_not_there(sound: Examiner) -> None:
    set_on(sound.trio.primary, synchronous_standby_names="nobody")
    found = sound.expect("commits-wait")
    sound.carry_out(found["commits-wait"][0])


@pytest.mark.since_18  # idle_replication_slot_timeout
def test_a_slot_in_the_list_is_invalidated(sound: Examiner) -> None:
    """Breaker 16: a standby was away for longer than slots may be idle."""
    primary = sound.trio.primary
    tell(primary, "SELECT pg_create_physical_replication_slot('away', true)")
    set_on(primary, idle_replication_slot_timeout="'1s'")
    reason = "SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = 'away'"

    def lost() -> bool:
        tell(primary, "CHECKPOINT")
        return bool(ask(primary, reason) == "idle_timeout")

    eventually(lost, what="the slot is invalidated", interval_s=0.2)
    reset_on(primary, "idle_replication_slot_timeout")
    set_on(primary, synchronized_standby_slots="standby_1, away")
    found = sound.expect("listed-slot-invalidated")
    assert "idle_timeout" in found["listed-slot-invalidated"][0]["evidence"]
    assert sound.fix().code == 0
    tell(primary, "SELECT pg_drop_replication_slot('away')")


@pytest.mark.long
def test_unknown_slot_of_the_standby_is_named_once_made(sound: Examiner) -> None:
    """What the remedy writes keeps the names that are right."""
    trio = sound.trio
    make_slot(trio.primary, trio.dbname, "extra", failover=False)
    set_on(trio.primary, synchronized_standby_slots="nowhere, extra")
    sound.expect(
        "listed-slot-missing",
        "listed-slot-logical",
        "standby-slot-listed",
        "slot-without-failover",
    )
    sound.fix()
    assert ask(trio.primary, "SHOW synchronized_standby_slots") == "standby_1"
    tell(trio.primary, "SELECT pg_drop_replication_slot('extra')")


def test_consumers_that_wait_are_named_with_the_slot(sound: Examiner) -> None:
    primary = sound.trio.primary
    tell(primary, "SELECT pg_create_physical_replication_slot('away', true)")
    set_on(primary, synchronized_standby_slots="standby_1, away")
    write(primary, sound.trio.dbname, 3001)

    def waits() -> list[Finding]:
        found = sound.problems().get("listed-slot-inactive", [])
        return [finding for finding in found if "waits for it now" in finding["evidence"]]

    (finding,) = eventually(waits, what="the walsender is seen to wait")
    sound.carry_out(finding)
    sound.carry_out(sound.expect("leftover-slot")["leftover-slot"][0])


def test_synchronous_replication_that_was_on_before_is_missed() -> None:
    streaming = node("a", state(standby=False))
    assert streaming.state is not None
    replication = replace(streaming.state.replication, followers=("c", "b"))
    above = replace(streaming, state=replace(streaming.state, replication=replication))
    view = View((above, node("b", state())), (), synchronous_before="FIRST 1 (a)")
    (found,) = [
        finding
        for finding in run_checks(facts_of(view, candidate(view)))
        if finding.check == "synchronous-before"
    ]
    assert found.wrong
    assert 'ANY 1 ("b", "c")' in found.remedy.full
