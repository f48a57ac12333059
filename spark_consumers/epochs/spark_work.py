"""Looks at Spark's running jobs, so that /healthz tells a long epoch from one that hangs."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from spark_consumers.epochs.health import Health
from spark_consumers.failures import FOREIGN
from spark_consumers.liveness import heard_by, under_way

BESIDE = "slottables audit"
"""The job group of work beside the epochs, which says nothing of theirs."""
_EVERY_S = 5.0
_INPUT = 2
"""The place of inputRecords in what `running` returns of a stage."""
_COUNTS = ("numCompleteTasks", "inputRecords", "shuffleReadRecords")
_WRITTEN = ("shuffleWriteRecords", "outputRecords")


@contextlib.contextmanager
def watched(spark: SparkSession, health: Health) -> Iterator[None]:
    """Tell `health` of Spark's work, again and again, and of each step, until the block ends."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(_EVERY_S):
            with contextlib.suppress(*FOREIGN):  # Java that has ended does not work
                stages = running(spark)
                health.looked(stages, time.process_time())
                under_way.read(sum(stage[_INPUT] for stage in stages))

    thread = threading.Thread(target=look, name="spark-work", daemon=True)
    thread.start()
    try:
        with heard_by(health.worked):
            yield
    finally:
        stop.set()
        thread.join(_EVERY_S)


def running(spark: SparkSession) -> list[tuple[int, ...]]:
    """Return the running stages, each with how many tasks have ended and how many rows went by."""
    context = spark.sparkContext
    jvm: Any = context._jvm
    store: Any = context._jsc.sc().statusStore()
    status = jvm.org.apache.spark.JobExecutionStatus.RUNNING
    beside: set[int] = set()
    for job in _each(store.jobsList(jvm.java.util.Collections.singletonList(status))):
        if job.jobGroup().isDefined() and job.jobGroup().get() == BESIDE:
            beside |= {int(number) for number in _each(job.stageIds())}
    found = []
    for stage in _each(store.activeStages()):
        if int(stage.stageId()) not in beside:
            counts = (int(getattr(stage, name)()) for name in (*_COUNTS, *_WRITTEN))
            found.append((int(stage.stageId()), *counts))
    return sorted(found)


def _each(values: Any) -> Iterator[Any]:
    for number in range(values.size()):
        yield values.apply(number)
