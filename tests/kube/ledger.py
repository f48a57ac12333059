"""Load whose every acknowledged transaction is written down, and the comparison with Kafka."""

import contextlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import psycopg

from schemas.events import table_topic
from services.demo.copies import committed, database_rows, kafka_tables
from tests.kube.cluster import Outside, awaited

TABLE = """
    CREATE TABLE t (id bigserial PRIMARY KEY, tx bigint NOT NULL, body text NOT NULL)
"""
_BEGUN = "SELECT pg_current_xact_id()::text::bigint"
_INSERT = "INSERT INTO t (tx, body) SELECT %s, repeat('x', 100) FROM generate_series(1, %s)"
_UPDATE = "UPDATE t SET body = 'y' WHERE id = (SELECT max(id) FROM t)"


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a client was told: the transactions whose commit PostgreSQL has acknowledged."""

    outside: Outside
    prefix: str
    acknowledged: dict[int, int] = field(default_factory=dict)
    """number of the transaction -> how many rows it has inserted"""

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Write a transaction after the other while the block runs, on whichever node can."""
        done = threading.Event()
        thread = threading.Thread(target=self._work, args=(done,), name="load")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _work(self, done: threading.Event) -> None:
        sizes = itertools.cycle((1, 2, 3))
        while not done.is_set():
            with (  # a switch ends the session: what was not told is in doubt
                contextlib.suppress(psycopg.Error),
                psycopg.connect(self.outside.conninfo) as connection,
            ):
                while not done.wait(0.01):
                    self._write(connection, next(sizes))
            done.wait(0.2)

    def _write(self, connection: psycopg.Connection, size: int) -> None:
        with connection.transaction():
            [(number,)] = connection.execute(_BEGUN).fetchall()
            connection.execute(_INSERT, [number, size])
            connection.execute(_UPDATE)
        self.acknowledged[number] = size

    def await_more(self, count: int = 100) -> None:
        """Wait until so many more transactions are acknowledged."""
        wanted = len(self.acknowledged) + count
        awaited(
            lambda: len(self.acknowledged) >= wanted,
            what=f"{count} more transactions are acknowledged",
            timeout_s=120,
        )

    def compare(self) -> str:
        """Wait until Kafka has the database's rows; then nothing is missing, nothing is twice.

        By transaction: each that was acknowledged is in the database whole; Kafka has the inserts
        of exactly the database's transactions; and no event has the place of another.
        """
        truth = database_rows(self.outside.conninfo, ("t",))["t"]
        brokers = self.outside.broker.bootstrap_servers

        def same() -> bool:
            return kafka_tables(brokers, self.prefix, ("t",))["t"].rows == truth

        awaited(same, what="Kafka has what the database has", timeout_s=120, interval_s=1)
        with psycopg.connect(self.outside.conninfo) as connection:
            kept: Counter[int] = Counter(
                dict(connection.execute("SELECT tx, count(*) FROM t GROUP BY tx"))
            )
        lost = {tx: rows for tx, rows in self.acknowledged.items() if kept[tx] != rows}
        assert not lost, f"acknowledged, and not in the database: {lost}"
        places: Counter[tuple[int, int]] = Counter()
        inserted: Counter[int] = Counter()
        for _partition, _key, value in committed(brokers, table_topic(self.prefix, "public", "t")):
            assert value is not None
            event = json.loads(value)
            source = event["source"]
            places[source["commit_lsn"], source["seq"]] += 1
            if event["op"] == "c":
                inserted[source["txId"]] += 1
        twice = [place for place, count in places.items() if count > 1]
        assert not twice, f"twice in Kafka: {twice[:10]}"
        assert inserted == kept, f"not alike: {list((kept - inserted) + (inserted - kept))[:10]}"
        return (
            f"equal by transaction: {len(self.acknowledged)} acknowledged, {len(kept)} in the "
            f"database and in Kafka, {places.total()} events, none lost, none twice"
        )
