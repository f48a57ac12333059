"""Watches every hop from outside, once a second, in a thread of its own.

It only reads, and a server that is down is a fact to show, not a failure.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any, Final

import psycopg
from confluent_kafka import Consumer, KafkaException, TopicPartition

from schemas.events import table_topic
from services.demo.display import Board, Hop
from services.demo.workload import TABLES

_INTERVAL_S: Final = 1.0
_ROWS: Final = """
    SELECT 4 * (SELECT count(*) FROM pgbench_history) + (SELECT count(*) FROM pgbench_accounts)
             + (SELECT count(*) FROM pgbench_branches) + (SELECT count(*) FROM pgbench_tellers)
"""
"""Rows written: each transaction updates three and adds one, the rest was loaded."""
_LAGS: Final = """
    SELECT slot_name::text, pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint
      FROM pg_replication_slots WHERE slot_type = 'logical'
"""
_READY: Final = """
    SELECT slot_name::text, synced AND NOT temporary AND invalidation_reason IS NULL
      FROM pg_replication_slots WHERE slot_type = 'logical'
"""


class Observer:
    """Keeps `board` up to date. `primary` and `standby` are conninfos and may be replaced."""

    def __init__(
        self,
        board: Board,
        *,
        primary: str,
        standby: str | None,
        subscriber: str,
        bootstrap_servers: str,
        prefix: str,
        slots: tuple[str, str],
        tables_log: Path,
    ) -> None:
        self.primary = primary
        self.standby = standby
        self._subscriber = subscriber
        self._prefix = prefix
        self._slots = slots
        self._tables_log = tables_log
        self._board = board
        self._hops = [Hop(name) for name in ("primary", "subscriber", "Kafka", "Iceberg")]
        board.hops = self._hops
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap_servers, "group.id": "slotbridge-demo", "log_level": 0}
        )
        self._seen: dict[str, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="observer", daemon=True)

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._look()
        self._consumer.close()

    def _loop(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        """Read rows and lag of each hop, and the state of the failover slots."""
        primary, subscriber, kafka, iceberg = self._hops
        rows = _query(self.primary, _ROWS)
        lags = dict(_query(self.primary, _LAGS))
        if rows:
            self._update(primary, int(rows[0][0]))
            primary.lag = ""
        else:
            primary.lag = "down"
            primary.rows_per_second = 0.0
        for hop, slot in zip((kafka, subscriber), self._slots, strict=True):
            hop.lag = f"{lags[slot] / 1024:,.0f} kB" if slot in lags else "?"
        for row in _query(self._subscriber, _ROWS):
            self._update(subscriber, int(row[0]))
        self._update(kafka, self._kafka_records())
        batches = table_batches(self._tables_log)
        self._update(iceberg, sum(batch["events"] for batch in batches))
        iceberg.lag = f"epoch {batches[-1]['epoch']}" if batches else "starting"
        ready = dict(_query(self.standby, _READY)) if self.standby is not None else None
        self._board.slots = {
            slot: "no standby" if ready is None else "ready" if ready.get(slot) else "not ready"
            for slot in self._slots
        }

    def _update(self, hop: Hop, rows: int) -> None:
        now = time.monotonic()
        last, then = self._seen.get(hop.name, (rows, now - _INTERVAL_S))
        hop.rows = rows
        hop.rows_per_second = max(0.0, (rows - last) / (now - then))
        self._seen[hop.name] = (rows, now)

    def _kafka_records(self) -> int:
        """Return how many records the tables' topics have; the last number without an answer."""
        total = 0
        try:
            known = self._consumer.list_topics(timeout=2).topics
            for table in TABLES:
                topic = table_topic(self._prefix, "public", table)
                if topic not in known:
                    continue
                for partition in known[topic].partitions:
                    place = TopicPartition(topic, partition)
                    low, high = self._consumer.get_watermark_offsets(place, timeout=2)
                    total += high - low
        except KafkaException:
            return self._seen.get("Kafka", (0, 0.0))[0]
        return total


def table_batches(log: Path) -> list[dict[str, Any]]:
    """Return the epochs that slottables has reported, from the JSON lines of its log."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"epoch"')]


def _query(conninfo: str, query: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query, [] when the server can't answer."""
    try:
        with psycopg.connect(conninfo, connect_timeout=2, autocommit=True) as connection:
            return connection.execute(query.encode()).fetchall()
    except psycopg.Error:
        return []
