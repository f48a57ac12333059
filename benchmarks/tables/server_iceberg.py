"""From PostgreSQL to Iceberg tables that are read: Slotbridge, and debezium-server-iceberg.

    python -m benchmarks.tables.server_iceberg --distribution FOLDER

FOLDER is what `mvn -Passembly -DskipTests package` in that project's repository packs
(debezium-server-iceberg-dist/target/*.zip, unpacked). Each contender in turn has a database, a slot
and a warehouse of its own on the same server, and the same load. One JSON line for each measure:

initial    the rows that are there before: seconds from the start of the processes
fresh      pgbench: from COMMIT until all four tables have the row; looks at which sums differ
backlog    changes made while the contender was stopped: seconds from its start to the last of them
reader     `SELECT sum(…)` over that table after it, by Spark, DuckDB and pyiceberg
kills      another backlog, SIGKILL for all processes in the middle of it; rows lost or too many

Files are looked at from outside (looks.py). Not measured: compaction, which debezium-server-iceberg
leaves to its user, and which `slottables run` does.
"""

import argparse
import bisect
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks.bridge import described, wait_until
from benchmarks.race.environment import Environment, environment, say
from benchmarks.tables.catalog_file import pointers
from benchmarks.tables.duckdb_reader import duckdb_reader
from benchmarks.tables.looks import (
    Growth,
    Look,
    Looks,
    files_of,
    rows_of,
)
from benchmarks.tables.readers import (
    SparkReader,
    seconds_of_duckdb,
    seconds_of_pyiceberg,
    spark_reader,
)
from benchmarks.tables.ways import (
    PREFIX,
    SLOT,
    Commit,
    Meters,
    ServerIceberg,
    ServerIcebergBatches,
    Slottables,
    Way,
)

_TIMEOUT_S: Final = 900.0
_MARK: Final = 1_000_000_000
"""Keys from here on say in `accounts` that all before them is there."""
_MARK_INTERVAL_S: Final = 2.0
_CHANGES: Final = 10
"""Changes of `accounts` in a transaction of a backlog."""
_EVENTS_AN_EPOCH: Final = 20_000
"""While it is killed: else few epochs would be there to be cut short."""
_SUM_LOOKS: Final = 20
_PGBENCH: Final = ("pgbench_accounts", "pgbench_tellers", "pgbench_branches", "pgbench_history")
_SUMS: Final = {
    "pgbench_tellers": "tbalance",
    "pgbench_branches": "bbalance",
    "pgbench_history": "delta",
}
_TABLES: Final = """
CREATE TABLE accounts (aid int PRIMARY KEY, bid int, abalance int, filler text);
CREATE TABLE history (aid int, abalance int);
INSERT INTO accounts SELECT n, n / 100000, 0, repeat('x', 40) FROM generate_series(1, {rows}) n;
"""
_BACKLOG: Final = """
DO $$ DECLARE aids int[]; BEGIN
  PERFORM setseed(0.5);
  FOR n IN 1..{transactions} LOOP
    aids := ARRAY(SELECT 1 + floor(random() * {rows})::int FROM generate_series(1, 10));
    {changes}
    COMMIT;
  END LOOP;
END $$
"""
_UPDATES: Final = "UPDATE accounts SET abalance = n WHERE aid = ANY(aids);"
_MIXED: Final = """
    UPDATE accounts SET abalance = {base} + n WHERE aid = ANY(aids[1:4]);
    INSERT INTO accounts
      SELECT {rows} + 3 * n + g, 0, {base} + n, repeat('x', 40) FROM generate_series(0, 2) g;
    DELETE FROM accounts WHERE aid = ANY(aids[8:10]);
    INSERT INTO history VALUES (aids[1], n);
"""
_COMPARED: Final = {"accounts": "aid, bid, abalance", "history": "aid, abalance"}
_WITHOUT_KEY: Final = ("history", "pgbench_history")
Figures = dict[str, Any]


class Course:
    """One contender, its database, and what is measured of it."""

    def __init__(self, given: Environment, way: Way, options: argparse.Namespace) -> None:
        self._bed, self._server, self._way, self._options = given.bed, given.server, way, options
        self._marks, self._marked_at = 0, time.monotonic()
        self._last_aid = Growth("aid")
        self._balance = Growth("abalance")

    def run(self) -> Iterator[Figures]:
        """All measures, in the order of the module's text."""
        way, options = self._way, self._options
        yield {"measure": "initial", **self._initial()}
        if way.name != ServerIcebergBatches.name:
            for rate in options.rates:
                yield {"measure": "fresh", "transactions_per_s": rate, **self._fresh(rate)}
        way.stop()
        yield {"measure": "backlog", **self._backlog()}
        way.stop()
        yield from self._readers()
        yield {"measure": "kills", **self._kills()}

    def _initial(self) -> Figures:
        rows = self._options.rows
        since = time.monotonic()
        with Meters(self._way) as meters:
            self._way.start()
            self._wait(partial(self._filled, rows, 100_000), "the rows that were there before")
            seconds = time.monotonic() - since
        self._settle()
        return {"rows": rows + 100_000, "seconds": round(seconds, 1), **meters.figures()}

    def _fresh(self, rate: int) -> Figures:
        options, way = self._options, self._way
        folder = self._bed.folder / f"looks-{way.name}-{rate}"
        with Looks(way.database, PREFIX, folder) as looks:
            self._pgbench(rate, options.warm_up_seconds)
            with Meters(self._way) as meters:
                since = time.time()
                self._pgbench(rate, options.seconds)
                until = time.time()
            self._settle()
        commits = [commit for commit in way.commits() if since <= commit.at < until]
        names = {name: way.iceberg_name(name) for name in _PGBENCH}
        places = [
            Look(at, {name: found[own] for name, own in names.items()})
            for at, found in looks.looks
            if found.keys() >= {*names.values()}
        ]
        ages = arrivals(commits, reached(places, way.position))
        measured = [look for look in places if since <= look.at < until]
        return {
            "transactions": len(ages),
            "commits_to_tables": len(measured),
            **described(ages),
            **meters.figures(),
            **self._sums(places, since, until),
        }

    def _sums(self, places: list[Look], since: float, until: float) -> Figures:
        """Moments spread over the measured time, at which a reader took what was there."""
        differ = 0
        with duckdb_reader() as database:
            for number in range(_SUM_LOOKS):
                at = since + (until - since) * (number + 0.5) / _SUM_LOOKS
                look = [one for one in places if one.at <= at][-1]
                found = {
                    database.execute(
                        f"SELECT coalesce(sum({column}), 0)::bigint"
                        f" FROM iceberg_scan('{look.places[name]}')"
                    ).fetchall()[0][0]
                    for name, column in _SUMS.items()
                }
                differ += len(found) > 1
        return {"sums_differ": differ, "sums_looked_at": _SUM_LOOKS}

    def _backlog(self) -> Figures:
        transactions = self._options.changes // _CHANGES
        self._write(transactions, _UPDATES)
        since = time.monotonic()
        with Meters(self._way) as meters:
            self._way.start()
            self._await_mark()
            seconds = time.monotonic() - since
        self._settle()
        changes = transactions * _CHANGES
        return {"changes": changes, "seconds": round(seconds, 1), **meters.figures()}

    def _readers(self) -> Iterator[Figures]:
        way, place = self._way, self._place("accounts")
        with self._spark() as spark:
            for table in ("pgbench_accounts", "accounts"):
                name = way.iceberg_name(table)
                yield {
                    "measure": "reader",
                    "table": table,
                    "spark_s": spark.seconds_of_sum(name, way.live),
                    **files_of(self._place(table)),
                }
            found = self._right(spark, {"pgbench_history": "aid, delta", **_COMPARED})
        found["duckdb_s"] = seconds_of_duckdb(place, way.live)
        yield {"measure": "reader", "pyiceberg": seconds_of_pyiceberg(place), **found}

    def _kills(self) -> Figures:
        options, way = self._options, self._way
        base, transactions = options.changes, options.changes // _CHANGES
        self._write(transactions, _MIXED.format(base=base, rows=options.rows))
        since = time.monotonic()
        way.start(events_max=_EVENTS_AN_EPOCH)
        kills = 0
        for share in options.killed_at:
            self._wait(partial(self._come, base + share * transactions), "a part of the backlog")
            if not self._arrived():
                way.kill()
                kills += 1
                way.start(events_max=_EVENTS_AN_EPOCH)
        self._await_mark()
        seconds = time.monotonic() - since
        self._settle()
        way.stop()
        found = {"kills": kills, "seconds": round(seconds, 1), "revived": way.revived}
        with self._spark() as spark:
            return found | self._right(spark, _COMPARED)

    def _right(self, spark: SparkReader, tables: dict[str, str]) -> Figures:
        """Rows that the source has and the table lacks, and the reverse."""
        found = {}
        for table, columns in tables.items():
            with psycopg.connect(self._way.conninfo) as connection:
                source = Counter(connection.execute(f"SELECT {columns} FROM {table}").fetchall())
            own = Counter[tuple[Any, ...]]()
            if self._place(table).is_file():  # a table without rows may not be made yet
                live = "" if table in _WITHOUT_KEY else self._way.live
                own = spark.rows(self._way.iceberg_name(table), columns, live)
            found[f"{table}_lacks"] = (source - own).total()
            found[f"{table}_too_many"] = (own - source).total()
        return found

    def _spark(self) -> AbstractContextManager[SparkReader]:
        return spark_reader(self._way.catalog, self._way.database, PREFIX)

    def _pgbench(self, rate: int, seconds: int) -> None:
        load = ["-n", "-c", "2", "-R", str(rate), "-T", str(seconds), self._way.conninfo]
        self._server.run_tool("pgbench", load, timeout_s=seconds + _TIMEOUT_S)

    def _write(self, transactions: int, changes: str) -> None:
        rows = self._options.rows
        query = _BACKLOG.format(transactions=transactions, rows=rows, changes=changes)
        with psycopg.connect(self._way.conninfo, autocommit=True) as connection:
            connection.execute(query)
        self._mark()

    def _mark(self) -> None:
        self._marks += 1
        self._marked_at = time.monotonic()
        with psycopg.connect(self._way.conninfo) as connection:
            connection.execute("INSERT INTO accounts VALUES (%s)", [_MARK + self._marks])

    def _arrived(self) -> bool:
        return (self._last_aid.as_of(self._place("accounts")) or 0) >= _MARK + self._marks

    def _await_mark(self) -> None:
        self._wait(self._arrived, "the last change")

    def _settle(self) -> None:
        """Wait until all that was committed is in all tables.

        A batch comes to one table after the other: all are there once a later batch is in one.
        """
        for _ in range(2):
            self._mark()
            self._await_mark()

    def _come(self, balance: float) -> bool:
        return (self._balance.as_of(self._place("accounts")) or 0) >= balance

    def _place(self, table: str) -> Path:
        name = self._way.iceberg_name(table)
        return pointers(self._way.database, PREFIX).get(name, Path("/nonexistent"))

    def _filled(self, accounts: int, pgbench_accounts: int) -> bool:
        """Write a transaction now and then meanwhile: rows become an epoch with one."""
        if time.monotonic() - self._marked_at > _MARK_INTERVAL_S:
            self._mark()
        return self._has("accounts", accounts) and self._has("pgbench_accounts", pgbench_accounts)

    def _has(self, table: str, rows: int) -> bool:
        place = self._place(table)
        return place.is_file() and rows_of(place) >= rows

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        def come() -> bool:
            self._way.revive()
            return condition()

        wait_until(come, what=f"{self._way.name}: {what}", timeout_s=_TIMEOUT_S)


def reached(looks: list[Look], column: str) -> list[tuple[int, float]]:
    """(position up to which all tables of a look have come, its Unix time), both rising."""
    growths: dict[str, Growth] = {}
    found = []
    for at, places in looks:
        positions = []
        for name, place in places.items():
            growth = growths.setdefault(name, Growth(column))
            positions.append(growth.as_of(place) or 0)
        found.append((min(positions), at))
    return found


def arrivals(commits: list[Commit], steps: list[tuple[int, float]]) -> list[float]:
    """The ages of transactions in seconds when all tables had them, the lowest first."""
    positions = [position for position, _ in steps]
    return sorted(
        steps[bisect.bisect_left(positions, commit.position)][1] - commit.at for commit in commits
    )


def ways(options: argparse.Namespace) -> list[Callable[[Environment, str], Way]]:
    """How to make each contender that was asked for."""
    folder = options.distribution
    known: dict[str, Callable[[Environment, str], Way]] = {
        Slottables.name: Slottables,
        ServerIceberg.name: lambda e, name: ServerIceberg(e, name, folder),
        ServerIcebergBatches.name: lambda e, name: ServerIcebergBatches(e, name, folder),
    }
    return [known[name] for name in options.contenders or known]


def main() -> None:
    """Each contender in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--distribution", type=Path, required=True, help="unpacked; see above")
    parser.add_argument("--contenders", nargs="*", help="all of them by default")
    parser.add_argument("--rows", type=int, default=300_000, help="of `accounts` before the load")
    parser.add_argument("--changes", type=int, default=200_000, help="of each backlog")
    parser.add_argument("--rates", type=int, nargs="*", default=[200, 60], help="pgbench's")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--warm-up-seconds", type=int, default=60, help="before each rate")
    parser.add_argument("--killed-at", type=float, nargs="*", default=[0.25, 0.5, 0.75])
    options = parser.parse_args()
    with environment(track_commit_timestamp="on") as given:
        for number, make in enumerate(ways(options)):
            dbname = f"bench{number}"
            with psycopg.connect(given.server.conninfo(), autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {dbname}")
            conninfo = given.server.conninfo(dbname)
            given.server.run_tool("pgbench", ["-i", "-q", "-I", "dtgp", conninfo])
            with psycopg.connect(conninfo) as connection:
                connection.execute(_TABLES.format(rows=options.rows))
            way = make(given, dbname)
            say(way.name)
            for line in Course(given, way, options).run():
                sys.stdout.write(json.dumps({"contender": way.name, **line}) + "\n")
                sys.stdout.flush()
            way.stop()
            wait_until(lambda: _dropped(given), what="the slot is not in use")


def _dropped(given: Environment) -> bool:
    query = "SELECT pg_drop_replication_slot(%s)"
    with psycopg.connect(given.server.conninfo(), autocommit=True) as connection:
        try:
            connection.execute(query, [SLOT])
        except psycopg.errors.ObjectInUse:
            return False
    return True


if __name__ == "__main__":
    main()
