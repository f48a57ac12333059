"""How long reading the transactions keeps an epoch from beginning, while they come steadily.

`python -m benchmarks.tables.reads --rate 200` prints one JSON line: of the reads of `--seconds`,
one each second, the median and the worst. No Spark: a broker, and the transactions' topic alone.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.tables.source import PREFIX
from schemas.events import transaction_topic
from schemas.settings import KafkaSettings
from services.testbed.bed import Bed
from spark_consumers.kafka.reader import Topics
from spark_consumers.kafka.transactions import TransactionLog

_PAUSE_S = 1.0


def main() -> None:
    """Write at a rate, read each second, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=int, default=200, help="transactions per second")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        Path(name).chmod(0o755)
        with Bed(Path(name) / "bed", lazy=True) as bed:
            bed.start("kafka")
            found = measure(bed.kafka.bootstrap_servers, options.rate, options.seconds)
    sys.stdout.write(json.dumps(found) + "\n")


def measure(servers: str, rate: int, seconds: float) -> dict[str, Any]:
    """The durations of the reads."""
    topic = transaction_topic(PREFIX)
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic(topic, num_partitions=1)]).values():
        future.result(30)
    kafka = KafkaSettings(bootstrap_servers=servers, topic_prefix=PREFIX)
    log = TransactionLog(kafka, Topics(kafka), lambda _: True, None, -1)
    ended = threading.Event()
    writer = threading.Thread(target=_write, args=(servers, topic, rate, ended))
    writer.start()
    reads = []
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < seconds:
            started = time.monotonic()
            log.read()
            reads.append(time.monotonic() - started)
            cut = log.cut(1_000_000)
            if cut is not None:
                log.done(cut)
            time.sleep(_PAUSE_S)
    finally:
        ended.set()
        writer.join()
        log.close()
    return {
        "transactions_per_s": rate,
        "reads": len(reads),
        "median_s": round(statistics.median(reads), 2),
        "worst_s": round(max(reads), 2),
    }


def _write(servers: str, topic: str, rate: int, ended: threading.Event) -> None:
    """A transaction's two records, in a Kafka transaction of their own, at a rate."""
    producer = Producer({"bootstrap.servers": servers, "transactional.id": "reads"})
    producer.init_transactions(30)
    lsn, due = 1000, time.monotonic()
    while not ended.is_set():
        lsn += 100
        counts = [{"data_collection": "public.t", "event_count": 1}]
        common = {"id": f"1:{lsn}", "commit_lsn": lsn, "ts_ms": int(time.time() * 1000)}
        producer.begin_transaction()
        producer.produce(topic, json.dumps({"status": "BEGIN", **common}))
        producer.produce(topic, json.dumps({"status": "END", **common, "data_collections": counts}))
        producer.commit_transaction(30)
        due += 1 / rate
        ended.wait(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
