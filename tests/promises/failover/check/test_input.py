"""What can't be judged, in each form of the answer; and connection strings of every kind."""

import json
from pathlib import Path

import pytest

from services.testbed.bed import Bed
from services.testbed.ports import free_port
from tests.promises.failover.check.examining import Examiner, examiner_of, set_on
from tests.promises.failover.conftest import NewTrio
from tests.promises.failover.servers import subscribe, tell


def test_answers_for_people_programs_and_plugins(sound: Examiner) -> None:
    people = sound.run()
    assert people.code == 0
    assert people.out.startswith("ready     s1 on b (b against ")
    assert "\x1b" not in people.out
    assert "  ok        pg-hba " in people.out
    assert people.out.splitlines()[-1].startswith("1 of 1 slots ready on b; 0 critical, 0 warnings")
    report = sound.run("--json").json
    assert (report["ready"], report["severity"], report["primary"]) == (True, "ok", "a")
    plugin = sound.run("--nagios")
    assert plugin.code == 0
    (line,) = plugin.out.splitlines()
    assert line.startswith("SLOTFAILOVER OK - 1 of 1 slots ready on b")
    assert "| ready=1;1:;;0;1 critical=0;;0;0 warning=0;0;;0 'not judged'=0;0;;0 " in line
    assert line.endswith("'s1 ahead'=0B;;0;0")
    assert sound.run("--nagios", "--json").code == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("node", "said"),
    [("zz", "zz is not one of the nodes a, b"), ("a", "a is the primary")],
)
def test_check_refuses_a_node_that_is_not_a_standby(sound: Examiner, node: str, said: str) -> None:
    ran = sound.run("--standby", node)
    assert ran.code == 2
    assert said in ran.err


def test_no_standby(sound: Examiner) -> None:
    sound.trio.standby.stop()
    found = sound.expect("standby-answers", "node-answers", "listed-slot-inactive")
    assert "nothing can take over" in found["standby-answers"][0]["consequence"]
    assert sound.run("--nagios").code == 2
    assert "NOT READY s1" in sound.run().out
    assert "does not answer" in sound.run("--standby", "b").err
    sound.trio.standby.start()


def test_a_role_that_sees_too_little(sound: Examiner, tmp_path: Path) -> None:
    """Else what is hidden would look like what is off."""
    trio = sound.trio
    tell(trio.primary, "CREATE ROLE feeble LOGIN")
    nodes = {"a": trio.primary.conninfo(user="feeble"), "b": trio.standby.conninfo()}
    ran = examiner_of(trio, tmp_path, nodes=nodes).run()
    assert ran.code == 20
    assert "GRANT pg_monitor" in ran.err
    plugin = examiner_of(trio, tmp_path, nodes=nodes).run("--nagios")
    assert plugin.code == 3
    assert plugin.out.startswith("SLOTFAILOVER UNKNOWN - ")
    tell(trio.primary, "GRANT pg_monitor TO feeble")
    monitor = examiner_of(trio, tmp_path, nodes=nodes)
    monitor.expect("timeline-history")  # that is a file, which sql/roles.sql makes readable
    tell(trio.primary, "DROP ROLE feeble")


def test_nodes_of_different_clusters(sound: Examiner, tmp_path: Path) -> None:
    trio = sound.trio
    nodes = {"a": trio.primary.conninfo(), "x": trio.subscriber.conninfo()}
    strangers = examiner_of(trio, tmp_path, nodes=nodes)
    assert strangers.run().code == 31
    assert strangers.run("--nagios").code == 2


def test_two_primaries(fresh: Examiner) -> None:
    tell(fresh.trio.standby, "SELECT pg_promote()")
    ran = fresh.run("--json")
    assert ran.code == 35
    assert "a on timeline 1, b on timeline 2" in ran.json["error"]
    plugin = fresh.run("--nagios")
    assert plugin.code == 2
    assert plugin.out.startswith("SLOTFAILOVER CRITICAL - ")
    fresh.trio.standby.kill()
    lone = fresh.expect("node-answers", "standby-answers", "listed-slot-inactive")
    assert "b does not answer" in lone["node-answers"][0]["what"]


@pytest.mark.long
@pytest.mark.parametrize(
    "conninfo", ["host=a port=b port", "postgres://[::1", "service=not_defined_anywhere"]
)
def test_texts_that_are_not_connection_strings_are_refused(
    sound: Examiner, tmp_path: Path, conninfo: str
) -> None:
    nodes = {"a": conninfo, "b": sound.trio.standby.conninfo()}
    ran = examiner_of(sound.trio, tmp_path, nodes=nodes).run()
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "(a)" in ran.err


def test_connection_strings_of_every_kind(
    local_bed: Bed, local_trio: NewTrio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPv6 in a URI, a service file, a Unix-domain socket whose folder needs quotes."""
    sockets = local_bed.folder / "so'ck et"
    sockets.mkdir()
    sockets.chmod(0o777)
    trio = local_trio(
        {"listen_addresses": "127.0.0.1,::1", "unix_socket_directories": f'"{sockets}"'}
    )
    subscribe(trio, "s1")
    services = tmp_path / "services.conf"
    services.write_text(f"[b]\nhost=localhost\nport={trio.standby.port}\nuser=postgres\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    escaped = str(sockets).replace("'", "\\'")
    unix = f"host='{escaped}' port={trio.primary.port} user=postgres dbname='postgres'"
    uri = f"postgresql://postgres@[::1]:{trio.primary.port}/postgres?application_name=it%27s"
    for primary in (uri, unix):
        nodes = {"a": primary, "b": "service=b dbname=postgres"}
        examiner_of(trio, tmp_path, nodes=nodes).expect()
    services.write_text(f"[b]\nhost=127.0.0.1\nport={free_port()}\nuser=postgres\n")
    nodes = {"a": uri, "b": "service=b dbname=postgres"}
    blind = examiner_of(trio, tmp_path, nodes=nodes)
    found = blind.expect("node-answers", "standby-answers")
    assert found["node-answers"][0]["evidence"] == "b: refused, connection refused"


@pytest.mark.long
def test_fix_is_refused_where_it_could_not_ask(sound: Examiner) -> None:
    set_on(sound.trio.primary, synchronized_standby_slots="")
    sound.expect("standby-slot-listed")
    assert sound.run("--fix").code == 2
    asked = sound.run("--fix", "--json")
    assert asked.code == 2
    assert "no terminal" in json.loads(asked.out)["error"]
    assert sound.run("--fix", "--nagios").code == 3
    assert sound.run("--fix", "--yes").code == 0
    refused = sound.run("--yes")
    assert refused.code == 2
    assert "--yes is only for --fix" in refused.err
