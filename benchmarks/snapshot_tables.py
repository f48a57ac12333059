"""Rows of many small tables, and of two large ones, into Kafka by a snapshot.

    python -m benchmarks.snapshot_tables [--tables 200] [--rows 100] [--large 200000]

    first start   the bridge makes the topics, too
    one by one    chunks as large as a table: each table has chunks of its own
    together      tables share chunks, as they do by default

Except for the first start, topics are made before. Each line: the milliseconds from the first
table's end to the last one's, a table; and the peak of resident memory.
"""

import re
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.bridge import Figures, connect, report
from benchmarks.snapshot import peak_while
from services.testbed.bed import Bed

_COLUMNS: Final = "id bigint PRIMARY KEY, a int, b text, c numeric(12,2), d text, e timestamptz"
_VALUES: Final = "g, g % 1000, md5(g::text), g / 7.0, 'note ' || g, now()"
_FIRST_START: Final = "first_start"
_TOPICS_S: Final = 3.0
"""When a broker has told of new topics to everybody."""


def make(bed: Bed, schema: str, tables: int, rows: int) -> None:
    """Make a schema of equal tables, and its publication."""
    with connect(bed) as connection:
        connection.execute(f"CREATE SCHEMA {schema}".encode())
        for number in range(tables):
            table = f"{schema}.t{number:04}"
            connection.execute(f"CREATE TABLE {table} ({_COLUMNS})".encode())
            values = f"SELECT {_VALUES} FROM generate_series(1, {rows}) g"
            connection.execute(f"INSERT INTO {table} {values}".encode())
        connection.execute("ANALYZE")
        connection.execute(f"CREATE PUBLICATION {schema} FOR TABLES IN SCHEMA {schema}".encode())


def make_topics(bed: Bed, schema: str, tables: int, name: str) -> None:
    """Make the topics of a run."""
    admin = AdminClient({"bootstrap.servers": bed.kafka.bootstrap_servers})
    topics = [NewTopic(f"{name}.{schema}.t{number:04}", 1, 1) for number in range(tables)]
    for future in admin.create_topics(topics).values():
        future.result()
    time.sleep(_TOPICS_S)


def measure(bed: Bed, schema: str, tables: int, name: str, snapshot: dict[str, Any]) -> Figures:
    """Run one snapshot of the schema, under a prefix of its own."""
    if not name.startswith(_FIRST_START):
        make_topics(bed, schema, tables, name)
    document = {
        "source": {
            "conninfo": bed.primary.conninfo(bed.dbname),
            "slot": name,
            "publication": schema,
        },
        "kafka": {
            "bootstrap_servers": bed.kafka.bootstrap_servers,
            "topic_prefix": name,
            "partitions": 1,
        },
        "snapshot": {"mode": "initial_only", **snapshot},
        "bridge": {"spool_folder": str(bed.folder)},
    }
    config = bed.folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    _, peak_mib = peak_while(bed, "run", config)
    log = (bed.folder / f"run-{name}.log").read_text(encoding="utf-8")
    found = re.findall(r"^(\S+)Z .*(?:\] )(table is done|streaming)", log, re.MULTILINE)
    times = [datetime.fromisoformat(at) for at, what in found if what == "table is done"]
    assert len(times) == tables, log[-2000:]
    began = next(datetime.fromisoformat(at) for at, what in found if what == "streaming")
    seconds = (times[-1] - began).total_seconds()
    return {
        "tables": tables,
        "way": name,
        "ms a table": round(1000 * seconds / tables, 1),
        "seconds": round(seconds, 1),
        "peak MiB": round(peak_mib),
    }


def lines(bed: Bed, tables: int, rows: int, large: int) -> Iterator[Figures]:
    """Yield a line for each way."""
    make(bed, "small", tables, rows)
    make(bed, "large", 2, large)
    for turn in range(2):
        yield measure(bed, "small", tables, f"{_FIRST_START}_{turn}", {})
        for workers in (1, 2):
            alone = {"chunk_rows_max": rows, "workers": workers}
            yield measure(bed, "small", tables, f"one_by_one_{workers}_{turn}", alone)
            yield measure(bed, "small", tables, f"together_{workers}_{turn}", {"workers": workers})
            yield measure(bed, "large", 2, f"large_{workers}_{turn}", {"workers": workers})


def main(
    tables: Annotated[int, typer.Option(min=2)] = 200,
    rows: Annotated[int, typer.Option(min=1)] = 100,
    large: Annotated[int, typer.Option(min=1000)] = 200_000,
    json_: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start servers of its own, measure, print."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as folder:
        Path(folder).chmod(0o755)
        with Bed(Path(folder), lazy=True) as bed:
            bed.start("pair", "kafka")
            report([*lines(bed, tables, rows, large)], as_json=json_)


if __name__ == "__main__":
    typer.run(main)
