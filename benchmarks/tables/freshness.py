"""How old a row is when it can be read: from its transaction's commit to the end of its epoch."""

import threading
import time
from collections import deque

from benchmarks.bridge import described
from benchmarks.tables.contenders import Ours
from benchmarks.tables.source import ROWS_A_TRANSACTION, Source
from spark_consumers.epochs.report import EpochReport

_WARM_UP_S = 20.0


def freshness(source: Source, ours: Ours, *, rows_per_s: int, seconds: float) -> dict[str, float]:
    """Median, 99th percentile and worst of the transactions after a warm-up, in seconds.

    Updates, ten rows a transaction, each transaction in Kafka when it has committed: what the
    bridge takes until then (docs/why/performance.md, latency) is not in it.
    """
    waiting: deque[tuple[int, float]] = deque()
    ended = threading.Event()
    pause_s = ROWS_A_TRANSACTION / rows_per_s

    def write() -> None:
        due = time.monotonic()
        while not ended.is_set():
            source.write("update", ROWS_A_TRANSACTION)
            waiting.append((source.commit_lsn, time.monotonic()))
            due += pause_s
            ended.wait(max(0.0, due - time.monotonic()))

    writer = threading.Thread(target=write)
    ages: list[float] = []
    begun = time.monotonic()

    def done(report: EpochReport) -> None:
        now = time.monotonic()
        while waiting and waiting[0][0] <= report.commit_lsn:
            _, written = waiting.popleft()
            if written - begun > _WARM_UP_S:
                ages.append(now - written)

    writer.start()
    try:
        with ours.running(done):
            time.sleep(_WARM_UP_S + seconds)
    finally:
        ended.set()
        writer.join()
    return {"rows_per_s": rows_per_s, "transactions": len(ages), **described(ages)}
