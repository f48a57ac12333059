"""Resident memory while many large transactions are open at once (full size: benchmarks)."""

import contextlib
import json
from pathlib import Path

import psycopg

from schemas.events import transaction_topic
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import committed
from tests.promises.bridge.running import Bridge
from tests.providers.interface import Provider

TRANSACTIONS = 10
ROWS = 8_000
TURN_ROWS = 2_000
NOTE_BYTES = 400
RESIDENT_MIB_MAX = 256
GROWTH_MIB_MAX = 128
"""What is written is more than that: frames of NOTE_BYTES and their headers."""


def peak_mib(bridge: Bridge) -> int:
    """The most that was resident so far."""
    status = Path(f"/proc/{bridge.pid}/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) // 1024


def event_counts(bridge: Bridge) -> list[int]:
    """Of each transaction that has ended in Kafka."""
    topic = transaction_topic(bridge.prefix)
    values = (value for _, _, value in committed(bridge.kafka.bootstrap_servers, topic) if value)
    return [end["event_count"] for end in map(json.loads, values) if end["status"] == "END"]


def test_ten_open_transactions_are_held_in_bounded_memory(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    small = "-c logical_decoding_work_mem=1MB"
    conninfo = pair.primary.conninfo(fresh_database, options=small)
    with contextlib.ExitStack() as stack:
        watcher = stack.enter_context(psycopg.connect(conninfo, autocommit=True))
        watcher.execute("CREATE TABLE t (id int, note text)")
        bridge = new_bridge(conninfo).start().streaming()
        watcher.execute("INSERT INTO t VALUES (0, 'first')")
        bridge.caught_up()
        idle = peak_mib(bridge)
        writers = [stack.enter_context(psycopg.connect(conninfo)) for _ in range(TRANSACTIONS)]
        for start in range(0, ROWS, TURN_ROWS):
            for number, writer in enumerate(writers):
                first = number * ROWS + start
                writer.execute(
                    "INSERT INTO t SELECT g, repeat('x', %s) FROM generate_series(%s::int, %s) g",
                    [NOTE_BYTES, first, first + TURN_ROWS - 1],
                )
        bridge.caught_up()
        while_open = peak_mib(bridge)
        for writer in writers:
            writer.commit()
        bridge.caught_up()
        peak = peak_mib(bridge)
        assert bridge.stop() == 0, bridge.output
    assert sorted(event_counts(bridge)) == [1, *[ROWS] * TRANSACTIONS]
    assert while_open - idle < GROWTH_MIB_MAX / 2, (idle, while_open, peak)
    assert peak - idle < GROWTH_MIB_MAX, (idle, while_open, peak)
    assert peak < RESIDENT_MIB_MAX, (idle, while_open, peak)
