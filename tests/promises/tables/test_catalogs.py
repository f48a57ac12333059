"""Catalogs other than SQLite: PostgreSQL by JDBC, and REST by Iceberg's own server."""

import contextlib
import http.client
import http.server
import json
import os
import subprocess
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyspark
import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from schemas.errors import ExitCode, Retryable
from services.testbed import jars
from services.testbed.java import find_java_home
from services.testbed.ports import free_port, is_free
from spark_consumers.epochs import publication
from spark_consumers.epochs.publication import TableCommit
from spark_consumers.iceberg import catalog, current
from spark_consumers.iceberg.staging import Staging
from spark_consumers.operations import Operator
from spark_consumers.session import catalog_options
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.object_storage import ObjectStorage, object_storage
from tests.promises.tables.publisher import SourceTable
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient

KEPT = ("content-type", "accept", "authorization")
TABLE = SourceTable("things", {"id": ("int8", -1), "name": ("text", -1)})


@pytest.fixture
def rest_uri(servers: None, tmp_path: Path) -> Iterator[str]:
    """Of a REST catalog with a warehouse of its own."""
    of_spark = Path(pyspark.__file__).parent / "jars"
    hadoop = [*of_spark.glob("hadoop-client-*.jar"), *of_spark.glob("commons-logging-*.jar")]
    class_path = ":".join(map(str, [*jars.resolve("iceberg-rest"), *hadoop]))
    port, log = free_port(), tmp_path / "rest.log"
    settings = {
        "CATALOG_WAREHOUSE": str(tmp_path / "rest"),
        "CATALOG_URI": f"jdbc:sqlite:{tmp_path / 'rest.db'}",
        "CATALOG_REST_PORT": str(port),
    }
    java = find_java_home() / "bin" / "java"
    command: list[str | Path] = [java, "-Xmx256m", "-XX:+UseSerialGC", "-cp", class_path]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "org.apache.iceberg.rest.RESTCatalogServer"],
            stdout=file,
            stderr=file,
            env=os.environ | settings,
        )
    try:
        eventually(
            lambda: process.poll() is not None or not is_free(port),
            what="the REST catalog",
            timeout_s=60,
        )
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.wait(timeout=patient(30))


@pytest.fixture
def storage(servers: None, tmp_path: Path) -> Iterator[ObjectStorage]:
    """Object storage with an empty bucket."""
    with object_storage(tmp_path / "storage.log") as found:
        yield found


def follow(spark: SparkSession, pipeline: Pipeline) -> None:
    """Two epochs through the catalog of the pipeline's settings, with a restart in between."""
    pipeline.spark = spark.newSession()
    for name, value in catalog_options(pipeline.tables).items():
        if name.startswith("spark.sql.catalog."):
            pipeline.spark.conf.set(name, value)
    pipeline.publisher.announce(TABLE)
    with pipeline.publisher.transaction() as t:
        t.insert(TABLE, {"id": 1, "name": "as it was"})
    pipeline.apply()
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.update(TABLE, {"id": 1, "name": "changed"})
    assert pipeline.apply().epoch == 2
    assert [row["name"] for row in pipeline.rows("things")] == ["changed"]


def test_tables_in_a_postgresql_catalog(
    spark: SparkSession, pair: Provider, fresh_database: str, new_pipeline: NewPipeline
) -> None:
    server = conninfo_to_dict(pair.primary.conninfo(fresh_database))
    uri = f"jdbc:postgresql://127.0.0.1:{server['port']}/{fresh_database}"
    options = {"jdbc.user": server["user"]}
    follow(spark, new_pipeline(catalog_uri=uri, catalog_options=options))
    with psycopg.connect(pair.primary.conninfo(fresh_database)) as connection:
        names = connection.execute("SELECT table_name FROM iceberg_tables").fetchall()
    assert sorted(names) == [("_epochs",), ("things",)]


@pytest.mark.long
def test_tables_in_a_rest_catalog(
    spark: SparkSession, rest_uri: str, new_pipeline: NewPipeline, tmp_path: Path
) -> None:
    pipeline = new_pipeline(catalog_type="rest", catalog_uri=rest_uri)
    follow(spark, pipeline)
    assert list((tmp_path / "rest").rglob("things/data/*.parquet"))


class Gateway:
    """A proxy before a REST catalog that names no endpoints and answers `transactions/commit`.

    `answers`: the status of each such request, the last one of all that follow; None: as the
    catalog answers; 0: the catalog commits, and then the answer is 503. Any other is given without
    asking the catalog. `ordered`: the order of the snapshots in each table's metadata.
    """

    def __init__(
        self,
        uri: str,
        answers: Sequence[int | None],
        ordered: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        self.answers, self.asked = list(answers), 0
        port = urllib.parse.urlsplit(uri).port
        gateway = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                answer = None
                if self.path.endswith("/transactions/commit"):
                    gateway.asked += 1
                    one_left = len(gateway.answers) == 1
                    answer = gateway.answers[0] if one_left else gateway.answers.pop(0)
                status, text = answer or 503, b""
                if not answer:
                    found, text = self._forward(body)
                    status = found if answer is None else 503
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            def _forward(self, body: bytes) -> tuple[int, bytes]:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(60))
                with contextlib.closing(connection):
                    kept = {k: v for k, v in self.headers.items() if k.lower() in KEPT}
                    connection.request(self.command, self.path, body or None, kept)
                    response = connection.getresponse()
                    text = response.read()
                document = json.loads(text or b"{}")
                document.pop("endpoints", None)
                metadata = document.get("metadata", {})
                if "snapshots" in metadata:
                    metadata["snapshots"] = ordered(metadata["snapshots"])
                return response.status, json.dumps(document).encode() if text else text

            do_GET = do_POST = do_HEAD = do_DELETE = _answer

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "Gateway":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(patient(30))
        self._server.server_close()


@pytest.mark.long
@pytest.mark.parametrize("answer", [404, 405, 501])
def test_a_rest_catalog_without_transactions_gets_one_table_after_the_other(
    spark: SparkSession, rest_uri: str, new_pipeline: NewPipeline, answer: int
) -> None:
    """It names no endpoints, so that only its answer tells."""
    with Gateway(rest_uri, [answer]) as gateway, capture_logs() as logs:
        follow(spark, new_pipeline(catalog_type="rest", catalog_uri=gateway.uri))
        assert gateway.asked == 1, "it is asked once"
    told = [line for line in logs if "one request" in line["event"]]
    assert [line["log_level"] for line in told] == ["warning"]


@pytest.mark.long
def test_where_tables_are_committed_one_by_one_an_overtaken_writer_records_no_epoch(
    spark: SparkSession,
    rest_uri: str,
    new_pipeline: NewPipeline,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is frozen when its tables have the epoch; the other one records that, and goes on."""

    def brought(pipeline: Pipeline, number: int) -> None:
        with pipeline.publisher.transaction() as t:
            t.insert(TABLE, {"id": number, "name": "new"})
        pipeline.apply()

    with Gateway(rest_uri, [404]) as gateway:
        pipeline = new_pipeline(catalog_type="rest", catalog_uri=gateway.uri)
        follow(spark, pipeline)
        each_alone = publication.each_alone

        def frozen(changes: Sequence[TableCommit]) -> bool:
            monkeypatch.setattr(publication, "each_alone", each_alone)
            done = each_alone(changes)
            second = Pipeline(pipeline.spark, pipeline.settings, pipeline.publisher)
            for number in (3, 4):
                brought(second, number)
            assert second.runner.record.epoch == 5
            return done

        monkeypatch.setattr(publication, "each_alone", frozen)
        with pytest.raises(Retryable, match="another program has changed the table") as raised:
            brought(pipeline, 2)
        assert raised.value.exit_code is ExitCode.LOCKED
        table = catalog.load(pipeline.spark, pipeline.identifier("_epochs"))
        summaries = [found["summary"] for found in catalog.metadata(table)["snapshots"]]
        assert [found["slotbridge.epoch"] for found in summaries] == ["1", "2", "3", "4", "5"]
        pipeline.restart()
        brought(pipeline, 5)
        assert [row.id for row in pipeline.rows("things")] == [1, 2, 3, 4, 5]


@pytest.mark.long
@pytest.mark.parametrize(
    "ordered",
    [lambda told: told[::-1], lambda told: [*told[-1:], *told[:-1]]],
    ids=["backwards", "the last one first"],
)
@pytest.mark.usefixtures("any_table_is_large")
def test_what_is_written_is_adopted_whole_in_whichever_order_a_rest_catalog_tells_snapshots(
    spark: SparkSession,
    rest_uri: str,
    new_pipeline: NewPipeline,
    monkeypatch: pytest.MonkeyPatch,
    ordered: Callable[[list[Any]], list[Any]],
) -> None:
    """Another writer removes the branch once, between the two commits of an epoch."""
    with Gateway(rest_uri, [None], ordered) as gateway:
        pipeline = new_pipeline(catalog_type="rest", catalog_uri=gateway.uri)
        follow(spark, pipeline)
        with pipeline.publisher.transaction() as t:
            t.update(TABLE, {"id": 1, "name": "changed again"})
        place = "spark_consumers.iceberg.delete_insert.insert"

        def after_a_start(*given: Any) -> None:
            monkeypatch.setattr(place, current.insert)
            known = pipeline.runner.states["public.things"].sealed
            Staging(pipeline.spark).begin(pipeline.identifier("things"), known)
            current.insert(*given)

        monkeypatch.setattr(place, after_a_start)
        with pytest.raises(Retryable, match="another program has changed the table"):
            pipeline.apply()
        pipeline.restart()
        pipeline.apply()
        assert [row["name"] for row in pipeline.rows("things")] == ["changed again"]


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 503])
def test_a_rest_catalog_that_may_have_committed_is_never_taken_for_one_without_transactions(
    spark: SparkSession, rest_uri: str, new_pipeline: NewPipeline, first: int
) -> None:
    with Gateway(rest_uri, [first, 404]) as gateway:
        pipeline = new_pipeline(catalog_type="rest", catalog_uri=gateway.uri)
        with pytest.raises(Exception, match="CommitStateUnknown"):
            follow(spark, pipeline)
        pipeline.restart()
        if first:
            with pytest.raises(Exception, match="NoSuchTable"):
                pipeline.apply()
        else:
            assert pipeline.runner.record.epoch == 1, "it has committed"
        assert len(pipeline.rows("things")) == (0 if first else 1)
        gateway.answers[:] = [None]
        pipeline.restart()
        with pipeline.publisher.transaction() as t:
            t.insert(TABLE, {"id": 2, "name": "later"})
        pipeline.apply()
        assert [row.id for row in pipeline.rows("things")] == [1, 2]
        gateway.answers[:] = [404]
        with pipeline.publisher.transaction() as t:
            t.insert(TABLE, {"id": 3, "name": "last"})
        with pytest.raises(Exception, match="NoSuchTable"):
            pipeline.apply()
        assert [row.id for row in pipeline.rows("things")] == [1, 2]


@pytest.mark.long
def test_a_warehouse_in_object_storage(
    spark: SparkSession, storage: ObjectStorage, new_pipeline: NewPipeline, tmp_path: Path
) -> None:
    """JDBC catalog, files in S3: epochs, the streaming query, maintenance, another reader."""
    uri = f"{tmp_path / 'catalog.db'}"
    pipeline = new_pipeline(
        warehouse=f"s3://{storage.bucket}/tables",
        catalog_uri=f"jdbc:sqlite:{uri}",
        catalog_options=storage.options,
    )
    pipeline.set_tables(orphans_older_ms=0)
    follow(spark, pipeline)
    with pipeline.publisher.transaction() as t:
        t.insert(TABLE, {"id": 2, "name": "by the query"})
    assert [report.epoch for report in pipeline.stream(once=True)] == [3]

    lost = next(key for key in storage.names() if key.endswith(".parquet")) + ".lost"
    storage.put(lost, b"of a writer that was killed")
    done = Operator(pipeline.spark, pipeline.settings).maintain()
    assert sum(each.orphans for each in done) == 1
    assert lost not in storage.names()

    from pyiceberg.catalog.sql import SqlCatalog

    read = SqlCatalog(
        "slotbridge", uri=f"sqlite:///{uri}", init_catalog_tables="false", **storage.options
    )
    found = read.load_table((pipeline.kafka.topic_prefix, "things")).scan().to_arrow()
    assert sorted(found["name"].to_pylist()) == ["by the query", "changed"]
    assert "s3://" in catalog.load(pipeline.spark, pipeline.identifier("things")).location()
    assert not list(tmp_path.rglob("*.parquet"))
