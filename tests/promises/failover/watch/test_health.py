"""/primary and /replica: what a load balancer is told, of made-up views and of a real pair."""

import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from services.failover.model.view import View
from services.failover.watch.web.health import primary_health, replica_health
from services.testbed.ports import free_port
from tests.conftest import NewPair
from tests.promises.failover.servers import configuration, tell
from tests.promises.failover.views import node, state
from tests.promises.failover.watch.watch_process import SETTINGS, Watching
from tests.providers.waiting import eventually, patient

WRITTEN = 100_000_000


def pair_view(
    *, lag: int = 0, streams: bool = True, leading: int = 1, fenced: bool = False
) -> View:
    """A pair a, b, of which `leading` nodes are primaries."""
    primary = node("a", state(standby=False, fenced=fenced))
    assert primary.state is not None
    written = replace(primary.state.replication, written_lsn=WRITTEN)
    primary = replace(primary, state=replace(primary.state, replication=written))
    standby = node("b", state(standby=leading < 2, streams=streams))
    assert standby.state is not None
    replayed = replace(
        standby.state.replication, replayed_lsn=WRITTEN - lag, receiver_streaming=streams
    )
    return View((primary, replace(standby, state=replace(standby.state, replication=replayed))), ())


@pytest.mark.parametrize(
    ("view", "query", "status"),
    [
        (pair_view(), {}, 200),
        (pair_view(), {"node": "a"}, 200),
        (pair_view(), {"node": "b"}, 503),
        (pair_view(), {"node": "x"}, 404),
        (pair_view(leading=2), {}, 503),
        (pair_view(leading=2), {"node": "a"}, 503),
        (pair_view(fenced=True), {}, 503),
        (View((node("a", None),), ()), {}, 503),
        (None, {}, 503),
    ],
)
def test_primary_health_has_its_status(
    view: View | None, query: dict[str, str], status: int
) -> None:
    assert primary_health(view, query)[0] == status


@pytest.mark.parametrize(
    ("view", "query", "status"),
    [
        (pair_view(), {}, 200),
        (pair_view(), {"node": "b"}, 200),
        (pair_view(), {"node": "a"}, 503),
        (pair_view(lag=2**20 + 1), {"lag": "1MB"}, 503),
        (pair_view(lag=2**20), {"lag": "1MB"}, 200),
        (pair_view(lag=2**20), {"lag": "1048576"}, 200),
        (pair_view(lag=2**20), {"lag": "1 kB"}, 503),
        (pair_view(lag=2**30), {}, 200),
        (pair_view(streams=False), {}, 503),
        (pair_view(leading=2), {}, 503),
        (pair_view(), {"lag": "much"}, 400),
        (pair_view(), {"lag": "-1"}, 400),
        (pair_view(), {"node": "x"}, 404),
        (None, {}, 503),
    ],
)
def test_replica_health_has_its_status(
    view: View | None, query: dict[str, str], status: int
) -> None:
    assert replica_health(view, query)[0] == status


def raw(url: str, request: str) -> tuple[int, str]:
    """Ask as a load balancer does, in HTTP/1.0 and without a Host: status, and what follows."""
    where = urlsplit(url)
    assert where.hostname is not None
    with socket.create_connection(
        (where.hostname, where.port or 80), timeout=patient(30)
    ) as connection:
        connection.sendall(f"{request} HTTP/1.0\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


def test_a_load_balancer_follows_a_promotion_of_a_real_pair(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    config = configuration(tmp_path, trio, watch={**SETTINGS, "repoint": False})
    watching = Watching(config)

    def status(request: str) -> int:
        return raw(watching.url, request)[0]

    try:
        eventually(lambda: status("GET /primary") == 200, what="there is a primary", timeout_s=60)
        assert status("HEAD /primary?node=a") == 200
        assert raw(watching.url, "HEAD /primary?node=b") == (503, "")
        assert status("OPTIONS /primary?node=a") == 200
        eventually(
            lambda: status("GET /replica?node=b&lag=16MB") == 200, what="b follows", timeout_s=60
        )
        assert status("GET /replica?node=a") == 503
        assert status("GET /replica?lag=lots") == 400
        trio.primary.kill()
        eventually(lambda: status("GET /primary") == 503, what="no primary", timeout_s=60)
        assert status("GET /replica") == 503
        tell(trio.standby, "SELECT pg_promote()")
        eventually(lambda: status("GET /primary?node=b") == 200, what="b leads", timeout_s=60)
        assert watching.ask("primary").json["node"] == "b"
    finally:
        watching.end()


HAPROXY = """
defaults
    mode tcp
    timeout connect 5s
    timeout client 1m
    timeout server 1m
    timeout check 1m
listen primary
    bind 127.0.0.1:{port}
    option httpchk
    http-check send meth GET uri-lf /primary?node=%[srv_name]
    http-check expect status 200
    default-server check inter 500ms fall 1 rise 1 addr 127.0.0.1 port {watch}
    server a 127.0.0.1:{a}
    server b 127.0.0.1:{b}
"""


@pytest.mark.long
def test_haproxy_leads_clients_to_whoever_takes_writes(new_pair: NewPair, tmp_path: Path) -> None:
    program = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")
    if program is None:
        pytest.skip("NOT TESTED: HAProxy asks the failover service. There is no haproxy")
    trio = new_pair()
    watching = Watching(configuration(tmp_path, trio, watch={**SETTINGS, "repoint": False}))
    port = free_port()
    config = tmp_path / "haproxy.cfg"
    ports = {"a": trio.primary.port, "b": trio.standby.port}
    config.write_text(HAPROXY.format(port=port, watch=urlsplit(watching.url).port, **ports))
    with (tmp_path / "haproxy.log").open("wb") as log:
        process = subprocess.Popen([program, "-db", "-f", config], stdout=log, stderr=log)
    through = trio.primary.conninfo(port=port, connect_timeout=round(patient(2)))

    def writable_port() -> int:
        """The port of the server that is reached through HAProxy, 0 if none takes writes."""
        try:
            with psycopg.connect(through) as connection:
                row = connection.execute(
                    "SELECT pg_is_in_recovery(), current_setting('port')::int"
                ).fetchone()
        except psycopg.OperationalError:
            return 0
        assert row is not None
        return 0 if row[0] else int(row[1])

    try:
        eventually(lambda: writable_port() == ports["a"], what="it leads to a", timeout_s=60)
        trio.primary.kill()
        tell(trio.standby, "SELECT pg_promote()")
        eventually(lambda: writable_port() == ports["b"], what="it leads to b", timeout_s=60)
    finally:
        process.kill()
        process.wait(timeout=patient(30))
        watching.end()
