"""Rows per second into Iceberg tables: epochs of `slottables`, and a plain foreachBatch MERGE.

`python -m benchmarks.tables --rows 1000000` prints a JSON line for each load and contender, and one
for freshness. Both contenders read the same topic with the same Spark session, into tables of the
same columns. The plain way is what Debezium's and Spark's guides show: parse, keep the last event
of a key, MERGE; without transactions, without order across partitions, with default properties.
The table is filled from Kafka for `slottables`; the plain one is a copy of it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.race.process_metrics import usage
from benchmarks.tables.contenders import EVENTS_AN_EPOCH, Ours, Plain
from benchmarks.tables.freshness import freshness
from benchmarks.tables.rig import Rig, rig
from benchmarks.tables.source import Form, Source


def measure(given: Rig, contender: Ours | Plain, load: str, rows: int) -> dict[str, Any]:
    """What a contender does with what is in Kafka; CPU is Spark's Java and this process."""
    cpu = _cpu_s(given)
    started = time.monotonic()
    taken = list(contender.take())
    seconds = time.monotonic() - started
    events = sum(count for count, _ in taken)
    each = sorted(s for _, s in taken)
    return {
        "load": load,
        "table_rows": rows,
        "contender": contender.name,
        "events": events,
        "epochs": len(taken),
        "events_per_s": round(events / seconds) if events else 0,
        "events_per_cpu_s": round(events / max(0.01, _cpu_s(given) - cpu)),
        "median_epoch_s": round(each[len(each) // 2], 2) if each else None,
    }


def _cpu_s(given: Rig) -> float:
    own = usage(os.getpid())
    assert own is not None
    return own.cpu_s + given.java_cpu_s


def main() -> None:
    """Fill, then measure each load for both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--events", type=int, default=200_000, help="of each load")
    parser.add_argument("--contenders", default="slottables,plain")
    parser.add_argument("--freshness-seconds", type=float, default=60.0, help="0: not measured")
    parser.add_argument("--freshness-rows-per-s", type=int, default=500)
    parser.add_argument("--key-index", action="store_true", help="tables.key_index")
    parser.add_argument("--uuid", action="store_true", help="keys without order, not integers")
    parser.add_argument("--toast-bytes", type=int, default=0, help="a text that updates leave out")
    options = parser.parse_args()
    with rig(
        driver_memory="3g",
        offsets_per_trigger_max=EVENTS_AN_EPOCH,
        spark_options={},
        key_index=options.key_index,
    ) as given:
        for line in _lines(given, options):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


def _lines(given: Rig, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    form = Form(options.uuid, options.toast_bytes)
    source = Source(given.servers, form=form)
    ours = Ours(given.spark, given.settings)
    plain = Plain(given.spark, given.settings, given.folder, form)
    asked = options.contenders.split(",")
    contenders = [c for c, name in ((ours, "slottables"), (plain, "plain")) if name in asked]
    source.write("insert", options.events)
    for contender in contenders:
        yield measure(given, contender, "insert", 0)
    source.write("insert", options.rows - options.events)
    yield measure(given, ours, "fill", options.rows)
    if plain in contenders:
        plain.copy(ours.table)
    for load in ("update", "mixed"):
        source.write(load, options.events)
        for contender in contenders:
            yield measure(given, contender, load, options.rows)
    if options.freshness_seconds:
        rate, seconds = options.freshness_rows_per_s, options.freshness_seconds
        found = freshness(source, ours, rows_per_s=rate, seconds=seconds)
        yield {"load": "freshness", "table_rows": options.rows, **found}


if __name__ == "__main__":
    main()
