"""`python -m tests.promises.adoption --rounds 50 [--schemas] …`: a killed Debezium.

The load is pgbench: its own TPC-B transactions and scripts of ours (`pgbench_load`).

A round is one connector with a database and a load of its own; several share a Kafka Connect, which
is killed at random, and started and killed again. Prints a line for each round and the sums. Exit
code 1 where a round failed, or lost or repeated an event from the adoption on.
"""

import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer

from services.adoption.connector import JSON_CONVERTER
from services.testbed.bed import Bed
from tests.promises.adoption.ground import Taken, connectors, kill_at_random
from tests.promises.adoption.load import Compared
from tests.providers.memory import roomy_memory

AT_ONCE = 5
WITH_SCHEMAS = {f"{part}.converter": JSON_CONVERTER for part in ("key", "value")}
LIMIT_S = 300.0
"""How long one run of `adopt` may take."""


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 50,
    seed: Annotated[int, typer.Option(help="Of the first Kafka Connect.")] = 1,
    exactly_once: Annotated[
        bool, typer.Option("--exactly-once", help="Kafka Connect in its exactly-once mode.")
    ] = False,
    flat: Annotated[
        bool, typer.Option("--flat", help="Each second connector makes flat rows.")
    ] = False,
    pgbench: Annotated[
        bool, typer.Option(help="pgbench is the load, else threads of this process.")
    ] = True,
    schemas: Annotated[
        bool, typer.Option("--schemas", help="JsonConverter's default: JSON with schemas.")
    ] = False,
) -> None:
    """Run them on servers of their own."""
    folder = Path(tempfile.mkdtemp(prefix="slotbridge-adoption-", dir=roomy_memory()))
    folder.chmod(0o755)
    sums, done, failed, left_out, killed = Compared(), 0, 0, 0, 0
    with Bed(folder / "bed", lazy=True, synchronous=False) as bed:
        bed.start("kafka", "pair")
        while done < rounds:
            count = min(AT_ONCE, rounds - done)
            outcomes, kills = _rounds(
                *(bed, folder, seed, count, exactly_once, flat, pgbench, schemas)
            )
            killed += kills
            for found, skipped in outcomes:
                done += 1
                if found is None:
                    failed += 1
                else:
                    sums += found
                    left_out += skipped
            seed += 1
            sys.stdout.write(
                f"{done} rounds, {failed} failed, {killed} kills of Kafka Connect: {_line(sums)}; "
                f"{left_out} records were left out\n"
            )
            sys.stdout.flush()
    shutil.rmtree(folder)
    raise SystemExit(int(bool(failed or sums.lost or sums.twice or sums.wrong)))


def _line(one: Compared) -> str:
    return (
        f"lost {one.lost}, twice {one.twice}, wrong {one.wrong}; {one.transactions} transactions, "
        f"{one.theirs} events of Debezium, {one.ours} of the bridge"
    )


def _rounds(
    bed: Bed,
    folder: Path,
    seed: int,
    count: int,
    exactly_once: bool,
    flat: bool,
    pgbench: bool,
    schemas: bool,
) -> tuple[list[tuple[Compared | None, int]], int]:
    """Return what each round found and left out, and how often their Kafka Connect was killed."""
    rng = random.Random(seed)
    found: list[tuple[Compared | None, int]] = []
    place = folder / f"connect{seed}"
    with connectors(
        *(bed.primary, bed.kafka, place, bed.processes, rng, count),
        exactly_once=exactly_once,
        flat=count // 2 if flat else 0,
        pgbench=pgbench,
        converters=WITH_SCHEMAS if schemas else None,
    ) as (debezium, taken):
        try:
            kills = kill_at_random(debezium, taken, rng, seed)
        except Exception:
            sys.stdout.write(f"seed {seed}: {traceback.format_exc()}\n")
            return [(None, 0)] * count, 0
        for number, one in enumerate(taken):
            began = time.monotonic()
            try:
                outcome, told = _round(one)
            except Exception:
                sys.stdout.write(f"{seed}/{number}: {traceback.format_exc()}\n")
                found.append((None, 0))
                continue
            skipped = sum(told["left_out"].values())
            found.append((outcome, skipped))
            sys.stdout.write(
                f"{seed}/{number}: {kills} kills; {told['transactions']} transactions again, "
                f"{skipped} records left out, {sum(told['published'].values())} published; "
                f"{_line(outcome)} ({time.monotonic() - began:.0f} s)\n"
            )
            for fault in outcome.faults[:5]:
                sys.stdout.write(f"    {fault}\n")
            sys.stdout.flush()
    return found, kills


def _round(one: Taken) -> tuple[Compared, dict[str, dict[str, int]]]:
    assert one.load is not None
    one.load.go()
    one.translate()
    one.limit_s = LIMIT_S
    done = one.adopt()
    assert done.returncode == 0, done.stderr + done.stdout
    one.new_bridge().streaming()
    one.load.more(50)
    return one.compared(), json.loads(done.stdout)


if __name__ == "__main__":
    typer.run(main)
