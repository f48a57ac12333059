"""Nothing that a weaker role, a stranger or another manager prepares is run, shown or crossed."""

import contextlib
import http.server
import json
import os
import re
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import SlotbridgeError
from services.failover.observe import bridge_client
from services.failover.observe.server_link import ServerLink
from services.testbed.postgres import PostgresServer
from tests.conftest import NewPair
from tests.promises.failover.pgbouncer import INSTALLED, pgbouncer
from tests.promises.failover.servers import (
    ask,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    tell,
    write,
)
from tests.promises.failover.watch.watch_process import SETTINGS, TOKEN, Watching
from tests.providers.databases import create
from tests.providers.interface import Server, Trio
from tests.providers.roles import make_roles, make_subscriber_role
from tests.providers.waiting import eventually, patient

PREPARED = (
    "CREATE SCHEMA IF NOT EXISTS slotfailover",
    """CREATE TABLE slotfailover.journal (
        run text, number int, at timestamptz, by text, command text, step text, server text,
        sql jsonb, outcome text, seen jsonb, seconds float8, intent jsonb,
        PRIMARY KEY (run, number))""",
    """CREATE FUNCTION slotfailover.f() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN EXECUTE 'ALTER ROLE low SUPERUSER'; RETURN NEW; END $$""",
    "CREATE TRIGGER t BEFORE INSERT ON slotfailover.journal"
    " FOR EACH ROW EXECUTE FUNCTION slotfailover.f()",
)


def test_a_journal_that_a_weaker_role_has_prepared_is_not_used(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    tell(trio.primary, "CREATE ROLE low LOGIN", "GRANT CREATE ON DATABASE postgres TO low")
    with connect_as(trio.primary, "low") as low:
        for statement in PREPARED:
            low.execute(statement)
    config = configuration(tmp_path, trio, as_roles=False)  # sql/ has made nothing yet
    ran = slotfailover("repoint", "--config", config, "--yes", "--json")
    assert ran.code == 0, ran.err
    assert any("slotfailover.journal is not used" in note for note in ran.json["notes"]), ran.out
    assert ask(trio.primary, "SELECT rolsuper FROM pg_roles WHERE rolname = 'low'") is False
    tell(trio.primary, "DROP TABLE slotfailover.journal")
    with connect_as(trio.primary, "low") as low:  # for who reads it
        low.execute("CREATE VIEW slotfailover.journal AS SELECT 1 AS run")
    read = slotfailover("history", "--config", config)
    assert read.code == 0, read.err
    tell(
        trio.primary,
        "DROP SCHEMA slotfailover CASCADE",
        "REVOKE CREATE ON DATABASE postgres FROM low",
    )
    role = make_roles(trio.primary, trio.dbname, publication="p").failover
    for statement in ("CREATE TABLE slotfailover.x ()", "CREATE SCHEMA x"):
        with connect_as(trio.primary, role) as low, pytest.raises(Exception, match="denied"):
            low.execute(statement)
    tell(trio.primary, "ALTER TABLE slotfailover.journal ADD COLUMN newer text")
    ran = slotfailover("repoint", "--config", config, "--yes", "--json")
    assert (ran.code, ran.json["notes"]) == (0, []), ran.out
    assert slotfailover("history", "--config", config, "--json").json["entries"]
    (tmp_path / "journal").unlink()
    assert slotfailover("history", "--config", config, "--json").json["entries"]


@contextlib.contextmanager
def connect_as(server: Server, role: str, dbname: str = "postgres") -> Iterator[Any]:
    import psycopg

    with psycopg.connect(server.conninfo(dbname, user=role), autocommit=True) as connection:
        yield connection


@pytest.mark.long
def test_no_password_is_in_the_subscribers_log(new_pair: NewPair, tmp_path: Path) -> None:
    """Neither as a superuser nor as the role of sql/subscriber_roles.sql."""
    trio = new_pair()
    subscribe(trio, "s1")
    assert isinstance(trio.subscriber, PostgresServer)
    tell(trio.subscriber, "ALTER SYSTEM SET log_statement = 'ddl'", "SELECT pg_reload_conf()")
    role = make_subscriber_role(trio.subscriber, trio.dbname)
    config = configuration(tmp_path, trio)
    written = len(trio.subscriber.log.read_text())
    ran = slotfailover("switchover", "--to", "b", "--config", config, "--yes", "--no-rejoin")
    assert "point subscription s1" in ran.err, ran.err
    log = trio.subscriber.log.read_text()[written:]
    assert "hush" not in log, log
    back = trio.primary.conninfo(trio.dbname, password="hush").replace("'", "''")
    tell(trio.subscriber, f"ALTER SUBSCRIPTION s1 CONNECTION '{back}'", dbname=trio.dbname)
    written = len(trio.subscriber.log.read_text())
    roles = {"sub": trio.subscriber.conninfo(trio.dbname, user=role)}
    config = configuration(tmp_path, trio, subscribers=roles)
    ran = slotfailover("repoint", "--config", config, "--yes")
    assert "point subscription s1" in ran.err, ran.err
    write(trio.standby, trio.dbname, 1)
    await_equal(trio, trio.standby)
    log = trio.subscriber.log.read_text()[written:]
    assert "hush" not in log, log


def nodes(trio: Trio) -> dict[str, Server]:
    return {"a": trio.primary, "b": trio.standby}


@pytest.mark.long
def test_databases_in_sql_ascii_can_be_checked(new_pair: NewPair, tmp_path: Path) -> None:
    trio = new_pair()
    tell(
        trio.primary,
        "CREATE DATABASE ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'"
        " LOCALE_PROVIDER libc TEMPLATE template0",
    )
    eventually(
        lambda: ask(trio.standby, "SELECT count(*) FROM pg_database WHERE datname = 'ascii'") == 1,
        what="the database is on the standby",
    )
    by_ascii = {n: s.conninfo("ascii") for n, s in nodes(trio).items()}
    config = configuration(tmp_path, trio, nodes=by_ascii)
    ran = slotfailover("check", "--config", config, "--json")
    assert ran.json["primary"] == "a", ran.err


def test_the_control_token_follows_no_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    stolen: list[str] = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stolen.append(self.headers.get("Authorization", ""))
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Elsewhere) as thief:

        class Redirecting(Elsewhere):
            def do_POST(self) -> None:
                self.send_response(302)
                self.send_header("Location", f"http://127.0.0.1:{thief}/")
                self.end_headers()

        with serving(Redirecting) as port:
            monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{thief}")
            bridge = bridge_client.Bridge("slot", f"http://127.0.0.1:{port}", TOKEN.encode())
            with pytest.raises(SlotbridgeError) as caught:
                bridge_client.send_to(bridge, "host=b")
    assert "302" in caught.value.message
    assert stolen == []


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.long
def test_the_page_answers_to_its_names_and_hides_hooks(new_pair: NewPair, tmp_path: Path) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    watch = {**SETTINGS, "token": TOKEN, "allowed_hosts": ["pair.example"]}
    machines = {"a": {"stop": "curl -u admin:ilo-secret https://ilo/stop"}}
    config = configuration(tmp_path, trio, as_roles=False, watch=watch, machines=machines)
    replica = Watching(config)  # only a superuser is told the plan of a switchover
    try:
        replica.await_verdict("rest")
        plan = replica.ask("v1/plan").text
        assert "the command of failover.machines.a" in plan
        assert "ilo-secret" not in plan
        assert host_answers(replica, "pair.example") == 200
        assert host_answers(replica, "evil.example") == 421
    finally:
        replica.end()
    config = configuration(tmp_path, trio, watch={**watch, "token_to_read": True})
    replica = Watching(config)
    try:
        assert replica.ask("v1/status").status == 401
        assert replica.ask("v1/status", token=TOKEN).status == 200
        assert replica.ask("metrics").status == 200
    finally:
        replica.end()


def host_answers(replica: Watching, host: str) -> int:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(replica.url + "v1/status", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=patient(30)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.long
def test_a_pause_holds_by_its_number_whatever_the_clocks_say(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """Another replica, whose clock is ahead, has resumed before."""
    trio = new_pair()
    make_roles(trio.primary, trio.dbname, publication="p")
    tell(
        trio.primary,
        "INSERT INTO slotfailover.watch (paused, at, by, reason, version)"
        " VALUES (false, '2999-01-01T00:00:00.000+00:00', 'x', '', 7)",
    )
    config = configuration(tmp_path, trio, watch={**SETTINGS, "token": TOKEN})
    replica = Watching(config)
    try:
        replica.await_verdict("rest")
        said = replica.order("pause", "mine")
        assert (said["paused"], said["in_effect"], said["shared"]) == (True, True, True)
        assert replica.status["pause"]["paused"]
        assert ask(trio.primary, "SELECT paused || ' ' || version FROM slotfailover.watch") == (
            "true 8"
        )
        trio.primary.kill()
        answer = replica.ask("v1/resume", token=TOKEN, body=b"")
        assert (answer.status, answer.json["shared"]) == (202, False)
    finally:
        replica.end()


@pytest.mark.long
def test_a_server_that_cannot_be_read_hides_no_other(new_pair: NewPair, tmp_path: Path) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    create(trio.subscriber, "reports")
    tell(
        trio.subscriber,
        "CREATE ROLE reader LOGIN IN ROLE pg_monitor",
        "GRANT SELECT (subconninfo, xmin) ON pg_subscription TO reader",
        "GRANT EXECUTE ON FUNCTION pg_show_replication_origin_status() TO reader",
        "GRANT SELECT ON pg_replication_origin_status TO reader",
        dbname=trio.dbname,
    )
    subscribers = {
        "sub": trio.subscriber.conninfo(trio.dbname, user="reader"),
        "reports": trio.subscriber.conninfo("reports"),
    }
    config = configuration(tmp_path, trio, subscribers=subscribers, watch=SETTINGS)
    replica = Watching(config)
    try:
        replica.await_verdict("rest")
        assert replica.metric('slotfailover_up{server="sub"}') == 1
        tell(
            trio.subscriber,
            "REVOKE SELECT (subconninfo) ON pg_subscription FROM reader",
            dbname=trio.dbname,
        )
        eventually(lambda: replica.metric('slotfailover_up{server="sub"}') == 0, what="it is told")
        assert replica.ask("readyz").status == 200
        trio.primary.kill()
        eventually(lambda: replica.metric('slotfailover_up{server="a"}') == 0, what="a is down")
        assert replica.metric('slotfailover_primary{server="a"}') == 0
    finally:
        replica.end()
    ran = slotfailover("failover", "--config", config, "--yes", "--json")
    assert ran.json["new_primary"] == "b", ran.err
    assert [left["subject"] for left in ran.json["left"]] == ["sub"], ran.err


@pytest.mark.long
def test_traces_of_a_manager_are_told_and_promoting_commands_refuse(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    with contextlib.closing(session(trio.primary, "Patroni heartbeat")):
        ran = slotfailover("check", "--config", config, "--json")
        found = [f for f in ran.json["findings"] if f["check"] == "managed-by"]
        assert [f["severity"] for f in found] == ["warning"]
        shown = slotfailover("switchover", "--to", "b", "--config", config, "--dry-run", "--json")
        assert any("managed by Patroni" in note for note in shown.json["notes"]), shown.out
        config = configuration(tmp_path, trio, managed_by="patroni")
        ran = slotfailover("check", "--config", config, "--json")
        found = [f for f in ran.json["findings"] if f["check"] == "managed-by"]
        assert [f["severity"] for f in found] == ["ok"]
    for command in (["failover"], ["switchover"], ["resume"], ["rejoin", "b"]):
        ran = slotfailover(*command, "--config", config, "--yes")
        assert (ran.code, "patronictl" in ran.err) == (2, True), ran.err
    assert slotfailover("check", "--fix", "--yes", "--config", config).code == 2
    assert slotfailover("repoint", "--config", config, "--yes").code == 0
    assert slotfailover("plan", "--config", config).code == 0


def session(server: Server, name: str) -> Any:
    import psycopg

    return psycopg.connect(server.conninfo(application_name=name), autocommit=True)


@pytest.mark.long
def test_a_pooler_in_front_of_a_node_is_refused(new_pair: NewPair, tmp_path: Path) -> None:
    """PgBouncer gives its clients a backend's number of its own, which is how it shows."""
    trio = new_pair()
    with pooler(trio.primary.port) as port:
        pooled = {"a": trio.primary.conninfo(port=port), "b": trio.standby.conninfo()}
        config = configuration(tmp_path, trio, nodes=pooled)
        ran = slotfailover("check", "--config", config)
        assert (ran.code, "a connection pooler answers for a" in ran.err) == (25, True), ran.err
        for mode in ("session", "transaction") if INSTALLED else ():
            with pgbouncer(trio.primary.port, mode) as real:
                pooled["a"] = trio.primary.conninfo(port=real)
                config = configuration(tmp_path, trio, nodes=pooled)
                ran = slotfailover("failover", "--config", config, "--yes")
                said = "a connection pooler answers for a" in ran.err
                assert (ran.code, said) == (25, True), ran.err
    link = ServerLink("a", trio.primary.conninfo(), connect_timeout_s=60, deadline_s=patient(10))
    assert link.ask(lambda c: c.execute("SELECT 1").fetchone()) == (1,)
    link.close()


@contextlib.contextmanager
def pooler(target: int) -> Iterator[int]:
    """What matters of a pooler: BackendKeyData is its own."""

    class Pooling(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            client: socket.socket = self.request
            with socket.create_connection(("127.0.0.1", target)) as server:
                back = threading.Thread(target=pump, args=(server, client, _with_own_number))
                back.start()
                pump(client, server, bytes)
                back.join()

    def pump(source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(change(data))
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Pooling) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield listening.server_address[1]
        finally:
            listening.shutdown()
            thread.join()


def _with_own_number(data: bytes) -> bytes:
    """Another backend number in BackendKeyData: `K`, its length, number, secret."""
    return re.sub(
        rb"K(\x00\x00\x00[\x0c-\xff])....",
        lambda found: b"K" + found[1] + struct.pack(">i", 12345678),
        data,
        count=1,
        flags=re.DOTALL,
    )


@pytest.mark.long
def test_consumers_that_nobody_named_are_told_of_when_their_slots_are_lost(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """A failover slot of Debezium or another program, not yet synchronized; the primary dies."""
    trio = new_pair(synchronous=False)
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, watch=SETTINGS)
    tell(
        trio.primary,
        "SELECT pg_create_logical_replication_slot('of_debezium', 'pgoutput', false, false, true)",
        dbname=trio.dbname,
    )
    replica = Watching(config)
    try:
        replica.await_verdict("rest")
        entry = "SELECT count(*) FROM slotfailover.journal WHERE step = 'seen'"
        table = "SELECT to_regclass('slotfailover.journal') IS NOT NULL"
        eventually(
            lambda: ask(trio.standby, table) and ask(trio.standby, entry) >= 1,
            what="watch has recorded the slots",
        )
    finally:
        replica.end()
    (tmp_path / "journal").unlink()
    trio.primary.kill()
    copied = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'of_debezium' AND synced"
    shown = slotfailover("failover", "--config", config, "--dry-run", "--json")
    if ask(trio.standby, copied) == 0:
        assert any("of_debezium: failover slots" in n for n in shown.json["notes"]), shown.out
    assert json.loads(shown.out)
    assert os.environ.get("PGPASSWORD") is None
