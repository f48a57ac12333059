"""`slottables status`, asked of the metrics that `slottables run` serves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from schemas.errors import ExitCode, Retryable, SettingsError
from schemas.tables import TablesSettings
from services.testbed.ports import free_port
from spark_consumers.command import app
from spark_consumers.epochs.ledger import EpochRecord, ParkedTable
from spark_consumers.epochs.metrics import Metrics
from spark_consumers.epochs.report import EpochReport, TableReport
from spark_consumers.iceberg.table_note import Parked
from spark_consumers.liveness import under_way
from spark_consumers.status import RunStatus, parsed_status, read_run_status


def report(epoch: int, **rows: int) -> EpochReport:
    """An epoch that brought rows to tables."""
    tables = {f"public.{name}": TableReport(n, n, 0, 7, "append") for name, n in rows.items()}
    return EpochReport(epoch, 0x16B3748, 1, 0.5, 0, tables)


def shown(status: RunStatus) -> str:
    """What people see."""
    console = Console(width=100)
    with console.capture() as capture:
        console.print(status.screen())
    return capture.get()


def test_a_run_tells_epoch_lag_rows_and_rebuilds(tmp_path: Path) -> None:
    settings = TablesSettings(warehouse=str(tmp_path), http_port=free_port(), http_host="127.0.0.1")
    metrics = Metrics()
    metrics.serve(settings)
    unknown = read_run_status(settings)
    assert (unknown.epoch, unknown.commit_lsn) == (None, None)
    assert (unknown.lag_bytes, unknown.lag_seconds) == (None, None)
    assert unknown.document()["commit_lsn"] is None
    assert "last epoch not known yet; lag not known yet" in shown(unknown)
    metrics.begun(EpochRecord(0, -1, 0, {}, None, {}), [])
    assert "no epoch yet; lag not known yet" in shown(read_run_status(settings))
    under_way.begin(195_812)
    under_way.read(120_000)
    filling = read_run_status(settings)
    assert "the next one has read 120,000 of 195,812 events, writes its" in shown(filling)
    under_way.tables, under_way.tables_written = 11, 4
    filling = read_run_status(settings)
    assert "wrote 4 of 11 tables" in " ".join(shown(filling).split())
    assert filling.document()["under_way"] == {
        "events": 195_812,
        "events_read": 120_000,
        "tables": 11,
        "tables_written": 4,
    }
    under_way.begin(0)
    metrics.begun(EpochRecord(18, 0x16B3700, 0, {}, None, {}), ["public.a"])
    begun = read_run_status(settings)
    assert "epoch 18, 0/16B3700; lag not known yet" in shown(begun)
    assert begun.events_since_start == {"public.a": 0}
    metrics.idle()
    assert "epoch 18, 0/16B3700; 0 bytes and 0.0 s behind" in shown(read_run_status(settings))
    metrics.done(report(1, a=10))
    metrics.waiting(0, 123)
    metrics.idle()
    metrics.rebuilding({"public.a": 0.25})
    metrics.filling(["public.f"])
    note = Parked(1, 0x10, 0x20, 7, "no value fits", "mend it")
    metrics.parked({"public.z": ParkedTable(note, None, 3, 0)}, {})
    first = read_run_status(settings)
    metrics.done(report(2, a=20, b=5))
    metrics.rebuilding({})
    metrics.filling([])
    metrics.parked({}, {})
    second = read_run_status(settings)
    assert (first.events_since_start, first.rebuilding) == ({"public.a": 10}, ["public.a"])
    assert second.events_since_start == {"public.a": 30, "public.b": 5}
    spent_s = second.time_s - first.time_s
    assert second.rates(first) == pytest.approx({"public.a": 20 / spent_s, "public.b": 5 / spent_s})
    assert second.rates(None) == {}
    assert first.rates(second) == {}, "another run"
    assert first.document() == {
        "epoch": 1,
        "commit_lsn": "0/16B3748",
        "lag_bytes": 123,
        "lag_seconds": 0.0,
        "events_since_start": {"public.a": 10},
        "rebuilding": ["public.a"],
        "rebuild_ratio": {"public.a": 0.25},
        "filling": ["public.f"],
        "parked": {
            "public.z": {
                "has": "0/10",
                "refused_at": "0/20",
                "reason": "no value fits",
                "remedy": "mend it",
            }
        },
        "events_per_second": {},
        "under_way": dict.fromkeys(("events", "events_read", "tables", "tables_written"), 0),
    }
    assert "epoch 1, 0/16B3748; 123 bytes and 0.0 s behind" in shown(first)
    assert "since start" in shown(first)
    assert "being rebuilt █████░░░░░░░░░░░░░░░ 25% of its topic read" in shown(first)
    assert second.rebuild_ratio == {}
    assert "filling: a snapshot has rows to bring" in shown(first)
    assert "parked, has 0/10" in shown(first)
    assert "refused at 0/20: no value fits. Remedy: mend it" in shown(first)
    assert (second.parked, second.filling) == ({}, [])
    config = tmp_path / "c.yaml"
    document = {"tables": {"warehouse": str(tmp_path), "http_port": settings.http_port}}
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    command = ["status", "--config", str(config)]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert (done.exit_code, json.loads(done.output)["epoch"]) == (0, 2)
    metrics.parked({"public.z": ParkedTable(note, None, 3, 0)}, {})
    for arguments in (command, [*command, "--json"]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == ExitCode.CHECK_FAILED, "a table is parked"
        assert "public.z" in done.output


def test_a_run_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    settings = TablesSettings(warehouse=str(tmp_path), http_port=free_port())
    with pytest.raises(Retryable, match="does not answer") as raised:
        read_run_status(settings)
    assert raised.value.exit_code == ExitCode.SERVER_UNREACHABLE
    with pytest.raises(SettingsError, match="port of the run is not known"):
        read_run_status(TablesSettings(warehouse=str(tmp_path)))
    with pytest.raises(KeyError):
        parsed_status("# another program\nup 1\n", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["run"], ["epochs"]])
def test_without_the_extra_spark_the_error_names_it(tmp_path: Path, command: list[str]) -> None:
    """`status` does without it."""
    port = free_port()
    config = tmp_path / "c.yaml"
    document = {
        "source": {"conninfo": "host=127.0.0.1 port=1 dbname=x"},
        "kafka": {"bootstrap_servers": "127.0.0.1:1", "topic_prefix": "p"},
        "tables": {"warehouse": str(tmp_path), "http_port": port},
    }
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    code = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from spark_consumers.command import app; app(sys.argv[1:])"
    )

    def done(*arguments: str) -> tuple[int, str]:
        line = [sys.executable, "-c", code, *arguments, "--config", str(config)]
        found = subprocess.run(line, capture_output=True, text=True, check=False)
        return found.returncode, found.stderr

    returned, told = done(*command)
    assert returned == ExitCode.PROGRAM_MISSING, told
    assert len(told.splitlines()) == 1
    assert "pyspark" in told and "pip install 'slotbridge[spark]'" in told
    assert done("status")[0] == ExitCode.SERVER_UNREACHABLE
