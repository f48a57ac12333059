"""What one Kafka transaction takes by itself: three records into three partitions.

    python -m benchmarks.transaction_floor    [--transactions 300] [--debug eos,protocol]

As the bridge writes a small transaction (its table, `transaction`, progress), with its producers,
but nothing before it and nothing else going on, by a broker that has warmed up. No latency of ours
can be below it.
"""

import statistics
import time
from typing import Annotated, Any, Final

import typer
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.bridge import Figures, report
from benchmarks.race.environment import environment
from schemas.settings import BridgeSettings, KafkaSettings
from services.bridge.sink.options import producer_options
from services.bridge.sink.producer_pair import ProducerPair
from services.waiter import Waiter

TOPICS: Final = ("table", "transaction", "progress")
WARM_UP: Final = 6_000
PAUSE_S: Final = 0.05
TIMEOUT_S: Final = 30.0


def measure(bootstrap_servers: str, transactions: int, debug: str) -> Figures:
    """Medians in ms: until the commit returns, and until a read_committed consumer has a record."""
    servers: dict[str, Any] = {"bootstrap.servers": bootstrap_servers}
    admin = AdminClient(servers)
    for topic in TOPICS:
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(TIMEOUT_S)
    consumer = Consumer(servers | {"group.id": "floor", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(TOPICS[0], 0, 0)])
    options = {"debug": debug} if debug else {}
    kafka = KafkaSettings(
        bootstrap_servers=bootstrap_servers, topic_prefix="floor", options=options
    )
    made = producer_options(kafka, BridgeSettings(), "floor", (), False)
    turns = ProducerPair(made, Waiter(), subject="floor")
    turns.begin_session()
    committed, visible = [], []
    for _ in range(WARM_UP + transactions):
        since = time.monotonic()
        turns.begin()
        for topic in TOPICS:
            turns.current.produce(topic, b"value", b"key", 0)
        turns.current.commit_transaction(TIMEOUT_S)
        committed.append((time.monotonic() - since) * 1000)
        turns.pass_on()
        message = consumer.poll(TIMEOUT_S)
        if message is None or message.error() is not None:
            raise RuntimeError("a committed record does not come")
        visible.append((time.monotonic() - since) * 1000)
        time.sleep(PAUSE_S if len(visible) > WARM_UP else 0)
    consumer.close()
    return {
        "transactions": transactions,
        "committed ms": round(statistics.median(committed[WARM_UP:]), 1),
        "visible ms": round(statistics.median(visible[WARM_UP:]), 1),
    }


def main(
    transactions: Annotated[int, typer.Option(min=1)] = 300,
    debug: Annotated[str, typer.Option(help="librdkafka's, to standard error")] = "",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start a broker, measure, print."""
    with environment() as (bed, _):
        found = measure(bed.kafka.bootstrap_servers, transactions, debug)
    report([found], as_json=as_json)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
