"""Two bridges of one slot with `bridge.standby`: one works, the other waits without a deadline."""

import time
import urllib.error
import urllib.request

import psycopg

from services.testbed.ports import free_port
from tests.bridge.conftest import NewBridge
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

TAKE_OVER_MAX_S = 15.0
"""Far above the 3 s between two attempts: other tests share the machine."""


def probe(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return 0


def test_a_standby_bridge_outlasts_its_deadline_and_takes_over(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    port = free_port()
    first = new_bridge(conninfo).start().streaming()
    waiting = new_bridge(conninfo, standby=True, http_port=port, connect_deadline_ms=1000).start()
    try:
        attempts = "hot standby"
        eventually(lambda: waiting.output.count(attempts) >= 4, what="it tries again and again")
        assert waiting.running, waiting.output
        probes = {path: probe(port, path) for path in ("/healthz", "/readyz", "/availablez")}
        assert probes == {"/healthz": 200, "/readyz": 503, "/availablez": 200}
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
            connection.execute("INSERT INTO t SELECT generate_series(1, 100)")
            first.caught_up()
            first.kill()
            killed = time.monotonic()
            eventually(lambda: probe(port, "/readyz") == 200, what="it takes over")
            assert time.monotonic() - killed < TAKE_OVER_MAX_S
            connection.execute("INSERT INTO t SELECT generate_series(101, 200)")
        waiting.caught_up()
        waiting.assert_kafka_equals(conninfo, "t")
        assert waiting.stop() == 0, waiting.output
    finally:
        waiting.end()


def test_a_standby_bridge_ends_at_its_deadline_if_no_other_bridge_is_there(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    nobody = pair.primary.conninfo(fresh_database, port=free_port())
    bridge = new_bridge(nobody, standby=True, connect_deadline_ms=1000).start()
    assert bridge.exit_code() == 10, bridge.output
