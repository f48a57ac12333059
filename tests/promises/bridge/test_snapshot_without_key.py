"""Rows of tables without a key: those from before the slot once, as `r`, all others as changes."""

import contextlib
import os
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import make_conninfo

from schemas.errors import ExitCode, SlotbridgeError
from schemas.settings import SourceSettings
from schemas.shaping import ShapingSettings
from schemas.snapshot import SlotBeginning, SnapshotProgress, SnapshotRequest, SnapshotSettings
from services.bridge.events.shaping.tables import Shaping
from services.bridge.failpoints import OF_A_SNAPSHOT, VARIABLE
from services.bridge.snapshot.places import Beginning, Density, Place, from_before
from services.bridge.snapshot.progress import (
    Apart,
    ChunkPosition,
    SnapshotPlan,
    TableProgress,
    beginning_for,
    plan,
    progress_of,
)
from services.bridge.snapshot.slot_creation import beginning_event, make_slot
from services.bridge.snapshot.visibility import Sight
from services.bridge.source.database import Primary
from services.bridge.source.replication_connection import ReplicationConnection
from tests.bridge.snapshot.test_progress import OWNER, shape
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.recover_process import drop_slot, recovered
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import (
    DONE,
    INITIAL,
    Writers,
    await_chunks,
    chunks,
    done,
    lift_limits,
    read_all,
    rows_a_second,
)
from tests.promises.bridge.test_failover import both, promote
from tests.providers.databases import once_free
from tests.providers.interface import Provider
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient, patient_ms

READ: dict[str, Any] = {**INITIAL, "without_key": "read"}
ROWS = 3_000
LOG = shape("public.log")
BEGINNING = Beginning(Sight(90, 100, frozenset({95})), all_tables=True, files={1: 500})


class Inserts(Writers):
    """Rows of numbers that come once each, with savepoints and rollbacks, until it is left."""

    def __init__(self, conninfo: str, first: int) -> None:
        super().__init__(conninfo, 3)
        self._next = first
        self._lock = threading.Lock()

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        with psycopg.connect(self._conninfo) as connection:
            while not self._stop.wait(0.003):
                try:
                    self._insert(connection, chance)
                    self.committed += 1
                except psycopg.Error:  # the server is gone
                    return

    def _insert(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        """A row of the transaction, one of a subtransaction, and one that is rolled back."""
        with self._lock:
            numbers = range(self._next, self._next + 3)
            self._next += 3
        connection.execute("INSERT INTO log VALUES (%s, 'top')", [numbers[0]])
        connection.execute("SAVEPOINT a")
        connection.execute("INSERT INTO log VALUES (%s, 'sub')", [numbers[1]])
        self._stop.wait(chance.choice((0, 0, 0.01)))
        connection.execute("RELEASE a" if chance.random() < 0.7 else "ROLLBACK TO a")
        connection.execute("SAVEPOINT b")
        connection.execute("INSERT INTO log VALUES (%s, 'never')", [numbers[2]])
        connection.execute("ROLLBACK TO b")
        if chance.random() < 0.1:
            connection.rollback()
        else:
            connection.commit()


def run(conninfo: str, *statements: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def make_log(conninfo: str, rows: int = ROWS) -> None:
    run(
        conninfo,
        "CREATE TABLE log (n int, note text)",
        f"INSERT INTO log SELECT g, 'old' FROM generate_series(1, {rows}) g",
    )


def assert_each_once(bridge: Bridge, conninfo: str, table: str = "log") -> Counter[str]:
    """Each row is in Kafka once, and no other; how many came as `r`, how many as `c`."""
    with psycopg.connect(conninfo) as connection:
        truth = {n for (n,) in connection.execute(f"SELECT n FROM {table}".encode())}
    events = [*bridge.events(table)]
    found = Counter(event["after"]["n"] for event in events)
    assert {*found.values()} <= {1}, f"twice: {[n for n, count in found.items() if count > 1][:9]}"
    assert found.keys() == truth, f"differ: {sorted(found.keys() ^ truth)[:9]}"
    return Counter(event["op"] for event in events)


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    return pair.primary.conninfo(fresh_database)


@pytest.mark.long
def test_inserted_all_the_time_and_killed_at_random_moments(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """Also while the slot is made, with transactions that are open then."""
    make_log(conninfo)
    chance, kills = random.Random(33), 10
    slow = {**READ, "chunk_rows_max": 10, "rows_per_second_max": rows_a_second(100)}
    bridge = new_bridge(conninfo, snapshot=slow)
    with Inserts(conninfo, ROWS + 1) as inserts:
        eventually(lambda: inserts.committed > 20, what="rows come before the slot")
        done_at = [0]
        for _ in range(kills):
            bridge.start().streaming()
            await_chunks(bridge, done_at[-1] + 2)
            time.sleep(chance.uniform(0, 0.3))
            bridge.kill()
            done_at.append(chunks(bridge))
        lift_limits(bridge)
        read_all(bridge)
    assert inserts.committed > 100
    assert len({*done_at}) > 3, f"the kills were not in the middle of it: {done_at}"
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    ops = assert_each_once(bridge, conninfo)
    assert ops["r"] > ROWS and ops["c"] > 50, ops


@pytest.mark.long
@pytest.mark.parametrize(
    ("failpoint", "passage"),
    [
        ("first record", 1),
        *((name, 3) for name in OF_A_SNAPSHOT),
        ("before kafka commit", 6),
        ("after kafka commit", 6),
    ],
)
def test_killed_at_each_seam(
    failpoint: str, passage: int, conninfo: str, new_bridge: NewBridge
) -> None:
    make_log(conninfo, 600)
    bridge = new_bridge(conninfo, snapshot={**READ, "chunk_rows_max": 100})
    with Inserts(conninfo, 601):
        bridge.start(**{VARIABLE: f"{failpoint}:{passage}"})
        assert bridge.exit_code() == -9, bridge.output
        read_all(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_each_once(bridge, conninfo)


@pytest.mark.long
def test_a_slot_whose_beginning_is_unknown_is_refused(conninfo: str, new_bridge: NewBridge) -> None:
    """It was made by a bridge that was killed before Kafka knew; the remedy is in the message."""
    make_log(conninfo, 10)
    bridge = new_bridge(conninfo, snapshot=READ)
    bridge.start(**{VARIABLE: "slot created:1"})
    assert bridge.exit_code() == -9, bridge.output
    bridge.start()
    assert bridge.exit_code() == ExitCode.SETTINGS, bridge.output
    assert "public.log has no key, and the slot was not made" in bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["no session", "the session ends"])
def test_a_new_slot_whose_beginning_is_unknown_is_dropped(fault: str, conninfo: str) -> None:
    """Its tables without a key could never be read."""
    given = {"conninfo": conninfo, "slot": f"s_{os.urandom(4).hex()}", "publication": "p"}
    source = SourceSettings.model_validate(given)
    primary = Primary(source, sql_deadline_ms=patient_ms(7_000), idle_timeout_ms=60_000)
    replication = ReplicationConnection(
        *(conninfo, source.slot),
        wal_sender_timeout_ms=patient_ms(20_000),
        sql_deadline_ms=patient_ms(7_000),
    )
    ends = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = "
    ends += "current_database() AND application_name = 'slotbridge_slot'"
    if fault == "the session ends":
        primary.waiter.work = partial(run, conninfo, ends)
    if fault == "no session":
        primary.conninfo = make_conninfo(conninfo, dbname="no_such_database")
    with contextlib.closing(primary), contextlib.closing(replication):
        with pytest.raises(SlotbridgeError):
            make_slot(primary, replication, source, deadline_s=patient(7))
        assert primary.slot() is None


@pytest.mark.long
def test_a_slot_that_a_repair_has_made_begins_anew(conninfo: str, new_bridge: NewBridge) -> None:
    """What the repair has published comes not again; a table that was left out is not read on."""
    make_log(conninfo, 30)
    run(
        conninfo,
        "CREATE TABLE keyed (n int NOT NULL, note text)",
        "INSERT INTO keyed SELECT generate_series(1, 20)",
    )
    shaping = {"keys": {"public.keyed": ["n"]}}
    bridge = new_bridge(conninfo, snapshot=READ, shaping=shaping)
    bridge.start(**{VARIABLE: "first record:1"})
    assert bridge.exit_code() == -9, bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)
    run(conninfo, "INSERT INTO log VALUES (31)", "INSERT INTO keyed VALUES (21)")
    assert recovered(bridge, "--without", "public.log").tables["public.keyed"].created == 21
    bridge.start().streaming()
    eventually(lambda: "public.log has no key, and" in bridge.output, what="it is refused")
    run(
        conninfo,
        "INSERT INTO keyed VALUES (22)",
        "CREATE TABLE later (n int)",
        "INSERT INTO later VALUES (1)",
    )
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert assert_each_once(bridge, conninfo, "keyed") == {"c": 22}
    assert f"{bridge.prefix}.public.log" not in bridge.topics()
    bridge.start().streaming()
    eventually(lambda: bridge.output.count("refused=1") == 2, what="the tables are planned")
    assert bridge.stop() == 0, bridge.output
    assert assert_each_once(bridge, conninfo, "later") == {"c": 1}


@pytest.mark.long
@pytest.mark.parametrize("without_key", ["read", "refuse"])
def test_where_a_former_slot_began_is_forgotten(
    without_key: str, conninfo: str, new_bridge: NewBridge
) -> None:
    """A slot of the same name, of which nothing is known: as if there had been no other."""
    make_log(conninfo, 10)
    bridge = new_bridge(conninfo, snapshot=READ)
    bridge.start(**{VARIABLE: "first record:1"})
    assert bridge.exit_code() == -9, bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)
        drop_origin = "SELECT pg_replication_origin_drop(%s)"
        once_free(connection, drop_origin, f"slotbridge_{bridge.slot}")
    name = f"{bridge.prefix}.progress"
    admin = AdminClient({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    admin.delete_topics([name])[name].result(patient(30))
    eventually(lambda: name not in bridge.topics(), what="the topic is gone", timeout_s=60)
    given = bridge.config.read_text()
    bridge.config.write_text(given.replace("without_key: read", f"without_key: {without_key}"))
    bridge.start(**{VARIABLE: "slot created:1"})
    assert bridge.exit_code() == -9, bridge.output
    bridge.config.write_text(given)
    bridge.start()
    assert bridge.exit_code() == ExitCode.SETTINGS, bridge.output
    assert "public.log has no key, and the slot was not made" in bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)


@pytest.mark.long
def test_a_failover_in_the_middle(new_pair: NewPair, new_bridge: NewBridge) -> None:
    """Rows keep their place and their transaction's number on the standby."""
    trio = new_pair(synchronous=False)
    primary, standby = (one.conninfo(trio.dbname) for one in (trio.primary, trio.standby))
    make_log(primary, 6_000)
    slow = {**READ, "chunk_rows_max": 10, "rows_per_second_max": rows_a_second(300)}  # 20 s
    bridge = new_bridge(both(trio), snapshot=slow)
    with Inserts(primary, 10_000) as before:
        bridge.start().streaming(primary)
        await_ready(trio.primary, trio.standby, bridge.slot)
        await_chunks(bridge, chunks(bridge) + 5)
        assert "snapshot is done" not in bridge.output, "the failover is too late"
        trio.primary.kill()
        promote(trio)
    with Inserts(standby, 100_000) as after:
        bridge.streaming(standby)
        done(bridge)
    assert before.committed > 20 and after.committed > 20
    bridge.caught_up(standby)
    assert bridge.stop() == 0, bridge.output
    assert_each_once(bridge, standby)


def test_updates_and_deletes_under_replica_identity_full(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """Whoever takes away what `before` says, and adds `after`, has the table in the end."""
    make_log(conninfo, 2_000)
    run(conninfo, "ALTER TABLE log REPLICA IDENTITY FULL")
    bridge = new_bridge(conninfo, snapshot={**READ, "chunk_rows_max": 40}).start().streaming()
    chance = random.Random(5)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        while "snapshot is done" not in bridge.output:
            assert bridge.running, bridge.output
            one = chance.randint(1, 2_000)
            if chance.random() < 0.7:
                connection.execute("UPDATE log SET note = note || '+' WHERE n = %s", [one])
            else:
                connection.execute("DELETE FROM log WHERE n = %s", [one])
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    with psycopg.connect(conninfo) as connection:
        truth = {*connection.execute("SELECT n, note FROM log").fetchall()}
    events = [*bridge.events("log")]
    assert {"r", "u", "d"} <= {event["op"] for event in events}
    events.sort(key=lambda event: (event["source"]["commit_lsn"], event["source"]["seq"]))
    rows: set[tuple[int, str]] = set()
    for event in events:
        before, after = event["before"], event["after"]
        if before is not None:
            rows.discard((before["n"], before["note"]))
        if after is not None:
            rows.add((after["n"], after["note"]))
    assert rows == truth


def test_tables_that_come_later_have_all_their_rows_as_changes(
    conninfo: str, new_bridge: NewBridge
) -> None:
    make_log(conninfo, 30)
    bridge = read_all(new_bridge(conninfo, snapshot=READ))
    run(
        conninfo,
        "CREATE TABLE later (n int)",
        "INSERT INTO later SELECT generate_series(1, 20)",
        "CREATE TABLE keyed (n int PRIMARY KEY)",
        "INSERT INTO keyed SELECT generate_series(1, 20)",
    )
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    bridge.start().streaming()
    done_before = bridge.output.count("snapshot is done")
    run(conninfo, "INSERT INTO later VALUES (21)", "INSERT INTO log VALUES (31, '')")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert bridge.output.count("snapshot is done") == done_before
    assert assert_each_once(bridge, conninfo, "later") == {"c": 21}
    assert assert_each_once(bridge, conninfo, "keyed") == {"c": 20}
    assert assert_each_once(bridge, conninfo) == {"r": 30, "c": 1}


@pytest.mark.long
def test_rows_are_filtered_and_asked_for_once(conninfo: str, new_bridge: NewBridge) -> None:
    """A signal reads them where nothing has yet; a second one would send them twice."""
    make_log(conninfo, 500)
    run(conninfo, "CREATE TABLE signals (id text PRIMARY KEY, type text, data text)")
    settings = {
        **READ,
        "mode": "on_request",
        "signal_table": "public.signals",
        "where": {"public.log": "n > 100"},
    }
    bridge = new_bridge(conninfo, snapshot=settings).start().streaming()
    ask = "INSERT INTO signals VALUES ('{}', 'execute-snapshot', %s)"
    for number in range(2):
        data = '{"data-collections": ["public.log"]}'
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(ask.format(number).encode(), [data])
        bridge.caught_up()
        if number == 0:
            done(bridge)
    eventually(lambda: bridge.output.count("received a signal") == 2, what="both are heard")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    rows = [event["after"]["n"] for event in bridge.events("log")]
    assert sorted(rows) == [*range(101, 501)]


@pytest.mark.long
def test_blocks_without_wanted_rows_are_passed(conninfo: str, new_bridge: NewBridge) -> None:
    """A table that was mostly deleted, with wide rows at its end; none is read twice or left."""
    make_log(conninfo, 20_000)
    run(
        conninfo,
        "DELETE FROM log WHERE n % 4000 <> 0",
        "INSERT INTO log SELECT g, repeat('x', 3000) FROM generate_series(20001, 20050) g",
    )
    bridge = read_all(new_bridge(conninfo, snapshot={**READ, "chunk_rows_max": 10}))
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert assert_each_once(bridge, conninfo) == {"r": 55}


@pytest.mark.long
@pytest.mark.parametrize(
    "statement",
    ["ALTER TABLE log ALTER n TYPE bigint", "VACUUM FULL log", "TRUNCATE log"],
)
def test_a_table_that_is_rewritten_in_the_middle_is_not_read_on(
    statement: str, conninfo: str, new_bridge: NewBridge
) -> None:
    """Its rows have moved, or say another transaction: none comes twice, and the log tells."""
    make_log(conninfo)
    slow = {**READ, "chunk_rows_max": 10, "rows_per_second_max": rows_a_second(100)}
    bridge = new_bridge(conninfo, snapshot=slow)
    bridge.start().streaming()
    await_chunks(bridge, 3)
    run(conninfo, statement, "INSERT INTO log VALUES (999999, '')")
    eventually(
        lambda: "was truncated or rewritten since the slot was made" in bridge.output,
        what="it is told",
        timeout_s=60,
    )
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    read = Counter(event["after"]["n"] for event in bridge.events("log") if event["op"] in "rc")
    assert {*read.values()} == {1} and 20 < len(read) < ROWS


@pytest.mark.long
@pytest.mark.parametrize("runs", [True, False], ids=["while it runs", "while it is stopped"])
def test_a_publication_that_was_changed_in_between_is_told(
    runs: bool, conninfo: str, new_bridge: NewBridge
) -> None:
    """What was inserted meanwhile is lost: nobody is to take the rest for the whole table."""
    make_log(conninfo)
    slow = {**READ, "chunk_rows_max": 10, "rows_per_second_max": rows_a_second(30)}
    bridge = new_bridge(conninfo, snapshot=slow, tables=("public.log",))
    bridge.start().streaming()
    await_chunks(bridge, 3)
    if not runs:
        assert bridge.stop() == 0, bridge.output
    run(
        conninfo,
        f"ALTER PUBLICATION {bridge.publication} DROP TABLE log",
        "INSERT INTO log VALUES (999999, '')",
        f"ALTER PUBLICATION {bridge.publication} ADD TABLE log",
    )
    if not runs:
        bridge.start().streaming()
    eventually(
        lambda: "the publication, or its place in that, was changed since" in bridge.output,
        what="it is told",
        timeout_s=60,
    )
    assert bridge.stop() == 0, bridge.output
    assert DONE not in bridge.output


@pytest.mark.long
@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE UNLOGGED TABLE later (n int)", "INSERT INTO later VALUES (1)"),
        ("ALTER PUBLICATION {} SET (publish = '')", "CREATE TABLE later (n int)"),
    ],
)
def test_a_later_table_that_was_not_published_from_its_beginning_is_told(
    statements: tuple[str, ...], conninfo: str, new_bridge: NewBridge
) -> None:
    make_log(conninfo, 30)
    bridge = read_all(new_bridge(conninfo, snapshot=READ))
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    run(
        conninfo,
        *(statement.format(bridge.publication) for statement in statements),
        "INSERT INTO later VALUES (2)",
        "ALTER TABLE later SET LOGGED",
        f"ALTER PUBLICATION {bridge.publication} SET (publish = 'insert, update, delete')",
    )
    bridge.start().streaming()
    eventually(lambda: "public.later has no key, and" in bridge.output, what="it is told")
    assert bridge.stop() == 0, bridge.output


def planned(
    beginning: Beginning | None = BEGINNING,
    told: SnapshotProgress | None = None,
    unpublished: tuple[str, ...] = (),
    place: Place | None = Place(500, new=False, kept=True),  # noqa: B008
    asked: tuple[SnapshotRequest, ...] = (),
    **settings: Any,
) -> SnapshotPlan:
    """The plan for public.log."""
    places = {} if place is None else {1: place}
    apart = beginning and Apart(beginning, places, unpublished)
    given = SnapshotSettings.model_validate({**READ, **settings})
    found = [] if told is None else [told]
    return plan([LOG], found, given, Shaping(ShapingSettings(), "p"), OWNER, asked, apart)


def progress(**changed: Any) -> SnapshotProgress:
    table = TableProgress(LOG, ["(7,3)"], 60, 6)
    return progress_of(OWNER, table, ChunkPosition(900, 6, 910), 1, 0).model_copy(update=changed)


def test_the_rows_from_before_the_slot_are_planned() -> None:
    (table,) = planned().tables.values()
    assert (table.before, table.last) == ((BEGINNING.sight, 500), None)
    (table,) = planned(told=progress()).tables.values()
    assert (table.last, table.rows) == (["(7,3)"], 60)
    assert planned(told=progress(done=True), place=Place(501, new=False, kept=True)).next is None
    assert not planned(told=progress(done=True), place=Place(501, new=False, kept=True)).refused


def test_a_request_does_not_read_a_table_again_once_the_setting_is_taken_back() -> None:
    asked = SnapshotRequest(
        slot="s",
        tables="public.*",
        where="",
        type="read",
        id="1",
        timeline=OWNER.timeline,
        commit_lsn=950,
        seq=0,
        ts_ms=1,
    )
    found = planned(None, progress(done=True), asked=(asked,), without_key="refuse")
    assert found.next is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"without_key": "refuse"}, "has no primary key"),
        ({"beginning": None}, "the slot was not made by a bridge"),
        ({"place": Place(501, new=False, kept=True)}, "was truncated or rewritten"),
        ({"place": None}, "was truncated or rewritten"),
        ({"place": Place(500, new=False, kept=False)}, "its place in that, was changed since"),
        ({"beginning": BEGINNING._replace(files={})}, "joined the publication after"),
        ({"unpublished": ("update",)}, "leaves out updates"),
        ({"told": progress(oid=9)}, "a failover may have undone"),
        ({"told": progress(timeline=2, commit_lsn=499, seen_lsn=501)}, "a failover may have"),
    ],
)
def test_rows_that_would_come_twice_or_never_are_refused(
    given: dict[str, Any], reason: str
) -> None:
    found = planned(**given)
    assert reason in found.refused["public.log"] and not found.tables


def test_a_table_that_was_made_after_the_slot_needs_no_snapshot() -> None:
    others = BEGINNING._replace(files={})
    made = Place(1, new=True, kept=True)  # its first file has the number of its oid
    found = planned(others, place=made)
    assert not found.refused and not found.tables
    assert planned(others._replace(all_tables=False), place=made).refused
    assert planned(others, place=made._replace(file=7)).refused
    assert planned(others, place=made._replace(kept=False)).refused
    assert planned(others._replace(files={1: 1}), place=made).tables


def test_the_beginning_of_the_slot_survives_its_record() -> None:
    told = SlotBeginning(
        slot="s", lsn=450, timeline=2, sight="90:100:95", all_tables=True, files={1: 500}, ts_ms=1
    )
    event = beginning_event("p", told)
    assert event.key == b'{"slot":"s","beginning":true}'
    again = SlotBeginning.model_validate_json(event.value or b"")
    assert beginning_for(OWNER, [again]) == BEGINNING
    assert beginning_for(OWNER, [replace_lsn(again, 500)]) is None
    assert beginning_for(OWNER._replace(slot="another"), [again]) is None


def replace_lsn(told: SlotBeginning, lsn: int) -> SlotBeginning:
    return told.model_copy(update={"lsn": lsn})


@pytest.mark.long
@pytest.mark.parametrize("wraps", [0, 3])
def test_rows_from_before_are_told_by_their_transaction(wraps: int, conninfo: str) -> None:
    """The condition, evaluated by the server for raw xids as `xmin` shows them."""
    epoch = wraps * 2**32
    with psycopg.connect(conninfo) as connection:
        (now,) = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone() or (0,)
        sight = Sight(epoch + now - 20, epoch + now - 10, frozenset({epoch + now - 15}))
        # The server's own epoch is 0: what it gives out is moved to the one of `sight`.
        condition = from_before(sight).replace("::text::bigint - ", f"::text::bigint + {epoch} - ")
        xids = [1, 2, 3, now - 30, now - 20, now - 15, now - 14, now - 11, now - 10, now - 1]
        xids += [2**32 - 1, now + 2**31, now + 1_000]
        rows = connection.execute(
            f"SELECT xmin FROM unnest(%s::bigint[]) AS t (xmin) WHERE {condition}".encode(), [xids]
        ).fetchall()
    assert [xid for (xid,) in rows] == [
        *(1, 2, 3, now - 30, now - 20, now - 14, now - 11),
        *(2**32 - 1, now + 2**31, now + 1_000),
    ]


def test_as_many_blocks_are_read_as_have_the_rows() -> None:
    density = Density()
    first = density.blocks(1, 1_000)
    density.learn(1, 200, 2)
    assert (first, density.blocks(1, 1_000), density.blocks(2, 1_000)) == (20, 10, 20)
    density.learn(1, 0, 50)
    assert density.blocks(1, 1_000) == 10_000


def test_a_partitioned_root_without_a_key_is_refused() -> None:
    root = replace(LOG, partitioned=True)
    assert "root of its partitions" in BEGINNING.refusal(root, Place(500, new=False, kept=True))
