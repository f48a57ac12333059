"""The tables of the torture's workload, and the transactions that its clients run on them.

Every transaction ends with its row in `ledger`, which says how many changes it has made to each
table; what a savepoint rolls back has the tid `never`. Clients share accounts, `scratch` and
`shape`, and have items of their own: client * 10^9 + n. Some make a table, for large rows; some ask
for the rows of a table once more. `fill` makes the rows that are there before the bridge.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import psycopg

Connection = psycopg.Connection[Any]

ACCOUNTS: Final = 50
NEVER: Final = "never"
OWN_ROWS: Final = (
    *("items", "toast", "key", "savepoints", "large", "table", "routed", "outbox", "signal"),
)
"""Kinds that touch nothing of other clients: prepared, they may wait for long."""
LARGE_ROWS: Final = (150, 300, 300, 600)
NARROW: Final = "narrow"
"""Another publication than the bridge's."""
DDL: Final = ("shape", "renamed")
"""Kinds that lock a table which others need: never left prepared."""
RENAMED: Final = "r"
"""What the names of the column of `renamed` begin with; its value is the name that it had."""
_RENAMED: Final = 4
MADE: Final = "made_"
"""What the names of tables begin with that a transaction has made."""
_MADE_ROWS: Final = 6
_MADE_CHARACTERS: Final = 400_000
"""Two fill a request to Kafka: the new topic's partitions take several, one after the other."""
SCHEMA: Final = """
    CREATE TABLE ledger (tid text PRIMARY KEY, kind text, expected text);
    CREATE TABLE account (id int PRIMARY KEY, balance bigint, tid text);
    CREATE TABLE item (id bigint PRIMARY KEY, n int, tid text, payload text);
    ALTER TABLE item ALTER COLUMN payload SET STORAGE EXTERNAL;
    CREATE TABLE whole (id bigint PRIMARY KEY, tid text, payload text);
    ALTER TABLE whole ALTER COLUMN payload SET STORAGE EXTERNAL;
    ALTER TABLE whole REPLICA IDENTITY FULL;
    CREATE TABLE scratch (id bigint PRIMARY KEY, tid text);
    CREATE TABLE shape (id bigint PRIMARY KEY, tid text);
    CREATE TABLE renamed (id bigint PRIMARY KEY, tid text, r0 text);
    CREATE TABLE routed (id bigint PRIMARY KEY, n int, tid text);
    CREATE TABLE outbox (id bigint PRIMARY KEY, aggregatetype text, aggregateid text, type text,
                         payload text);
    CREATE TABLE signals (id varchar(42) PRIMARY KEY, type varchar(32) NOT NULL,
                          data varchar(2048));
    CREATE PUBLICATION narrow FOR TABLE ledger;
"""
FILLED: Final = 300
"""Items of each client that are there before the bridge."""
_BEFORE: Final = """
    INSERT INTO account SELECT g, 0, 'before' FROM generate_series(1, 50) g;
    INSERT INTO item SELECT c * 1000000000::bigint + g, 0, 'before',
                            repeat(md5(g::text), CASE WHEN g % 10 = 0 THEN 90 ELSE 1 END)
                       FROM generate_series(1, 5) c, generate_series(0, 299) g;
    INSERT INTO whole SELECT g, 'before', repeat(md5(g::text), 90) FROM generate_series(1, 80) g;
    INSERT INTO scratch SELECT g, 'before' FROM generate_series(1, 100) g;
    INSERT INTO shape SELECT g, 'before' FROM generate_series(1, 100) g;
    INSERT INTO renamed SELECT g, 'before', 'r0' FROM generate_series(1, 100) g;
    INSERT INTO routed SELECT g, 0, 'before' FROM generate_series(1, 100) g
"""
SNAPSHOT: Final[dict[str, Any]] = {
    "mode": "initial",
    "signal_table": "public.signals",
    "chunk_rows_max": 20,
}
READ: Final = ("account", "item", "whole", "scratch", "shape", "renamed", "routed", "ledger")
"""Tables whose rows a signal asks for."""
_SIGNALS: Final = ("execute", "execute", "execute", "execute", "pause", "resume", "stop")
SHAPING: Final[dict[str, Any]] = {
    "routes": [{"tables": r"public\.routed", "topic": "elsewhere-{prefix}"}],
    "outbox": {"table": "public.outbox", "topic": "{prefix}.outbox.{type}"},
}
"""`routed` goes to a topic that does not begin with the prefix, `outbox` has no envelopes."""
AGGREGATE_TYPES: Final = ("order", "person")


def fill(connection: Connection) -> None:
    """Make the rows that no slot decodes: Kafka has them from a snapshot alone, or never."""
    for statement in _BEFORE.split(";"):
        connection.execute(statement.encode())


def ask(connection: Connection, tid: str, kind: str, *tables: str, where: str = "") -> None:
    """Insert a signal, as Debezium's: `kind` is execute, stop, pause or resume; no table: all."""
    names = [f"public.{table}" for table in tables]
    data: dict[str, Any] = {"data-collections": names}
    if where:
        data["additional-conditions"] = [{"data-collection": n, "filter": where} for n in names]
    signal = [tid, f"{kind}-snapshot", json.dumps(data)]
    connection.execute("INSERT INTO signals VALUES (%s, %s, %s)", signal)


def ask_alone(connection: Connection, tid: str, kind: str, *tables: str) -> None:
    """The same, as a transaction of the ledger."""
    with connection.transaction():
        ask(connection, tid, kind, *tables)
        expected = json.dumps({"signals": 1, "ledger": 1})
        connection.execute("INSERT INTO ledger VALUES (%s, 'signal', %s)", [tid, expected])


class Work:
    """One client's transactions: `next_id` numbers its items, `mine` are those that exist.

    `touched` are the old items that the last one changed; `locked` are not to be changed, as an
    undecided prepared transaction has touched them.
    """

    def __init__(self, client: int, moments: random.Random) -> None:
        self.client = client
        self.random = moments
        self.next_id = client * 10**9 + FILLED
        self.mine: set[int] = set()
        self.locked: set[int] = set()
        self.touched: set[int] = set()
        self.kinds: dict[str, tuple[float, Callable[[Connection, str], Counter[str]]]] = {
            "transfer": (28, self._transfer),
            "items": (25, self._items),
            "toast": (8, self._toast),
            "key": (8, self._key),
            "savepoints": (10, self._savepoints),
            "large": (3, self._large),
            "truncate": (4, self._truncate),
            "shape": (5, self._shape),
            "renamed": (3, self._renamed),
            "table": (2, self._table),
            "routed": (6, self._routed),
            "outbox": (6, self._outbox),
            "signal": (0.4, self._signal),
            "message": (4, self._message),
            "empty": (2, lambda _connection, _tid: Counter()),
        }

    def choose(self) -> str:
        """The next transaction's kind."""
        names = list(self.kinds)
        return self.random.choices(names, [self.kinds[name][0] for name in names])[0]

    def run(self, connection: Connection, kind: str, tid: str) -> None:
        """Everything between BEGIN and COMMIT, with the ledger's row at the end."""
        self.touched = set()
        done = self.kinds[kind][1](connection, tid)
        done["ledger"] += 1
        connection.execute(
            "INSERT INTO ledger VALUES (%s, %s, %s)", [tid, kind, json.dumps(dict(done))]
        )

    def settle(self, connection: Connection) -> None:
        """Learn which items exist, after a transaction whose end was not certain."""
        rows = connection.execute(
            "SELECT id FROM item WHERE id BETWEEN %s AND %s",
            [self.client * 10**9, (self.client + 1) * 10**9 - 1],
        ).fetchall()
        self.mine = {row[0] for row in rows} - self.locked

    def _new_ids(self, count: int) -> list[int]:
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        return ids

    def _some(self, count: int) -> list[int]:
        return self.random.sample(sorted(self.mine), min(count, len(self.mine)))

    def _transfer(self, connection: Connection, tid: str) -> Counter[str]:
        ids = sorted(self.random.sample(range(1, ACCOUNTS + 1), 2))
        for number, account in enumerate(ids):
            connection.execute(
                "UPDATE account SET balance = balance + %s, tid = %s WHERE id = %s",
                [10 - 20 * number, tid, account],
            )
        return Counter(account=2)

    def _insert_items(self, connection: Connection, tid: str, count: int) -> list[int]:
        ids = self._new_ids(count)
        connection.execute(
            "INSERT INTO item SELECT g, 0, %s, 'small' FROM generate_series(%s::bigint, %s) g",
            [tid, ids[0], ids[-1]],
        )
        return ids

    def _items(self, connection: Connection, tid: str) -> Counter[str]:
        added = self._insert_items(connection, tid, self.random.randint(1, 8))
        changed = self._some(5)
        connection.execute("UPDATE item SET n = n + 1, tid = %s WHERE id = ANY(%s)", [tid, changed])
        gone = [item for item in self._some(4) if item not in changed]
        connection.execute("DELETE FROM item WHERE id = ANY(%s)", [gone])
        self.touched = {*changed, *gone}
        self.mine = self.mine - set(gone) | set(added)
        return Counter(item=len(added) + len(changed) + len(gone))

    def _toast(self, connection: Connection, tid: str) -> Counter[str]:
        """Large values, which the updates leave alone."""
        first, second = self._new_ids(2)
        text = "".join(self.random.choices("abcdefghij", k=3000))
        connection.execute("INSERT INTO item VALUES (%s, 0, %s, %s)", [first, tid, text])
        connection.execute("UPDATE item SET n = 1 WHERE id = %s", [first])
        connection.execute("INSERT INTO whole VALUES (%s, %s, %s)", [second, tid, text])
        connection.execute("UPDATE whole SET tid = %s || '+' WHERE id = %s", [tid, second])
        self.mine.add(first)
        return Counter(item=2, whole=2)

    def _key(self, connection: Connection, tid: str) -> Counter[str]:
        """A changed key is two events: d and c."""
        old = self._some(2)
        new = self._new_ids(len(old)) if old else []
        for before, after in zip(old, new, strict=True):
            connection.execute(
                "UPDATE item SET id = %s, tid = %s WHERE id = %s", [after, tid, before]
            )
        self.touched = set(old)
        self.mine = self.mine - set(old) | set(new)
        return Counter(item=2 * len(old))

    def _savepoints(self, connection: Connection, tid: str) -> Counter[str]:
        kept = self._insert_items(connection, tid, 3)
        connection.execute("SAVEPOINT a")
        self._insert_items(connection, NEVER, self.random.randint(1, 5))
        connection.execute("SAVEPOINT b")
        self._insert_items(connection, NEVER, 2)
        connection.execute("RELEASE b")
        connection.execute("ROLLBACK TO a")
        kept += self._insert_items(connection, tid, 2)
        self.mine |= set(kept)
        return Counter(item=5)

    def _large(self, connection: Connection, tid: str) -> Counter[str]:
        """Streamed while in progress, as logical_decoding_work_mem is 64kB."""
        count = self.random.choice(LARGE_ROWS)
        kept = self._insert_items(connection, tid, count)
        connection.execute("SAVEPOINT a")
        self._insert_items(connection, NEVER, count)
        connection.execute("ROLLBACK TO a")
        gone = kept[:-20]
        connection.execute("DELETE FROM item WHERE id = ANY(%s)", [gone])
        self.mine |= set(kept[-20:])
        return Counter(item=len(kept) + len(gone))

    def _truncate(self, connection: Connection, tid: str) -> Counter[str]:
        connection.execute("TRUNCATE scratch")
        ids = self._new_ids(3)
        for item in ids:
            connection.execute("INSERT INTO scratch VALUES (%s, %s)", [item, tid])
        return Counter(scratch=1 + len(ids))

    def _shape(self, connection: Connection, tid: str) -> Counter[str]:
        """A column more or less, and a row of the new shape."""
        column = f"c{self.random.randint(0, 3)}"
        connection.execute(f"ALTER TABLE shape DROP COLUMN IF EXISTS {column}".encode())
        if self.random.random() < 0.6:
            kind = self.random.choice(["int DEFAULT 7", "text", "numeric(10,2)"])
            connection.execute(f"ALTER TABLE shape ADD COLUMN {column} {kind}".encode())
        connection.execute(
            "INSERT INTO shape (id, tid) VALUES (%s, %s)", [self._new_ids(1)[0], tid]
        )
        return Counter(shape=1)

    def _renamed(self, connection: Connection, tid: str) -> Counter[str]:
        """A column has another name from one block of a stream to the next, here or elsewhere.

        Other sessions may rename it between the rows before and the rows after it.
        """
        count = self.random.choice(LARGE_ROWS)
        added = self._insert_items(connection, tid, count)
        rows = 0
        if self.random.random() < 0.6:
            self._insert_renamed(connection, tid)
            rows += 1
            if self.random.random() < 0.7:
                old, new = self._column(connection), f"{RENAMED}{self.random.randrange(_RENAMED)}"
                if old != new:
                    rename = f"ALTER TABLE renamed RENAME COLUMN {old} TO {new}"
                    connection.execute(rename.encode())
            added += self._insert_items(connection, tid, count)
        self._insert_renamed(connection, tid)
        connection.execute("DELETE FROM item WHERE id = ANY(%s)", [added[:-20]])
        self.mine |= set(added[-20:])
        return Counter(item=2 * len(added) - 20, renamed=rows + 1)

    def _insert_renamed(self, connection: Connection, tid: str) -> None:
        connection.execute("LOCK TABLE renamed IN ROW EXCLUSIVE MODE")  # before its name is read
        name = self._column(connection)
        connection.execute(
            f"INSERT INTO renamed (id, tid, {name}) VALUES (%s, %s, %s)".encode(),
            [self._new_ids(1)[0], tid, name],
        )

    def _column(self, connection: Connection) -> str:
        row = connection.execute(
            "SELECT attname FROM pg_attribute"
            " WHERE attrelid = 'renamed'::regclass AND attnum > 0 AND attname NOT IN ('id', 'tid')"
        ).fetchone()
        assert row is not None
        return str(row[0])

    def _table(self, connection: Connection, tid: str) -> Counter[str]:
        """A table of its own: its topic is made when its first rows are on their way."""
        ids = self._new_ids(_MADE_ROWS)
        name = f"{MADE}{ids[0]}"
        connection.execute(
            f"CREATE TABLE {name} (id bigint PRIMARY KEY, tid text,"
            " payload text STORAGE EXTERNAL)".encode()
        )
        connection.execute(
            f"INSERT INTO {name} SELECT g, %s, repeat(g::text, %s)"
            " FROM generate_series(%s::bigint, %s) g".encode(),
            [tid, _MADE_CHARACTERS // len(str(ids[0])), ids[0], ids[-1]],
        )
        return Counter({name: len(ids)})

    def _routed(self, connection: Connection, tid: str) -> Counter[str]:
        """Rows whose topic is named by a route."""
        ids = self._new_ids(self.random.randint(1, 4))
        connection.execute(
            "INSERT INTO routed SELECT g, 0, %s FROM generate_series(%s::bigint, %s) g",
            [tid, ids[0], ids[-1]],
        )
        connection.execute("UPDATE routed SET n = 1 WHERE id = ANY(%s)", [ids])
        return Counter(routed=2 * len(ids))

    def _outbox(self, connection: Connection, tid: str) -> Counter[str]:
        """Messages, removed in the transaction that has written them, as applications do."""
        ids = self._new_ids(self.random.randint(1, 4))
        for number in ids:
            kind = self.random.choice(AGGREGATE_TYPES)
            connection.execute(
                "INSERT INTO outbox VALUES (%s, %s, %s, 'made', %s)",
                [number, kind, str(number), tid],
            )
        connection.execute("DELETE FROM outbox WHERE id = ANY(%s)", [ids])
        return Counter(outbox=len(ids))

    def _signal(self, connection: Connection, tid: str) -> Counter[str]:
        """Rows are asked for once more, all or some, or what was asked for is held or given up."""
        kind, table = self.random.choice(_SIGNALS), self.random.choice(READ)
        some = kind == "execute" and self.random.random() < 0.25
        ask(connection, tid, kind, table, where="tid <> 'before'" if some else "")
        return Counter(signals=1)

    def _message(self, connection: Connection, tid: str) -> Counter[str]:
        connection.execute("SELECT pg_logical_emit_message(true, 'slotbridge.failover', %s)", [tid])
        return Counter()
