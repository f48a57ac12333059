"""What asking partitions how a transaction was decided costs a bridge: CPU time for each.

    python -m benchmarks.marker_check    [--transactions 2000] [--partitions 8] [--rounds 3]

The bridge's own producers write one record into a topic of so many partitions and commit, with and
without `MarkerCheck` (services/bridge/sink/markers.py), in turns; a bridge of its own is not
started. CPU time is of the whole process, librdkafka's threads included, not the broker's.
"""

import statistics
import time
from typing import Annotated, Any

import typer

from benchmarks.bridge import Figures, report
from benchmarks.race.environment import environment
from schemas.progress import (
    ProgressKafka,
    ProgressPosition,
    ProgressRecord,
    ProgressServer,
    ProgressSettings,
    ProgressWitness,
)
from schemas.settings import BridgeSettings, KafkaSettings
from services.bridge.events.event import Event
from services.bridge.sink.markers import MarkerCheck
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer

WARM_UP = 200


class Unchecked(MarkerCheck):
    """Asks nothing."""

    def flushed(self, topics: Any) -> None:
        """Remember nothing."""

    def require_delivered(self) -> None:
        """Return at once."""


def measure(servers: str, prefix: str, partitions: int, transactions: int, *, check: bool) -> float:
    """CPU ms of this process for each transaction."""
    settings = KafkaSettings(
        bootstrap_servers=servers, topic_prefix=prefix, partitions=partitions, replication_factor=1
    )
    topics = Topics(settings)
    topics.prepare()
    producer = TransactionalProducer(settings, BridgeSettings(), topics, "bench")
    if not check:
        producer.markers.close()
        producer.markers = Unchecked(topics, lambda: None, producer.tails.judge)
    producer.begin_session()
    for number in range(WARM_UP + transactions):
        if number == WARM_UP:
            began_s = time.process_time()
        producer.send([Event(f"{prefix}.public.t", str(number).encode(), b"value")])
        producer.commit(_record(number + 1))
    took_s = time.process_time() - began_s
    producer.abandon()
    return took_s * 1000 / transactions


def _record(lsn: int) -> ProgressRecord:
    return ProgressRecord(
        slot="bench",
        ts_ms=0,
        position=ProgressPosition(commit_lsn=lsn, end_lsn=lsn, seq=0),
        server=ProgressServer(system_identifier="1", timeline=1, history={}),
        witness=ProgressWitness(kind="origin"),
        kafka=ProgressKafka(),
        settings=ProgressSettings(publication="p", publication_oid=1, source_origin="any"),
    )


def main(
    transactions: Annotated[int, typer.Option(min=1)] = 2000,
    partitions: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start a broker, measure, print."""
    found: dict[bool, list[float]] = {True: [], False: []}
    with environment() as (bed, _):
        servers = bed.kafka.bootstrap_servers
        for number in range(rounds):
            for check in (True, False):
                prefix = f"markers{number}{'ny'[check]}"
                cost_ms = measure(servers, prefix, partitions, transactions, check=check)
                found[check].append(cost_ms)
    figures: Figures = {
        "partitions": partitions,
        "with it, CPU ms": round(statistics.median(found[True]), 3),
        "without": round(statistics.median(found[False]), 3),
    }
    report([figures], as_json=as_json)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
