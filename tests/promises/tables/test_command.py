"""`slottables` as a process: its lines and its exit codes; test_drill kills and stops it."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from schemas.errors import ExitCode
from schemas.kafka import Format
from schemas.settings import Settings
from services.testbed.java import short_lived_spark
from spark_consumers.terminal import readable
from tests.promises.tables.conftest import Pipeline
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient


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

    def log(self) -> str:
        """What it has logged."""
        return self.log_file.read_text(encoding="utf-8")

    def end(self) -> int:
        """Wait for the exit code."""
        return self._process.wait(timeout=patient(240))


@pytest.fixture
def config(tmp_path: Path, warehouse: Path, spark_jars: str, pipeline: Pipeline) -> Path:
    """The configuration of `pipeline` as a file."""
    path = tmp_path / "slotbridge.yaml"
    document = {
        "kafka": pipeline.kafka.model_dump(include={"bootstrap_servers", "topic_prefix"}),
        "tables": {
            "warehouse": str(warehouse),
            "driver_memory": "1g",
            "spark_options": {"spark.jars": spark_jars, **short_lived_spark(tmp_path / "spark")},
        },
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


KAFKA = {"bootstrap_servers": "127.0.0.1:1", "topic_prefix": "x"}


@pytest.mark.parametrize("part", ["key_format", "value_format"])
@pytest.mark.parametrize("form", get_args(Format))
def test_tables_read_each_format(part: str, form: str) -> None:
    registry = {"url": "http://registry"}
    settings = Settings.model_validate({"kafka": {**KAFKA, part: form}, "registry": registry})
    assert getattr(readable(settings), part) == form


@pytest.mark.parametrize(
    ("section", "code", "hint"),
    [
        ({"kafka": KAFKA}, 12, "bootstrap"),
        ({"kafka": None}, 2, "add `kafka:`"),
        ({"kafka": {**KAFKA, "cloudevents": "structured"}}, 2, "to binary"),
    ],
)
def test_wrong_configuration_stops_it_before_spark_starts(
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


def command_lines(of: Path) -> list[str]:
    """The command lines of Java, as all users of the machine see them, that name a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(place.read_bytes().decode(errors="replace"))
    return [line for line in found if "SparkSubmit" in line and str(of) in line]


@pytest.mark.long
def test_verify_answers_by_its_exit_code_and_shows_no_secret(
    config: Path, pair: Provider, fresh_database: str
) -> None:
    document = yaml.safe_load(config.read_text(encoding="utf-8"))
    document["source"] = {"conninfo": pair.primary.conninfo(fresh_database)}
    document["tables"]["catalog_options"] = {"jdbc.password": "planted"}
    document["tables"]["spark_options"]["spark.sql.catalog.slotbridge.token"] = "planted"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    process = Process(config, "verify", "--table", "public.none")
    eventually(lambda: command_lines(config.parent), what="Java runs", timeout_s=60)
    assert not [line for line in command_lines(config.parent) if "planted" in line]
    assert process.end() == ExitCode.CHECK_FAILED, process.log()
    report = process.lines()[0]
    assert report["equal"] is False
    assert "which server Kafka's events are of is not known" in report["source_not_judged"]
    assert report["tables"][0]["columns"] == ["no such table at the source"]
