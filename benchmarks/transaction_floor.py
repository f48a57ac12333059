"""What one Kafka transaction takes by itself: three records into three partitions, two producers.

    python -m benchmarks.transaction_floor    [--transactions 300] [--debug eos,protocol]

As the bridge writes a small transaction (its table, `transaction`, progress), but with nothing
before it and nothing else going on. No latency of ours can be below it.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.bridge import Figures, report
from services.bridge.kafka.options import LINGER_MS
from services.local.bed import Bed

TOPICS: Final = ("table", "transaction", "progress")
WARM_UP: Final = 50
PAUSE_S: Final = 0.05
TIMEOUT_S: Final = 30.0


def measure(bootstrap_servers: str, transactions: int, debug: dict[str, str]) -> Figures:
    """Medians in ms: until the commit returns, and until a read_committed consumer has a record."""
    servers: dict[str, Any] = {"bootstrap.servers": bootstrap_servers}
    admin = AdminClient(servers)
    for topic in TOPICS:
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(TIMEOUT_S)
    consumer = Consumer(servers | {"group.id": "floor", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(TOPICS[0], 0, 0)])
    options = servers | {"linger.ms": LINGER_MS, "compression.type": "lz4", **debug}
    producers = [Producer(options | {"transactional.id": f"floor-{turn}"}) for turn in (0, 1)]
    for producer in producers:
        producer.init_transactions(TIMEOUT_S)
    committed, visible = [], []
    for number in range(WARM_UP + transactions):
        producer = producers[number % 2]
        since = time.monotonic()
        producer.begin_transaction()
        for topic in TOPICS:
            producer.produce(topic, b"value", b"key", 0)
        producer.commit_transaction(TIMEOUT_S)
        committed.append((time.monotonic() - since) * 1000)
        _await_record(consumer)
        visible.append((time.monotonic() - since) * 1000)
        time.sleep(PAUSE_S)
    consumer.close()
    return {
        "transactions": transactions,
        "committed ms": round(statistics.median(committed[WARM_UP:]), 1),
        "visible ms": round(statistics.median(visible[WARM_UP:]), 1),
    }


def _await_record(consumer: Consumer) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        message = consumer.poll(TIMEOUT_S)
        if message is not None and message.error() is None:
            return
    raise RuntimeError("a committed record does not come")


def main(
    transactions: Annotated[int, typer.Option(min=1)] = 300,
    debug: Annotated[str, typer.Option(help="librdkafka's, to standard error")] = "",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start a broker, measure, print."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        Path(name).chmod(0o755)
        with Bed(Path(name), lazy=True) as bed:
            bed.start("kafka")
            wanted = {"debug": debug} if debug else {}
            found = measure(bed.kafka.bootstrap_servers, transactions, wanted)
    report([found], as_json=as_json)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
