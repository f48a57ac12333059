"""What 1, 2, 4 bridges of one database, with disjoint publications, cost the primary.

    python -m benchmarks.several_slots [--rows 400000] [--trials 3] [--slots 1,2,4] [--json]

The load is written once: four tables in turn, ten rows a transaction. In each trial n bridges read
it from n copies of one slot, at once; the publication of each has 4/n of the tables, so that
together they always publish every row. Processor seconds are those of the walsenders, of the
bridges and of the broker, from their start until every slot is confirmed up to the end; the ratios
are to one slot in the same round. `nothing`: one slot whose publication has none of the tables,
which is what decoding costs without any output.
"""

import statistics
import time
from functools import partial
from typing import Annotated, Final, NamedTuple

import psycopg
import typer

from benchmarks.bridge import Connection, Figures, report, wait_until
from benchmarks.race.contenders import Slotbridge, SlotCopy
from benchmarks.race.environment import Environment, environment, say
from benchmarks.race.process_metrics import ProcessMetrics, await_rest, usage
from services.testbed.pair import create_database

DBNAME: Final = "several"
LOADED: Final = "several_loaded"
TABLES: Final = ("t0", "t1", "t2", "t3")
ROWS_A_TRANSACTION: Final = 10
DEADLINE_S: Final = 900.0
_ROW: Final = (
    "g, (g % 100000)::int, 'customer-' || g, (g % 1000) + 0.25, md5(g::text),"
    " timestamptz '2026-01-01 00:00:00.123456+00' + g * interval '1 second'"
)


class Load(NamedTuple):
    """What was written: rows, bytes of WAL, and where it ends."""

    rows: int
    wal_bytes: int
    end_lsn: str


class Used(NamedTuple):
    """What one trial has used: seconds on the clock, processor seconds."""

    seconds: float
    walsenders_s: float
    bridges_s: float
    broker_s: float


def write_load(connection: Connection, rows: int) -> Load:
    """Make tables, publications and a slot, then the rows."""
    connection.execute("SET synchronous_commit = off")
    columns = "(id bigint PRIMARY KEY, a int, b text, c numeric, d text, e timestamptz)"
    for table in (*TABLES, "unused"):
        connection.execute(f"CREATE TABLE {table} {columns}".encode())
    for name, tables in _publications().items():
        connection.execute(f"CREATE PUBLICATION {name} FOR TABLE {', '.join(tables)}".encode())
    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [LOADED])
    before = _lsn(connection)
    inserts = " ".join(
        f"INSERT INTO {table} SELECT {_ROW} FROM generate_series(base + {number * 10}, "
        f"base + {number * 10 + ROWS_A_TRANSACTION - 1}) AS g; COMMIT;"
        for number, table in enumerate(TABLES)
    )
    step = ROWS_A_TRANSACTION * len(TABLES)
    connection.execute(
        f"DO $$ BEGIN FOR base IN 1..{rows} BY {step} LOOP {inserts} END LOOP; END $$".encode()
    )
    end = _lsn(connection)
    row = connection.execute("SELECT pg_wal_lsn_diff(%s, %s)::bigint", [end, before]).fetchone()
    assert row is not None
    return Load(rows, row[0], end)


def _publications() -> dict[str, tuple[str, ...]]:
    """Name -> its tables: `p2_1` is the second of two."""
    found = {
        f"p{count}_{number}": TABLES[number * 4 // count : (number + 1) * 4 // count]
        for count in (1, 2, 4)
        for number in range(count)
    }
    return found | {"p0_0": ("unused",)}


def trial(place: Environment, connection: Connection, load: Load, count: int, name: str) -> Used:
    """Let `count` bridges read the load, or one that publishes nothing (0)."""
    copies = [
        SlotCopy(
            *(place.bed, place.server, f"{name}_{number}", load.end_lsn, True, DBNAME),
            publication=f"p{count}_{number}",
        )
        for number in range(max(1, count))
    ]
    for copy in copies:
        connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [LOADED, copy.slot])
    await_rest(place.bed.kafka.pid)
    broker = ProcessMetrics(place.bed.kafka.pid)
    bridges = [Slotbridge() for _ in copies]
    since = time.monotonic()
    try:
        for bridge, copy in zip(bridges, copies, strict=True):
            bridge.launch(copy)
        slots = [copy.slot for copy in copies]
        wait_until(
            lambda: _confirmed(connection, slots, load.end_lsn),
            what=f"{', '.join(slots)} are confirmed up to {load.end_lsn}",
            timeout_s=DEADLINE_S,
        )
        seconds = time.monotonic() - since
        broker.look()
        walsenders = [pid for slot in slots for pid in _walsender(connection, slot)]
        assert len(walsenders) == len(copies)
        used = Used(
            seconds,
            sum(_cpu_s(pid) for pid in walsenders),
            sum(_cpu_s(bridge.pid) for bridge in bridges),
            broker.cpu_s,
        )
    finally:
        for bridge in bridges:
            bridge.stop()
    for copy in copies:
        wait_until(partial(_free, connection, copy.slot), what="the slot is free")
        connection.execute("SELECT pg_drop_replication_slot(%s)", [copy.slot])
    return used


def _confirmed(connection: Connection, slots: list[str], lsn: str) -> bool:
    row = connection.execute(
        "SELECT bool_and(confirmed_flush_lsn >= %s::pg_lsn) FROM pg_replication_slots"
        " WHERE slot_name = ANY(%s)",
        [lsn, slots],
    ).fetchone()
    return row is not None and bool(row[0])


def _walsender(connection: Connection, slot: str) -> list[int]:
    rows = connection.execute(
        "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND active", [slot]
    )
    return [int(row[0]) for row in rows]


def _free(connection: Connection, slot: str) -> bool:
    return not _walsender(connection, slot)


def _cpu_s(pid: int) -> float:
    """Processor seconds of the process since it began."""
    found = usage(pid)
    assert found is not None, f"process {pid} has ended"
    return found.cpu_s


def _lsn(connection: Connection) -> str:
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return str(row[0])


def measure(place: Environment, load: Load, counts: list[int], trials: int) -> list[Figures]:
    """One line for each number of slots: medians of its trials, which were made in turns."""
    found: dict[int, list[Used]] = {count: [] for count in counts}
    with _connect(place) as connection:
        for round_ in range(trials + 1):
            for count in counts:
                used = trial(place, connection, load, count, f"s{round_}_{count}")
                if round_:  # the first one warms the broker up
                    found[count].append(used)
                    say(f"round {round_}, {count or 'no'} slots with output: {used}")
    return [_line(count, used, found[1], load) for count, used in found.items()]


def _line(count: int, used: list[Used], of_one: list[Used], load: Load) -> Figures:
    walsenders = statistics.median(one.walsenders_s for one in used)
    ratios = [one.walsenders_s / base.walsenders_s for one, base in zip(used, of_one, strict=True)]
    return {
        "slots": count or "nothing",
        "s": round(statistics.median(one.seconds for one in used), 1),
        "walsenders CPU-s": round(walsenders, 2),
        "x one slot": round(statistics.median(ratios), 2),
        "CPU-s per GB of WAL": round(walsenders / load.wal_bytes * 1e9, 1),
        "bridges CPU-s": round(statistics.median(one.bridges_s for one in used), 2),
        "broker CPU-s": round(statistics.median(one.broker_s for one in used), 2),
    }


def _connect(place: Environment) -> Connection:
    return psycopg.connect(place.server.conninfo(DBNAME), autocommit=True)


def main(
    rows: Annotated[int, typer.Option(min=40)] = 400_000,
    trials: Annotated[int, typer.Option(min=1)] = 3,
    slots: Annotated[str, typer.Option(help="1, 2, 4; 0: one that publishes nothing")] = "1,2,4,0",
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start servers of its own, measure, print."""
    counts = [int(count) for count in slots.split(",")]
    if 1 not in counts or not set(counts) <= {0, 1, 2, 4}:
        raise typer.BadParameter("--slots needs 1, and takes 0, 2 and 4 beside it")
    with environment() as place:
        create_database(place.server, DBNAME)
        with _connect(place) as connection:
            load = write_load(connection, rows)
        say(f"{load.rows:,} rows, {load.wal_bytes / 1e6:,.0f} MB of WAL")
        lines = measure(place, load, counts, trials)
    report(lines, as_json=json)


if __name__ == "__main__":
    typer.run(main)
