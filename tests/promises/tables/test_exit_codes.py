"""The exit code of every end: 1 says that rows differ, and nothing else."""

import errno
import json
import resource
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from schemas.lsn import format_lsn
from schemas.settings import KafkaSettings, Settings
from schemas.tables import TablesSettings
from services.testbed.ports import free_port
from spark_consumers import command
from spark_consumers.audit.audit import Audit
from spark_consumers.audit.report import TableAudit
from spark_consumers.audit.schedule import repeated, scheduled
from spark_consumers.epochs.audit_log import AuditLog
from spark_consumers.epochs.audit_result import AuditResult
from spark_consumers.failures import translated
from spark_consumers.iceberg import catalog, table_files
from spark_consumers.operations import Operator
from spark_consumers.session import session_beside
from spark_consumers.terminal import exit_codes
from spark_consumers.verify.as_of import verify_as_of
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.test_indexed_delete import change, filled, items
from tests.promises.tables.test_job import ONE, insert
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

ABSENT = "postgresql://127.0.0.1"


def ended(work: Callable[[], object], *, as_json: bool = False) -> int:
    """The exit code of a command that does `work`."""
    with pytest.raises(SystemExit) as end, exit_codes(as_json=as_json):
        work()
    assert isinstance(end.value.code, int)
    return end.value.code


def raising(error: BaseException) -> Callable[[], object]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/warehouse/x"), ExitCode.DISK_FULL),
        (OSError(errno.EMFILE, "Too many open files"), ExitCode.NO_DESCRIPTORS),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), ExitCode.PRIVILEGE_MISSING),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), ExitCode.SERVER_UNREACHABLE),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), ExitCode.BUG),
        (KeyError("a"), ExitCode.BUG),
        (AssertionError(), ExitCode.BUG),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_failure_is_taken_for_a_difference(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(raising(error), as_json=True) == code
    out, told = capsys.readouterr()
    if code < 128:
        assert json.loads(out)["exit_code"] == code
        assert ("Traceback" in told) == (code == ExitCode.BUG), told
        assert told.splitlines()[-1].startswith("error: ")


def test_a_disk_that_is_full_is_told_where_a_file_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "_local", lambda _: _Full())
    assert ended(lambda: table_files.write_file(None, "/t/x.puffin", b"x")) == ExitCode.DISK_FULL
    told = capsys.readouterr().err
    assert "No space left on device" in told and "/t/x.puffin" in told


class _Full:
    """A file on a disk that is full."""

    parent = Path("/tmp")

    def __str__(self) -> str:
        return "/t/x.puffin"

    def open(self, _mode: str) -> Any:
        return Path("/dev/full").open("wb", buffering=0)


@pytest.fixture(params=["jdbc", "rest"])
def away(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Operator:
    """The commands of an operator whose catalog is down."""
    port = free_port()
    uri = {"jdbc": f"jdbc:{ABSENT}:{port}/lake", "rest": f"http://127.0.0.1:{port}/"}
    tables = TablesSettings.model_validate(
        {
            "warehouse": str(tmp_path),
            "catalog_type": request.param,
            "catalog_uri": uri[request.param],
        }
    )
    kafka = KafkaSettings(bootstrap_servers="127.0.0.1:1", topic_prefix="away")
    settings = Settings(kafka=kafka, tables=tables)
    return Operator(session_beside(spark, tables), settings)


@pytest.mark.long
def test_a_catalog_that_is_down_is_unreachable(
    away: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    for work in (
        lambda: list(away.maintain()),
        lambda: list(away.epochs()),
        lambda: list(away.rebuild(["public.a"])),
        lambda: list(away.tag(1)),
    ):
        assert ended(work) == ExitCode.SERVER_UNREACHABLE
        told = capsys.readouterr().err
        assert "catalog" in told and "Traceback" not in told


@pytest.mark.long
def test_a_disk_that_is_full_while_rows_are_written_loses_none(
    spark: SparkSession, new_pipeline: NewPipeline
) -> None:
    """A file that can't grow is what a full disk is to Java."""
    pipeline = new_pipeline()
    pipeline.publisher.announce(ONE)
    insert(pipeline, ONE, 1)
    pipeline.apply()
    texts = {number: secrets.token_hex(200_000) for number in (2, 3)}
    with pipeline.publisher.transaction() as t:
        for number, text in texts.items():
            t.insert(ONE, {"id": number, "v": text})
    assert spark._jvm is not None
    java = spark._jvm.java.lang.ProcessHandle.current().pid()
    _, most = resource.prlimit(java, resource.RLIMIT_FSIZE)
    resource.prlimit(java, resource.RLIMIT_FSIZE, (300_000, most))
    try:
        with pytest.raises(Exception) as caught:  # of Spark or of ours
            pipeline.apply()
    finally:
        resource.prlimit(java, resource.RLIMIT_FSIZE, (most, most))
    assert translated(caught.value, "apply an epoch").exit_code == ExitCode.DISK_FULL
    pipeline.restart()
    pipeline.apply()
    assert {row["id"]: row["v"] for row in pipeline.rows("one") if row["id"] in texts} == texts
    assert len(pipeline.rows("one")) == 3


@pytest.mark.long
def test_a_role_that_the_catalogs_database_refuses_is_no_outage(
    pair: Provider,
    fresh_database: str,
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server's text may be in any language."""
    port = conninfo_to_dict(pair.primary.conninfo(fresh_database))["port"]
    tables = TablesSettings.model_validate(
        {
            "warehouse": str(tmp_path),
            "catalog_uri": f"jdbc:{ABSENT}:{port}/{fresh_database}",
            "catalog_options": {"jdbc.user": "nobody_of_this_name"},
        }
    )
    kafka = KafkaSettings(bootstrap_servers="127.0.0.1:1", topic_prefix="refused")
    operator = Operator(session_beside(spark, tables), Settings(kafka=kafka, tables=tables))
    assert ended(lambda: list(operator.epochs())) == ExitCode.PRIVILEGE_MISSING
    assert "refuses the role" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.usefixtures("any_table_is_large", "by_spark")
def test_files_of_a_table_that_spreads_them_over_folders(new_pipeline: NewPipeline) -> None:
    properties = {"write.object-storage.enabled": "true"}
    rules = {"public.items": {"properties": properties}}
    pipeline = new_pipeline(key_index=True, rules=rules)
    filled(pipeline)
    assert change(pipeline, "b", 1) == "index"
    assert items(pipeline)[0] == "b"


@pytest.fixture
def changelog(new_pipeline: NewPipeline, tmp_path: Path) -> tuple[Pipeline, Path]:
    """A pipeline with nothing but a changelog, and its configuration as a file."""
    pipeline = new_pipeline(rules={"public.one": {"kind": "changelog"}})
    pipeline.publisher.announce(ONE)
    insert(pipeline, ONE, 1)
    pipeline.apply()
    document = {
        "kafka": pipeline.kafka.model_dump(include={"bootstrap_servers", "topic_prefix"}),
        "tables": json.loads(pipeline.tables.model_dump_json()),
    }
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    return pipeline, config


class _Shared:
    """The tests' own session, which a command neither starts nor stops."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __call__(self, _settings: Settings) -> "_Shared":
        return self

    def __enter__(self) -> SparkSession:
        return self._spark

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.long
def test_a_comparison_that_judged_nothing_is_not_judged(
    changelog: tuple[Pipeline, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, config = changelog
    monkeypatch.setattr(command, "_session", _Shared(pipeline.spark))
    as_of = format_lsn(pipeline.runner.record.commit_lsn)
    arguments = ["verify", "--config", str(config), "--as-of", as_of]
    done = CliRunner().invoke(command.app, arguments)
    assert done.exit_code == ExitCode.NOT_JUDGED, done.output
    assert "not a single table was judged" in done.stderr
    done = CliRunner().invoke(command.app, [*arguments, "--json"])
    assert done.exit_code == ExitCode.NOT_JUDGED
    assert json.loads(done.stdout) == {"equal": False, "source_not_judged": "", "tables": []}


@pytest.mark.long
def test_a_comparison_as_of_an_lsn_gives_the_events_back(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ONE)
    insert(pipeline, ONE, 1, 2)
    pipeline.apply()

    def persisted() -> int:
        return int(pipeline.spark.sparkContext._jsc.getPersistentRDDs().size())

    before = persisted()
    (found,) = verify_as_of(pipeline.spark, pipeline.settings, pipeline.publisher.commit_lsn)
    assert found.equal and found.source_rows == 2
    assert persisted() == before


class _Failing:
    """An audit that fails in another way each time, and ends with the last one."""

    def __init__(self, stop: threading.Event, *errors: Exception) -> None:
        self._stop = stop
        self._errors = iter(errors)
        self._left = len(errors)

    def run(self, _names: object = ()) -> list[TableAudit]:
        self._left -= 1
        if not self._left:
            self._stop.set()
        raise next(self._errors)


def test_a_schedule_goes_on_whatever_an_audit_fails_with() -> None:
    stop = threading.Event()
    failing = _Failing(stop, KeyError("value"), OSError(errno.ENOSPC, "full"), Retryable("later"))
    found = list(repeated(failing.run, 0.0, stop))
    assert [isinstance(one, SlotbridgeError) and one.exit_code for one in found] == [
        ExitCode.BUG,
        ExitCode.DISK_FULL,
        ExitCode.SERVER_UNREACHABLE,
    ]
    assert "KeyError" in str(found[0]) and "value" not in str(found[0])


@pytest.mark.long
def test_audits_beside_the_epochs_survive_what_nobody_expects(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def run(_self: Audit, _names: object = ()) -> list[TableAudit]:
        calls.append(1)
        raise TypeError("a bug")

    monkeypatch.setattr(Audit, "run", run)
    tables = pipeline.tables.model_copy(update={"audit_interval_ms": 50})
    settings = pipeline.settings.model_copy(update={"tables": tables})
    with scheduled(pipeline.spark, settings):
        eventually(lambda: len(calls) > 2, what="audits go on")


@pytest.mark.long
def test_results_that_a_newer_release_has_recorded_are_read(pipeline: Pipeline) -> None:
    spark, log = pipeline.spark, AuditLog(pipeline.runner.namespace)
    log.record(spark, {"public.a": AuditResult(7, 8, 0)})
    table = catalog.load(spark, log.identifier)
    ((name, text),) = (pair for pair in catalog.properties(table).items() if ".found." in pair[0])
    newer = json.loads(text) | {"planted": [1]}
    catalog.set_property(table, name, json.dumps(newer))
    assert log.findings(spark)["public.a"].verified_lsn == 7
    log.record(spark, {"public.a": AuditResult(9, 10, 3)})
    assert log.findings(spark)["public.a"].differences == 3


@pytest.fixture
def failing(
    changelog: tuple[Pipeline, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """The command `audit --repeat` of which every round fails."""
    pipeline, config = changelog
    stop = threading.Event()
    work = _Failing(stop, Retryable("a"), KeyError("b"), Retryable("c", exit_code=ExitCode.LOCKED))
    monkeypatch.setattr(command, "_session", _Shared(pipeline.spark))
    monkeypatch.setattr(command, "stop_on_signals", lambda: stop)
    monkeypatch.setattr("spark_consumers.audit.audit.Audit", lambda *_, **__: work)
    yield ["audit", "--config", str(config), "--repeat", "0s"]


@pytest.mark.long
def test_audits_that_all_failed_end_with_the_last_ones_code(failing: list[str]) -> None:
    done = CliRunner().invoke(command.app, failing)
    assert done.exit_code == ExitCode.LOCKED, done.output
    assert len(done.stderr.splitlines()) >= 3
