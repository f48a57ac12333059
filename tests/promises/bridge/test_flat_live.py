"""Flat rows through a running bridge, a kill, and what refuses them."""

import json
from collections import Counter
from typing import Any

import psycopg
import pytest

from schemas.errors import BadInput, ExitCode
from slotbridge.consumer import Transactions
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.recover_process import recover
from tests.promises.bridge.snapshots import chunks, read_all
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient

CHANGES = (
    "INSERT INTO t VALUES (1, 'one'), (2, 'two'), (3, NULL)",
    "UPDATE t SET note = 'uno' WHERE id = 1",
    "UPDATE t SET id = 20 WHERE id = 2",
    "DELETE FROM t WHERE id = 3",
    "TRUNCATE t",
)
POSITION = ("__commit_lsn", "__seq", "__timeline")


@pytest.mark.parametrize("deletes", ["rewrite", pytest.param("tombstone", marks=pytest.mark.long)])
def test_rows_come_flat_once_each_and_readers_of_envelopes_refuse_them(
    deletes: str, pair: Provider, fresh_database: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = new_bridge(
        conninfo,
        shaping={"flat": {"fields": ["table"], "deletes": deletes}},
        snapshot={"mode": "initial"},
    )
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        connection.execute("INSERT INTO t VALUES (0, 'there')")
        read_all(bridge)
        eventually(lambda: chunks(bridge) > 0, what="its rows are in Kafka", timeout_s=60)
        for statement in CHANGES:
            connection.execute(statement.encode())
        connection.execute("INSERT INTO t SELECT g, 'many' FROM generate_series(100, 3099) g")
        bridge.kill()
        bridge.start().streaming()
        bridge.caught_up()
    found = [
        (json.loads(key) if key else None, json.loads(value) if value else None)
        for key, value in bridge.records("public.t")
    ]
    told = [(key, None if row is None else shown(row)) for key, row in found]
    assert told.count(({"id": 0}, {"__op": "r", "id": 0, "note": "there"})) == 1
    for key, row in expected(deletes):
        assert (key, row) in told
    assert ({"__op": "t"}) in [row for _, row in told]
    rows = [row for _, row in found if row is not None and row["__op"] != "t"]
    assert max(Counter(tuple(row[name] for name in POSITION) for row in rows).values()) == 1
    assert sum(row.get("note") == "many" for row in rows) == 3000
    if deletes == "tombstone":
        assert all(row["__op"] != "d" for row in rows)
    assert bridge.stop() == 0, bridge.output
    refused = recover(bridge)
    assert refused.returncode == ExitCode.SETTINGS
    assert "shaping.flat" in refused.stderr
    reader = Transactions(kafka.bootstrap_servers, bridge.prefix, patience_s=patient(2))
    with reader as transactions, pytest.raises(BadInput, match="flat row"):
        transactions.read(patient(60))


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row without what every row has."""
    assert row["__table"] == "t"
    assert row.get("__deleted", "false") == ("true" if row["__op"] == "d" else "false")
    others = (*POSITION, "__table", "__deleted")
    return {name: value for name, value in row.items() if name not in others}


def expected(deletes: str) -> list[tuple[Any, Any]]:
    gone = [
        ({"id": 2}, {"__op": "d", "id": 2, "note": None}),
        ({"id": 3}, {"__op": "d", "id": 3, "note": None}),
    ]
    return [
        ({"id": 1}, {"__op": "c", "id": 1, "note": "one"}),
        ({"id": 1}, {"__op": "u", "id": 1, "note": "uno"}),
        ({"id": 20}, {"__op": "c", "id": 20, "note": "two"}),
        *(gone if deletes == "rewrite" else []),
        ({"id": 2}, None),
        ({"id": 3}, None),
    ]
