"""`source.witness: sequence`: a role that may call no function of replication origins."""

import threading
from collections.abc import Callable
from functools import partial

import psutil
import psycopg
import pytest
from psycopg import sql

from schemas.errors import ExitCode
from schemas.lsn import format_lsn
from services.bridge.failpoints import VARIABLE
from services.failover.observe.bridge_positions import read_positions
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.evidence.ground import refusal
from tests.promises.bridge.evidence.test_refusals_at_start import (
    drop_origin,
    drop_progress,
    put,
    run_once,
)
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_failover import promote
from tests.promises.bridge.test_fenced_server import unready
from tests.promises.bridge.test_privileges import _status
from tests.promises.bridge.test_teardown import teardown
from tests.providers.interface import Provider, Server
from tests.providers.progress_records import altered
from tests.providers.roles import ODD, make_roles
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient_ms

QUICK = {"connect_deadline_ms": patient_ms(6_700)}
ORIGIN_FUNCTIONS = """
    SELECT count(*), count(*) FILTER (WHERE has_function_privilege(%s, oid, 'EXECUTE'))
      FROM pg_proc WHERE proname LIKE 'pg\\_%%replication\\_origin\\_%%'
"""


def make_role(server: Server, dbname: str, prefix: str, *, creates: bool = True) -> str:
    """Make table, publication for all tables, and a role as a provider's administrator can."""
    role = f"plain_{prefix}"
    with psycopg.connect(server.conninfo(dbname), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        name = sql.Identifier(f"p_{prefix}")
        connection.execute(sql.SQL("CREATE PUBLICATION {} FOR ALL TABLES").format(name))
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN REPLICATION IN ROLE pg_read_all_data").format(
                sql.Identifier(role)
            )
        )
        if creates:
            grant = sql.SQL("GRANT CREATE ON DATABASE {} TO {}")
            connection.execute(grant.format(sql.Identifier(dbname), sql.Identifier(role)))
        found = connection.execute(ORIGIN_FUNCTIONS, [role]).fetchone()
        assert found is not None and found[0] >= 8 and found[1] == 0
    return role


def tell(conninfo: str, *statements: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def insert(conninfo: str, rows: range) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t SELECT unnest(%s::int[])", [list(rows)])


def sequence_of(bridge: Bridge) -> str:
    return f"slotbridge.witness_{bridge.slot}"


def position(conninfo: str, bridge: Bridge) -> int:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        query = f"SELECT pg_sequence_last_value('{sequence_of(bridge)}')"
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0] or 0)


def await_topic(bridge: Bridge) -> None:
    topic = f"{bridge.prefix}.public.t"
    eventually(lambda: topic in bridge.topics(), what="events come to Kafka")


def assert_once(bridge: Bridge, conninfo: str) -> None:
    bridge.assert_kafka_equals(conninfo, "t")
    assert set(bridge.identities("t").values()) == {1}


@pytest.fixture
def admin(pair: Provider, fresh_database: str) -> str:
    return pair.primary.conninfo(fresh_database)


@pytest.fixture
def new_plain(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> Callable[[], Bridge]:
    """A bridge as a role without functions of origins; its sequence is its own."""
    role = make_role(pair.primary, fresh_database, topic_prefix)
    conninfo = pair.primary.conninfo(fresh_database, user=role)
    return lambda: new_bridge(conninfo, witness="sequence", **QUICK)


def test_started_killed_and_restarted_without_a_function_of_origins(
    admin: str, new_plain: Callable[[], Bridge]
) -> None:
    bridge = new_plain()
    for turn in range(4):
        bridge.start().streaming(admin)
        insert(admin, range(turn * 500, turn * 500 + 500))
        if turn < 3:
            await_topic(bridge)
            bridge.kill()
    bridge.caught_up(admin)
    eventually(lambda: bridge.progress()[-1].witness.lsn > 0, what="the record notes the sequence")
    code, status = _status(bridge)
    (host,) = status["hosts"]
    assert (code, host["witness"], host["problem"]) == (0, "sequence", None)
    assert host["origin_lsn"] > 0
    assert bridge.stop() == 0, bridge.output
    record = bridge.progress()[-1]
    assert record.witness.kind == "sequence"
    assert 0 < record.witness.lsn <= position(admin, bridge) <= record.position.end_lsn
    assert_once(bridge, admin)
    with psycopg.connect(admin, autocommit=True) as connection:
        query = "SELECT count(*) FROM pg_replication_origin WHERE roname LIKE %s"
        assert connection.execute(query, [f"%{bridge.slot}%"]).fetchone() == (0,)
    assert not [topic for topic in bridge.topics() if "witness" in topic]
    done = teardown(bridge, "--yes")
    assert done.returncode == 0, done.stderr
    assert f"sequence {sequence_of(bridge)}" in done.stdout
    assert "nothing of it is there" in teardown(bridge, "--yes").stdout


@pytest.mark.long
def test_a_failover_under_load(new_pair: NewPair, new_bridge: NewBridge, topic_prefix: str) -> None:
    trio = new_pair()
    role = make_role(trio.primary, trio.dbname, topic_prefix)
    admin, standby = trio.primary.conninfo(trio.dbname), trio.standby.conninfo(trio.dbname)
    both = trio.primary.conninfo(
        trio.dbname,
        user=role,
        host="127.0.0.1,127.0.0.1",
        port=f"{trio.primary.port},{trio.standby.port}",
    )
    bridge = new_bridge(both, witness="sequence").start().streaming(admin)
    insert(admin, range(100))
    await_ready(trio.primary, trio.standby, bridge.slot)
    acknowledged: list[int] = []

    def load() -> None:
        with psycopg.connect(admin, autocommit=True) as connection:
            for number in range(100, 100_000):
                try:
                    connection.execute("INSERT INTO t VALUES (%s)", [number])
                except psycopg.Error:
                    return
                acknowledged.append(number)

    writer = threading.Thread(target=load)
    writer.start()
    eventually(lambda: len(acknowledged) > 300, what="300 rows are there", timeout_s=60)
    bridge.kill()
    bridge.start().streaming(admin)
    eventually(lambda: len(acknowledged) > 600, what="600 rows are there", timeout_s=60)
    trio.primary.kill()
    promote(trio)
    writer.join()
    bridge.streaming(standby)
    insert(standby, range(200_000, 200_100))
    bridge.caught_up(standby)
    eventually(
        lambda: (
            bridge.progress()[-1].server.timeline == 2 and bridge.progress()[-1].witness.lsn > 0
        ),
        what="the sequence was moved on the new timeline",
    )
    assert bridge.stop() == 0, bridge.output
    assert_once(bridge, standby)
    there = {event["after"]["id"] for event in bridge.events("t")}
    assert there >= {*acknowledged}
    old = new_bridge(
        trio.primary.conninfo(trio.dbname, user=role),
        witness="sequence",
        connect_deadline_ms=patient_ms(1_000),
    )
    trio.primary.start()
    assert old.start().exit_code() == ExitCode.TIMELINE, old.output


@pytest.mark.long
def test_kafka_lost_the_progress_or_has_less(admin: str, new_plain: Callable[[], Bridge]) -> None:
    bridge = new_plain()
    run(bridge, admin, range(3))
    record, kept = bridge.progress()[-1], position(admin, bridge)
    tell(admin, f"SELECT setval('{sequence_of(bridge)}', {record.position.end_lsn + 1000})")
    line = refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, "Kafka lost committed data")
    assert f"the witness sequence has {format_lsn(record.position.end_lsn + 1000)}" in line
    assert "somebody has set the sequence" in line
    tell(admin, f"SELECT setval('{sequence_of(bridge)}', {kept})")
    run(bridge, admin, range(3, 6))
    assert_once(bridge, admin)
    drop_progress(bridge)
    line = refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, "no progress record")
    assert "the witness sequence has" in line and "restored from a dump" in line


@pytest.mark.long
@pytest.mark.parametrize("known", [True, False])
def test_a_sequence_that_was_set_back(
    pair: Provider,
    fresh_database: str,
    admin: str,
    new_bridge: NewBridge,
    topic_prefix: str,
    *,
    known: bool,
) -> None:
    """By pg_restore, say. The WAL tells it from a restored volume, where it is readable."""
    role = make_role(pair.primary, fresh_database, topic_prefix)
    conninfo = pair.primary.conninfo(fresh_database, user=role)
    bridge = new_bridge(conninfo, witness="sequence", snapshot={"mode": "when_needed"}, **QUICK)
    run(bridge, admin, range(3))
    eventually(partial(_killed_after_move, bridge, admin), what="the record is of the move")
    record = bridge.progress()[-1]
    if not known:  # as of a logical message
        put(bridge, altered(record, xid=0))
        record = bridge.progress()[-1]
    tell(admin, f"SELECT setval('{sequence_of(bridge)}', {record.witness.lsn - 8})")
    told = "set back (setval, pg_restore), the server" if known else "either it was set back alone"
    line = refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, told)
    assert "witness sequence is at" in line
    assert ("slotbridge recover" not in line) is known
    assert bridge.progress()[-1] == record, "nothing was repaired"
    assert "the topics are repaired" not in bridge.output
    remedy = line[line.index("SELECT setval") :]
    tell(admin, remedy[: remedy.index(")") + 1])
    run(bridge, admin, range(1000, 1003))
    assert_once(bridge, admin)


def _killed_after_move(bridge: Bridge, admin: str) -> bool:
    bridge.start().streaming(admin)
    lsn = bridge.progress()[-1].position.end_lsn
    eventually(lambda: bridge.progress()[-1].position.end_lsn > lsn, what="the record goes on")
    bridge.kill()
    record = bridge.progress()[-1]
    position = record.position
    return (
        bool(position.xid) and position.end_lsn >= record.witness.wal_lsn > position.commit_lsn > 0
    )


@pytest.mark.long
def test_a_dropped_sequence_is_told_with_its_remedy(
    admin: str, new_plain: Callable[[], Bridge]
) -> None:
    bridge = new_plain()
    run(bridge, admin, range(3))
    tell(admin, f"DROP SEQUENCE {sequence_of(bridge)}")
    line = refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, "witness sequence has no position")
    remedy = line[line.index("CREATE SEQUENCE") : line.index("; GRANT")]
    tell(admin, *remedy.split("; "))
    assert refusal(bridge.start(), ExitCode.PRIVILEGE_MISSING, "may not read and move")
    role = psycopg.conninfo.conninfo_to_dict(bridge.conninfo)["user"]
    tell(admin, f'GRANT SELECT, UPDATE ON SEQUENCE {sequence_of(bridge)} TO "{role}"')
    run(bridge, admin, range(3, 6))
    assert_once(bridge, admin)


@pytest.mark.long
def test_a_sequence_of_an_administrator(
    pair: Provider, fresh_database: str, admin: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    """The role may create nothing; the refusal tells what to grant."""
    role = make_role(pair.primary, fresh_database, topic_prefix, creates=False)
    conninfo = pair.primary.conninfo(fresh_database, user=role)
    bridge = new_bridge(conninfo, witness="sequence", **QUICK)
    line = refusal(bridge.start(), ExitCode.PRIVILEGE_MISSING, "CREATE SCHEMA IF NOT EXISTS")
    hint = line[line.index("CREATE SCHEMA") :].replace("the bridge's role", role)
    tell(admin, *hint.strip("'\"").split("; "))
    run(bridge, admin, range(3))
    assert_once(bridge, admin)
    denied = teardown(bridge, "--yes")
    assert denied.returncode == ExitCode.PRIVILEGE_MISSING
    assert f"may not drop sequence {sequence_of(bridge)}" in denied.stderr


@pytest.mark.long
def test_the_scripts_roles_and_what_slotfailover_sees(
    pair: Provider, fresh_database: str, admin: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    tell(admin, "CREATE TABLE t (id int PRIMARY KEY, note text)")
    suffix = ODD + topic_prefix
    slot, publication = f"s_{topic_prefix}", f"p_{topic_prefix}"
    made = make_roles(
        pair.primary, fresh_database, publication=publication, suffix=suffix, sequence=slot
    )
    conninfo = pair.primary.conninfo(fresh_database, user=made.bridge)
    bridge = new_bridge(conninfo, slot=slot, witness="sequence", **QUICK)
    run(bridge, admin, range(3))
    assert_once(bridge, admin)
    seen = pair.primary.conninfo(fresh_database, user=made.failover)
    with psycopg.connect(seen, autocommit=True) as connection:
        found = read_positions(connection, slot)
        assert found is not None and found[f"slotbridge_{slot}"] == position(admin, bridge)
    tell(admin, f'REVOKE SELECT ON SEQUENCE {sequence_of(bridge)} FROM "{quoted(made.failover)}"')
    with psycopg.connect(seen, autocommit=True) as connection:
        assert read_positions(connection, slot) is None, "hidden is not the same as never moved"


def quoted(role: str) -> str:
    return role.replace('"', '""')


@pytest.mark.long
def test_from_an_origin_to_a_sequence_and_back(admin: str, new_bridge: NewBridge) -> None:
    """The other witness still counts, and keeps a second bridge waiting."""
    tell(admin, "CREATE TABLE t (id int PRIMARY KEY, note text)")
    first, second = new_bridge(admin, **QUICK), new_bridge(admin, witness="sequence", **QUICK)
    first.start().streaming()
    second.start()
    eventually(lambda: "hot standby" in second.output, what="the second bridge waits")
    insert(admin, range(3))
    first.caught_up()
    assert first.stop() == 0, first.output
    second.streaming()
    assert "not judged: the progress record lacks it" in second.output
    assert "witness sequence's position" in second.output
    first.start()
    eventually(lambda: first.output.count("hot standby") > 0, what="the first bridge waits")
    assert first.stop() == 0, first.output
    insert(admin, range(3, 6))
    second.caught_up()
    assert second.stop() == 0, second.output
    assert second.progress()[-1].witness.kind == "sequence"
    run_once(first, range(6, 9))
    assert first.progress()[-1].witness.kind == "origin"
    assert_once(first, admin)
    drop_progress(first)
    drop_origin(first)
    line = refusal(first.start(), ExitCode.WITNESSES_DISAGREE, "no progress record")
    assert "the witness sequence has" in line


def run(bridge: Bridge, admin: str, rows: range) -> None:
    """Rows go to Kafka, the record notes the sequence, and the bridge stops."""
    bridge.start().streaming(admin)
    insert(admin, rows)
    bridge.caught_up(admin)
    lsn = bridge.progress()[-1].witness.lsn
    eventually(lambda: bridge.progress()[-1].witness.lsn > lsn, what="the record notes it")
    assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_readiness_waits_until_the_first_heartbeat_was_written(
    admin: str, new_bridge: NewBridge
) -> None:
    """A lock keeps the session from moving its witness; it streams all the same."""
    bridge = new_bridge(admin, witness="sequence", http_port=0)
    assert bridge.start().streaming().stop() == 0, bridge.output
    with psycopg.connect(admin) as lock:
        bridge.start(**{VARIABLE: "started:1:stop"})
        process = psutil.Process(bridge.pid)
        stopped = psutil.STATUS_STOPPED
        eventually(lambda: process.status() == stopped, what="it is about to stream")
        lock.execute(f"ALTER SEQUENCE {sequence_of(bridge)} CACHE 1".encode())
        process.resume()
        bridge.streaming()
        assert "no heartbeat of this session" in unready(bridge)
        lock.rollback()
    eventually(lambda: unready(bridge) == "", what="the first heartbeat is judged")
    assert bridge.sessions == 2, bridge.output
    assert bridge.stop() == 0, bridge.output
