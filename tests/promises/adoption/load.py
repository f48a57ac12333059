"""A load whose every change is written down in the database, and what Kafka has of it, by key."""

import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import psycopg

from tests.promises.bridge.reading import committed
from tests.providers.waiting import eventually, patient

SETUP = """
    CREATE SEQUENCE versions;
    CREATE TABLE truth (
        n bigserial, tbl text, key text, op text, txid bigint, version bigint
    );
    CREATE TABLE counters (id int PRIMARY KEY, version bigint, note text);
    CREATE TABLE moved (id text PRIMARY KEY, version bigint);
    CREATE TABLE batch (id bigint PRIMARY KEY, version bigint);
    CREATE TABLE log (version bigint, note text);
    CREATE FUNCTION told() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        x bigint := txid_current() % 4294967296;
        was text := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) ->> TG_ARGV[0] END;
        now text := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) ->> TG_ARGV[0] END;
    BEGIN
        IF TG_OP = 'DELETE' OR was <> now THEN
            INSERT INTO truth (tbl, key, op, txid) VALUES (TG_TABLE_NAME, was, 'd', x);
        END IF;
        IF TG_OP <> 'DELETE' THEN
            INSERT INTO truth (tbl, key, op, txid, version) VALUES (
                TG_TABLE_NAME, now, CASE WHEN was = now THEN 'u' ELSE 'c' END, x,
                (to_jsonb(NEW) ->> TG_ARGV[1])::bigint);
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER told AFTER INSERT OR UPDATE OR DELETE ON counters
        FOR EACH ROW EXECUTE FUNCTION told('id', 'version');
    CREATE TRIGGER told AFTER INSERT OR UPDATE OR DELETE ON moved
        FOR EACH ROW EXECUTE FUNCTION told('id', 'version');
    CREATE TRIGGER told AFTER INSERT OR UPDATE OR DELETE ON batch
        FOR EACH ROW EXECUTE FUNCTION told('id', 'version');
    CREATE TRIGGER told AFTER INSERT ON log
        FOR EACH ROW EXECUTE FUNCTION told('version', 'version');
    CREATE TABLE last (id int PRIMARY KEY, version bigint);
    CREATE PUBLICATION pub FOR TABLE counters, moved, batch, log, last;
"""
TABLES = ("counters", "moved", "batch", "log")
PGBENCH_KEYS = {
    "pgbench_accounts": ("aid", "abalance"),
    "pgbench_branches": ("bid", "bbalance"),
    "pgbench_tellers": ("tid", "tbalance"),
}
"""pgbench's tables with a key: the columns of the key, and of what each change changes."""
HISTORY = "pgbench_history"
KEYLESS = {"log": "version", HISTORY: "delta"}
"""Tables without a key, and a column: each of their changes differs by it or by its transaction."""
KEYED = {
    **dict.fromkeys(("counters", "moved", "batch", "numbered"), ("id", "version")),
    **PGBENCH_KEYS,
}
_KEYS = 40
_VERSION = "nextval('versions')"


Decode = Callable[[bytes, str, Literal["key", "value"]], Any]
"""A record's key or value of a topic -> its document."""


class Load:
    """Clients that change rows until `stop`; seldom in large transactions, some rolled back."""

    def __init__(self, conninfo: str, seed: int, clients: int = 2) -> None:
        self.committed = 0
        self._conninfo = conninfo
        self._enough = threading.Event()
        self.goes_on = threading.Event()
        """Set while the clients work."""
        self._threads = [
            threading.Thread(target=self._run, args=[random.Random(f"{seed}/{client}")])
            for client in range(clients)
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def go(self) -> None:
        """Let the clients work."""
        self.goes_on.set()

    def pause(self) -> None:
        """Let each client end its transaction, and wait."""
        self.goes_on.clear()

    def more(self, count: int) -> None:
        """Wait until `count` more transactions are committed."""
        wanted = self.committed + count
        eventually(
            lambda: self.committed >= wanted, what=f"{count} more transactions", timeout_s=120
        )

    def stop(self) -> None:
        """No more of it."""
        self._enough.set()
        self.goes_on.set()
        for thread in self._threads:
            thread.join(patient(60))

    def _run(self, rng: random.Random) -> None:
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            while not self._enough.wait(0.015):
                self.goes_on.wait()
                try:
                    with connection.transaction():
                        for _ in range(rng.choice((1, 1, 2, 5))):
                            _change(connection, rng)
                        if rng.random() < 0.02:
                            _large(connection, rng)
                        if rng.random() < 0.05:
                            raise psycopg.Rollback
                    self.committed += 1
                except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                    continue


def _change(connection: psycopg.Connection[Any], rng: random.Random) -> None:
    key, what = rng.randrange(_KEYS), rng.random()
    if what < 0.5:
        connection.execute(
            f"INSERT INTO counters VALUES (%s, {_VERSION}, 'n') ON CONFLICT (id) DO UPDATE"
            f" SET version = {_VERSION}".encode(),
            [key],
        )
    elif what < 0.65:
        connection.execute("DELETE FROM counters WHERE id = %s", [key])
    elif what < 0.8:
        connection.execute(
            f"INSERT INTO log VALUES ({_VERSION}, %s)".encode(), ["x" * rng.randrange(80)]
        )
    elif what < 0.9:
        connection.execute(
            f"INSERT INTO moved VALUES (%s, {_VERSION}) ON CONFLICT (id) DO NOTHING".encode(),
            [f"k{key}"],
        )
    else:
        connection.execute(
            f"UPDATE moved SET id = %s, version = {_VERSION} WHERE id = %s".encode(),
            [f"k{rng.randrange(_KEYS)}", f"k{key}"],
        )


def _large(connection: psycopg.Connection[Any], rng: random.Random) -> None:
    """Many rows with one LSN (COPY), or many changes."""
    if rng.random() < 0.5:
        count = rng.choice((20, 100, 800))
        row = connection.execute(
            f"SELECT array_agg({_VERSION}) FROM generate_series(1, %s)".encode(), [count]
        ).fetchone()
        assert row is not None
        with connection.cursor().copy("COPY batch FROM STDIN") as copy:
            for number in row[0]:
                copy.write_row((number, number))
    else:
        connection.execute(f"UPDATE counters SET version = {_VERSION}".encode())
        connection.execute(
            f"UPDATE batch SET version = {_VERSION}"
            " WHERE id IN (SELECT id FROM batch ORDER BY id DESC LIMIT 100)".encode()
        )


def plain_json(data: bytes, _topic: str, _part: str) -> Any:
    """Read JSON, with or without a schema."""
    document = json.loads(data)
    return document["payload"] if document.keys() == {"schema", "payload"} else document


class Change(NamedTuple):
    """A change of a key; no version of a delete, whose old row the server does not send."""

    op: str
    txid: int
    version: int | None


@dataclass
class Compared:
    """What is wrong, over all keys, from each key's last record of Debezium on."""

    lost: int = 0
    twice: int = 0
    wrong: int = 0
    """Out of order, or never written."""
    theirs: int = 0
    ours: int = 0
    transactions: int = 0
    """That the database has committed."""
    faults: list[str] = field(default_factory=list)

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(
            *(self.lost + other.lost, self.twice + other.twice, self.wrong + other.wrong),
            *(self.theirs + other.theirs, self.ours + other.ours),
            *(self.transactions + other.transactions, self.faults + other.faults),
        )


def compare(
    conninfo: str, bootstrap_servers: str, prefix: str, decode: Decode = plain_json
) -> Compared:
    """Compare the topics with what the database says that it has done.

    What Debezium has written behind the bridge, after a release, counts as the bridge's.
    """
    truth: dict[tuple[str, str], list[Change]] = defaultdict(list)
    with psycopg.connect(conninfo) as connection:
        for table, key, *change in connection.execute(
            "SELECT tbl, key, op, txid, version FROM truth ORDER BY n"
        ):
            truth[table, key].append(Change(*change))
        tables = {name for (name,) in connection.execute("SELECT tablename FROM pg_tables")}
    topics = _Topics(bootstrap_servers, f"{prefix}.public.", decode)
    found = Compared(transactions=len({one.txid for of_key in truth.values() for one in of_key}))
    for table in KEYED.keys() & tables:
        events = _by_key(topics, table)
        for key in events.keys() | {key for of, key in truth if of == table}:
            _compare_key(found, f"{table} {key}", truth[table, key], events.get(key, []))
    for table in {*KEYLESS} & tables:
        written = Counter(one for (of, _), all_of in truth.items() if of == table for one in all_of)
        _compare_keyless(found, topics, table, written)
    return found


class _Topics(NamedTuple):
    """Where the records of tables are, and how they are read."""

    bootstrap_servers: str
    start: str
    decode: Decode

    def records(self, table: str) -> Iterator[tuple[int, Any, Any]]:
        """Yield partition, key, value of what a consumer sees, all decoded."""
        topic = self.start + table
        for partition, key, value in committed(self.bootstrap_servers, topic):
            yield (
                partition,
                None if key is None else self.decode(key, topic, "key"),
                None if value is None else self.decode(value, topic, "value"),
            )


def _by_key(topics: _Topics, table: str) -> dict[str, list[tuple[Change, bool]]]:
    """Key -> its events in order, and whether each is the bridge's; tombstones are checked."""
    found: dict[str, list[tuple[Change, bool]]] = defaultdict(list)
    untold: set[str] = set()
    places: dict[str, int] = {}
    for partition, key, value in topics.records(table):
        name = str(key[KEYED[table][0]])
        assert places.setdefault(name, partition) == partition, f"{table} {name}: in two partitions"
        if value is None:
            untold.discard(name)
            continue
        change, is_ours = _change_of(value, KEYED[table][1])
        if is_ours:
            assert name not in untold or change.op == "d", f"{table} {name}: no tombstone"
        (untold.add if change.op == "d" else untold.discard)(name)
        is_ours = is_ours or any(ours for _, ours in found[name])
        found[name].append((change, is_ours))
    assert not untold, f"{table}: no tombstone of {sorted(untold)[:5]}"
    return found


def _change_of(event: dict[str, Any], column: str) -> tuple[Change, bool]:
    """What an event or a flat row tells, and whether it is the bridge's."""
    if "__op" in event:
        version = None if event["__op"] == "d" else event[column]
        return Change(event["__op"], event["__txId"], version), bool(event.get("__commit_lsn"))
    version = (event["after"] or {}).get(column)
    source = event["source"]
    return Change(event["op"], source["txId"], version), bool(source.get("commit_lsn"))


def _compare_key(
    found: Compared, name: str, truth: list[Change], events: list[tuple[Change, bool]]
) -> None:
    theirs = [change for change, is_ours in events if not is_ours]
    ours = [change for change, is_ours in events if is_ours]
    found.theirs += len(theirs)
    found.ours += len(ours)
    start = 0
    if theirs:
        assert theirs[-1] in truth, (name, theirs[-1])
        start = len(truth) - truth[::-1].index(theirs[-1])
    expected = truth[start:]
    if ours == expected:
        return
    missing, extra = Counter(expected) - Counter(ours), Counter(ours) - Counter(expected)
    repeated = sum(count for change, count in extra.items() if change in truth)
    found.lost += missing.total()
    found.twice += repeated
    found.wrong += extra.total() - repeated + (not missing and not extra)
    found.faults.append(f"{name}: behind {theirs[-1:]}: {ours[:4]} instead of {expected[:4]}")


def _compare_keyless(
    found: Compared, topics: _Topics, table: str, written: Counter[Change]
) -> None:
    """A table without a key: each row once, over both."""
    theirs, ours = set[Change](), Counter[Change]()
    for _partition, _key, value in topics.records(table):
        change, is_ours = _change_of(value, KEYLESS[table])
        if is_ours:
            ours[change] += 1
        else:
            found.theirs += 1
            theirs.add(change)
    found.ours += ours.total()
    lost = written.keys() - theirs - ours.keys()
    twice = sum(count - 1 + (change in theirs) for change, count in ours.items())
    found.lost += len(lost)
    found.twice += twice
    found.wrong += len((theirs | ours.keys()) - written.keys())
    if lost or twice:
        found.faults.append(f"{table}: {len(lost)} lost, {twice} twice")
