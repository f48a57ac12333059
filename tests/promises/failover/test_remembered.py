"""What the journals keep, what must be given up with a timeline, how long Kafka is waited for."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest

from schemas.errors import ExitCode, OperatorNeeded
from schemas.settings import KafkaSettings
from services.failover.checks.facts import facts_of
from services.failover.checks.registry import run_checks
from services.failover.execute import timeline_memory
from services.failover.execute.history import read_entries, read_history, unfinished
from services.failover.execute.journal import DONE, Journal
from services.failover.execute.subscription_note import note_feeding
from services.failover.execute.timeline_memory import Asked
from services.failover.model.destination import MARK
from services.failover.model.kafka_progress import KafkaProgress
from services.failover.model.preconditions import require_newest
from services.failover.model.timelines import Milestone
from services.failover.model.view import View
from services.failover.observe import kafka_progress
from services.failover.observe.bridge_client import Bridge
from services.failover.observe.cluster import Cluster
from services.failover.observe.kafka_progress import ProgressReader
from services.failover.observe.own_tables import writing
from tests.failover.model.test_timelines import promoted
from tests.promises.failover.conftest import NewTrio
from tests.promises.failover.servers import (
    KILLED_AFTER_A_STEP,
    KILLED_AFTER_STEPS,
    ask,
    await_equal,
    configuration,
    slotfailover_process,
    subscribe,
    tell,
    write,
)
from tests.promises.failover.views import node, slot, state
from tests.promises.failover.watch.test_live import LEADS_TO, promote, unquoted
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient

SEEN_OFTEN = 6000
BEGUN = {"run": "r", "number": 1, "at": "2026-01-01T00:00:00+00:00", "by": "a person"}
NOTHING = View(nodes=(), subscribers=())


def test_many_watch_entries_hide_no_run_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with path.open("w") as file:
        for n in range(SEEN_OFTEN):
            if n == 3:
                file.write(json.dumps({**BEGUN, "command": "switchover", "step": "begin"}) + "\n")
            seen = {"run": f"w{n}", "number": 1, "at": f"2026-02-01T00:00:00.{n:06}+00:00"}
            file.write(json.dumps({**seen, "by": "w", "command": "watch", "step": "seen"}) + "\n")
    found = unfinished(read_history(cast("Cluster", None), NOTHING, path, "postgres"))
    assert found is not None and found.run == "r"


@pytest.mark.long
def test_many_watch_entries_hide_no_run_of_the_table(pair: Provider, fresh_database: str) -> None:
    with psycopg.connect(pair.primary.conninfo(fresh_database), autocommit=True) as connection:
        with writing(connection, "journal"):
            connection.execute(
                "INSERT INTO slotfailover.journal (run, number, at, by, command, step)"
                " VALUES ('r', 1, '2026-01-01', 'a person', 'switchover', 'begin')"
            )
            connection.execute(
                "INSERT INTO slotfailover.journal (run, number, at, by, command, step)"
                " SELECT 'w' || n, 1, timestamptz '2026-02-01' + n * interval '1 s', 'w', 'watch',"
                " 'seen' FROM generate_series(1, %s) n",
                [SEEN_OFTEN],
            )
        entries = read_entries(connection, 5000)
    found = unfinished(entries)
    assert found is not None and found.run == "r"
    assert entries == sorted(entries, key=lambda entry: entry.at)


def test_the_beginning_of_a_run_does_not_replace_the_recorded_slots(tmp_path: Path) -> None:
    """A new primary may have lost some: that a run was killed there is no reason to forget them."""
    view = View((node("a", state(slot("s1"), standby=False)),), ())
    path = tmp_path / "journal"
    cluster = cast("Cluster", SimpleNamespace(recorded_at=""))
    journal = Journal(path, cluster, "postgres", "repoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "_to_table", lambda *_: None)
        journal.begin(view, {"command": "repoint"})
        journal.end(view, DONE, 1.0)
    begun, ended = (json.loads(line)["intent"] for line in path.read_text().splitlines())
    assert "met" in begun and "failover_slots" not in begun
    assert ended["failover_slots"] == ["s1"]


@pytest.mark.long
def test_a_repoint_that_was_killed_is_not_followed_by_one_to_the_old_primary(
    local_trio: NewTrio, tmp_path: Path
) -> None:
    """The subscription leads to the new primary, and has not been fed by it yet."""
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    promote(trio.primary, trio.standby)
    steps = KILLED_AFTER_STEPS.format(steps=2)
    ran = slotfailover_process("repoint", "--config", config, "--yes", before=steps)
    assert ran.code == -9, ran.err
    trio.standby.kill()
    trio.primary.start()
    ran = slotfailover_process("repoint", "--config", config, "--yes")
    assert ran.code == ExitCode.TIMELINE, ran.err
    assert "older than timeline 2" in ran.err
    leads_to = unquoted(ask(trio.subscriber, LEADS_TO, trio.dbname))
    assert f"port={trio.standby.port}" in leads_to


@pytest.mark.long
def test_without_a_journal_file_the_subscription_itself_tells_whom_it_was_led_to(
    local_trio: NewTrio, tmp_path: Path
) -> None:
    """The journal's table is on the new primary alone, which gives no answer after a power cut."""
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, journal=None)
    promote(trio.primary, trio.standby)
    ran = slotfailover_process("repoint", "--config", config, "--yes", before=KILLED_AFTER_A_STEP)
    assert ran.code == -9, ran.err
    trio.standby.kill()
    trio.primary.start()
    for command in ("repoint", "resume"):
        ran = slotfailover_process(command, "--config", config, "--yes")
        assert ran.code == ExitCode.TIMELINE, ran.err
        assert "older than timeline 2" in ran.err
        assert "which sub/s1 remembers" in ran.err
    assert ask(trio.subscriber, "SELECT subenabled FROM pg_subscription", trio.dbname) is False
    trio.primary.stop()
    trio.standby.start()
    ran = slotfailover_process("repoint", "--config", config, "--yes")
    assert ran.code == 0, ran.err
    write(trio.standby, trio.dbname, 1)
    await_equal(trio, trio.standby)


@pytest.mark.long
def test_who_enables_by_hand_what_a_run_had_disabled_has_the_say_from_then_on(
    local_trio: NewTrio, tmp_path: Path
) -> None:
    """The mark is still in the comment; the subscription's row tells that it was changed since."""
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    promote(trio.primary, trio.standby)
    ran = slotfailover_process("repoint", "--config", config, "--yes", before=KILLED_AFTER_A_STEP)
    assert ran.code == -9, ran.err
    comment = "SELECT obj_description(oid, 'pg_subscription') FROM pg_subscription"
    noted = ask(trio.subscriber, comment, trio.dbname)
    assert noted.endswith("] [disabled by slotfailover]")
    for change in ("ENABLE", "DISABLE"):
        tell(trio.subscriber, f"ALTER SUBSCRIPTION s1 {change}", dbname=trio.dbname)
    ran = slotfailover_process("repoint", "--config", config, "--yes")
    assert ran.code == 0, ran.err
    assert "sub/s1 was disabled, and stays so" in ran.out + ran.err
    assert ask(trio.subscriber, "SELECT subenabled FROM pg_subscription", trio.dbname) is False
    assert "disabled by slotfailover" not in ask(trio.subscriber, comment, trio.dbname)


@pytest.mark.long
def test_a_note_of_what_feeds_a_subscription_overwrites_no_mark(
    pair: Provider, fresh_database: str
) -> None:
    """A run has disabled and marked it since it was seen: `watch` and a command share no lock."""
    url = pair.primary.conninfo(fresh_database)
    connect = partial(psycopg.connect, url, autocommit=True)
    with connect() as run, connect() as watch, ThreadPoolExecutor(1) as pool:
        run.execute(
            "CREATE SUBSCRIPTION s CONNECTION 'host=127.0.0.1 port=1' PUBLICATION p"
            " WITH (connect = false)"
        )
        try:
            run.execute("ALTER SUBSCRIPTION s ENABLE")
            assert note_feeding(watch, "s", "fed")
            with run.transaction():
                run.execute("ALTER SUBSCRIPTION s DISABLE")
                run.execute(f"COMMENT ON SUBSCRIPTION s IS '{MARK}'")
                waits = pool.submit(note_feeding, watch, "s", "fed, as seen before")
                query = "SELECT FROM pg_locks WHERE NOT granted AND pid = %s"
                pid = watch.info.backend_pid
                eventually(lambda: run.execute(query, [pid]).rowcount == 1, what="it waits")
            assert waits.result(patient(30)) is False
            comment = "SELECT obj_description(oid, 'pg_subscription') FROM pg_subscription"
            assert run.execute(f"{comment} WHERE subname = 's'").fetchone() == (MARK,)
        finally:
            run.execute("ALTER SUBSCRIPTION s DISABLE")
            run.execute("ALTER SUBSCRIPTION s SET (slot_name = NONE)")
            run.execute("DROP SUBSCRIPTION s")


def test_the_hint_names_all_that_remembers_a_timeline() -> None:
    view = promoted(2000)
    with pytest.raises(OperatorNeeded) as caught:
        require_newest(view, view.node("b"), "test")
    for memory in ("COMMENT ON SUBSCRIPTION", "slotfailover.journal", "failover.journal", "prefix"):
        assert memory in caught.value.hint


def test_a_kafka_that_hangs_is_waited_for_no_longer_than_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes connections and answers nothing; its client goes on for 10 s and more."""
    monkeypatch.setattr(timeline_memory, "_KAFKA_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers = f"127.0.0.1:{silent.getsockname()[1]}"
        kafka = KafkaSettings(bootstrap_servers=servers, topic_prefix="p")
        asked = Asked(Bridge("s", kafka=kafka))
        answer = asked.answer()
        assert asked._answer is not None and not asked._answer.done(), "it was waited for"
        reader = ProgressReader(Bridge("s", kafka=kafka))
        assert all(one.problem for one in (reader.read(), reader.read()) if one is not None)
        assert reader._pending is not None and not reader._pending.done(), "it was waited for"
    assert answer is not None and answer.problem == "no answer within 1 s"
    assert Asked(Bridge("s")).answer() is None
    assert ProgressReader(Bridge("s")).read() is None


class Kafka:
    """Answers a reading once it is let to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: Queue[KafkaProgress | Exception] = Queue()
        self.reader = ProgressReader(
            Bridge("s1", kafka=KafkaSettings(bootstrap_servers="k:1", topic_prefix="p"))
        )
        monkeypatch.setattr(kafka_progress, "PATIENCE_S", 0.05)
        monkeypatch.setattr(kafka_progress, "read_published", lambda *_: self._answer())

    def _answer(self) -> KafkaProgress:
        found = self.answers.get()
        if isinstance(found, Exception):
            raise found
        return found

    def late(self, answer: KafkaProgress) -> KafkaProgress:
        """What the next observation begins with, where a reading hung until after the last one."""
        self.answers.put(answer)
        pending = self.reader._pending
        assert pending is not None
        pending.result(patient(30))
        return self.read()

    def read(self) -> KafkaProgress:
        """What an observation begins with."""
        found = self.reader.read()
        assert found is not None
        return found


def published_by(origin: int) -> View:
    """The bridge has published so far."""
    at = replace(state(slot("s1"), standby=False), origins={"slotbridge_s1": origin})
    return View((node("a", at),), (), bridge_slot="s1")


RECORD = KafkaProgress(500, 500, "7000", 2, began=950)


@pytest.mark.parametrize("error", [TimeoutError("boom"), ValueError("boom")])
def test_whatever_goes_wrong_with_kafka_is_an_answer(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = Kafka(monkeypatch)
    monkeypatch.setattr(kafka_progress, "PATIENCE_S", 30.0)
    for answer in (error, RECORD):
        kafka.answers.put(answer)
    assert kafka.read().problem == f"{type(error).__name__}: boom"
    assert kafka.read().lsn == 500

    def no_more(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    assert "can't start new thread" in kafka.read().problem


def test_a_kafka_that_is_slow_is_judged_by_the_answer_of_an_observation_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kafka = Kafka(monkeypatch)
    assert kafka.read().problem == "no answer within 0.05 s"
    real = "certificate verify failed"
    assert kafka.late(KafkaProgress(problem=real)).problem == real
    assert kafka.read().problem == "no answer within 0.05 s"

    def judged(first: KafkaProgress, origin: int) -> tuple[bool, str]:
        found = run_checks(facts_of(kafka.reader.complete(first, published_by(origin)), None))
        (record,) = [each for each in found if each.check == "kafka-record"]
        return record.wrong, str(record)

    wrong, seen = judged(kafka.late(RECORD), 600)
    assert not wrong and "not judged: whether it has all up to the origin" in seen
    wrong, seen = judged(kafka.late(replace(RECORD, lsn=600, latest=600)), 700)
    assert not wrong and "not judged" in seen
    wrong, seen = judged(kafka.late(replace(RECORD, lsn=800, latest=800)), 750)
    assert not wrong and "not judged" not in seen
    assert kafka.read().problem
    wrong, seen = judged(kafka.late(RECORD), 760)
    assert wrong and "it lost committed records" in seen  # the bridge had published 750 before


def test_the_timeline_that_kafka_has_told_stays_met(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = Kafka(monkeypatch)
    kafka.read()
    kafka.late(RECORD)
    for _ in range(2):
        view = kafka.reader.complete(kafka.read(), published_by(400))
        assert view.published is not None and view.published.problem
        assert view.milestones == (("Kafka", Milestone("7000", 2, 950)),)
    kafka.late(replace(RECORD, timeline=1, began=None))
    assert kafka.reader.known == (("Kafka", Milestone("7000", 2, 950)),)
    kafka.read()
    kafka.late(replace(RECORD, system_identifier="9000", timeline=1, began=None))
    assert kafka.reader.known == (("Kafka", Milestone("9000", 1, None)),)
