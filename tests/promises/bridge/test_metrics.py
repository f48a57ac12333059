"""/metrics of a bridge that moves rows: every figure beside what PostgreSQL and Kafka have."""

import re
import urllib.request
from collections import Counter
from collections.abc import Callable

import psycopg
import pytest

from services.bridge import metrics
from services.bridge.events.event import Event
from services.bridge.sink import row_tally
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient

SMALL = "-c logical_decoding_work_mem=64kB"


def scrape(bridge: Bridge) -> dict[str, float]:
    """Series -> value, as Prometheus would read them."""
    (*_, url) = re.findall(r"url=(http://\S+/metrics)", bridge.output)
    with urllib.request.urlopen(url, timeout=patient(30)) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in found}


def await_series(
    bridge: Bridge, holds: Callable[[dict[str, float]], object], what: str
) -> dict[str, float]:
    """Scrape until `holds` is true of the series; return them."""
    last: dict[str, float] = {}

    def so() -> bool:
        nonlocal last
        last = scrape(bridge)
        return bool(holds(last))

    eventually(so, what=what, timeout_s=60)
    return last


def test_rows_are_counted_by_table_and_operation_once_kafka_has_them(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE a (id int PRIMARY KEY, n int)")
        connection.execute("CREATE TABLE b (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo, http_port=0, loaded=False).start().streaming()
        connection.execute("INSERT INTO a SELECT i, 0 FROM generate_series(1, 60) i")
        for number in range(40):
            connection.execute("INSERT INTO b VALUES (%s)", [number])
        connection.execute("UPDATE a SET n = 1 WHERE id <= 50")
        connection.execute("DELETE FROM a WHERE id <= 7")
        connection.execute("TRUNCATE b")
        bridge.caught_up()
        truncated = 'slotbridge_rows_total{operation="t",table="public.b"}'
        found = await_series(
            bridge,
            lambda seen: seen.get(truncated) and "slotbridge_open_transactions" in seen,
            "the truncate is counted",
        )
        rows = connection.execute(
            "SELECT total_txns, total_bytes FROM pg_stat_replication_slots WHERE slot_name = %s",
            [bridge.slot],
        ).fetchone()
    wanted = {("a", "c"): 60, ("a", "u"): 50, ("a", "d"): 7, ("b", "c"): 40, ("b", "t"): 1}
    counted = {
        key: found[f'slotbridge_rows_total{{operation="{key[1]}",table="public.{key[0]}"}}']
        for key in wanted
    }
    assert counted == wanted
    in_kafka = Counter(("a", event["op"]) for event in bridge.events("a"))
    assert in_kafka == {key: number for key, number in wanted.items() if key[0] == "a"}
    assert found['slotbridge_row_bytes_total{operation="c",table="public.a"}'] > 60 * 100
    assert found["slotbridge_lag_seconds_count"] >= 1
    assert found["slotbridge_kafka_transaction_seconds_count"] >= 1
    assert 0 <= found["slotbridge_delivery_age_seconds"] < 86_400, "no time since 1970"
    slot = f'slot="{bridge.slot}"'
    assert found[f"slotbridge_slot_active{{{slot}}}"] == 1
    assert found[f"slotbridge_slot_failover{{{slot}}}"] == 1
    assert found[f'slotbridge_slot_wal_status{{{slot},status="reserved"}}'] == 1
    assert found[f'slotbridge_slot_invalidated{{reason="wal_removed",{slot}}}'] == 0
    assert found[f"slotbridge_slot_retained_bytes{{{slot}}}"] >= 0
    assert rows is not None and rows[0] > 0
    assert found[f"slotbridge_slot_decoded_transactions_total{{{slot}}}"] <= rows[0]
    assert any(name.startswith("slotbridge_build_info{") for name in found)
    assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_held_transactions_are_counted_with_their_bytes(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    trio = new_pair(settings={"max_prepared_transactions": 5})
    conninfo = trio.primary.conninfo(trio.dbname, options=SMALL)
    with (
        psycopg.connect(conninfo, autocommit=True) as connection,
        psycopg.connect(conninfo) as large,
    ):
        connection.execute("CREATE TABLE t (i int)")
        bridge = new_bridge(
            conninfo, http_port=0, loaded=False, spool_memory_bytes_max=10_000, two_phase=True
        )
        bridge.start().streaming()
        connection.execute("BEGIN; INSERT INTO t VALUES (-1); PREPARE TRANSACTION 'waits'")
        large.execute("INSERT INTO t SELECT generate_series(1, 5000)")
        found = await_series(
            bridge,
            lambda seen: (
                seen.get("slotbridge_spooled_transactions")
                and seen["slotbridge_prepared_transactions"]
                and seen["slotbridge_open_transactions"]
            ),
            "a transaction in progress and a prepared one are told",
        )
        assert found["slotbridge_open_bytes"] > 0
        assert found["slotbridge_spooled_bytes"] > 0
        assert found["slotbridge_prepared_bytes"] > 0
        large.commit()
        connection.execute("COMMIT PREPARED 'waits'")
        await_series(
            bridge,
            lambda seen: (
                seen["slotbridge_open_transactions"] == seen["slotbridge_prepared_bytes"] == 0
            ),
            "nothing waits",
        )


@pytest.mark.long
def test_series_of_a_session_end_with_it(new_pair: NewPair, new_bridge: NewBridge) -> None:
    trio = new_pair()
    conninfo = trio.primary.conninfo(trio.dbname)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
    bridge = new_bridge(conninfo, http_port=0, loaded=False).start().streaming()
    waiting = new_bridge(conninfo, http_port=0, loaded=False, standby=True).start()
    eventually(lambda: "hot standby" in waiting.output, what="the other one stands by")
    of_slot = f'slotbridge_slot_active{{slot="{bridge.slot}"}}'
    await_series(bridge, lambda seen: of_slot in seen, "the slot is told")
    idle = scrape(waiting)
    assert idle["slotbridge_streaming"] == 0
    assert not [name for name in idle if "slot_" in name or "_lsn_" in name or "_age_" in name]
    waiting.kill()
    trio.primary.stop("immediate")
    gone = await_series(
        bridge, lambda seen: seen["slotbridge_streaming"] == 0, "the session is lost"
    )
    assert not [name for name in gone if "_slot_" in name or "_lsn_" in name]
    name = "slotbridge_delivery_age_seconds"
    age_s = gone[name]
    await_series(bridge, lambda seen: seen[name] > age_s + 1, "the age rises")


EVENTS = [
    Event("t", b"k", b"one", None, False, "s.t", 1, 1, op="c"),
    Event("t", b"k", b"three", None, False, "s.t", 2, 1, op="u"),
    Event("t", b"k", None, [("__op", "d")], False, "s.t", 2, 1, op="d"),
    Event("t", b"k", b"", None, False, "s.t", 2, 1, op="d"),
    Event("t", b"k", None, None, False, "s.t", 2, 1),
    Event("b.transaction", b"k", b'{"status":"BEGIN"}'),
    Event("b.schema", b"k", b'{"schema":"s"}', table="s.t", seq=1),
    Event("o", None, b"free text", None, False, "s.outbox", 3, 1, op="c"),
]


def test_both_ways_of_counting_agree(twin: str) -> None:
    way = row_tally.plain_count if twin == "plain" else row_tally.count
    many = [
        Event("t", b"%d" % i, b"value", None, False, f"s.t{i % 23}", i, 1, op="cud"[i % 3])
        for i in range(500)
    ]
    expected: row_tally.Counts = {}
    row_tally.plain_count([*EVENTS, *many], expected)
    counts: row_tally.Counts = {}
    way(EVENTS, counts)
    assert counts == {
        ("s.t", "c"): [1, 4],
        ("s.t", "u"): [1, 6],
        ("s.t", "d"): [2, 2],
        ("s.outbox", "c"): [1, 9],
    }
    way(many, counts)
    assert counts == expected


def test_tables_beyond_the_limit_share_one_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "TABLES_MAX", 2)
    monkeypatch.setattr(metrics, "_tables", set())
    monkeypatch.setattr(metrics, "_children", {})
    metrics.count_rows({(f"limit.t{number}", "c"): [1, 10] for number in range(5)})
    shared = metrics.ROWS.labels(metrics.OTHER_TABLES, "c")
    assert shared._value.get() == 3
