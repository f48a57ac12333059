"""A value that somebody wrote as the placeholder is told from an unchanged one."""

import json
from typing import Any

import psycopg
import pytest

from schemas.events import PLACEHOLDER_VALUES_HEADER, UNAVAILABLE
from services.bridge.events.event import Event
from services.bridge.events.row_encoders import Column, Frame, holds_placeholder, writer
from services.bridge.events.values import plain
from tests.promises.bridge.compiled_row import encoded
from tests.promises.bridge.conftest import COMPILED, NewBridge
from tests.promises.bridge.reading import Record, read_committed
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import read_all
from tests.providers.interface import Provider

TABLE = """
    CREATE TABLE t (id int PRIMARY KEY, n int, note text, raw bytea, words text[], "a ""b" text);
    ALTER TABLE t ALTER note SET STORAGE EXTERNAL, ALTER raw SET STORAGE EXTERNAL;
    INSERT INTO t SELECT i, 0, '{mine}', '{mine}', NULL, 'x' FROM generate_series(1, 30) i
"""
CHANGES = (
    "INSERT INTO t SELECT i, 0, 'x', 'x', '{{x}}', 'x' FROM generate_series(31, 60) i",
    "INSERT INTO t VALUES (70, 1, '{mine}', '{mine}', '{{{mine}}}', '{mine}')",
    "INSERT INTO t VALUES (71, 1, repeat('0123456789', 500), repeat('x', 5000)::bytea)",
    "UPDATE t SET n = 2 WHERE id = 71",  # both are unchanged
    "UPDATE t SET n = 3, note = '{mine}' WHERE id = 71",  # one is, the other looks like it
    "UPDATE t SET id = 72 WHERE id = 71",
    "UPDATE t SET n = 4, note = '{mine} and more' WHERE id = 72",
    "DELETE FROM t WHERE id = 72",
)


OPENING = '{"op":"c","before":null,"after":{'


def named(record: Record) -> list[str] | None:
    """The columns that the header names."""
    found = record.headers.get(PLACEHOLDER_VALUES_HEADER)
    return json.loads(found) if found else None


def told(bridge: Bridge) -> list[tuple[Any, ...]]:
    """Of each event: operation, id, n, and what the header names."""
    found = []
    for record in read_committed(bridge.kafka.bootstrap_servers, [f"{bridge.prefix}.public.t"]):
        if record.value is None:
            continue
        event = json.loads(record.value)
        row = event["after"] or event["before"]
        place = event["source"]["commit_lsn"], event["source"]["seq"]
        found.append((place, (event["op"], row["id"], row["n"], named(record))))
    return [one for _, one in sorted(found)]


def test_a_header_names_values_that_look_unchanged(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(TABLE.format(mine=UNAVAILABLE).encode())
        bridge = new_bridge(conninfo, snapshot={"mode": "initial"}).start()
        read_all(bridge)
        for change in CHANGES:
            connection.execute(change.format(mine=UNAVAILABLE).encode())
    bridge.caught_up()
    found = told(bridge)
    assert sorted(found[:30]) == [("r", number, 0, ["note", "raw"]) for number in range(1, 31)]
    assert found[30:60] == [("c", number, 0, None) for number in range(31, 61)]
    assert found[60:] == [
        ("c", 70, 1, ["note", "raw", "words", 'a "b']),
        ("c", 71, 1, None),
        ("u", 71, 2, None),
        ("u", 71, 3, ["note"]),
        ("d", 71, None, None),
        ("c", 72, 3, ["note"]),
        ("u", 72, 4, None),
        ("d", 72, None, None),
    ]


@COMPILED
@pytest.mark.parametrize("ascii", [True, False])
def test_the_fast_way_leaves_such_values_to_the_long_way(ascii: bool) -> None:
    columns = [
        Column(0, '"a":', plain.string, f'"{UNAVAILABLE}"', key=False),
        Column(1, '"b":', plain.string, f'"{UNAVAILABLE}"', key=False),
    ]
    frame = Frame("c", OPENING, '"schema":"s","table":"t",', metadata=True)
    write = writer(Event, "topic", "s.t", columns, 2, frame)

    def written(*values: str) -> Event | None:
        data = b"I\0\0\0\7N\0\2"
        for value in map(str.encode, values):
            data += b"t" + len(value).to_bytes(4) + value
        return encoded(write, data)

    other = "x" if ascii else "ö"
    assert written(other, UNAVAILABLE) is None
    assert written(UNAVAILABLE, other) is None
    assert written(other, UNAVAILABLE[:-1] + "f") is not None
    assert written(other, UNAVAILABLE + "x") is not None


@COMPILED
@pytest.mark.parametrize("unavailable", ["null", "0"])
def test_what_stands_for_a_number_that_is_never_stored_apart_looks_like_no_value(
    unavailable: str,
) -> None:
    """With a schema, that is null or 0, which says nothing: numbers are always in the WAL."""
    column = Column(0, '"a":', plain.integer, unavailable, key=False)
    frame = Frame("c", OPENING, '"schema":"s","table":"t",', metadata=True)
    write = writer(Event, "topic", "s.t", [column], 1, frame)
    for value in (b"0", b"17"):
        data = b"I\0\0\0\7N\0\1t" + len(value).to_bytes(4) + value
        assert encoded(write, data) is not None
    assert not holds_placeholder(unavailable)
    assert holds_placeholder(f'["{UNAVAILABLE}"]')
