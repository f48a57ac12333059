"""Rows that a table has already, into Kafka: a snapshot, Debezium's, and a repair after a loss.

    python -m benchmarks.snapshot [--rows 5000000] [--wide 200000] [--json]
    python -m benchmarks.snapshot --workers 1 --workers 2 --only-snapshot [--wait-us 200]

    copy        COPY table TO STDOUT, thrown away: what the server can give one reader
    snapshot    slotbridge with snapshot.mode initial_only, for each number of snapshot.workers
    debezium    snapshot.mode initial_only, its chunks as large as helps it most
    recover     the slot is dropped, one row in a thousand changed or deleted; slotbridge recover

Each line: the seconds from the start of the program to its end (Debezium: to the last row in
Kafka), the peak of resident memory, and how many bytes the table's topic has grown on disk.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
import yaml
from confluent_kafka import Consumer, KafkaException, TopicPartition

from benchmarks.bridge import Connection, Figures, connect, report, wait_until
from services.demo.copies import committed
from services.testbed.bed import Bed
from tests.providers.debezium import Connector, Debezium

NARROW: Final = "narrow"
WIDE: Final = "wide"
DEADLINE_S: Final = 3600.0
_PROGRAM: Final = Path(sys.executable).parent / "slotbridge"


def make(connection: Connection, table: str, rows: int) -> None:
    """Make a table of 6 columns, or of 2 KB a row, with `rows` rows."""
    if table == NARROW:
        columns, values = (
            "a int, b text, c numeric(12,2), d text, e timestamptz",
            "g % 1000, md5(g::text), g / 7.0, 'note ' || g, now()",
        )
    else:
        columns = ", ".join(f"c{n} text" for n in range(60))
        values = ", ".join(f"md5((g + {n})::text)" for n in range(60))
    connection.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, {columns})".encode())
    connection.execute(
        f"INSERT INTO {table} SELECT g, {values} FROM generate_series(1, {rows}) g".encode()
    )
    connection.execute(f"VACUUM ANALYZE {table}".encode())
    connection.execute(f"CREATE PUBLICATION {table} FOR TABLE {table}".encode())


def measure(
    bed: Bed,
    table: str,
    rows: int,
    workers: Sequence[int],
    *,
    only_snapshot: bool,
    debezium: bool,
    wait_us: int,
) -> Iterator[Figures]:
    """Yield a line for each way."""
    with connect(bed) as connection:
        make(connection, table, rows)
        yield _line(table, "copy", rows, _copy(connection, table), None, 0)
        for run, count in enumerate(workers):
            slot = f"s_{table}_{run}"
            config = _write(bed, table, slot, count, wait_us)
            seconds, peak_mib = peak_while(bed, "run", config)
            topic = f"{slot}.public.{table}"
            size = _size(bed, topic)
            _check(bed, topic, rows)
            yield _line(table, f"snapshot, workers {count}", rows, seconds, peak_mib, size)
        if only_snapshot:
            return
        if debezium:
            yield _debezium(bed, table, rows)
        connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
        column = "b" if table == NARROW else "c0"
        connection.execute(f"UPDATE {table} SET {column} = 'x' WHERE id % 2000 = 0".encode())
        connection.execute(f"DELETE FROM {table} WHERE id % 2000 = 1".encode())
        seconds, peak_mib = peak_while(bed, "recover", config, "--yes")
        yield _line(table, "recover", rows, seconds, peak_mib, _size(bed, topic) - size)


def _copy(connection: Connection, table: str) -> float:
    since = time.monotonic()
    with connection.cursor() as cursor, cursor.copy(f"COPY {table} TO STDOUT".encode()) as copy:
        for _ in copy:
            pass
    return time.monotonic() - since


def _write(bed: Bed, table: str, name: str, workers: int, wait_us: int) -> Path:
    waits = {f"public.{table}": f"pg_sleep({wait_us / 1e6:f}) IS NOT NULL"} if wait_us else {}
    config = bed.folder / f"{name}.yaml"
    document = {
        "source": {
            "conninfo": bed.primary.conninfo(bed.dbname),
            "slot": name,
            "publication": table,
        },
        "kafka": {
            "bootstrap_servers": bed.kafka.bootstrap_servers,
            "topic_prefix": name,
            "partitions": 1,
        },
        "snapshot": {"mode": "initial_only", "workers": workers, "where": waits},
        "bridge": {"spool_folder": str(bed.folder)},
    }
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    return config


def peak_while(bed: Bed, command: str, config: Path, *options: str) -> tuple[float, float]:
    """Run it to its end; seconds, and the peak of resident memory in MiB.

    The peak that wait4 tells is at least that of this program, which starts the other.
    """
    since, peak_mib = time.monotonic(), 0.0
    log = bed.folder / f"{command}-{config.stem}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [_PROGRAM, command, "--config", config, *options], stdout=output, stderr=output
        )
        while process.poll() is None:
            peak_mib = max(peak_mib, _peak_mib(process.pid))
            time.sleep(0.05)
    assert process.returncode == 0, log.read_text(encoding="utf-8")[-3000:]
    return time.monotonic() - since, peak_mib


def _peak_mib(pid: int) -> float:
    """Return the peak of a process's resident memory; 0 for one that has just ended."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024


def _debezium(bed: Bed, table: str, rows: int) -> Figures:
    topic = f"d-{table}.public.{table}"
    connector = Connector(
        f"d-{table}",
        bed.primary.conninfo(bed.dbname),
        f"d_{table}",
        table,
        f"d-{table}",
        options={
            "snapshot.mode": "initial_only",
            "table.include.list": f"public.{table}",
            "max.batch.size": 8192,
            "max.queue.size": 32_768,
            "snapshot.fetch.size": 20_000,
        },
    )
    worker = Debezium(
        bed.folder / f"d-{table}",
        [connector],
        bootstrap_servers=bed.kafka.bootstrap_servers,
        processes=bed.processes,
        name=f"debezium-{table}",
        heap="1g",
        settings={
            "producer.compression.type": "lz4",
            "producer.linger.ms": 10,
            "producer.batch.size": 262_144,
            "producer.buffer.memory": 67_108_864,
        },
    )
    since = time.monotonic()
    worker.launch()
    wait_until(lambda: _end(bed, topic) >= rows, what="Debezium is done", timeout_s=DEADLINE_S)
    seconds = time.monotonic() - since
    peak_mib = _peak_mib(worker.pid)
    worker.stop()
    return _line(table, "debezium", rows, seconds, peak_mib, _size(bed, topic))


def _end(bed: Bed, topic: str) -> int:
    """Return the end offset of a topic's only partition, 0 where there is none yet."""
    consumer = Consumer({"bootstrap.servers": bed.kafka.bootstrap_servers, "group.id": "bench"})
    try:
        return consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)[1]
    except KafkaException:
        return 0
    finally:
        consumer.close()


def _size(bed: Bed, topic: str) -> int:
    return sum(log.stat().st_size for log in (bed.kafka.folder / "data").glob(f"{topic}-0/*.log"))


def _check(bed: Bed, topic: str, rows: int) -> None:
    keys = [key for _, key, _ in committed(bed.kafka.bootstrap_servers, topic)]
    assert (len(keys), len(set(keys))) == (rows, rows)


def _line(
    table: str, way: str, rows: int, seconds: float, peak_mib: float | None, size: int
) -> Figures:
    return {
        "table": table,
        "way": way,
        "seconds": round(seconds, 1),
        "rows/s": round(rows / seconds),
        "peak MiB": round(peak_mib or 0.0, 1),
        "bytes": size,
    }


def main(
    rows: Annotated[int, typer.Option(min=1000)] = 5_000_000,
    wide: Annotated[int, typer.Option(min=1000)] = 200_000,
    workers: Annotated[list[int] | None, typer.Option(min=1, help="By default 1.")] = None,
    only_snapshot: Annotated[
        bool, typer.Option(help="Measure neither Debezium nor recover.")
    ] = False,
    debezium: Annotated[bool, typer.Option(help="Measure Debezium's snapshot, too.")] = True,
    wait_us: Annotated[
        int, typer.Option(help="Let the server wait so long for each row, as for a slow disk.")
    ] = 0,
    json_: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start servers of its own, measure, print."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        Path(name).chmod(0o755)
        with Bed(Path(name), lazy=True) as bed:
            bed.start("pair", "kafka")
            lines = [
                line
                for table, count in ((NARROW, rows), (WIDE, wide))
                for line in measure(
                    *(bed, table, count, workers or [1]),
                    only_snapshot=only_snapshot,
                    debezium=debezium,
                    wait_us=wait_us,
                )
            ]
    report(lines, as_json=json_)


if __name__ == "__main__":
    typer.run(main)
