"""Bad input: one clear line with the remedy, its own exit code, nothing half-created."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.pq.abc import PGconn
from structlog.testing import capture_logs

from schemas.errors import ExitCode, SetupError
from services.bridge.source.server_requirements import check_server
from services.postgres.server import Server, read_server
from services.runtime.process import warn_once
from tests.bridge.progress.test_ledger import SERVER
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import PATIENCE_S, Bridge
from tests.providers.databases import once_free
from tests.providers.interface import Provider
from tests.providers.interface import Server as LiveServer
from tests.providers.waiting import eventually, patient_ms

QUICK = {"connect_deadline_ms": patient_ms(1_700)}
"""Of bridges that do not start: one that is to, on a busy machine, may need several attempts."""


def last_line(text: str) -> str:
    line = text.strip().splitlines()[-1]
    assert line.startswith("error: "), text
    assert "Hint: " in line, line
    return line


def run(config: str, folder: Path, **environment: str) -> tuple[int, str]:
    path = folder / "c.yaml"
    path.write_text(config, encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).parent / "slotbridge", "run", "--config", path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **environment},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("source: {conninfo: host=a, slott: x}", "did you mean `slot`?"),
        ("source: {conninfo: host=a, two_phase: true, origin: none}", "can't go together"),
        ("source: {conninfo: host=a, slot: 'Bad Slot'}", "source.slot"),
        ("source: {conninfo: host=a}\nkafka: {bootstrap_servers: b}", "kafka.topic_prefix"),
        ("source: {conninfo: host=a}", "the section `kafka` is missing"),
        ("kafka: {bootstrap_servers: b, topic_prefix: p}", "the section `source` is missing"),
        ("bridge: {commit_interval_ms: soon}", "bridge.commit_interval_ms"),
        ("source: {conninfo: host=a, tables: [t]}", "schema.table"),
        ("[not a mapping", "is not YAML"),
        (
            "source: {conninfo: 'nonsense=1'}\nkafka: {bootstrap_servers: b, topic_prefix: p}",
            "source.conninfo is not a connection string",
        ),
        (
            "source: {conninfo: 'host=h password=a s3cret'}\n"
            "kafka: {bootstrap_servers: b, topic_prefix: p}",
            "source.conninfo is not a connection string",
        ),
        (
            "source: {conninfo: 'postgresql://u:s3cret'}\n"
            "kafka: {bootstrap_servers: b, topic_prefix: p}",
            "source.conninfo is not a connection string",
        ),
    ],
)
def test_wrong_settings(config: str, expected: str, tmp_path: Path) -> None:
    code, errors = run(config, tmp_path)
    assert code == ExitCode.SETTINGS, errors
    assert expected in errors
    assert "s3cret" not in errors
    assert errors.count("error: ") == 1


@pytest.mark.slow
def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    config = "source: {conninfo: host=a}\nkafka: {bootstrap_servers: b, topic_prefix: p}"
    code, errors = run(config, tmp_path, SLOTBRIDGE_SOURCE__SLOT="Bad Slot")
    assert code == ExitCode.SETTINGS
    assert "SLOTBRIDGE_SOURCE__SLOT" in errors


@pytest.mark.long
def test_an_unreachable_server(new_bridge: NewBridge) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        bridge = new_bridge(f"host=127.0.0.1 port={port} user=u dbname=d", **QUICK).start()
        assert bridge.exit_code() == ExitCode.SERVER_UNREACHABLE, bridge.output
    assert str(port) in last_line(bridge.output)


def test_an_unreachable_broker(
    pair: Provider, fresh_database: str, tmp_path: Path, topic_prefix: str
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    code, errors = run(
        f"source: {{conninfo: '{conninfo}', slot: s_{topic_prefix}}}\n"
        f"kafka: {{bootstrap_servers: '127.0.0.1:1', topic_prefix: {topic_prefix}}}\n"
        "bridge: {connect_deadline_ms: 1000}",
        tmp_path,
    )
    assert code == ExitCode.KAFKA_UNREACHABLE, errors
    assert "kafka.bootstrap_servers" in last_line(errors)
    with psycopg.connect(conninfo) as connection:
        slots = connection.execute(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", [f"s_{topic_prefix}"]
        ).fetchone()
    assert slots == (0,), "a slot was left behind"


@pytest.mark.long
def test_wrong_kafka_options(pair: Provider, fresh_database: str, tmp_path: Path) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    code, errors = run(
        f"source: {{conninfo: '{conninfo}'}}\n"
        "kafka: {bootstrap_servers: b, topic_prefix: p, options: {no.such.option: 1}}",
        tmp_path,
    )
    assert code == ExitCode.SETTINGS, errors
    assert "no.such.option" in last_line(errors)


@pytest.mark.long
def test_a_connection_setting_that_libpq_refuses(pair: Provider, new_bridge: NewBridge) -> None:
    bridge = new_bridge(pair.primary.conninfo("postgres", sslmode="bogus"), **QUICK).start()
    assert bridge.exit_code() == ExitCode.SETTINGS, bridge.output
    assert "sslmode" in last_line(bridge.output)


@pytest.mark.long
def test_a_missing_database_and_a_missing_role(pair: Provider, new_bridge: NewBridge) -> None:
    bridge = new_bridge(pair.primary.conninfo("nowhere"), **QUICK).start()
    assert bridge.exit_code() == ExitCode.SERVER_SETTING, bridge.output
    assert '"nowhere" does not exist' in last_line(bridge.output)
    bridge = new_bridge(pair.primary.conninfo("postgres", user="nobody_here"), **QUICK).start()
    assert bridge.exit_code() == ExitCode.PRIVILEGE_MISSING, bridge.output


def test_missing_privileges(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    role = f"r_{topic_prefix}"
    with psycopg.connect(pair.primary.conninfo(fresh_database), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        conninfo = pair.primary.conninfo(fresh_database, user=role)
        bridge = new_bridge(conninfo, **QUICK).start()
        assert bridge.exit_code() == ExitCode.PRIVILEGE_MISSING, bridge.output
        last_line(bridge.output)
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


@pytest.mark.parametrize(
    ("level", "effective", "accepted"),
    [
        ("logical", "", True),
        ("replica", "", False),
        ("replica", "logical", True),
        ("replica", "replica", True),  # the bridge's slot will be the first
        ("minimal", "minimal", False),
    ],
)
def test_levels_as_servers_before_and_of_19_tell_them(
    level: str, effective: str, accepted: bool
) -> None:
    """By values: no server of 19 is packaged."""
    server = replace(SERVER, wal_level=level, effective_wal_level=effective)
    if accepted:
        check_server(server)
    else:
        with pytest.raises(SetupError, match=f"wal_level is {level}"):
            check_server(server)


def test_a_newer_version_is_told_once_and_not_refused() -> None:
    warn_once.cache_clear()
    with capture_logs() as logs:
        for _ in range(2):
            check_server(replace(SERVER, version=200001))
        check_server(replace(SERVER, version=180010))
    assert [one["log_level"] for one in logs] == ["warning"]
    assert "PostgreSQL 20 is newer than 19" in logs[0]["event"]


def test_wal_level_and_version() -> None:
    good = Server(
        system_identifier="1",
        timeline=1,
        version=170005,
        database="d",
        in_recovery=False,
        wal_level="logical",
        synchronized_standby_slots="",
        wal_sender_timeout_ms=60_000,
    )
    check_server(good)
    for version, name in ((170004, "17.4"), (170000, "17.0"), (160010, "16.10")):
        with pytest.raises(SetupError, match=f"PostgreSQL {re.escape(name)} is too old") as old:
            check_server(replace(good, version=version))
        assert old.value.exit_code is ExitCode.SERVER_VERSION
        assert "17.5" in old.value.hint
    with pytest.raises(SetupError, match="wal_level is replica") as level:
        check_server(replace(good, wal_level="replica"))
    assert level.value.exit_code is ExitCode.WAL_LEVEL


@pytest.mark.long
def test_two_phase_needs_18(oldest_pair: Provider) -> None:
    with psycopg.connect(oldest_pair.primary.conninfo()) as connection:
        server = read_server(connection)
    check_server(server)
    with pytest.raises(SetupError, match="PostgreSQL 17 can lose prepared") as old:
        check_server(server, two_phase=True)
    assert old.value.exit_code is ExitCode.SERVER_VERSION


@pytest.mark.long
def test_a_live_server_without_logical_wal(new_pair: NewPair, new_bridge: NewBridge) -> None:
    trio = new_pair(settings={"wal_level": "replica", "sync_replication_slots": "off"})
    bridge = new_bridge(trio.primary.conninfo(trio.dbname), **QUICK).start()
    assert bridge.exit_code() == ExitCode.WAL_LEVEL, bridge.output
    assert "ALTER SYSTEM SET wal_level = logical" in last_line(bridge.output)
    with psycopg.connect(trio.primary.conninfo(trio.dbname)) as connection:
        left = connection.execute("SELECT count(*) FROM pg_publication").fetchone()
    assert left == (0,), "a publication was left behind"


@pytest.mark.long
@pytest.mark.since_18
def test_no_free_replication_origin(new_pair: NewPair, new_bridge: NewBridge) -> None:
    trio = new_pair(settings={"max_active_replication_origins": "1"})
    conninfo = trio.primary.conninfo(trio.dbname)
    first = new_bridge(conninfo).start().streaming()
    assert first.stop() == 0
    other = f"{first.prefix}x"
    bridge = new_bridge(conninfo, prefix=other, slot="another_slot", **QUICK).start()
    assert bridge.exit_code() == ExitCode.SERVER_SETTING, bridge.output
    assert "raise max_active_replication_origins" in last_line(bridge.output)


@pytest.mark.long
def test_a_slot_taken_by_another_process(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = new_bridge(conninfo).start().streaming()
    assert bridge.stop() == 0
    taken = taken_slot(conninfo, bridge)
    impatient = new_bridge(conninfo, **QUICK).start()
    assert impatient.exit_code() == ExitCode.SLOT_IN_USE, impatient.output
    last_line(impatient.output)
    taken.finish()
    bridge.start().streaming()
    assert bridge.stop() == 0


def taken_slot(conninfo: str, bridge: Bridge) -> PGconn:
    """Stream from the slot of a bridge that has ended; the caller closes the connection."""
    taken = psycopg.pq.PGconn.connect(f"{conninfo} replication=database".encode())
    command = (
        f"START_REPLICATION SLOT {bridge.slot} LOGICAL 0/0 "
        f"(proto_version '1', publication_names '{bridge.publication}')"
    )
    streams = psycopg.pq.ExecStatus.COPY_BOTH
    eventually(
        lambda: taken.exec_(command.encode()).status == streams, what="the former walsender is gone"
    )
    return taken


def test_a_slot_of_another_plugin(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = new_bridge(conninfo, **QUICK)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", [bridge.slot]
        )
    assert bridge.start().exit_code() == ExitCode.SERVER_SETTING, bridge.output
    assert "test_decoding" in last_line(bridge.output)


@pytest.mark.long
def test_a_port_in_use(pair: Provider, fresh_database: str, new_bridge: NewBridge) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        bridge = new_bridge(pair.primary.conninfo(fresh_database), http_port=port).start()
        assert bridge.exit_code() == ExitCode.PORT_IN_USE, bridge.output
        assert "another slotbridge may run here" in bridge.output
    assert str(port) in last_line(bridge.output)


def test_a_slot_that_someone_else_advanced(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo).start().streaming()
        assert bridge.stop() == 0
        connection.execute("INSERT INTO t VALUES (1)")
        advance = "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())"
        once_free(connection, advance, bridge.slot)
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    assert "can't be decoded again" in last_line(bridge.output)


def test_progress_that_is_lost_or_belongs_to_another_database(
    pair: Provider, subscriber: LiveServer, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = new_bridge(conninfo).start().streaming()
    assert bridge.stop() == 0
    other_topics = new_bridge(
        conninfo, prefix=f"{bridge.prefix}x", slot=bridge.slot, publication=bridge.publication
    ).start()
    assert other_topics.exit_code() == ExitCode.WITNESSES_DISAGREE, other_topics.output
    assert "no progress record" in last_line(other_topics.output)
    other_database = new_bridge(subscriber.conninfo(), slot=bridge.slot, **QUICK).start()
    assert other_database.exit_code() == ExitCode.WRONG_DATABASE, other_database.output
    last_line(other_database.output)


@pytest.mark.long
def test_a_host_that_refuses_us_for_good_while_the_primary_restarts(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """An operator is needed only where every host says so."""
    conninfo = pair.primary.conninfo(
        fresh_database,
        host="127.0.0.1,127.0.0.1",
        port=f"1,{pair.primary.port}",
        user="nobody_here",
    )
    bridge = new_bridge(conninfo, **QUICK).start()
    assert bridge.exit_code() == ExitCode.SERVER_UNREACHABLE, bridge.output
    line = last_line(bridge.output)
    assert "connection refused" in line and '"nobody_here" does not exist' in line
    both = pair.primary.conninfo(
        fresh_database,
        host="127.0.0.1,127.0.0.1",
        port=f"{pair.primary.port},{pair.primary.port}",
        user="nobody_here",
    )
    bridge = new_bridge(both, **QUICK).start()
    assert bridge.exit_code() == ExitCode.PRIVILEGE_MISSING, bridge.output
