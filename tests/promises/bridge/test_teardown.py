"""`slotbridge teardown` on real servers, and what a start says of rows that it will not send."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from psycopg import sql

from schemas.errors import ExitCode, Retryable
from services.bridge.cli import teardown as bridge_teardown
from services.testbed.pair import set_parameter
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.providers.interface import Broker, Provider
from tests.providers.roles import make_roles
from tests.providers.waiting import eventually


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    return pair.primary.conninfo(fresh_database)


def teardown(bridge: Bridge, *options: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).parent / "slotbridge")
    command = [program, "teardown", "--config", str(bridge.config), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, input="n\n")


def test_a_broker_that_does_not_answer_is_no_bug_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_teardown, "_DELETE_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        admin = AdminClient({"bootstrap.servers": address, "log_level": 2})
        with pytest.raises(Retryable) as found:
            bridge_teardown.delete_topic(admin, "p.t")
    assert found.value.exit_code == ExitCode.KAFKA_UNREACHABLE
    assert found.value.subject == "topic p.t"


def test_teardown_removes_what_the_bridge_made_and_nothing_while_it_runs(
    pair: Provider, conninfo: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute("INSERT INTO t SELECT generate_series(1, 1000)")
        connection.execute("ANALYZE t")
        bridge = new_bridge(conninfo).start().streaming()
        assert "rows that the tables already have are not sent" in bridge.output
        assert "rows_about=1000" in bridge.output
        used = teardown(bridge, "--yes")
        assert (used.returncode, "stop the bridge" in used.stderr) == (ExitCode.SLOT_IN_USE, True)
        assert bridge.stop() == 0, bridge.output

        def slot_is_free() -> bool:
            row = connection.execute(
                "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [bridge.slot]
            ).fetchone()
            return row == (False,)

        eventually(slot_is_free, what="the slot is free")
        assert teardown(bridge).returncode == ExitCode.CHECK_FAILED  # the answer was no
        options = ("--publication", "--topics", "--json")
        planned = teardown(bridge, "--dry-run", *options)
        assert planned.returncode == 0, planned.stderr
        done = teardown(bridge, "--yes", *options)
        assert done.returncode == 0, done.stderr
        removed = [(one["kind"], one["name"]) for one in json.loads(done.stdout)["removed"]]
        assert removed == [
            (one["kind"], one["name"]) for one in json.loads(planned.stdout)["removed"]
        ]
        assert [kind for kind, _ in removed[:3]] == ["slot", "origin", "publication"]
        assert removed[-1] == ("topic", f"{bridge.prefix}.progress")
        left = connection.execute(
            "SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name = %(slot)s)"
            " + (SELECT count(*) FROM pg_replication_origin WHERE roname LIKE '%%' || %(slot)s)"
            " + (SELECT count(*) FROM pg_publication WHERE pubname = %(publication)s)",
            {"slot": bridge.slot, "publication": bridge.publication},
        ).fetchone()
        assert left == (0,)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    eventually(
        lambda: not [name for name in admin.list_topics().topics if name.startswith(bridge.prefix)],
        what="the topics are gone",
    )
    again = teardown(bridge, "--yes", "--publication", "--topics")
    assert (again.returncode, again.stdout) == (0, "nothing of it is there\n"), again.stderr


@pytest.mark.long
def test_teardown_checks_all_rights_before_it_removes_anything(
    pair: Provider, conninfo: str, fresh_database: str, topic_prefix: str, new_bridge: NewBridge
) -> None:
    """The bridge's role may drop the slot, but not the origin or another role's publication."""
    publication = f"p_{topic_prefix}"
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
    made = make_roles(
        pair.primary, fresh_database, publication=publication, suffix=f"_{topic_prefix}"
    )
    bridge = new_bridge(pair.primary.conninfo(fresh_database, user=made.bridge))
    bridge.start().streaming(conninfo)
    assert bridge.stop() == 0, bridge.output
    for options in (("--dry-run",), ("--yes",), ("--yes", "--publication")):
        refused = teardown(bridge, *options)
        assert refused.returncode == ExitCode.PRIVILEGE_MISSING, refused.stdout + refused.stderr
        assert f"may not drop origin slotbridge_{bridge.slot}" in refused.stderr
        assert ("publication" in refused.stderr) is ("--publication" in options)
        assert "nothing is removed" in refused.stderr
    with psycopg.connect(conninfo, autocommit=True) as connection:
        slot = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s"
        assert connection.execute(slot, [bridge.slot]).fetchone() == (1,)
        function = "EXECUTE ON FUNCTION pg_replication_origin_drop(text)"
        role = sql.Identifier(made.bridge)
        connection.execute(sql.SQL(f"GRANT {function} TO {{}}").format(role))
    done = teardown(bridge, "--yes")
    assert done.returncode == 0, done.stderr
    names = f"slot {bridge.slot}", f"origin slotbridge_{bridge.slot}"
    assert [f"removed {name}" in done.stdout.splitlines() for name in names] == [True, True]


@pytest.mark.long
@pytest.mark.usefixtures("kafka")
def test_teardown_refuses_while_commits_would_wait_for_the_bridge(
    pair: Provider, conninfo: str, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo).start().streaming()
    assert bridge.stop() == 0, bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        row = connection.execute("SHOW synchronous_standby_names").fetchone()
    assert row is not None
    set_parameter(pair.primary, "synchronous_standby_names", f'"slotbridge_{bridge.slot}"')
    try:
        refused = teardown(bridge, "--yes")
    finally:
        set_parameter(pair.primary, "synchronous_standby_names", row[0])
    assert refused.returncode == ExitCode.SERVER_SETTING
    assert "commits wait for the bridge" in refused.stderr
    assert teardown(bridge, "--yes").returncode == 0
