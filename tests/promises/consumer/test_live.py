"""Consumers of a running bridge: a store of their own that is killed, read-your-writes."""

import random
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest

from schemas.errors import Retryable, SettingsError
from services.testbed.ports import free_port
from slotbridge.consumer import Position, Transactions, wait_for
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import PATIENCE_S, Bridge
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient

EXAMPLE = Path(__file__).parents[3] / "examples" / "consumer.py"
ACCOUNTS = 50


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    return pair.primary.conninfo(fresh_database)


def transfer(conninfo: str, stop: threading.Event) -> None:
    """Move money between accounts, and some accounts away and back; the sum stays the same."""
    chance = random.Random(1)
    with psycopg.connect(conninfo) as connection:
        while not stop.wait(0.002):
            one, other = chance.sample(range(ACCOUNTS), 2)
            amount = chance.randint(1, 100)
            update = "UPDATE pgbench_accounts SET abalance = abalance + %s WHERE aid = %s"
            connection.execute(update, [-amount, one])
            connection.execute(update, [amount, other])
            if chance.random() < 0.1:
                connection.execute("CREATE TABLE IF NOT EXISTS other (id serial PRIMARY KEY)")
                connection.execute("INSERT INTO other DEFAULT VALUES")
            connection.commit()


def fill(conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE pgbench_accounts (aid int PRIMARY KEY, abalance int)")


def fund(conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO pgbench_accounts SELECT g, 100 FROM generate_series(0, %s) g",
            [ACCOUNTS - 1],
        )


@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.long)])
def test_the_example_keeps_a_copy_exactly_once_through_kills(
    conninfo: str, kafka: Broker, new_bridge: NewBridge, tmp_path: Path, kills: int
) -> None:
    """SIGKILLs under load. At every moment the copy has the sum of a whole transaction."""
    fill(conninfo)
    bridge = new_bridge(conninfo).start().streaming()
    fund(conninfo)
    stop, path, chance = threading.Event(), tmp_path / "copy.sqlite", random.Random(2)
    load = threading.Thread(target=transfer, args=[conninfo, stop])
    load.start()
    command = [
        *(sys.executable, str(EXAMPLE)),
        *(kafka.bootstrap_servers, bridge.prefix, str(path)),
    ]
    for number in range(kills + 1):
        process = subprocess.Popen(command, cwd=EXAMPLE.parents[1])
        if number < kills:
            before = position(path)
            eventually(lambda: position(path) > before, what="it goes on", timeout_s=60)  # noqa: B023
            time.sleep(chance.uniform(0, 0.4))
            assert total(path) == 100 * ACCOUNTS
            process.kill()
            process.wait(PATIENCE_S)
    stop.set()
    load.join(PATIENCE_S)
    bridge.caught_up()
    with psycopg.connect(conninfo) as connection:
        rows = connection.execute("SELECT aid, abalance FROM pgbench_accounts").fetchall()
    truth: dict[int, int] = dict(rows)
    eventually(lambda: copied(path) == truth, what="the copy is equal", timeout_s=60)
    process.terminate()
    process.wait(PATIENCE_S)
    assert bridge.stop() == 0, bridge.output


def position(path: Path) -> int:
    """The commit_lsn that is stored, -1 for none."""
    rows = _ask(path, "SELECT position FROM progress")
    return Position.parse(rows[0][0]).commit_lsn if rows else -1


def total(path: Path) -> int:
    return int(_ask(path, "SELECT sum(balance) FROM accounts")[0][0])


def copied(path: Path) -> dict[int, int]:
    return {int(aid): int(balance) for aid, balance in _ask(path, "SELECT * FROM accounts")}


def _ask(path: Path, query: str) -> list[tuple[str, ...]]:
    if not path.exists():
        return []
    store = sqlite3.connect(path, timeout=patient(30))
    try:
        return store.execute(query).fetchall()
    except sqlite3.OperationalError:  # its tables are not made yet
        return []
    finally:
        store.close()


def test_transactions_come_whole_in_order_with_tables_and_truncates(
    conninfo: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    fill(conninfo)
    bridge = new_bridge(conninfo).start().streaming()
    fund(conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        with connection.transaction():
            connection.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
            connection.execute("UPDATE pgbench_accounts SET abalance = 0 WHERE aid = 3")
            connection.execute("UPDATE t SET id = 9 WHERE id = 1")
        connection.execute("TRUNCATE t")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    with Transactions(kafka.bootstrap_servers, bridge.prefix) as transactions:
        got = [found for _ in range(3) if (found := transactions.read(patient(60))) is not None]
        assert transactions.read(0.5) is None
    assert [[(e.table, e.op) for e in one.events] for one in got] == [
        [("public.pgbench_accounts", "c")] * ACCOUNTS,
        [
            *[("public.t", "c")] * 2,
            ("public.pgbench_accounts", "u"),
            *(("public.t", "d"), ("public.t", "c")),
        ],
        [("public.t", "t")],
    ]
    assert got[1].events[-1].key == {"id": 9}
    assert got[1].commit_lsn < got[2].commit_lsn
    only = Transactions(
        kafka.bootstrap_servers, bridge.prefix, position=got[0].position, tables=["public.t"]
    )
    with only as transactions:
        again = [found for _ in range(2) if (found := transactions.read(patient(60))) is not None]
    assert [len(one.events) for one in again] == [4, 1]


def test_a_writer_waits_until_kafka_has_its_changes(
    conninfo: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    fill(conninfo)
    port = free_port()
    bridge = new_bridge(conninfo, http_port=port).start().streaming()
    url = f"http://127.0.0.1:{port}"
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for number in range(5):
            connection.execute("INSERT INTO pgbench_accounts VALUES (%s, 0)", [number])
            row = connection.execute(
                "SELECT pg_current_wal_insert_lsn()::text, ('x' || substr(pg_walfile_name("
                "pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int"
            ).fetchone()
            assert row is not None
            assert wait_for(url, row[0], timeline=row[1], timeout_s=patient(30)).timeline == row[1]
            assert len([*bridge.events("pgbench_accounts")]) == number + 1
        with pytest.raises(Retryable, match="does not have FFFFFFFF/0 yet: at"):
            wait_for(url, "FFFFFFFF/0", timeout_s=0.1)
        with pytest.raises(SettingsError, match="not a position"):
            wait_for(url, "here", timeout_s=0.1)
    assert bridge.stop() == 0, bridge.output
    with pytest.raises(Retryable):
        wait_for(url, "0/1", timeout_s=0.1)


@pytest.mark.long
def test_events_that_never_come_are_named(
    conninfo: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    """As of an outbox, which has no topic of its own."""
    fill(conninfo)
    bridge: Bridge = new_bridge(conninfo).start().streaming()
    fund(conninfo)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    reader = Transactions(
        kafka.bootstrap_servers,
        bridge.prefix,
        topics={"public.pgbench_accounts": f"{bridge.prefix}.message"},
        patience_s=patient(0.7),
    )
    with reader as transactions, pytest.raises(Retryable, match=r"public\.pgbench_accounts"):
        transactions.read(patient(30))
