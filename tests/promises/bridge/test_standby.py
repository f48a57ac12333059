"""Two bridges of one slot with `bridge.standby`: one works, the other waits without a deadline."""

import urllib.error
import urllib.request

import psycopg
import pytest

from services.testbed.ports import free_port
from tests.promises.bridge.conftest import NewBridge
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient, patient_ms

DEADLINE_MS = 5_000
ATTEMPTS = 15
"""So many take longer than the deadline: half a second is between two."""


def probe(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{path}", timeout=patient(60)
        ) as answer:
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
    settings = {"standby": True, "connect_deadline_ms": DEADLINE_MS}
    waiting = new_bridge(conninfo, http_port=port, **settings).start()
    try:
        attempts = "hot standby"
        what = "it tries again and again"
        eventually(lambda: waiting.output.count(attempts) >= ATTEMPTS, what=what)
        assert waiting.running, waiting.output
        probes = {path: probe(port, path) for path in ("/healthz", "/readyz", "/availablez")}
        assert probes == {"/healthz": 200, "/readyz": 503, "/availablez": 200}
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
            connection.execute("INSERT INTO t SELECT generate_series(1, 100)")
            first.caught_up()
            first.kill()
            eventually(lambda: probe(port, "/readyz") == 200, what="it takes over")
            connection.execute("INSERT INTO t SELECT generate_series(101, 200)")
        waiting.caught_up()
        waiting.assert_kafka_equals(conninfo, "t")
        assert waiting.stop() == 0, waiting.output
    finally:
        waiting.end()


@pytest.mark.long
def test_a_standby_bridge_ends_at_its_deadline_if_no_other_bridge_is_there(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    nobody = pair.primary.conninfo(fresh_database, port=free_port())
    bridge = new_bridge(nobody, standby=True, connect_deadline_ms=patient_ms(340)).start()
    assert bridge.exit_code() == 10, bridge.output
