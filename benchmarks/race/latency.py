"""Latency over offered load: from a client's COMMIT until a read_committed consumer has the event.

    make bench LATENCY=1    python -m benchmarks.race.latency [--rates 100,1000] [--seconds 10]

Transactions of one row, evenly spaced, from a process of its own; consumer and clock are here.
Every event must arrive. `reached`: the transactions in a second that the clients managed. Each
contender has warmed up first, and with it the broker, as in the race: both run for months.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import psycopg
import typer
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.bridge import Figures, report
from benchmarks.race.contenders import PUBLICATION, Contender, Slotbridge, SlotCopy
from benchmarks.race.debezium import DebeziumContender, ExactlyOnceDebezium
from benchmarks.race.environment import environment
from benchmarks.race.plot import lines
from benchmarks.race.writers import Load
from services.testbed.bed import Bed
from services.testbed.pair import create_database
from services.testbed.postgres import PostgresServer

PROMPT: Final = {"producer.linger.ms": 0}
CLIENTS: Final = 4
WARM_UP_RATE: Final = 1000.0
ARRIVAL_S: Final = 60.0
START_S: Final = 120.0


def measure(
    bed: Bed,
    server: PostgresServer,
    contender: Contender,
    rates: list[float],
    seconds: float,
    warm_up_seconds: float,
) -> list[Figures]:
    """One line for each rate, after a warm-up at WARM_UP_RATE."""
    name = f"latency_{contender.name.replace('-', '_')}"
    create_database(server, name)
    slot_copy = SlotCopy(bed, server, name, "", True, name)
    with psycopg.connect(slot_copy.conninfo, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE narrow"
            " (id bigint PRIMARY KEY, a int, b text, c numeric, d text, e timestamptz)"
        )
        connection.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE narrow".encode())
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        servers: dict[str, Any] = {"bootstrap.servers": bed.kafka.bootstrap_servers}
        topic = f"{slot_copy.prefix}.public.narrow"
        admin = AdminClient(servers)
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
        consumer = Consumer(
            servers
            | {"group.id": name, "isolation.level": "read_committed", "fetch.wait.max.ms": 100}
        )
        consumer.assign([TopicPartition(topic, 0, 0)])
        contender.launch(slot_copy)
        try:
            _await_streaming(connection, name, contender)
            first, found = 1, []
            rounds = [(WARM_UP_RATE, warm_up_seconds), *((rate, seconds) for rate in rates)]
            for rate, duration in rounds:
                found.append(_one(slot_copy, contender, consumer, first, rate, duration))
                first += int(rate * duration) + CLIENTS
        finally:
            contender.stop()
            consumer.close()
    return found[1:]


def _one(
    slot_copy: SlotCopy,
    contender: Contender,
    consumer: Consumer,
    first: int,
    rate: float,
    seconds: float,
) -> Figures:
    load = Load(slot_copy.conninfo, first=first, rate=rate, seconds=seconds, clients=CLIENTS)
    arrived: dict[int, float] = {}
    committed: dict[int, float] | None = None
    deadline = float("inf")
    while committed is None or len(arrived) < len(committed):
        message = consumer.poll(0.05)
        if message is not None and message.error() is None:
            arrived.setdefault(json.loads(message.key() or b"{}")["id"], time.monotonic())
        elif committed is None and not load.writing:
            committed = load.committed()
            deadline = time.monotonic() + ARRIVAL_S
        if time.monotonic() > deadline:
            raise RuntimeError(f"{contender.name}: events are missing\n{contender.complaint()}")
    waits = sorted((arrived[number] - at) * 1000 for number, at in committed.items())
    took_s = max(committed.values()) - min(committed.values())
    return {
        "contender": contender.name,
        "offered/s": round(rate),
        "reached/s": round(len(committed) / took_s),
        "events": len(waits),
        "median ms": round(statistics.median(waits), 1),
        "p99 ms": round(waits[int(len(waits) * 0.99)], 1),
        "max ms": round(waits[-1], 1),
    }


def _await_streaming(
    connection: "psycopg.Connection[Any]", slot: str, contender: Contender
) -> None:
    query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    deadline = time.monotonic() + START_S
    while connection.execute(query, [slot]).fetchone() != (True,):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{contender.name} does not stream:\n{contender.complaint()}")
        time.sleep(0.05)


def main(
    rates: Annotated[str, typer.Option()] = "10,100,1000,2000,4000,8000",
    seconds: Annotated[float, typer.Option(min=1)] = 10.0,
    warm_up_seconds: Annotated[
        float, typer.Option(min=1, help="Of each contender, at 1,000 transactions a second.")
    ] = 90.0,
    contenders: Annotated[str, typer.Option()] = "slotbridge,debezium,debezium-eos",
    out: Annotated[Path, typer.Option()] = Path("bench-results"),
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start servers of its own, measure, print, write JSON and plot."""
    known: dict[str, Contender] = {
        "slotbridge": Slotbridge(),
        "debezium": DebeziumContender(PROMPT),
        "debezium-eos": ExactlyOnceDebezium(PROMPT),
    }
    found: list[Figures] = []
    numbers = [*map(float, rates.split(","))]
    with environment() as (bed, server):
        for each in contenders.split(","):
            found += measure(bed, server, known[each], numbers, seconds, warm_up_seconds)
            sys.stderr.write(f"{json.dumps(found[-len(numbers) :])}\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / "latency.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    series = {
        f"{each} {which}": [
            (float(line["offered/s"]), max(float(line[f"{which} ms"]), 0.1))
            for line in found
            if line["contender"] == each
        ]
        for each in contenders.split(",")
        for which in ("median", "p99")
    }
    plot = lines(series, x_title="transactions/s offered", y_title="ms")
    (out / "latency.svg").write_text(plot, encoding="utf-8")
    report(found, as_json=as_json)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
