"""What a small epoch costs: `python -m benchmarks.tables.epochs` prints one JSON line.

Four tables, 300 updates at a time, one session as the demo starts it. CPU is Java's, from the
operating system; commands are what Python asks of Java (py4j). `--tables 40 --touched 4`: of many
tables few are changed. `--other-topics 1000`: the broker has so many topics of others besides.
"""

import argparse
import contextlib
import json
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from py4j.clientserver import ClientServerConnection  # type: ignore[import-untyped]

from benchmarks.tables.contenders import Ours
from benchmarks.tables.rig import Rig, rig
from benchmarks.tables.source import Source
from services.testbed.java import short_lived_spark
from spark_consumers.epochs.report import EpochReport

EVENTS = 300


def main() -> None:
    """Bring epoch after epoch; the median is of the second half."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--touched", type=int, help="by each epoch; all of them by default")
    parser.add_argument("--other-topics", type=int, default=0)
    parser.add_argument(
        "--option", action="append", default=[], help="of Spark, name=value; may be repeated"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as scratch:
        given = short_lived_spark(Path(scratch))
        given |= dict(option.split("=", 1) for option in options.option)
        with rig(driver_memory="1g", offsets_per_trigger_max=50_000, spark_options=given) as one:
            found = _measure(one, options)
    sys.stdout.write(json.dumps(found) + "\n")


def _measure(given: Rig, options: argparse.Namespace) -> dict[str, Any]:
    epochs, touched = options.epochs, options.touched or options.tables
    names = [f"t{number}" for number in range(options.tables)]
    source = Source(given.servers, names)
    source.make_topics(options.other_topics)
    each: list[list[float]] = []
    reports: queue.SimpleQueue[EpochReport] = queue.SimpleQueue()
    with _commands() as asked, Ours(given.spark, given.settings).running(reports.put):
        for number in range(epochs):
            before = (time.monotonic(), given.java_cpu_s, len(asked))
            if number:
                source.write("update", EVENTS, touched)
            else:
                source.write("insert", 500 * options.tables)
            brought = 1
            while reports.get(timeout=300).commit_lsn < source.commit_lsn:
                brought += 1  # the query does not wait until all is written
            after = (time.monotonic(), given.java_cpu_s, len(asked))
            each.append([(b - a) / brought for a, b in zip(before, after, strict=True)])
    seconds, cpu_s, commands = (
        statistics.median(values) for values in zip(*each[epochs // 2 :], strict=True)
    )
    return {
        "tables": options.tables,
        "touched": touched,
        "other_topics": options.other_topics,
        "events": EVENTS,
        "epoch_s": round(seconds, 2),
        "java_cpu_s": round(cpu_s, 2),
        "first_java_cpu_s": [round(values[1], 1) for values in each[:3]],
        "commands": round(commands),
    }


@contextlib.contextmanager
def _commands() -> Iterator[list[None]]:
    """Grows by one with each command that is sent to Java."""
    sent: list[None] = []
    send = ClientServerConnection.send_command

    def noted(connection: ClientServerConnection, command: str) -> Any:
        sent.append(None)
        return send(connection, command)

    ClientServerConnection.send_command = noted
    try:
        yield sent
    finally:
        ClientServerConnection.send_command = send


if __name__ == "__main__":
    main()
