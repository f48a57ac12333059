"""The load of a run: every change carries a token. And what Kafka has of it."""

import json
import random
import threading
from collections.abc import Iterator
from typing import Final

import psycopg
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from services.demo.copies import committed
from tests.league.verdict import Seen, Verdict, judge
from tests.providers.databases import Connection

PUBLICATION: Final = "league"
TABLES: Final = ("account", "entry", "ledger")
_ACCOUNTS: Final = 50
SETUP: Final = f"""
    CREATE TABLE account (id int PRIMARY KEY, version int NOT NULL, token text NOT NULL);
    CREATE TABLE entry (token text PRIMARY KEY, amount int NOT NULL);
    CREATE TABLE ledger (tid text PRIMARY KEY, changes int NOT NULL);
    INSERT INTO account SELECT id, 0, '' FROM generate_series(1, {_ACCOUNTS}) id;
    CREATE PUBLICATION {PUBLICATION} FOR TABLE account, entry, ledger;
"""
_SIZES: Final = (1, 1, 2, 5, 20)
_LARGE: Final = 1500
_LARGE_SHARE: Final = 0.02
_ROLLED_BACK_SHARE: Final = 0.05
_PAUSE_S: Final = 0.02
_LAST: Final = "last"
_ASK_S: Final = 30.0


class Client(threading.Thread):
    """Writes transactions to whichever server of `conninfo` takes writes, until `enough` is set."""

    def __init__(self, number: int, seed: int, conninfo: str, enough: threading.Event) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._name = f"{seed}.{number}"
        self._conninfo = conninfo
        self._random = random.Random(f"league {seed} {number}")
        self._enough = enough
        self._count = 0
        self.acknowledged: list[str] = []
        """Transactions whose COMMIT has returned."""

    def run(self) -> None:
        """Connect anew whenever a server goes away."""
        while not self._enough.is_set():
            try:
                with psycopg.connect(
                    self._conninfo, autocommit=True, connect_timeout=3
                ) as connection:
                    self._work(connection)
            except (psycopg.OperationalError, psycopg.InterfaceError):
                self._enough.wait(0.2)

    def _work(self, connection: Connection) -> None:
        while not self._enough.wait(self._random.uniform(0, 2 * _PAUSE_S)):
            self._count += 1
            tid = f"{self._name}.{self._count}"
            try:
                rolled_back = self._random.random() < _ROLLED_BACK_SHARE
                with connection.transaction(force_rollback=rolled_back):
                    write(connection, tid, self._random)
                if not rolled_back:
                    self.acknowledged.append(tid)
            except psycopg.errors.DeadlockDetected:
                continue


def write(connection: Connection, tid: str, moments: random.Random) -> None:
    """Write one transaction: updates, inserts, and its row of the ledger somewhere between them."""
    large = moments.random() < _LARGE_SHARE
    changes = _LARGE if large else moments.choice(_SIZES)
    ledger_at = moments.randint(1, changes)
    if large:
        connection.execute(
            "INSERT INTO entry SELECT %s || '/' || n, n FROM generate_series(1, %s) n",
            [tid, changes],
        )
        connection.execute("INSERT INTO ledger VALUES (%s, %s)", [tid, changes])
        return
    for number in range(1, changes + 1):
        token = f"{tid}/{number}"
        if moments.random() < 0.6:
            connection.execute(
                "UPDATE account SET version = version + 1, token = %s WHERE id = %s",
                [token, moments.randint(1, _ACCOUNTS)],
            )
        else:
            connection.execute("INSERT INTO entry VALUES (%s, %s)", [token, number])
        if number == ledger_at:
            connection.execute("INSERT INTO ledger VALUES (%s, %s)", [tid, changes])


def write_last(connection: Connection) -> None:
    """Write the transaction that tells that all before it have come."""
    connection.execute("INSERT INTO ledger VALUES (%s, 0)", [_LAST])


def has_last(bootstrap_servers: str, prefix: str) -> bool:
    """Tell whether Kafka shows the last transaction."""
    return any(
        event.token == f"{_LAST}/0" for event in _events(bootstrap_servers, prefix, "ledger")
    )


def ends(bootstrap_servers: str, prefix: str) -> int:
    """Return the sum of the end offsets of all tables' partitions."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    known = admin.list_topics(timeout=_ASK_S).topics
    asked = admin.list_offsets(
        {
            TopicPartition(topic, partition): OffsetSpec.latest()  # type: ignore[no-untyped-call]
            for topic in (f"{prefix}.public.{table}" for table in TABLES)
            if topic in known
            for partition in known[topic].partitions
        }
    )
    return sum(end.result(_ASK_S).offset for end in asked.values())


def compare(connection: Connection, bootstrap_servers: str, prefix: str) -> Verdict:
    """Judge what a consumer of committed records reads now."""
    ledger: dict[str, int] = dict(connection.execute("SELECT tid, changes FROM ledger").fetchall())
    versions: dict[int, int] = dict(
        connection.execute("SELECT id, version FROM account WHERE version > 0").fetchall()
    )
    seen = [event for table in TABLES for event in _events(bootstrap_servers, prefix, table)]
    return judge(ledger, versions, seen)


def _events(bootstrap_servers: str, prefix: str, table: str) -> Iterator[Seen]:
    for _partition, _key, value in committed(bootstrap_servers, f"{prefix}.public.{table}"):
        row = json.loads(value or b"{}").get("after")
        if row is None:
            continue
        if table == "ledger":
            yield Seen(f"{row['tid']}/0")
        elif table == "entry":
            yield Seen(row["token"])
        else:
            yield Seen(row["token"], row["id"], row["version"])
