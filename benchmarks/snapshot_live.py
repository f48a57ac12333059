"""How far live changes are behind while a snapshot runs: from COMMIT to a read_committed consumer.

    python -m benchmarks.snapshot_live [--rows 1000000] [--rate 100] [--workers 2] [--json]

One connection commits a row, `--rate` times a second, with the clock's time in it; a consumer here
notes when it sees it. Rows from the time of the snapshot and from the 10 seconds after it are told
apart.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Final

import psycopg
import typer
import yaml
from confluent_kafka import Consumer, TopicPartition

from benchmarks.bridge import Figures, connect, report, wait_until
from benchmarks.snapshot import NARROW, make
from services.testbed.bed import Bed

PREFIX: Final = "live"
AFTER_S: Final = 10.0
_PROGRAM: Final = Path(sys.executable).parent / "slotbridge"


def measure(bed: Bed, rows: int, rate: float, workers: int) -> list[Figures]:
    """Return a line for the time of the snapshot, and one for the time after it."""
    with connect(bed) as connection:
        make(connection, NARROW, rows)
        connection.execute("CREATE TABLE live (id bigint PRIMARY KEY, at double precision)")
        connection.execute(f"ALTER PUBLICATION {NARROW} ADD TABLE live".encode())
    log, config = bed.folder / "live.log", _write(bed, workers)
    over = threading.Event()
    seen: list[tuple[float, float]] = []
    writer = threading.Thread(target=_write_rows, args=(bed, rate, over))
    consumer = threading.Thread(target=_consume, args=(bed, seen, over))
    with log.open("wb") as output:
        process = subprocess.Popen([_PROGRAM, "run", "-c", config], stdout=output, stderr=output)
    try:
        wait_until(lambda: b"streaming" in log.read_bytes(), what="the bridge streams")
        since = time.time()
        writer.start()
        consumer.start()
        wait_until(
            lambda: b"snapshot is done" in log.read_bytes(), what="all is read", timeout_s=3600
        )
        ended = time.time()
        time.sleep(AFTER_S)
        over.set()
        writer.join()
        consumer.join()
    finally:
        over.set()
        process.terminate()
        process.wait(60)
    during = [delay for at, delay in seen if at < ended]
    after = [delay for at, delay in seen if at >= ended]
    pace = round(rows / (ended - since))
    return [_line("during the snapshot", pace, during), _line("after it", 0, after)]


def _write(bed: Bed, workers: int) -> Path:
    config = bed.folder / "live.yaml"
    conninfo = bed.primary.conninfo(bed.dbname)
    kafka = {"bootstrap_servers": bed.kafka.bootstrap_servers, "topic_prefix": PREFIX}
    document = {
        "source": {"conninfo": conninfo, "slot": PREFIX, "publication": NARROW},
        "kafka": {**kafka, "partitions": 1},
        "snapshot": {"mode": "initial", "workers": workers},
        "bridge": {"spool_folder": str(bed.folder)},
    }
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    return config


def _write_rows(bed: Bed, rate: float, over: threading.Event) -> None:
    """Commit a row each 1/`rate` seconds, at its place in time."""
    with psycopg.connect(bed.primary.conninfo(bed.dbname), autocommit=True) as connection:
        number, began = 0, time.monotonic()
        while not over.wait(max(0.0, began + number / rate - time.monotonic())):
            connection.execute("INSERT INTO live VALUES (%s, %s)", [number, time.time()])
            number += 1


def _consume(bed: Bed, seen: list[tuple[float, float]], over: threading.Event) -> None:
    """Note (when each row was inserted, seconds until it was seen here) until `over`."""
    options = {
        "bootstrap.servers": bed.kafka.bootstrap_servers,
        "group.id": PREFIX,
        "isolation.level": "read_committed",
        "fetch.wait.max.ms": 10,
        "fetch.error.backoff.ms": 50,
    }
    consumer = Consumer(options)
    consumer.assign([TopicPartition(f"{PREFIX}.public.live", 0, 0)])
    try:
        while not over.is_set():
            message = consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue
            value = json.loads(message.value() or b"")
            if value["op"] == "c":
                seen.append((value["after"]["at"], time.time() - value["after"]["at"]))
    finally:
        consumer.close()


def _line(when: str, rows_per_s: int, delays: list[float]) -> Figures:
    ordered = sorted(delays)
    return {
        "when": when,
        "snapshot rows/s": rows_per_s,
        "live rows": len(ordered),
        "median ms": round(statistics.median(ordered) * 1000),
        "p99 ms": round(ordered[int(len(ordered) * 0.99)] * 1000),
        "worst ms": round(ordered[-1] * 1000),
    }


def main(
    rows: Annotated[int, typer.Option(min=1000)] = 1_000_000,
    rate: Annotated[float, typer.Option(min=1)] = 100,
    workers: Annotated[int, typer.Option(min=1)] = 1,
    json_: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start servers of its own, measure, print."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        Path(name).chmod(0o755)
        with Bed(Path(name), lazy=True) as bed:
            bed.start("pair", "kafka")
            lines = measure(bed, rows, rate, workers)
    report(lines, as_json=json_)


if __name__ == "__main__":
    typer.run(main)
