"""/healthz and /readyz of `slottables run`: while it works, hangs, fails and ends."""

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.errors import PySparkException

from services.testbed.ports import free_port, is_free
from spark_consumers.epochs import publication, spark_work, upkeep
from spark_consumers.epochs.epoch_runner import EpochRunner
from spark_consumers.epochs.health import Health
from spark_consumers.epochs.report import EpochReport
from spark_consumers.iceberg import maintenance
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable
from tests.promises.tables.test_job import ONE, THREE, Running, insert, read
from tests.providers.waiting import eventually, patient, patient_ms

DEADLINE_MS = patient_ms(2_000)
IDLE_MS = patient_ms(4_000)
IDLE_TOLD_MS = "spark.sql.streaming.noDataProgressEventInterval"
"""How often Spark tells that a query is idle: every 10 s by default."""
STALLED = "no: the streaming query has not come round for "


class Clock:
    """A time that stands still."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def probe(port: int, path: str) -> tuple[int, str]:
    """The status and text of a probe, 0 before it is served."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{path}", timeout=patient(60)
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError as error:
        return 0, str(error)


def test_only_signs_of_work_keep_it_healthy() -> None:
    clock = Clock()
    health = Health(clock)
    clock.now += 1e6
    assert health.answer("/healthz") == (True, "ok"), "without a deadline"
    health.expect(60)
    clock.now += 60
    assert health.answer("/healthz")[0]
    clock.now += 1
    assert health.answer("/healthz") == (False, f"{STALLED}61 s, and nothing works")
    health.looked([(1, 5, 100)], 1.0)
    assert health.answer("/healthz")[0], "a stage of Spark is there"
    for _ in range(13):
        clock.now += 5
        health.looked([(1, 5, 100)], health._busy_s + 0.1)
    assert not health.answer("/healthz")[0], "no task has ended, and waiting costs little"
    health.looked([(1, 5, 101)], health._busy_s)
    assert health.answer("/healthz")[0], "a task has read a row"
    clock.now += 61
    health.looked([(1, 5, 101)], health._busy_s + 30)
    assert health.answer("/healthz")[0], "this process computes"
    clock.now += 61
    assert not health.answer("/healthz")[0]
    health.worked()
    assert health.answer("/healthz")[0]


def test_readiness_goes_with_the_last_epoch() -> None:
    health = Health(Clock())
    assert health.answer("/readyz") == (False, "no")
    health.known()
    assert health.answer("/readyz") == (True, "ok")
    health.remark = "parked: public.a"
    health.failed("another writer")
    assert health.answer("/readyz") == (False, "no: another writer: parked: public.a")
    assert health.answer("/healthz") == (True, "ok: parked: public.a")
    health.known()
    assert not health.answer("/readyz")[0], "a new start has not brought an epoch yet"
    health.got_on()
    assert health.answer("/readyz")[0]


@pytest.fixture
def watched(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[Pipeline, int]]:
    """A pipeline whose work is looked at often, and the port of its probes."""
    deadline_ms = getattr(request, "param", DEADLINE_MS)
    monkeypatch.setattr(spark_work, "_EVERY_S", 0.2)
    port = free_port()
    pipeline = new_pipeline(http_port=port, progress_deadline_ms=deadline_ms)
    pipeline.publisher.announce(ONE, THREE)
    pipeline.spark.conf.set(IDLE_TOLD_MS, 2_000)
    yield pipeline, port
    pipeline.spark.conf.unset(IDLE_TOLD_MS)


@pytest.mark.long
def test_a_query_that_hangs_is_told_from_an_epoch_that_works(
    watched: tuple[Pipeline, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, port = watched
    step, hangs, goes_on = EpochRunner.step, threading.Event(), threading.Event()
    works: list[float] = []

    def slow(runner: EpochRunner) -> EpochReport | None:
        if runner.waiting()[0] and running.reports and not works:
            began = time.monotonic()
            rounds = 3 + 2 * DEADLINE_MS // 450
            count = rounds * pipeline.spark.sparkContext.defaultParallelism
            tasks = pipeline.spark.range(0, count, 1, count)
            tasks.selectExpr("java_method('java.lang.Thread', 'sleep', 450L)").collect()
            works.append(time.monotonic() - began)
        elif works and runner.waiting()[0] and not hangs.is_set():
            hangs.set()
            assert goes_on.wait(patient(400))
        return step(runner)

    monkeypatch.setattr(EpochRunner, "step", slow)
    unhealthy: list[tuple[int, str]] = []
    with Running(pipeline) as running:
        insert(pipeline, ONE, 1)
        eventually(lambda: running.failure or probe(port, "/readyz")[0] == 200, what="it runs")

        def worked() -> bool:
            running.sound()
            unhealthy.extend(found for found in [probe(port, "/healthz")] if found[0] != 200)
            return bool(works)

        eventually(lambda: running.failure or running.reports, what="the first epoch")
        insert(pipeline, ONE, 2)
        eventually(worked, what="a long epoch is done", timeout_s=120)
        assert works[0] > 2 * DEADLINE_MS / 1000 and not unhealthy, (works, unhealthy)
        eventually(lambda: running.failure or len(running.reports) == 2, what="its end")
        insert(pipeline, ONE, 3)
        assert hangs.wait(patient(180))
        assert probe(port, "/healthz")[0] == 200
        eventually(
            lambda: running.failure or probe(port, "/healthz")[0] == 503,
            what="the query hangs",
            timeout_s=60,
        )
        status, text = probe(port, "/healthz")
        assert (status, text.startswith(STALLED)) == (503, True), text
        goes_on.set()
        eventually(lambda: running.failure or probe(port, "/healthz")[0] == 200, what="it goes on")
    running.sound()
    assert probe(port, "/readyz") == (503, "no: `slottables run` has ended")


@pytest.mark.long
@pytest.mark.parametrize("work", ["publish", "maintain"])
def test_steps_of_many_tables_that_neither_spark_nor_python_works_on_keep_it_healthy(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """As a slow catalog's are: each takes a third of the time that is allowed."""
    port, steps, deadline_ms = free_port(), 0, 2 * DEADLINE_MS
    interval_ms = 1_000 if work == "maintain" else 0
    pipeline = new_pipeline(
        http_port=port, progress_deadline_ms=deadline_ms, maintenance_interval_ms=interval_ms
    )
    tables = [SourceTable(f"many{number}", {"id": ("int4", -1)}) for number in range(4)]
    pipeline.publisher.announce(*tables)

    def slowly(does: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*given: Any, **named: Any) -> Any:
            nonlocal steps
            time.sleep(deadline_ms / 3000)
            steps += 1
            return does(*given, **named)

        return slow

    monkeypatch.setattr("spark_consumers.epochs.threads._TABLES_AT_ONCE", 1)
    if work == "publish":
        monkeypatch.setattr(publication, "_write_metadata", slowly(publication._write_metadata))
    else:
        monkeypatch.setattr(upkeep, "maintain", slowly(maintenance.maintain))
    with pipeline.publisher.transaction() as t:
        for table in tables:
            t.insert(table, {"id": 1})
    seen: set[tuple[int, str]] = set()
    with Running(pipeline) as running:
        eventually(lambda: running.failure or not is_free(port), what="it runs", timeout_s=60)

        def worked() -> bool:
            running.sound()
            seen.add(probe(port, "/healthz"))
            return bool(running.reports) and steps >= len(tables)

        eventually(worked, what="all tables are done", timeout_s=120)
    assert seen == {(200, "ok")}


@pytest.mark.long
@pytest.mark.parametrize("watched", [IDLE_MS], indirect=True)
def test_an_idle_query_stays_healthy_and_a_failed_epoch_is_not_ready(
    watched: tuple[Pipeline, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, port = watched
    monkeypatch.setattr("spark_consumers.epochs.job._LOSS_PAUSE_S", 1.0)
    step, failing, seen = EpochRunner.step, threading.Event(), set()

    def meets(runner: EpochRunner) -> EpochReport | None:
        if failing.is_set() and runner.waiting()[0]:
            failing.clear()
            raise PySparkException("CommitFailedException: the table has changed")
        return step(runner)

    monkeypatch.setattr(EpochRunner, "step", meets)
    insert(pipeline, ONE, 1)
    with Running(pipeline) as running:
        eventually(lambda: running.failure or running.reports, what="an epoch")
        until = time.monotonic() + 1.5 * IDLE_MS / 1000
        while time.monotonic() < until:
            running.sound()
            seen.add(probe(port, "/healthz")[0])
            time.sleep(0.2)
        assert seen == {200} and probe(port, "/readyz") == (200, "ok")
        failing.set()
        insert(pipeline, ONE, 2)
        eventually(lambda: running.failure or probe(port, "/readyz")[0] == 503, what="it fails")
        assert "another writer" in probe(port, "/readyz")[1]
        eventually(lambda: running.failure or probe(port, "/readyz")[0] == 200, what="it goes on")
    running.sound()
    assert sum(report.transactions for report in running.reports) == 2


@pytest.mark.long
def test_each_table_tells_its_lsn_and_its_seconds(watched: tuple[Pipeline, int]) -> None:
    pipeline, port = watched
    insert(pipeline, ONE, 1)
    first = pipeline.publisher.commit_lsn
    with Running(pipeline) as running:
        eventually(lambda: running.failure or running.events == 1, what="one arrives")
        insert(pipeline, THREE, 1)
        eventually(lambda: running.failure or running.events == 2, what="three arrives")
        values = read(port)
    running.sound()
    last = pipeline.publisher.commit_lsn
    assert last > first
    for table in ("public.one", "public.three"):
        assert values[f'slottables_table_commit_lsn{{table="{table}"}}'] == last
        assert 0 < values[f'slottables_table_epoch_seconds{{table="{table}"}}'] < 86_400
