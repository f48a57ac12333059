"""Several small tables in one chunk: one database snapshot, one place, one Kafka transaction."""

import json
import random
from collections import Counter
from typing import Any

import psycopg
import pytest

from services.bridge.failpoints import OF_A_SNAPSHOT, VARIABLE
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.consumer_folds import fold_records
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import DONE, INITIAL, Writers, read_all, told
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

TABLES = [f"small_{number:02}" for number in range(24)]
ROWS = 8


class ChangesOfAll(Writers):
    """Inserts, updates, deletes and changes of keys in all tables; each transaction in several."""

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        with psycopg.connect(self._conninfo) as connection:
            while not self._stop.wait(0.01):
                try:
                    for table in sorted(chance.sample(TABLES, 3)):
                        self._change(connection, chance, table)
                    connection.commit()
                    self.committed += 1
                except psycopg.Error:  # a key that is there, a deadlock
                    connection.rollback()

    def _change(
        self, connection: psycopg.Connection[Any], chance: random.Random, table: str
    ) -> None:
        one, other, note = chance.randint(1, ROWS), chance.randint(1, ROWS), chance.getrandbits(40)
        query = chance.choice(
            [
                *2 * [f"INSERT INTO {table} VALUES ({one}, '{note}') ON CONFLICT DO NOTHING"],
                f"UPDATE {table} SET note = '{note}' WHERE id = {one}",
                f"DELETE FROM {table} WHERE id = {one}",
                f"UPDATE {table} SET id = {other}, note = '{note}' WHERE id = {one}",
            ]
        )
        connection.execute(query.encode())


@pytest.mark.parametrize("place", [pytest.param("primary", marks=pytest.mark.long), "standby"])
def test_small_tables_share_chunks_under_constant_change_killed_at_each_seam(
    place: str, pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database, options="-c synchronous_commit=local")
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table in TABLES:
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, note text)".encode())
            query = f"INSERT INTO {table} SELECT g, 'old' FROM generate_series(1, {ROWS}) g"
            connection.execute(query.encode())
        connection.execute("CREATE TABLE small_none (id int PRIMARY KEY)")
    snapshot: dict[str, Any] = {**INITIAL, "chunk_rows_max": 14}
    if place == "standby":
        snapshot |= {"conninfo": pair.standby.conninfo(fresh_database), "workers": 2}
    bridge = new_bridge(conninfo, snapshot=snapshot)
    with ChangesOfAll(conninfo, 2) as changes:
        eventually(lambda: changes.committed > 20, what="rows change")
        for failpoint in OF_A_SNAPSHOT:
            bridge.start(**{VARIABLE: f"{failpoint}:2"})
            assert bridge.exit_code() == -9, f"{failpoint}: {bridge.output}"
        assert DONE not in bridge.output
        read_all(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_all_exact(bridge, conninfo)
    assert {one.read_from for one in told(bridge)} == {place}


def assert_all_exact(bridge: Bridge, conninfo: str) -> None:
    """Both folds of each table are the table; no row was read twice; chunks are counted."""
    progress = told(bridge)
    reads, kinds = 0, Counter[str]()
    topics = {table: f"{bridge.prefix}.public.{table}" for table in TABLES}
    records = read_committed(bridge.kafka.bootstrap_servers, topics.values())
    for table, topic in topics.items():
        with psycopg.connect(conninfo) as connection:
            found = connection.execute(f"SELECT id, note FROM {table}".encode()).fetchall()
        truth = {
            json.dumps({"id": key}, separators=(",", ":")): {"id": key, "note": note}
            for key, note in found
        }
        own_records = [record for record in records if record.topic == topic]
        folded = fold_records(own_records)
        assert folded.by_offset == truth, table
        assert folded.by_position == truth, table
        assert max(folded.reads.values(), default=1) == 1, f"a row of {table} was read twice"
        own = [one for one in progress if one.table == table]
        assert [one.chunks for one in own] == [*range(1, len(own) + 1)]
        assert (own[-1].done, own[-1].rows) == (True, folded.reads.total())
        reads += folded.reads.total()
        events = (json.loads(record.value) for record in own_records if record.value)
        kinds.update(event["source"]["snapshot"] for event in events)
    assert kinds["first"] == 1 and kinds["last"] <= 1
    places = Counter(one.commit_lsn for one in progress)
    assert max(places.values()) > 2, "no tables share a chunk"
    ends = [json.loads(value) for _, value in bridge.records("transaction") if value]
    counted = [one for one in ends if one["id"].startswith("0:") and one["status"] == "END"]
    assert sum(one["event_count"] for one in counted) == reads
    assert max(len(one["data_collections"]) for one in counted) > 1
