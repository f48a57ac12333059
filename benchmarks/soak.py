"""Does the bridge grow? Half an hour at 70 % of what it can do on this machine.

    make bench SOAK=1    python -m benchmarks.soak [--minutes 30] [--share 0.7]

Transactions of ten narrow rows; the table is truncated once a minute. Capacity: as many as can be
made in half a minute, over the time until the last of them is in Kafka; writer, server, broker and
bridge share the machine. Then each sample has the bridge's resident memory, threads, descriptors,
and how far its slot is behind. After a warm-up, the medians of the first third and of the last are
compared: exit 1 when it has grown.
"""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import psycopg
import typer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.bridge import Connection, report, wait_until
from benchmarks.race.contenders import PUBLICATION, Slotbridge, SlotCopy
from benchmarks.race.environment import Environment, environment, say
from benchmarks.race.plot import lines
from benchmarks.race.process_metrics import Usage, usage
from benchmarks.race.workloads import narrow, narrow_inserts
from services.testbed.pair import create_database

NAME: Final = "soak"
CAPACITY_S: Final = 30.0
TICK_S: Final = 0.1
TRUNCATE_S: Final = 60.0
SAMPLE_S: Final = 10.0
WARM_UP_SHARE: Final = 0.2
GROWTH_MIB_MAX: Final = 3.0
_SMALL: Final = {"retention.bytes": "268435456", "segment.bytes": "67108864"}


@dataclass(frozen=True, slots=True)
class Sample:
    """Of the bridge; `cpu` in cores and `rows_s` since the sample before."""

    minutes: float
    rows_s: float
    cpu: float
    lag_mb: float
    resident_mib: float
    threads: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """`first`, `last`: medians of a third each, MiB resident, threads, descriptors, MB behind."""

    capacity_rows_s: float
    rows_s: float
    minutes: float
    first: tuple[float, float, float, float]
    last: tuple[float, float, float, float]

    @property
    def grew(self) -> bool:
        """More memory than noise explains, one thread or descriptor more, or ever more behind."""
        memory, threads, descriptors, lag = (
            b - a for a, b in zip(self.first, self.last, strict=True)
        )
        return (
            memory > GROWTH_MIB_MAX
            or threads > 0
            or descriptors > 0
            or lag > self.rows_s / 1000  # a second's rows, at most 1 KB of WAL each
        )


def verdict(capacity_rows_s: float, samples: list[Sample]) -> Verdict:
    """Of what was seen after the warm-up. Pure."""
    warm = samples[int(len(samples) * WARM_UP_SHARE) :]
    third = max(1, len(warm) // 3)

    def medians(part: list[Sample]) -> tuple[float, float, float, float]:
        of = statistics.median
        return (
            of(s.resident_mib for s in part),
            of(s.threads for s in part),
            of(s.descriptors for s in part),
            of(s.lag_mb for s in part),
        )

    rows_s = statistics.mean(s.rows_s for s in warm)
    first, last = medians(warm[:third]), medians(warm[-third:])
    return Verdict(capacity_rows_s, rows_s, samples[-1].minutes, first, last)


class Soak:
    """The load, and what is seen of `bridge` under it."""

    def __init__(self, connection: Connection, bridge: Slotbridge) -> None:
        self._connection = connection
        self._bridge = bridge
        self._rows = 0
        self._truncated = time.monotonic()

    def capacity(self, seconds: float) -> float:
        """Rows in a second, from a client's statement into Kafka."""
        since = time.monotonic()
        while time.monotonic() - since < seconds:
            self._write(10_000)
        self._caught_up()
        return self._rows / (time.monotonic() - since)

    def soak(self, rows_s: float, seconds: float) -> list[Sample]:
        """Write so many rows in a second, evenly, and look at the bridge now and then."""
        since = looked = time.monotonic()
        first = rows = self._rows
        cpu_s, samples = self._usage().cpu_s, []
        while (now := time.monotonic()) - since < seconds:
            due = int((now - since) * rows_s) - (self._rows - first)
            if due >= 10:
                self._write(due // 10 * 10)
            if now - looked >= SAMPLE_S:
                used = self._usage()
                passed = now - looked
                samples.append(
                    Sample(
                        round((now - since) / 60, 2),
                        round((self._rows - rows) / passed),
                        round((used.cpu_s - cpu_s) / passed, 3),
                        round(self._lag_mb(), 2),
                        round(used.resident_mib, 1),
                        len(self._proc("task")),
                        len(self._proc("fd")),
                    )
                )
                say(str(samples[-1]))
                looked, rows, cpu_s = now, self._rows, used.cpu_s
            time.sleep(max(0.0, TICK_S - (time.monotonic() - now)))
        self._caught_up()
        return samples

    def _write(self, rows: int) -> None:
        self._connection.execute(narrow_inserts(self._rows, rows))
        self._rows += rows
        if time.monotonic() - self._truncated > TRUNCATE_S:
            self._connection.execute("TRUNCATE narrow")
            self._truncated = time.monotonic()

    def _caught_up(self) -> None:
        end = self._value("SELECT pg_current_wal_insert_lsn()::text")
        wait_until(
            lambda: self._value(f"SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots"),
            what="the bridge has caught up",
            timeout_s=600,
        )

    def _lag_mb(self) -> float:
        lag = "pg_wal_lsn_diff(pg_current_wal_insert_lsn(), confirmed_flush_lsn)"
        return float(self._value(f"SELECT {lag} FROM pg_replication_slots")) / 1e6

    def _value(self, query: str) -> Any:
        row = self._connection.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]

    def _usage(self) -> Usage:
        found = usage(self._bridge.pid)
        if found is None or not found.running:
            raise RuntimeError(f"the bridge ended:\n{self._bridge.complaint()}")
        return found

    def _proc(self, folder: str) -> list[Path]:
        return list((Path("/proc") / str(self._bridge.pid) / folder).iterdir())


def run(place: Environment, minutes: float, share: float) -> tuple[Verdict, list[Sample]]:
    """On a database of its own."""
    create_database(place.server, NAME)
    slot_copy = SlotCopy(place.bed, place.server, NAME, "", True, NAME)
    bridge = Slotbridge()
    topic = f"{slot_copy.prefix}.public.narrow"
    admin = AdminClient({"bootstrap.servers": place.bed.kafka.bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1, 1, config=_SMALL)])[topic].result(30)
    with psycopg.connect(slot_copy.conninfo, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute(narrow(10, 0).setup.encode())
        connection.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE narrow".encode())
        bridge.launch(slot_copy)
        try:
            active = "SELECT count(*) = 1 FROM pg_replication_slots WHERE active"
            wait_until(
                lambda: connection.execute(active.encode()).fetchone() == (True,),
                what="the bridge streams",
            )
            soak = Soak(connection, bridge)
            capacity = soak.capacity(CAPACITY_S)
            say(f"capacity: {capacity:,.0f} rows/s")
            samples = soak.soak(capacity * share, minutes * 60)
        finally:
            bridge.stop()
    return verdict(capacity, samples), samples


def main(
    minutes: Annotated[float, typer.Option(min=0.5)] = 30.0,
    share: Annotated[float, typer.Option(help="of capacity", min=0.05, max=1.0)] = 0.7,
    out: Annotated[Path, typer.Option()] = Path("bench-results"),
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start servers of its own, soak, print the verdict, write JSON and a plot."""
    with environment() as place:
        found, samples = run(place, minutes, share)
    out.mkdir(parents=True, exist_ok=True)
    document = {"verdict": asdict(found), "samples": [asdict(s) for s in samples]}
    (out / "soak.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    series = {
        "MiB resident": [(s.minutes, s.resident_mib) for s in samples],
        "threads": [(s.minutes, float(s.threads)) for s in samples],
        "descriptors": [(s.minutes, float(s.descriptors)) for s in samples],
    }
    plot = lines(series, x_title="minutes", y_title="")
    (out / "soak.svg").write_text(plot, encoding="utf-8")
    names = ("MiB", "threads", "descriptors", "MB behind")
    report(
        [
            {"": which, **dict(zip(names, values, strict=True)), "rows/s": round(found.rows_s)}
            for which, values in (("first third", found.first), ("last third", found.last))
        ],
        as_json=as_json,
    )
    raise typer.Exit(int(found.grew))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
