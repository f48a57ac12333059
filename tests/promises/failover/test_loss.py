"""Commits that a promotion would lose are counted, named and refused: views, then real servers."""

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from schemas.acceptance import Kind
from schemas.errors import ExitCode, OperatorNeeded
from schemas.settings import FailoverSettings
from services.failover.checks.loss import lacking, last_contact, losses
from services.failover.checks.readiness import candidate, judge_all
from services.failover.execute.history import read_history, unfinished
from services.failover.execute.journal import BEGIN, SEEN, Entry, Journal, remembered_at
from services.failover.execute.timeline_memory import recall
from services.failover.model.conninfo import Conninfo
from services.failover.model.loss_limit import LossLimit, Sighting
from services.failover.model.timelines import Milestone
from services.failover.model.view import Node, View
from services.failover.observe.last_contact import Sightings
from services.failover.plan.failover import plan_failover
from services.failover.plan.request import Request
from services.failover.plan.resume import Intent
from services.testbed.postgres import PostgresServer
from tests.conftest import NewPair
from tests.promises.failover.servers import (
    accepting,
    ask,
    configuration,
    losing,
    slotfailover,
    subscribe,
    tell,
    write,
)
from tests.promises.failover.views import PORTS, node, slot, state
from tests.providers.tokens import Willing, token_of
from tests.providers.waiting import eventually

OFF = Kind.IS_OFF


def standby(name: str, received: int, timeline: int = 1, application: str = "") -> Node:
    said = state(received=received, timeline=timeline)
    pairs = (("host", "db"), ("port", PORTS["a"]), ("application_name", application or name))
    return node(name, replace(said, upstream=Conninfo(pairs)))


def view(
    *nodes: Node,
    lsn: int = 0,
    synchronous: str = "",
    timeline: int = 1,
    slots: frozenset[str] | None = None,
) -> View:
    seen = Sighting("a", timeline, lsn, 4.0, synchronous, "", slots) if lsn else None
    return View((node("a", None), *nodes), (), sighting=seen, loss_limit=LossLimit(100))


def refusal(seen: View, target: str = "", lacking: int | None = None) -> OperatorNeeded:
    with pytest.raises(OperatorNeeded) as refused:
        plan_failover(seen, Request(Willing(OFF, lacking=lacking), target=target))
    assert refused.value.exit_code is ExitCode.NOT_READY
    return refused.value


def planned(seen: View, target: str = "", **accepted: Any) -> str:
    request = Request(Willing(OFF, **accepted), target=target)
    return "; ".join(plan_failover(seen, request).notes)


def test_an_older_timeline_with_more_wal_is_not_promoted() -> None:
    seen = view(standby("b", 1000, timeline=2), standby("c", 1100, timeline=1))
    chosen = candidate(seen)
    assert chosen is not None
    assert chosen.name == "b"
    refused = refusal(seen, "c")
    assert "c is on timeline 1, b on 2" in refused.message


def test_two_timelines_of_one_number_are_not_taken_for_one() -> None:
    refused = refusal(view(branch("b", 500, 1000), branch("c", 600, 900)))
    assert "different timelines 2" in refused.message


def test_a_standby_that_was_promoted_beside_a_living_primary_is_not_the_newest() -> None:
    """Also where nobody but the sighting can tell, until the promotion was met by a consumer."""
    apart = branch("c", 600, 1200)
    chosen = candidate(view(standby("b", 1000), apart, lsn=1000))
    assert chosen is not None
    assert chosen.name == "b"
    refused = refusal(view(standby("b", 1000), apart, lsn=1000))
    assert "b lacks the commits of timeline 2" in refused.message
    assert "--accept lost-wal:b@7000:0/3E8+600" in refused.hint
    for alone in (view(apart, lsn=1000), view(standby("b", 1000), apart)):
        refused = refusal(alone)
        assert "c left timeline 1 at 0/258" in refused.message
        assert token_of(refused.hint).endswith("+400")
        met = replace(alone, milestones=(("the journal", Milestone("7000", 2, 600)),))
        planned(met)
    planned(view(apart, lsn=600))
    living = View((node("a", state(standby=False)), standby("b", 1000), apart), ())
    chosen = candidate(living)
    assert chosen is not None
    assert chosen.name == "b"


def branch(name: str, left: int, received: int) -> Node:
    """A standby on timeline 2, which left timeline 1 there."""
    found = standby(name, received, timeline=2)
    assert found.state is not None
    provenance = replace(found.state.provenance, history=((1, left),))
    return replace(found, state=replace(found.state, provenance=provenance))


def test_a_target_behind_another_standby_is_refused_by_the_bytes() -> None:
    seen = view(standby("b", 1000), standby("c", 1064))
    refused = refusal(seen, "b")
    assert "b lacks 64 bytes of WAL that c has" in refused.message
    assert "--accept lost-wal:b@7000:0/3E8+64" in refused.hint
    refusal(seen, "b", 63)
    assert "loss accepted" in planned(seen, target="b", lacking=64)


def test_the_last_known_position_limits_what_may_be_lost() -> None:
    assert "commits that may be lost: 100 bytes" in planned(view(standby("b", 1000), lsn=1100))
    refused = refusal(view(standby("b", 1000), lsn=1101))
    assert "b lacks 101 bytes of WAL that the primary had" in refused.message
    assert "loss accepted" in planned(view(standby("b", 1000), lsn=1101), lacking=101)
    notes = planned(view(standby("b", 1000), lsn=1000))
    assert "commits that may be lost: 0 bytes" in notes
    assert "last contact with a 4 s ago" in notes
    assert "not judged" in planned(view(standby("b", 1000)))


def test_a_slot_that_only_the_last_primary_had_is_not_lost_in_silence() -> None:
    b = standby("b", 1000)
    had = frozenset({"reports", "pg_16384_sync_16390_7", "kept"})
    assert b.state is not None
    kept = (slot("kept"),)
    own = slot("reports", synced=False)
    for copies in ((*kept, slot("reports", temporary=True)), kept, (*kept, own)):
        each = replace(b, state=replace(b.state, slots=copies))
        refused = refusal(view(each, lsn=1000, slots=had))
        assert "1 of 2 slots would be lost: reports: " in refused.message
        assert "--accept lost-slot:reports:b@7000" in refused.hint
        notes = planned(view(each, lsn=1000, slots=had), slots={"reports"})
        assert "not judged: failover slots that were made on a after the last contact" in notes
        (finding,) = judge_all(view(each, lsn=1000, slots=had), each)[1].reasons
        assert finding.wrong
    for unknown in (view(b, lsn=1000), view(b), view(branch("b", 900, 1000), lsn=900, slots=had)):
        assert "not judged: failover slots that the primary had" in planned(unknown)


def test_the_failover_slots_of_the_last_primary_are_remembered(tmp_path: Path) -> None:
    """By the file, and by the journal, whose entries of a beginning run do not tell them."""
    nodes = {name: SecretStr("") for name in "ab"}
    settings = FailoverSettings(nodes=nodes, journal=tmp_path / "journal")
    made = slot("made", synced=False, confirmed_flush_lsn=None)
    primary = state(slot("s1", synced=False), slot("own", failover=False), made, standby=False)
    living = View((node("a", primary), standby("b", 1000)), ())
    dead = View((node("a", None), standby("b", 1000)), ())
    memory = Sightings(settings)
    memory.complete(living)
    without = View((node("a", replace(primary, slots=())), standby("b", 1000)), ())
    for said, slots in ((living, frozenset({"s1"})), (without, frozenset[str]())):
        memory.complete(said)
        assert Sightings(settings).complete(dead).slots_last_seen == slots
    seen = tmp_path / "journal.seen"
    note = json.loads(seen.read_text())
    del note["failover_slots"]
    seen.write_text(json.dumps(note))
    assert Sightings(settings).complete(dead).slots_last_seen is None

    told = remembered_at(living)
    begun = {**told, "lsn": "0/4E8"}
    del begun["failover_slots"]
    at = datetime.now(UTC).isoformat()
    entries = [Entry("r", 1, at, "", "watch", SEEN, intent=told),
               Entry("s", 1, at, "", "failover", BEGIN, intent=begun)]  # fmt: skip
    memory = Sightings(settings)
    recall(SimpleNamespace(sightings=memory), entries, None)  # type: ignore[arg-type]
    assert memory.complete(dead).slots_last_seen == frozenset({"s1"})


def test_a_primary_seen_on_a_newer_timeline_is_not_passed_over() -> None:
    refused = refusal(view(standby("b", 1000, timeline=1), lsn=900, timeline=2))
    assert "a was the primary on timeline 2" in refused.message


@pytest.mark.parametrize(
    ("synchronous", "refused"),
    [
        ("ANY 1 (b, c)", True),
        ("FIRST 2 (b, c)", False),
        ("b", False),
        ("ANY 2 (b, c, d)", True),
        ("ANY 1 (*)", True),
        ("", False),
    ],
)
def test_too_few_synchronous_standbys_answer(synchronous: str, refused: bool) -> None:
    seen = view(standby("b", 1000), node("c", None), lsn=1000, synchronous=synchronous)
    if not refused:
        planned(seen)
        return
    assert "the silent ones may have commits" in refusal(seen).message
    assert "loss accepted" in planned(seen, lacking=0)


def test_a_standby_that_still_replays_its_own_wal_does_not_count_for_the_quorum() -> None:
    """It has more than it tells; the candidate has at least what it tells."""
    b, c = standby("b", 1000), standby("c", 900)
    assert c.state is not None
    reading = replace(c, state=replace(c.state, replication=replace(
        c.state.replication, received_all=False)))  # fmt: skip
    planned(view(b, c, lsn=1000, synchronous="ANY 1 (b, c)"))
    refused = refusal(view(b, reading, lsn=1000, synchronous="ANY 1 (b, c)"))
    assert "of them report their position" in refused.message
    assert "not judged: how much WAL c has" in planned(view(b, reading, lsn=1000))
    older = view(standby("b", 1000, timeline=2), node("c", None), lsn=900, synchronous="c")
    assert "not judged: which standbys commits waited for on timeline 2" in planned(older)


def test_the_journal_tells_for_whom_commits_waited_where_no_file_does(tmp_path: Path) -> None:
    """Of two memories the later position counts, whatever the clocks of their machines say."""
    nodes = {name: SecretStr("") for name in "abc"}
    a = node("a", state(standby=False, synchronous="ANY 1 (b, c)"))
    living = View((a, standby("b", 1000), standby("c", 1000)), ())
    dead = View((node("a", None), standby("b", 1000), node("c", None)), ())

    def told(said: View, at: str = "2026-01-01T00:00:00+00:00") -> Sightings:
        entry = Entry("r", 1, at, "", "watch", SEEN, intent=remembered_at(said))
        memory = Sightings(FailoverSettings(nodes=nodes))
        cluster: Any = SimpleNamespace(sightings=memory)
        recall(cluster, [entry, replace(entry, intent={"met": "?", "lsn": 7})], None)
        return memory

    found = told(living).complete(dead).sighting
    assert found is not None
    assert (found.node, found.synchronous, found.lsn) == ("a", "ANY 1 (b, c)", 1000)
    lost = replace(dead, sighting=found, loss_limit=LossLimit(100))
    assert "the silent ones may have commits" in refusal(lost).message
    assert "(by the journal)" in last_contact(lost, lost.node("b"))
    for strange in (told(living, "?"), Sightings(FailoverSettings(nodes=nodes))):
        assert strange.complete(dead).sighting is None
    foreign = View((node("a", None), node("b", state(system="9")), node("c", None)), ())
    assert told(living).complete(foreign).sighting is None

    settings = FailoverSettings(nodes=nodes, journal=tmp_path / "journal")
    Sightings(settings).complete(living)
    memory = Sightings(settings)
    for received, timeline, by, known in ((999, 1, "", "bc"), (1001, 1, "by the journal", "")):
        said = state(standby=False, received=received, timeline=timeline)
        memory.by_journals = told(View((node("a", said), *living.nodes[1:]), ())).by_journals
        seen = memory.complete(dead)
        assert (seen.sighting and seen.sighting.by, seen.known_standbys) == (by, frozenset(known))


def test_a_run_is_later_than_those_it_has_read_whatever_the_clocks_say(tmp_path: Path) -> None:
    """Else `resume` would go on with what another machine's clock puts last."""
    path = tmp_path / "journal"
    settings = FailoverSettings(nodes={"a": SecretStr("")})
    cluster: Any = SimpleNamespace(sightings=Sightings(settings))
    nothing = View((), ())
    for ahead, later in ((timedelta(hours=1), True), (timedelta(days=9), False)):
        theirs = (datetime.now(UTC) + ahead).isoformat(timespec="milliseconds")
        killed = Entry("theirs", 1, theirs, "", "switchover", BEGIN)
        recall(cluster, [killed, replace(killed, at="?")], None)
        path.unlink(missing_ok=True)
        journal = Journal(path, cluster, "postgres", "resume")
        journal.begin(nothing, {})
        journal.end(nothing, "done", 0.1)
        path.write_text(path.read_text() + json.dumps(asdict(killed)) + "\n")
        found = read_history(cluster, nothing, path, "postgres")
        assert (found[-1].run != "theirs") is later
        assert (unfinished(found) is None) is later
    for age_s in (-90_000.0, 90_000.0):
        begun = Intent("switchover", "b", system="7000", age_s=age_s)
        assert begun.stale(View((node("a", state(standby=False)),), ()))


def test_names_of_synchronous_standbys_are_noted_at_once(tmp_path: Path) -> None:
    """The next process must not take the standbys of a moment before for those that count."""
    settings = FailoverSettings(
        nodes={name: SecretStr("") for name in "ab"}, journal=tmp_path / "journal"
    )
    memory = Sightings(settings)
    dead = View((node("a", None), standby("b", 1000)), ())
    for synchronous in ("", "ANY 1 (b, c)"):
        a = node("a", state(standby=False, synchronous=synchronous))
        memory.complete(View((a, standby("b", 1000)), ()))
        found = Sightings(settings).complete(dead).sighting
        assert found is not None
        assert found.synchronous == synchronous


def test_a_command_that_ends_has_noted_what_it_saw_last(tmp_path: Path) -> None:
    """Its journal tells that position: an older note would count as one of an earlier primary."""
    settings = FailoverSettings(
        nodes={name: SecretStr("") for name in "ab"}, journal=tmp_path / "journal"
    )
    memory = Sightings(settings)
    for position in (1000, 1064):
        a = node("a", state(standby=False, received=position))
        memory.complete(View((a, standby("b", 1000)), ()))
    memory.close()
    dead = View((node("a", None), standby("b", 1000)), ())
    found = Sightings(settings).complete(dead).sighting
    assert found is not None
    assert found.position == (1, 1064)


def test_who_was_a_standby_is_remembered_until_it_is_promoted(tmp_path: Path) -> None:
    a, b, c = node("a", state(standby=False)), standby("b", 1000), standby("c", 1000)
    settings = FailoverSettings(
        nodes={name: SecretStr("") for name in "abc"}, journal=tmp_path / "journal"
    )
    memory = Sightings(settings)
    assert not Sightings(settings).complete(View((node("a", None), b, c), ())).known_standbys
    memory.complete(View((a, b, c), ()))
    away = memory.complete(View((a, b, node("c", None)), ()))  # it was down before the primary was
    assert away.seen_writable == "a"
    dead = View((node("a", None), b, node("c", None)), ())
    for each in (memory, Sightings(settings)):
        assert each.complete(dead).known_standbys == {"b", "c"}
    assert Sightings(settings).complete(dead).seen_writable == ""  # that was another process
    for at, known in (
        ("2020-01-01T00:00:00+00:00", {"b", "c"}),
        ("2999-01-01", {"b"}),
        ("?", {"b"}),
    ):
        begun = replace(dead, promotions=(("c", at),))
        assert Sightings(settings).complete(begun).known_standbys == known
    leads = node("c", state(standby=False, timeline=2))
    assert "c" not in memory.complete(View((node("a", None), b, leads), ())).known_standbys
    assert "c" not in memory.complete(dead).known_standbys
    seen = tmp_path / "journal.seen"
    seen.write_text(seen.read_text().replace('"standbys": {', '"standbys": 7, "x": {'))
    assert Sightings(settings).complete(dead).sighting is None


def test_a_standby_of_priority_0_is_only_promoted_by_name() -> None:
    far = replace(standby("c", 1000), priority=0)
    chosen = candidate(view(standby("b", 1000), far))
    assert chosen is not None
    assert chosen.name == "b"
    assert candidate(view(far)) is None
    favoured = replace(standby("c", 1000), priority=200)
    chosen = candidate(view(standby("b", 1000), favoured))
    assert chosen is not None
    assert chosen.name == "c"


@given(
    received=st.integers(1, 2000),
    other=st.integers(1, 2000),
    lsn=st.integers(1, 2000),
    accepted=st.none() | st.integers(0, 2000),
)
def test_less_knowledge_never_promises_less_loss(
    received: int, other: int, lsn: int, accepted: int | None
) -> None:
    """Forgetting a witness never makes a loss that it knew of look like none."""
    full = view(standby("b", received), standby("c", other), lsn=lsn)
    chosen = candidate(full)
    assert chosen is not None
    known = lacking(full, chosen)
    assert known == max(0, lsn - chosen.received)
    for less in (replace(full, sighting=None), View(full.nodes[:2], (), sighting=full.sighting)):
        left = candidate(less)
        assert left is not None
        if lacking(less, left) is None:
            assert "not judged" in last_contact(less, left)
    if accepted is None and known > 100:
        assert losses(full, chosen)


def test_the_last_primary_is_remembered_across_processes(tmp_path: Path) -> None:
    """By who reads the same journal; an old primary that comes back is not taken for the last."""
    settings = FailoverSettings(nodes={"a": SecretStr("")}, journal=tmp_path / "journal")

    def seen(timeline: int, received: int, synchronous: str = "", name: str = "b") -> View:
        said = state(standby=False, timeline=timeline, received=received, synchronous=synchronous)
        return Sightings(settings).complete(View((node(name, said), node("c", None)), ()))

    assert seen(1, 900, "FIRST 1 (b)", "a").sighting is None
    assert seen(2, 1000).synchronous_before == "FIRST 1 (b)"
    seen(1, 2000, name="a")
    dead = View((node("a", None), node("b", None), standby("c", 950, timeline=2)), ())
    found = Sightings(settings).complete(dead).sighting
    assert found is not None
    assert (found.node, found.timeline, found.lsn) == ("b", 2, 1000)
    assert found.age_s < 86_400
    assert Sightings(settings).complete(View(dead.nodes[:2], ())).sighting is None  # no system


@pytest.mark.long
def test_a_standby_that_lags_is_seen_and_not_promoted(new_pair: NewPair, tmp_path: Path) -> None:
    trio = new_pair(synchronous=False)
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, lag_bytes_max_on_failover=1000)
    sound = partial(slotfailover, "check", "--config", config)
    eventually(lambda: sound().code == 0, what="b lags by less", interval_s=0.2)
    assert isinstance(trio.primary, PostgresServer)
    conninfo = ask(trio.standby, "SHOW primary_conninfo")
    tell(trio.standby, "ALTER SYSTEM SET primary_conninfo = 'port=1'", "SELECT pg_reload_conf()")
    gone = "SELECT count(*) FROM pg_stat_wal_receiver"
    eventually(lambda: ask(trio.standby, gone) == 0, what="b receives nothing")
    write(trio.primary, trio.dbname, 1, 100)
    checked = slotfailover("check", "--config", config, "--json").json
    (lag,) = [f for f in checked["findings"] if f["check"] == "standby-lag"]
    assert (lag["severity"], checked["ready"]) == ("critical", False)
    assert "bytes of WAL" in lag["what"]
    trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes", *losing(trio.standby, "s1", "b"))
    assert ran.code == 34, ran.err
    assert "bytes of WAL that the primary had" in ran.err
    assert "--accept lost-wal:b@" in ran.err
    assert ask(trio.standby, "SELECT pg_is_in_recovery()") is True
    assert conninfo


def test_a_slot_that_was_not_synchronized_yet_is_lost_only_by_consent(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """The settings name no consumer of it, and nobody but the last sighting knows of it."""
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    tell(trio.standby, "ALTER SYSTEM SET sync_replication_slots = off", "SELECT pg_reload_conf()")
    worker = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'slotsync worker'"
    eventually(lambda: ask(trio.standby, worker) == 0, what="no slot is synchronized")
    make = "SELECT pg_create_logical_replication_slot('reports', 'pgoutput', failover => true)"
    ask(trio.primary, make)
    checked = slotfailover("check", "--config", config, "--json").json
    assert {s["slot"] for s in checked["slots"] if not s["ready"]} == {"reports"}
    assert isinstance(trio.primary, PostgresServer)
    trio.primary.kill()
    standing = slotfailover("status", "--config", config)
    assert "NOT READY: slots reports" in standing.out, standing.out
    checked = slotfailover("check", "--config", config)
    assert "NOT READY reports on b" in checked.out, checked.out
    for how in (["--dry-run"], ["--yes"]):
        ran = slotfailover("failover", "--config", config, *how)
        assert ran.code == 34, ran.err
        assert "reports: b does not have the slot" in ran.err
        assert "--accept lost-slot:reports:b@" in ran.err
    assert ask(trio.standby, "SELECT pg_is_in_recovery()") is True
    ran = slotfailover("failover", "--config", config, "--yes", *accepting(ran))
    assert ran.code == 0, ran.err
