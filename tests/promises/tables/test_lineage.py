"""OpenLineage's events of epochs, at a receiver that takes them, and at one that never answers."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from schemas.errors import SettingsError
from schemas.kafka import KafkaSettings
from schemas.shaping import ShapingSettings
from spark_consumers.epochs import lineage
from spark_consumers.epochs.lineage import Lineage, dataset
from spark_consumers.epochs.report import EpochReport, TableReport
from tests.promises.tables.conftest import NewPipeline
from tests.promises.tables.publisher import SourceTable

ROWS = SourceTable("rows", {"id": ("int4", -1), "v": ("int4", -1)})
OTHER = SourceTable("other", {"id": ("int4", -1)}, schema="app")


@contextlib.contextmanager
def receiver(*, frozen: bool = False) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that takes lineage events: its URL, and the events so far."""
    events: list[dict[str, Any]] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if frozen:
                over.wait()
                return
            assert self.path == "/api/v1/lineage"
            events.append(json.loads(body))
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", events
        finally:
            over.set()
            server.shutdown()
            thread.join()


@pytest.mark.long
def test_each_table_of_an_epoch_is_a_run_from_its_topic_to_its_files(
    new_pipeline: NewPipeline, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(openlineage=True)
    pipeline.publisher.announce(ROWS)
    pipeline.publisher.announce(OTHER)
    with pipeline.publisher.transaction() as t:
        for number in range(20):
            t.insert(ROWS, {"id": number, "v": 0})
        t.insert(OTHER, {"id": 1})
    with receiver() as (url, events):
        monkeypatch.setenv("OPENLINEAGE_URL", url)
        (report,) = pipeline.stream(once=True)
    broker, folder = pipeline.kafka.bootstrap_servers, pipeline.tables.warehouse
    named = [
        ("app.other", f"{topic_prefix}.app.other", "app__other", 1),
        ("public.rows", f"{topic_prefix}.public.rows", "rows", 20),
    ]
    assert [each["eventType"] for each in events] == ["START", "COMPLETE"] * 2
    for (name, topic, table, rows), start, complete in zip(
        named, events[::2], events[1::2], strict=True
    ):
        for event in (start, complete):
            job = f"slottables.{pipeline.runner.namespace}.{name}"
            assert event["job"]["name"] == job
            (source,), (output,) = event["inputs"], event["outputs"]
            assert (source["namespace"], source["name"]) == (f"kafka://{broker}", topic)
            place = f"{folder}/{pipeline.runner.namespace}/{table}"
            assert (output["namespace"], output["name"]) == ("file", place)
            assert output["outputFacets"]["outputStatistics"]["rowCount"] == rows
        assert start["run"]["runId"] == complete["run"]["runId"]
        assert start["eventTime"] < complete["eventTime"]
    assert {name for name, *_ in named} == set(report.tables)


def told(epoch: int, ts_ms: int = 1) -> EpochReport:
    """The report of an epoch of one table; `ts_ms`: latest commit among the events it has read."""
    table = TableReport(rows=1, events=1, duplicates=0, commit_lsn_max=epoch)
    return EpochReport(epoch, epoch, 1, 0.1, ts_ms, {"public.t": table})


def teller(outcomes: Counter) -> Lineage:
    kafka = KafkaSettings(bootstrap_servers="b1:9092, b2:9092", topic_prefix="p")
    return Lineage(kafka, ShapingSettings(), "p", lambda *_: "s3://lake/p/t", outcomes)


@pytest.fixture
def outcomes() -> Counter:
    return Counter("events", "Events.", ["outcome"], registry=CollectorRegistry())


def test_an_epoch_that_is_brought_again_is_the_same_run(
    monkeypatch: pytest.MonkeyPatch, outcomes: Counter
) -> None:
    with receiver() as (url, events):
        monkeypatch.setenv("OPENLINEAGE_URL", url)
        monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "ours")
        for number, ts_ms in ((1, 20), (1, 10), (2, 30)):  # another table had its part already
            one = teller(outcomes)
            one.report(told(number, ts_ms))
            one.close()
    runs = [event["run"]["runId"] for event in events]
    assert len(set(runs[:4])) == 1
    assert len(set(runs)) == 2
    assert events[0]["job"] == {"namespace": "ours", "name": "slottables.p.public.t", "facets": {}}
    assert events[0]["inputs"][0]["namespace"] == "kafka://b1:9092"
    assert outcomes.labels("sent")._value.get() == 6


def test_a_receiver_that_never_answers_delays_nothing(
    monkeypatch: pytest.MonkeyPatch, outcomes: Counter
) -> None:
    monkeypatch.setattr(lineage, "EVENTS_WAITING_MAX", 4)
    monkeypatch.setattr(lineage, "CLOSE_S", 0.1)
    with receiver(frozen=True) as (url, _):
        monkeypatch.setenv("OPENLINEAGE_URL", url)
        one = teller(outcomes)
        for number in range(50):
            one.report(told(number))
        one.close()
        dropped, failed = (outcomes.labels(name)._value.get() for name in ("dropped", "failed"))
    # Four wait, and one or none is being sent; a slow machine may have given up some of these.
    assert dropped + failed >= 95 and dropped > failed


def test_without_a_receiver_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, outcomes: Counter
) -> None:
    monkeypatch.delenv("OPENLINEAGE_URL", raising=False)
    with pytest.raises(SettingsError, match="nothing says where its events go"):
        teller(outcomes)


@pytest.mark.parametrize(
    ("location", "named"),
    [
        ("/w/ns/t", ("file", "/w/ns/t")),
        ("file:/w/ns/t", ("file", "/w/ns/t")),
        ("s3://lake/ns/t", ("s3://lake", "ns/t")),
    ],
)
def test_files_are_named_as_openlineage_names_them(location: str, named: tuple[str, str]) -> None:
    assert dataset(location) == named
