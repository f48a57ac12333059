"""`slottables` as a process: its lines, its signals, its exit codes."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.errors import ExitCode
from schemas.lsn import format_lsn
from services.local.java import find_java_home
from tests.providers.interface import Provider
from tests.providers.waiting import eventually
from tests.spark_consumers.conftest import Pipeline
from tests.spark_consumers.publisher import SourceTable

ROWS = SourceTable("rows", {"id": ("int4", -1), "v": ("int4", -1)})
LOG = SourceTable("log", {"v": ("int4", -1)}, key=(), identity="nothing")


class Process:
    """A running `slottables`."""

    def __init__(self, config: Path, *arguments: str) -> None:
        self.lines_file = config.with_suffix(".out")
        self.log_file = config.with_suffix(".log")
        program = Path(sys.executable).parent / "slottables"
        with self.lines_file.open("wb") as out, self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [program, *arguments, "--config", config, "--json"], stdout=out, stderr=log
            )

    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines so far; the last one may still be under way."""
        text = self.lines_file.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def events(self) -> dict[int, int]:
        """epoch -> how many events it had."""
        return {line["epoch"]: line["events"] for line in self.lines() if "epoch" in line}

    def log(self) -> str:
        """What it has logged."""
        return self.log_file.read_text(encoding="utf-8")

    def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal, if any, and wait for the exit code."""
        if number is not None:
            self._process.send_signal(number)
        return self._process.wait(timeout=240)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None


@pytest.fixture
def config(tmp_path: Path, warehouse: Path, spark_jars: str, pipeline: Pipeline) -> Path:
    """The configuration of `pipeline` as a file."""
    path = tmp_path / "slotbridge.yaml"
    document = {
        "kafka": pipeline.kafka.model_dump(include={"bootstrap_servers", "topic_prefix"}),
        "tables": {
            "warehouse": str(warehouse),
            "trigger_interval_ms": 100,
            "offsets_per_trigger_max": 300,
            "driver_memory": "1g",
            "spark_options": {"spark.jars": spark_jars},
        },
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def publish(pipeline: Pipeline, transactions: int) -> None:
    for _ in range(transactions):
        with pipeline.publisher.transaction() as t:
            for number in range(20):
                t.update(ROWS, {"id": number, "v": t.commit_lsn})
                t.insert(LOG, {"v": t.commit_lsn})


def test_killed_in_the_middle_it_goes_on_where_it_was(
    pipeline: Pipeline, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(find_java_home()))
    pipeline.publisher.announce(ROWS, LOG)
    with pipeline.publisher.transaction() as t:
        for number in range(20):
            t.insert(ROWS, {"id": number, "v": 0})
    publish(pipeline, 20)
    process = Process(config, "run")
    eventually(
        lambda: len(process.lines()) >= 1 or not process.running,
        what="a batch",
        timeout_s=240,
    )
    assert process.end(signal.SIGKILL) == -signal.SIGKILL, process.log()
    events = process.events()
    last_lsn = format_lsn(pipeline.publisher.commit_lsn)
    process = Process(config, "run")
    eventually(
        lambda: (
            any(line.get("commit_lsn") == last_lsn for line in process.lines())
            or not process.running
        ),
        what="every event is applied",
        timeout_s=240,
    )
    assert process.end(signal.SIGTERM) == 0, process.log()
    first = process.lines()[0]
    assert first["epoch"] - max(events) in (1, 2)
    assert set(first["tables"]) == {"public.rows", "public.log"}
    assert first["events"] == sum(table["events"] for table in first["tables"].values())
    last = pipeline.publisher.commit_lsn
    assert [tuple(row) for row in pipeline.rows("rows")] == [(n, last) for n in range(20)]
    assert sorted(row.v for row in pipeline.rows("log")) == sorted(
        lsn for lsn in range(last - 1900, last + 1, 100) for _ in range(20)
    )


@pytest.mark.parametrize(
    ("section", "code", "hint"),
    [
        ({"kafka": {"bootstrap_servers": "127.0.0.1:1", "topic_prefix": "x"}}, 12, "bootstrap"),
        ({"kafka": None}, 2, "add `kafka:`"),
    ],
)
def test_what_stops_it_before_spark_starts(
    tmp_path: Path,
    section: dict[str, Any],
    code: int,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLOTBRIDGE_TABLES__WAREHOUSE", str(tmp_path))
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(section), encoding="utf-8")
    process = Process(path, "run")
    assert process.end() == code, process.log()
    error = process.lines()[0]
    assert error["exit_code"] == code
    assert hint in error["hint"]
    assert process.log().startswith("error: ")


def test_verify_answers_by_its_exit_code(config: Path, pair: Provider, fresh_database: str) -> None:
    document = yaml.safe_load(config.read_text(encoding="utf-8"))
    document["source"] = {"conninfo": pair.primary.conninfo(fresh_database)}
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    process = Process(config, "verify", "--table", "public.none")
    assert process.end() == ExitCode.ANSWER_IS_NO, process.log()
    report = process.lines()[0]
    assert report["equal"] is False
    assert report["tables"][0]["columns"] == ["no such table at the source"]
