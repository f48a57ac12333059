"""`slottables audit` under load: no false alarm, and each planted difference named by its key."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from pydantic import SecretStr

from schemas.errors import ExitCode, OperatorNeeded, SlotbridgeError
from schemas.events import schema_topic
from schemas.settings import KafkaSettings
from schemas.snapshot import SnapshotProgress, SnapshotRequest, SnapshotSettings
from services.testbed import jars
from services.testbed.java import short_lived_spark
from spark_consumers.audit.audit import Audit
from spark_consumers.audit.report import Difference, TableAudit, exit_code
from spark_consumers.audit.schedule import scheduled
from spark_consumers.epochs import job
from spark_consumers.epochs.audit_log import AuditLog
from spark_consumers.epochs.audit_result import AuditResult
from spark_consumers.epochs.ledger import Ledger
from spark_consumers.epochs.metrics import Metrics
from spark_consumers.epochs.small_topics import TOPIC_IDS
from spark_consumers.failures import FOREIGN
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.snapshots import Snapshots, read_snapshots
from spark_consumers.session import session_beside
from tests.promises.bridge.conftest import NewBridge
from tests.promises.tables.conftest import NewPipeline, Pipeline, mark_incomplete
from tests.promises.tables.tables import ROWS, TABLES
from tests.providers.interface import Broker, Provider, Server
from tests.providers.progress_records import progress_record
from tests.providers.waiting import eventually, patient_ms

LOAD = """
    UPDATE items SET n = n + 1, note = md5(random()::text) WHERE id < 900 AND id % 50 = {step} % 50;
    DELETE FROM items WHERE id = {step} % 900;
    INSERT INTO items SELECT {step} % 900, {step}, 'again' ON CONFLICT DO NOTHING;
    INSERT INTO items VALUES (1000 + {step}, 0, 'new');
    INSERT INTO plain SELECT 'note', {step} FROM generate_series(1, 2);
"""


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread until the block ends; raise what it raised."""
    stop, failures = threading.Event(), []

    def run() -> None:
        try:
            work(stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    for failure in failures:
        raise failure


def load(conninfo: str, statements: str) -> Callable[[threading.Event], None]:
    """Run statements, in which {step} is a number, all the time, each step in a transaction."""

    def work(stop: threading.Event) -> None:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            step = 0
            while not stop.wait(0.01):
                step += 1
                with connection.transaction():
                    connection.execute(statements.format(step=step).encode())

    return work


def writer(pipeline: Pipeline) -> Callable[[threading.Event], None]:
    """`slottables run`."""

    def work(stop: threading.Event) -> None:
        job.run_epochs(pipeline.spark, pipeline.settings, report=lambda _: None, stop=stop)

    return work


@pytest.fixture
def live(
    pair: Provider,
    fresh_database: str,
    kafka: Broker,
    topic_prefix: str,
    new_bridge: NewBridge,
    new_pipeline: NewPipeline,
) -> Iterator[tuple[Pipeline, str]]:
    """Tables that a bridge streams and `run` follows, of every type, and two under load."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(TABLES.encode())
        connection.execute(b"CREATE TABLE items (id int PRIMARY KEY, n int, note text)")
        connection.execute(b"CREATE TABLE plain (note text, n int)")
        connection.execute(b"CREATE TABLE unused (id int PRIMARY KEY)")
    bridge = new_bridge(conninfo, snapshot={"mode": "initial"})
    bridge.start().streaming()
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix)

    def done() -> int:
        progress = read_snapshots(settings, TopicOffsets(settings), bridge.slot).progress
        return sum(one.done for one in progress.values())

    eventually(lambda: done() == len(EQUAL), what="a snapshot has read all tables, empty ones")
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(ROWS.encode())
        connection.execute(b"INSERT INTO items SELECT i, 0, 'x' FROM generate_series(0, 999) i")
    bridge.caught_up()
    pipeline = new_pipeline(
        conninfo,
        publication=f"p_{topic_prefix}",
        slot=bridge.slot,
        audit_busy_percent=50,
        audit_deadline_ms=600_000,
        rules={"public.whole": {"kind": "history"}, "public.log": {"kind": "changelog"}},
    )
    assert pipeline.stream(once=True)
    yield pipeline, conninfo


def audit(pipeline: Pipeline, *names: str) -> list[TableAudit]:
    return Audit(pipeline.spark, pipeline.settings, stop=threading.Event()).run(names)


def told(found: list[TableAudit]) -> str:
    return "\n".join(line for one in found for line in one.lines())


def plant(pipeline: Pipeline, table: str, *statements: str) -> None:
    """Change an Iceberg table behind the back of `run`, between two of its commits."""
    spark = session_beside(pipeline.spark, pipeline.tables)
    for statement in statements:

        def done(statement: str = statement) -> bool:
            try:
                spark.sql(statement.format(table=pipeline.identifier(table)))
            except FOREIGN:  # `run` has committed meanwhile
                return False
            return True

        eventually(done, what="a difference is planted")


EQUAL = {
    "Odd one.T-1": "equal",
    "public.emptied": "equal",
    "public.items": "equal",
    "public.lists": "equal",
    "public.log": "not judged",
    "public.plain": "equal",
    "public.types": "equal",
    "public.unused": "equal",
    "public.whole": "equal",
}


@pytest.mark.long
def test_audits_under_load_and_planted_differences(live: tuple[Pipeline, str]) -> None:
    pipeline, conninfo = live
    with beside(writer(pipeline)), beside(load(conninfo, LOAD)):
        found = audit(pipeline)
        assert {one.table: one.verdict for one in found} == EQUAL, told(found)
        assert exit_code(found, named=False) == ExitCode.OK
        log = AuditLog(pipeline.kafka.topic_prefix)
        first = log.findings(pipeline.spark)["public.items"].verified_lsn
        tables = pipeline.tables.model_copy(update={"audit_interval_ms": 100})
        with scheduled(pipeline.spark, pipeline.settings.model_copy(update={"tables": tables})):
            eventually(
                lambda: log.findings(pipeline.spark)["public.items"].verified_lsn > first,
                what="`run` audits by itself",
                timeout_s=600,
            )
        unequal = {one.table for one in found if one.buckets_unequal}
        assert not unequal - {"public.lists", "Odd one.T-1"}, told(found)
        plant(
            pipeline,
            "items",
            "UPDATE {table} SET note = 'flipped' WHERE id = 950",
            "DELETE FROM {table} WHERE id = 951",
            "INSERT INTO {table} SELECT * FROM {table} WHERE id = 952",
        )
        plant(pipeline, "plain", "INSERT INTO {table} VALUES ('planted', 7, 0, 0)")
        plant(pipeline, "types", "UPDATE {table} SET d = d / 10, b = X'00' WHERE id = 1")
        plant(pipeline, "whole", "UPDATE {table} SET note = 'z' WHERE id = 3 AND _valid_to IS NULL")
        plant(pipeline, "lists", "UPDATE {table} SET words = '[]' WHERE id = 1")
        found = audit(pipeline)
        assert exit_code(found, named=False) == ExitCode.CHECK_FAILED
        assert {one.table: one.rows for one in found if one.differences} == {
            "public.items": (
                Difference("different", '{"id":950}', ("note",)),
                Difference("extra", '{"id":952}'),
                Difference("missing", '{"id":951}'),
            ),
            "public.plain": (Difference("extra", '{"note":"planted","n":7}'),),
            "public.types": (Difference("different", '{"id":1}', ("b", "d")),),
            "public.whole": (Difference("different", '{"id":3}', ("note",)),),
            "public.lists": (Difference("different", '{"id":1}', ("words",)),),
        }, told(found)


def test_the_results_of_audits_as_metrics() -> None:
    metrics = Metrics()
    now_ms = int(time.time() * 1000)
    metrics.audited(
        {
            "public.a": AuditResult(7, now_ms, 0, "", 7, now_ms - 60_000, now_ms - 90_000),
            "public.b": AuditResult(9, now_ms, 3, "", 0, 0, now_ms - 3600_000),
            "public.c": AuditResult(9, now_ms, 0, "it waits", 5, now_ms, now_ms),
        }
    )

    def value(name: str, table: str) -> float:
        found = metrics.registry.get_sample_value(f"slottables_{name}", {"table": table})
        assert found is not None
        return found

    assert [value("verified_lsn", f"public.{t}") for t in "abc"] == [7, 0, 5]
    assert [value("audit_differences", f"public.{t}") for t in "abc"] == [0, 3, 0]
    assert [value("audit_not_judged", f"public.{t}") for t in "abc"] == [0, 0, 1]
    assert value("verified_age_seconds", "public.a") >= 60
    assert value("verified_age_seconds", "public.b") >= 3600
    metrics.audited({"public.a": AuditResult(8, now_ms, 0, "", 8, now_ms, now_ms)})
    assert value("audit_differences", "public.a") == 0
    labels = {"table": "public.b"}  # nothing follows it any more
    assert metrics.registry.get_sample_value("slottables_audit_differences", labels) is None


def test_exit_codes() -> None:
    def one(**given: Any) -> TableAudit:
        return TableAudit("public.t", "i", 1, 1, **given)

    equal, changelog = one(), one(reason="a changelog", by_design=True)
    assert exit_code([equal, changelog], named=False) == ExitCode.OK
    assert exit_code([equal, changelog], named=True) == ExitCode.NOT_JUDGED
    assert exit_code([changelog], named=False) == ExitCode.NOT_JUDGED
    assert exit_code([], named=False) == ExitCode.NOT_JUDGED
    assert exit_code([equal, one(reason="later")], named=False) == ExitCode.NOT_JUDGED
    assert exit_code([one(extra=1), one(reason="later")], named=False) == ExitCode.CHECK_FAILED


def slots_and_snapshots(conninfo: str) -> list[tuple[object, ...]]:
    """What audits have at the source: temporary slots, and sessions in a transaction."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        return connection.execute(
            "SELECT slot_name::text FROM pg_replication_slots WHERE slot_name LIKE 'slottables%'"
            " UNION ALL SELECT state FROM pg_stat_activity"
            " WHERE application_name LIKE 'slottables%' AND backend_xmin IS NOT NULL"
        ).fetchall()


def refusal(pipeline: Pipeline, conninfo: str) -> SlotbridgeError:
    """How an audit of another source ends, or one that waits in vain."""
    source, tables = pipeline.settings.source, pipeline.tables
    assert source
    source = source.model_copy(update={"conninfo": SecretStr(conninfo)})
    tables = tables.model_copy(update={"audit_deadline_ms": patient_ms(1_700)})
    settings = pipeline.settings.model_copy(update={"source": source, "tables": tables})
    with pytest.raises(SlotbridgeError) as found:
        Audit(pipeline.spark, settings, stop=threading.Event()).run()
    return found.value


@pytest.mark.long
def test_what_is_not_judged_and_what_is_refused(
    live: tuple[Pipeline, str],
    pair: Provider,
    subscriber: Server,
    fresh_database: str,
    tmp_path: Path,
) -> None:
    pipeline, conninfo = live
    standby = refusal(pipeline, pair.standby.conninfo(fresh_database))
    assert standby.exit_code == ExitCode.WRONG_DATABASE and "is a standby" in str(standby)
    foreign = refusal(pipeline, subscriber.conninfo("postgres"))
    assert foreign.exit_code == ExitCode.WRONG_DATABASE and "system identifier" in str(foreign)
    database = refusal(pipeline, pair.primary.conninfo("postgres"))
    assert database.exit_code == ExitCode.WRONG_DATABASE and "publication" in str(database)

    with psycopg.connect(conninfo, autocommit=True) as connection:
        done: list[object] = []

        def truncate(table: str, _done: int, _pages: int) -> None:
            if table != "public.items" and not done:
                done.append(connection.execute(b"TRUNCATE items"))

        work = Audit(pipeline.spark, pipeline.settings, stop=threading.Event(), progress=truncate)
        found = {one.table: one for one in work.run()}
        assert done and found["public.items"].reason.startswith("the table was rewritten")
        assert found["public.types"].verdict == "equal"
        assert exit_code(list(found.values()), named=False) == ExitCode.NOT_JUDGED
        late = refusal(pipeline, conninfo)  # `run` does not run, and lacks the TRUNCATE
        assert late.exit_code == ExitCode.NOT_JUDGED and "has not brought" in str(late)
        eventually(lambda: pipeline.stream(once=True), what="the bridge has published it")
        assert exit_code(audit(pipeline), named=False) == ExitCode.OK
        assert not slots_and_snapshots(conninfo)
        a_schema_topic_that_was_made_again(pipeline)
        tables_that_are_not_there(pipeline)

        source = pipeline.settings.source
        assert source
        options = {"audit_busy_percent": 0.01, "spark_options": spark_options(tmp_path)}
        document = {
            "source": {
                "conninfo": conninfo,
                "slot": source.slot,
                "publication": source.publication,
            },
            "kafka": {
                "bootstrap_servers": pipeline.kafka.bootstrap_servers,
                "topic_prefix": pipeline.kafka.topic_prefix,
            },
            "tables": json.loads(pipeline.tables.model_dump_json()) | options,
        }
        config = tmp_path / "audit.yaml"
        config.write_text(yaml.safe_dump(document), encoding="utf-8")
        program = Path(sys.executable).parent / "slottables"
        with (tmp_path / "audit.log").open("wb") as log:
            process = subprocess.Popen(
                [program, "audit", "public.types", "--config", config], stdout=log, stderr=log
            )
        try:
            eventually(
                lambda: process.poll() is not None or slots_and_snapshots(conninfo),
                what="the audit has its snapshot",
                timeout_s=180,
            )
            assert process.poll() is None, (tmp_path / "audit.log").read_text()
        finally:
            process.kill()
            process.wait()
        eventually(lambda: not slots_and_snapshots(conninfo), what="nothing is left", timeout_s=60)


def a_schema_topic_that_was_made_again(pipeline: Pipeline) -> None:
    """It has another id than `run` has noted; the id that was noted is another here."""
    name = schema_topic(pipeline.kafka.topic_prefix)
    ledger = Ledger(pipeline.kafka.topic_prefix, pipeline.tables)
    noted = ledger.noted(pipeline.spark)[TOPIC_IDS]
    assert name in json.loads(noted)
    ledger.note(pipeline.spark, {TOPIC_IDS: json.dumps({name: "of the former topic"})})
    with pytest.raises(OperatorNeeded, match="deleted and made again") as found:
        audit(pipeline)
    assert found.value.subject == name
    ledger.note(pipeline.spark, {TOPIC_IDS: noted})


def tables_that_are_not_there(pipeline: Pipeline) -> None:
    spark, log = pipeline.spark, AuditLog(pipeline.kafka.topic_prefix)
    session_beside(spark, pipeline.tables).sql(f"DROP TABLE {pipeline.identifier('whole')}")
    found = {one.table: one for one in audit(pipeline)}
    assert found["public.whole"].reason == "it has no Iceberg table"
    assert found["public.items"].verdict == "equal"
    assert exit_code([*found.values()], named=False) == ExitCode.NOT_JUDGED
    assert log.findings(spark)["public.whole"].reason
    tables = pipeline.tables.model_copy(update={"tables": ("public.items",)})
    settings = pipeline.settings.model_copy(update={"tables": tables})
    work = Audit(spark, settings, stop=threading.Event())
    assert [(one.table, one.verdict) for one in work.run()] == [("public.items", "equal")]
    assert [*log.findings(spark)] == ["public.items"], "what nothing follows any more goes"
    (named,) = work.run(["public.types"])
    assert "does not follow it" in named.reason
    with pytest.raises(SlotbridgeError, match="nor is it published"):
        work.run(["public.nowhere"])


def test_rows_from_before_the_slot_that_were_not_sent(
    pair: Provider,
    fresh_database: str,
    topic_prefix: str,
    new_bridge: NewBridge,
    new_pipeline: NewPipeline,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a snapshot their absence is not judged; what both sides have is."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(b"CREATE TABLE kept (id int PRIMARY KEY, note text)")
        connection.execute(b"CREATE TABLE silent (id int PRIMARY KEY)")
        connection.execute(b"CREATE TABLE floats (n int, lists float8[], v int[])")
        connection.execute(
            b"CREATE TABLE parts (id int, n int, PRIMARY KEY (id, n)) PARTITION BY LIST (n)"
        )
        for n in (1, 2):
            connection.execute(f"CREATE TABLE p{n} PARTITION OF parts FOR VALUES IN ({n})".encode())
        connection.execute(b"INSERT INTO kept SELECT i, 'old' FROM generate_series(1, 300) i")
        connection.execute(b"INSERT INTO silent VALUES (1)")
        connection.execute(
            f"CREATE PUBLICATION p_{topic_prefix} FOR ALL TABLES"
            " WITH (publish_via_partition_root)".encode()
        )
        bridge = new_bridge(conninfo)
        bridge.start().streaming()
        connection.execute(b"INSERT INTO kept VALUES (-1, 'new'), (-2, 'new')")
        connection.execute(b"UPDATE kept SET note = 'changed' WHERE id = 7")
        connection.execute(
            b"INSERT INTO floats SELECT i, ARRAY[i * 1e20], ARRAY[i] FROM generate_series(1, 100) i"
        )
        connection.execute(b"INSERT INTO parts SELECT i, 1 + i % 2 FROM generate_series(1, 9) i")
        bridge.caught_up()

        pipeline = new_pipeline(
            conninfo,
            publication=f"p_{topic_prefix}",
            slot=bridge.slot,
            audit_busy_percent=50,
            audit_deadline_ms=600_000,
        )
        assert pipeline.stream(once=True)
        for name in ("floats", "kept"):  # by the tables, events of both were left out
            mark_incomplete(pipeline, name)
        monkeypatch.setattr("spark_consumers.audit.audit.BUCKETS_AT_ONCE", 4)
        found = {one.table: one for one in audit(pipeline)}
        told_now = told([*found.values()])
        kept = found["public.kept"]
        assert (kept.verdict, kept.missing_left, kept.differences) == ("not judged", 299, 0)
        assert "299 rows of the source are not in the table" in kept.reason, told_now
        assert "snapshot.mode never" in kept.reason
        assert "and the source has rows" in found["public.silent"].reason
        assert found["public.floats"].verdict == "equal", told_now
        assert found["public.floats"].buckets_unequal > 4
        assert "incomplete since 0/1: " in "".join(found["public.floats"].lines()), told_now
        assert found["public.parts"].verdict == "equal", told_now
        assert exit_code([*found.values()], named=False) == ExitCode.NOT_JUDGED

        plant(pipeline, "kept", "UPDATE {table} SET note = 'flipped' WHERE id = -2")
        plant(pipeline, "kept", "INSERT INTO {table} VALUES (1000, 'extra', 0, 0)")
        (kept,) = audit(pipeline, "public.kept")
        assert kept.verdict == "different"
        assert kept.incomplete
        assert kept.rows == (
            Difference("different", '{"id":-2}', ("note",)),
            Difference("extra", '{"id":1000}'),
        )
        assert (kept.missing, kept.missing_left, kept.finding().differences) == (0, 299, 2)
        assert any("299 rows" in line for line in kept.lines())

        detached: list[object] = []

        def detach(table: str, _done: int, _pages: int) -> None:
            if table != "public.parts" and not detached:
                detached.append(connection.execute(b"ALTER TABLE parts DETACH PARTITION p2"))

        work = Audit(pipeline.spark, pipeline.settings, stop=threading.Event(), progress=detach)
        found = {one.table: one for one in work.run(["public.floats", "public.parts"])}
        assert detached and found["public.parts"].reason.startswith("its partitions changed")


def test_which_tables_have_all_their_rows_in_kafka() -> None:
    record = progress_record(
        slot="s",
        system_identifier="1",
        timeline=2,
        commit_lsn=900,
        end_lsn=900,
        seq=0,
        ts_ms=0,
        reads_rows=True,
        history={1: 500},
    )
    done = SnapshotProgress(
        slot="s",
        schema="public",
        table="t",
        oid=7,
        key=["id"],
        last=None,
        rows=3,
        chunks=1,
        done=True,
        timeline=2,
        commit_lsn=600,
        seq=3,
        waiting=0,
        ts_ms=0,
    )

    def unsent(told: SnapshotProgress | None, oid: int = 7, **settings: Any) -> str:
        progress = {} if told is None else {"public.t": told}
        snapshot = SnapshotSettings.model_validate(settings)
        return Snapshots(progress).unsent("public.t", oid, snapshot, record)

    assert unsent(done) == "" == unsent(done, mode="never") == unsent(done, exclude=["public.t"])
    assert "has not sent" in unsent(done, oid=8), "another table of that name"
    assert unsent(done.model_copy(update={"timeline": 1, "commit_lsn": 400})) == ""
    assert unsent(done.model_copy(update={"timeline": 1, "commit_lsn": 500})), "undone"
    assert unsent(done.model_copy(update={"timeline": 3})), "a timeline that nobody knows"
    assert "has not sent" in unsent(None)
    assert "snapshot.mode on_request" in unsent(None, mode="on_request", signal_topic="x")
    assert "snapshot.exclude" in unsent(None, exclude=["public.*"])
    assert "snapshot.where" in unsent(done, where={"public.t": "id > 3"})
    asked = SnapshotRequest(
        slot="s",
        id="a",
        type="read",
        tables="public.*",
        where="id > 3",
        timeline=2,
        commit_lsn=1,
        seq=1,
        ts_ms=0,
    )
    part = Snapshots({"public.t": done}, (asked,))
    assert "a signal" in part.unsent("public.t", 7, SnapshotSettings(), record)
    whole = Snapshots({"public.t": done}, (asked.model_copy(update={"where": ""}),))
    assert whole.unsent("public.t", 7, SnapshotSettings(), record) == ""


def spark_options(folder: Path) -> dict[str, str]:
    """Options of a Spark of its own."""
    return {**short_lived_spark(folder / "spark"), "spark.jars": jars.class_path("spark", ",")}
