"""Rows of a snapshot that are read from a standby (`snapshot.conninfo`)."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from schemas.errors import ExitCode, SetupError
from services.bridge.cli.app import app
from services.bridge.failpoints import VARIABLE
from services.bridge.snapshot.reader import SnapshotReader
from services.bridge.snapshot.row_reader import NotNow
from services.bridge.snapshot.standby import Standby
from services.bridge.snapshot.standby_state import require_written
from services.bridge.snapshot.tables import TableShape
from services.bridge.source.hosts import host_name
from services.postgres.server import Server as Identity
from services.postgres.server import read_server, written_lsn
from services.postgres.sessions import ROWS as READING
from services.testbed.pair import set_parameter
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import (
    INITIAL,
    Changes,
    assert_exact,
    await_chunks,
    chunks,
    done,
    fill,
    hasten,
    read_all,
    rows_a_second,
    told,
)
from tests.promises.bridge.test_metrics import await_series
from tests.promises.bridge.test_preflight import Examined
from tests.providers.databases import connect
from tests.providers.interface import Provider, Server
from tests.providers.waiting import eventually, patient, patient_ms

ROWS = 2_000


def test_rows_under_constant_change_come_from_the_standby(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """By two workers. The bridge is killed in the middle of a chunk; then nothing is replayed."""
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, ROWS)
    slow = {"chunk_rows_max": 20, "rows_per_second_max": rows_a_second(100), "workers": 2}
    other = pair.standby.conninfo(fresh_database)
    snapshot = {**INITIAL, **slow, "conninfo": other}
    bridge = new_bridge(conninfo, snapshot=snapshot)
    with Changes(conninfo, ROWS) as changes, connect(pair.standby) as standby:
        bridge.start(**{VARIABLE: "chunk read:3"})
        assert bridge.exit_code() == -9, bridge.output
        bridge.start().streaming()
        await_chunks(bridge, 4)
        standby.execute("SELECT pg_wal_replay_pause()")
        try:
            what = "the bridge tells what it waits for"
            eventually(lambda: "its replay is paused" in bridge.output, what=what)
            bridge.caught_up()
            read, before = chunks(bridge), changes.committed
            eventually(lambda: changes.committed > before + 20, what="rows change")
            bridge.caught_up()
            assert chunks(bridge) == read, "rows of another server"
            assert ("snapshot-standby-waits", host_name(other)) in Examined(bridge).names()
        finally:
            standby.execute("SELECT pg_wal_replay_resume()")
        hasten(bridge)
        done(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)
    assert {one.read_from for one in told(bridge)} == {"standby"}


@pytest.mark.long
def test_a_standby_that_lags_for_long_holds_up_rows_and_no_changes(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """By more than `snapshot.standby_wait_ms`; the metric of an alert tells it until the end."""
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 300)
    other = pair.standby.conninfo(fresh_database)
    eventually(lambda: _may_connect(other), what="the standby has the database")
    bridge = new_bridge(conninfo, http_port=0, snapshot={**INITIAL, "conninfo": other})
    waiting = "slotbridge_snapshot_waiting_seconds"
    lag = "SELECT extract(epoch FROM now() - pg_last_xact_replay_timestamp()) > 6"
    with connect(pair.standby) as standby, Changes(conninfo, 300) as changes:
        eventually(lambda: changes.committed > 3, what="rows change")
        standby.execute("SELECT pg_wal_replay_pause()")
        try:
            bridge.start().streaming()
            what = "the standby is 6 s behind, and the snapshot waits for as long"
            await_series(bridge, lambda seen: seen.get(waiting, 0) > 6, what)
            assert standby.execute(lag).fetchone() == (True,)
            before = changes.committed
            eventually(lambda: changes.committed > before + 20, what="rows change")
            bridge.caught_up()
            assert chunks(bridge) == 0, "rows of another server"
        finally:
            standby.execute("SELECT pg_wal_replay_resume()")
        done(bridge)
        await_series(bridge, lambda seen: seen[waiting] == 0, "the snapshot waits no longer")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)
    assert {one.read_from for one in told(bridge)} == {"standby"}


@pytest.mark.long
@pytest.mark.parametrize("named", ["standby", "primary"])
def test_what_the_standby_is_not_asked_for_comes_from_the_primary(
    named: str, pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Tables without a key; all rows where the server has become a primary."""
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 30)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE log (n int)")
        connection.execute("INSERT INTO log SELECT generate_series(1, 20)")
    servers = {"standby": pair.standby, "primary": pair.primary}
    other = servers[named].conninfo(fresh_database)
    bridge = new_bridge(conninfo, snapshot={**INITIAL, "without_key": "read", "conninfo": other})
    read_all(bridge)
    assert bridge.stop() == 0, bridge.output
    assert {one.table: one.read_from for one in told(bridge)} == {"log": "primary", "t": named}
    assert sorted(event["after"]["n"] for event in bridge.events("log")) == [*range(1, 21)]
    assert sum(event["op"] == "r" for event in bridge.events("t")) == 30
    assert ("is not a standby" in bridge.output) is (named == "primary")
    assert "rows of tables without a key are read from the primary" in bridge.output
    shown = command("snapshot", "status", bridge).splitlines()
    assert shown[1].split()[-2:] == ["read", "from"]
    assert [line.split()[-1] for line in shown[2:]] == ["primary", named]
    assert "rows of a snapshot are read from the standby" in command("check-config", bridge)
    promoted = ("snapshot-standby-promoted", host_name(other)) in Examined(bridge).names()
    assert promoted is (named == "primary")


def test_a_standby_of_another_cluster_is_refused(
    pair: Provider,
    subscriber: Server,
    fresh_database: str,
    fresh_subscriber_database: str,
    new_bridge: NewBridge,
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 5)
    other = subscriber.conninfo(fresh_subscriber_database)
    bridge = new_bridge(conninfo, snapshot={**INITIAL, "conninfo": other}).start()
    assert bridge.exit_code() == ExitCode.WRONG_DATABASE, bridge.output
    assert "snapshot.conninfo names another database" in bridge.output
    assert str(subscriber.port) in bridge.output
    assert chunks(bridge) == 0
    assert ("snapshot-standby-foreign", host_name(other)) in Examined(bridge).names()


def command(*words: str | Bridge) -> str:
    """Return what a command of `slotbridge` prints for the configuration of the bridge."""
    *names, bridge = words
    assert isinstance(bridge, Bridge)
    done = CliRunner().invoke(app, [*map(str, names), "--config", str(bridge.config)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.long
def test_a_standby_that_is_on_another_timeline_is_waited_for(
    pair: Provider, fresh_database: str
) -> None:
    """Its numbers may be beyond what the primary has written."""
    with psycopg.connect(pair.primary.conninfo(fresh_database)) as connection:
        server = replace(read_server(connection), timeline=99)
    other = pair.standby.conninfo(fresh_database)
    standby = Standby(other, "p", "s", server, deadline_ms=patient_ms(10_000))
    told = "replays timeline 1, the primary writes 99"
    with contextlib.closing(standby), pytest.raises(NotNow, match=told):
        standby.approach(1)


@pytest.mark.long
def test_a_role_that_does_not_see_the_timeline_is_refused(
    pair: Provider, fresh_database: str
) -> None:
    role = f"r_{fresh_database}"
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'".encode())
        server = read_server(connection)
        lsn = written_lsn(connection)
        other = make_conninfo(pair.standby.conninfo(fresh_database), user=role, password="x")
        eventually(lambda: _may_connect(other), what="the standby has the role")
        standby = Standby(other, "p", "s", server, deadline_ms=patient_ms(10_000))
        with contextlib.closing(standby), pytest.raises(SetupError) as refused:
            standby.approach(lsn)
        assert "GRANT pg_read_all_stats" in refused.value.hint
        connection.execute(f"DROP ROLE {role}".encode())


def _may_connect(conninfo: str) -> bool:
    try:
        psycopg.connect(conninfo).close()
    except psycopg.OperationalError:
        return False
    return True


@contextlib.contextmanager
def _on_both(
    primary: str, standby: str, server: Identity
) -> Iterator[tuple[SnapshotReader, Standby, TableShape]]:
    """Readers of the publication's only table on both servers; the standby is near."""
    on_primary = SnapshotReader(primary, "p", "s", server, deadline_ms=patient_ms(10_000))
    on_standby = Standby(standby, "p", "s", server, deadline_ms=patient_ms(10_000))
    with contextlib.closing(on_primary), contextlib.closing(on_standby):
        (shape,) = on_primary.inspect().shapes
        assert on_standby.approach(on_primary.mark("begun"), patient(10))
        yield on_primary, on_standby, shape


@pytest.mark.long
def test_a_standby_tells_its_collations_and_stays_within_what_the_primary_has_written(
    pair: Provider, fresh_database: str
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "CREATE COLLATION sorted (provider = libc, locale = 'C');"
            " CREATE COLLATION other (provider = libc, locale = 'C');"
            " CREATE TYPE r AS RANGE (subtype = text, collation = sorted);"
            ' CREATE TABLE t (a text COLLATE "C", b text, c r, PRIMARY KEY (a, b, c));'
            # No rows: what the server tells of a locale does not need one that is there.
            " UPDATE pg_collation SET collcollate = 'xx_XX'"
            " WHERE collname IN ('sorted', 'other')"
        )
        connection.execute("CREATE PUBLICATION p FOR TABLE t")
        server = read_server(connection)
    other = pair.standby.conninfo(fresh_database, options="-c search_path=pg_catalog")
    with _on_both(conninfo, other, server) as (reader, standby, shape):
        reader.begin(shape)
        standby.begin(shape)
        assert standby.shapes([shape.relation.oid]) == [shape], "whatever its search_path was"
        versions = reader.order_versions(shape, "")
        assert versions.keys() == {"public.sorted"}, "of a locale that sorts, and not by bytes"
        assert standby.order_versions(shape, "") == versions
        other, unknown = "b > 'x' COLLATE other", "b > 'x' COLLATE /**/ other"
        assert {"public.sorted", "public.other"} <= reader.order_versions(shape, other).keys()
        assert standby.order_versions(shape, unknown)['"COLLATE"'] is None
        replayed = standby.finish()
        require_written(replayed, reader.mark("read"), standby.name)


@pytest.mark.long
def test_what_a_standby_can_not_read_at_all_is_told_from_what_it_can_not_read_now(
    pair: Provider, fresh_database: str
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id);"
            " CREATE UNLOGGED TABLE leaf PARTITION OF t FOR VALUES FROM (0) TO (9);"
            " CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)"
        )
        server = read_server(connection)
    other = pair.standby.conninfo(fresh_database)
    with _on_both(conninfo, other, server) as (_, standby, shape):
        standby.begin(shape)
        with pytest.raises(NotNow, match="unlogged relations") as seen:
            standby.read(shape, None, "", rows_max=9, bytes_max=99)
        assert seen.value.never
        standby.end()


@pytest.fixture
def impatient(pair: Provider) -> Iterator[None]:
    """A standby whose recovery waits for no query."""
    set_parameter(pair.standby, "max_standby_streaming_delay", "0")
    yield
    set_parameter(pair.standby, "max_standby_streaming_delay", "30s")


@pytest.mark.long
def test_rows_whose_reading_is_cancelled_by_recovery_are_read_later(
    pair: Provider, fresh_database: str, impatient: None
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 3)
    with (
        psycopg.connect(conninfo, autocommit=True) as connection,
        connect(pair.standby) as watching,
    ):
        connection.execute("CREATE PUBLICATION p FOR TABLE t")
        server = read_server(connection)
        reader = SnapshotReader(conninfo, "p", "s", server, deadline_ms=patient_ms(10_000))
        (shape,) = reader.inspect().shapes
        lsn = reader.mark("token")
        reader.close()
        standby = Standby(
            pair.standby.conninfo(fresh_database), "p", "s", server, deadline_ms=patient_ms(10_000)
        )
        assert standby.approach(lsn, patient(10))
        standby.begin(shape)
        reads = (
            "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND wait_event = 'PgSleep'"
        )

        def conflict() -> None:
            what = "rows are read"
            eventually(lambda: watching.execute(reads, [READING.application]).fetchone(), what=what)
            connection.execute("ALTER TABLE t ADD more int")

        thread = threading.Thread(target=conflict)
        thread.start()
        with pytest.raises(NotNow, match="conflict with recovery") as seen:
            standby.read(shape, None, "pg_sleep(600) IS NULL", rows_max=9, bytes_max=99)
        assert seen.value.slow, "the next chunk is smaller"
        thread.join(patient(30))
        standby.end()
        standby.close()
