"""GET /v1/wait of `slottables run`: when the tables have what was committed before an LSN."""

import json
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from schemas.errors import OperatorNeeded, Retryable, SettingsError
from schemas.events import progress_topic, transaction_topic
from schemas.lsn import format_lsn
from schemas.settings import KafkaSettings
from schemas.tables import TablesSettings
from schemas.wait import WAIT_MAX_S, WAITERS_MAX
from services.runtime.http_server import HttpServer
from services.runtime.wait_page import PATH
from services.testbed.ports import free_port, is_free
from slotbridge.consumer.wait import Waited, wait_for
from spark_consumers.epochs.ledger import EpochRecord, ParkedTable
from spark_consumers.epochs.metrics import Metrics
from spark_consumers.epochs.wait_page import KafkaLook, KafkaState, wait_page
from spark_consumers.iceberg.table_note import Parked
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable
from tests.promises.tables.test_job import Running
from tests.providers.interface import Broker
from tests.providers.progress_records import progress_record
from tests.providers.waiting import eventually, patient

ONE = SourceTable("one", {"id": ("int4", -1), "v": ("text", -1)})
OTHER = SourceTable("other", {"id": ("int4", -1)})


class NoKafka(KafkaLook):
    """Kafka's state as the test says."""

    def __init__(self) -> None:
        super().__init__(KafkaSettings(bootstrap_servers="none:1", topic_prefix="p"), None)
        self.found: KafkaState | None = None
        self.failure = "none"

    def state(self) -> KafkaState | None:
        return self.found


class Page:
    """The page of a run without Spark."""

    def __init__(self, folder: Path) -> None:
        self.metrics = Metrics()
        self.kafka = NoKafka()
        self.wait = wait_page(self.metrics.state, self.kafka)
        self.port = free_port()
        settings = TablesSettings(warehouse=str(folder), http_port=self.port, http_host="127.0.0.1")
        self.metrics.serve(settings, [Route(PATH, self.wait.answer)])
        self.url = f"http://127.0.0.1:{self.port}"

    def get(self, query: str) -> tuple[int, dict[str, Any]]:
        """The status and the document."""
        try:
            with urllib.request.urlopen(f"{self.url}{PATH}?{query}", timeout=patient(20)) as found:
                return found.status, json.loads(found.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


def test_what_kafka_told_an_earlier_request_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be of a timeline that a failover has ended since."""
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("spark_consumers.epochs.wait_page.time", clock)
    told = KafkaState(100, 1, {}, 7)
    look = KafkaLook(KafkaSettings(bootstrap_servers="none:1", topic_prefix="p"), None)
    monkeypatch.setattr(look, "_ask", lambda: (told, ""))
    assert look.state() is None
    eventually(lambda: not look._asking, what="Kafka was asked")
    assert look.state() == told
    monkeypatch.setattr(look, "_refresh", lambda: None)
    now[0] += 3600
    assert look.state() is None


def test_kafka_is_asked_again_after_no_thread_could_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    told = KafkaState(100, 1, {}, 7)
    look = KafkaLook(KafkaSettings(bootstrap_servers="none:1", topic_prefix="p"), None)
    monkeypatch.setattr(look, "_ask", lambda: (told, ""))

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        assert look.state() is None
    eventually(lambda: look.state() == told, what="Kafka was asked")


@pytest.mark.parametrize(
    "text", [b"# HELP slottables_rows", b"{}", b'{"in": "kafka"}', b'{"in": "tables"}']
)
def test_an_answer_of_something_else_is_no_yes(text: bytes) -> None:
    async def answer(_request: Request) -> Response:
        return Response(text)

    server = HttpServer("127.0.0.1", 0, [Route(PATH, answer)])
    server.start()
    try:
        with pytest.raises(Retryable, match="something else answers"):
            wait_for(f"http://127.0.0.1:{server.port}", "0/64", within="tables")
    finally:
        server.end()


def test_an_answer_that_is_not_http_is_no_yes() -> None:
    def greet(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as server:
        greeting = threading.Thread(target=greet, args=(server,))
        greeting.start()
        with pytest.raises(Retryable, match="something else answers"):
            wait_for(f"http://127.0.0.1:{server.getsockname()[1]}", "0/64")
        greeting.join(patient(20))


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path)


def test_the_record_of_epochs_or_kafkas_progress_answers(page: Page) -> None:
    status, document = page.get("lsn=0/64&timeout_s=0.1")
    assert status == 504 and "their state is not known yet" in document["error"]
    page.metrics.begun(EpochRecord(3, 90, 0, {}, 7, {}), [])
    status, document = page.get("lsn=0/64&timeout_s=0.1")
    assert status == 504 and "at 0/5A" in document["error"]
    assert page.get("lsn=0/5A")[1] == {
        "lsn": "0/5A",
        "in": "tables",
        "reached": "0/5A",
        "timeline": None,
        "parked": {},
    }
    page.kafka.found = KafkaState(100, 3, {1: 50}, 7)
    assert page.get("lsn=0/64&timeout_s=0.1")[0] == 504, "the topic may be another one"
    page.kafka.found = KafkaState(100, 3, {1: 50}, 9)
    page.metrics.read_to(7)
    assert page.get("lsn=0/64&timeout_s=0.1")[0] == 504, "not read that far"
    page.metrics.read_to(9)
    assert page.get("lsn=0/64")[1]["timeline"] == 3, "nothing was committed in between"
    assert page.get("lsn=0/65&timeout_s=0.1")[0] == 504


def test_parked_tables_and_lost_commits_are_told(page: Page) -> None:
    page.metrics.begun(EpochRecord(3, 100, 0, {}, 7, {}), [])
    page.kafka.found = KafkaState(100, 3, {1: 50}, 9)
    note = Parked(1, 0x10, 0x20, 7, "no value fits", "mend it")
    page.metrics.parked({"public.z": ParkedTable(note, None, 3, 0)}, {})
    parked = page.get("lsn=0/64&in=tables&timeline=3")[1]["parked"]
    assert parked["public.z"]["has"] == "0/10"
    assert wait_for(page.url, "0/64", within="tables") == (3, ["public.z"])
    with pytest.raises(OperatorNeeded, match="timeline 1 was left at 0/32"):
        wait_for(page.url, "0/33", within="tables", timeline=1)
    with pytest.raises(Retryable, match="the tables do not have the changes yet"):
        wait_for(page.url, "0/64", within="tables", timeline=4, timeout_s=0.1)
    with pytest.raises(SettingsError, match=r"bridge\.http_port"):
        wait_for(page.url, "0/64")
    assert page.get("lsn=0/64&in=both")[0] == 400
    status, document = page.get("lsn=0/64&timeout_s=nan")
    assert status == 400 and "timeout_s" in document["error"]
    with urllib.request.urlopen(f"{page.url}/metrics", timeout=patient(20)) as found:
        assert b"slottables_epoch 3.0" in found.read()


def test_waiters_are_capped_and_a_client_that_is_gone_ends_its_wait(page: Page) -> None:
    clients = []
    for _ in range(WAITERS_MAX):
        client = socket.create_connection(("127.0.0.1", page.port))
        client.sendall(f"GET {PATH}?lsn=FFFF/0&timeout_s=60 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        clients.append(client)
    eventually(lambda: page.wait.waiters == WAITERS_MAX, what="all wait", timeout_s=30)
    assert page.get("lsn=0/1")[0] == 503
    for client in clients:
        client.close()
    eventually(lambda: page.wait.waiters == 0, what="none waits", timeout_s=10)


def tell_progress(pipeline: Pipeline, kafka: Broker, end_lsn: int) -> None:
    """A record of progress, as the bridge writes it also while nothing is committed."""
    topic = progress_topic(pipeline.kafka.topic_prefix)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    if topic not in admin.list_topics(timeout=patient(30)).topics:
        for future in admin.create_topics([NewTopic(topic, num_partitions=1)]).values():
            future.result(patient(30))
    record = progress_record(
        slot="slotbridge",
        system_identifier="1",
        timeline=2,
        commit_lsn=0,
        end_lsn=end_lsn,
        seq=0,
        ts_ms=1,
        history={1: 500},
    )
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    producer.produce(topic, record.model_dump_json(), "slotbridge")
    assert producer.flush(patient(30)) == 0


def test_a_writer_waits_until_the_tables_have_its_rows(
    new_pipeline: NewPipeline, kafka: Broker
) -> None:
    port = free_port()
    pipeline = new_pipeline(http_port=port)
    pipeline.publisher.announce(ONE)
    url = f"http://127.0.0.1:{port}"
    with Running(pipeline) as run:
        serves(run, port)
        for number in range(3):
            with pipeline.publisher.transaction() as t:
                t.insert(ONE, {"id": number, "v": "v"})
            lsn = pipeline.publisher.commit_lsn + 8
            tell_progress(pipeline, kafka, lsn)
            found = awaited(url, lsn)
            assert found == (2, [])
            assert len(pipeline.rows("one")) == number + 1, "no later transaction was needed"
            run.sound()
        with pytest.raises(Retryable, match="the tables do not have"):
            wait_for(url, format_lsn(lsn + 1), within="tables", timeout_s=1)
        with pytest.raises(OperatorNeeded, match="is lost"):
            wait_for(url, format_lsn(lsn), within="tables", timeline=1)


@pytest.mark.long
def test_a_table_that_was_dropped_is_named_until_an_epoch_has_made_it_anew(
    new_pipeline: NewPipeline, kafka: Broker
) -> None:
    pipeline = new_pipeline()
    pipeline.publisher.announce(ONE, OTHER)
    with pipeline.publisher.transaction() as t:
        t.insert(ONE, {"id": 1, "v": "v"})
        t.insert(OTHER, {"id": 1})
    pipeline.stream(once=True)
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('one')} PURGE")
    port = free_port()
    pipeline.set_tables(http_port=port)
    with Running(pipeline) as run:
        serves(run, port)
        for lacks in (["public.one"], []):
            lsn = pipeline.publisher.commit_lsn + 8
            tell_progress(pipeline, kafka, lsn)
            url = f"http://127.0.0.1:{port}"
            found = awaited(url, lsn)
            assert found == (2, lacks)
            run.sound()
            with pipeline.publisher.transaction() as t:
                t.insert(OTHER, {"id": 2 + len(lacks)})
    assert [row.v for row in pipeline.rows("one")] == ["v"]


def awaited(url: str, lsn: int) -> Waited:
    """What the page answers once the tables have what was committed before `lsn`."""
    return wait_for(url, format_lsn(lsn), within="tables", timeline=2, timeout_s=WAIT_MAX_S)


def serves(run: Running, port: int) -> None:
    """Wait until a run answers."""
    eventually(lambda: run.failure or not is_free(port), what="it serves", timeout_s=60)


@pytest.mark.long
@pytest.mark.parametrize("last", ["of other tables", "of the tables"])
def test_a_start_on_an_idle_source_answers_and_ends(
    new_pipeline: NewPipeline, kafka: Broker, last: str
) -> None:
    """No batch comes then: the checkpoint and the record tell what was read before."""
    pipeline = new_pipeline(tables=("public.one",))
    pipeline.publisher.announce(ONE, OTHER)
    for number in range(2):
        with pipeline.publisher.transaction() as t:
            t.insert(ONE, {"id": number, "v": "v"})
    pipeline.stream(once=True)
    if last == "of other tables":
        with pipeline.publisher.transaction() as t:
            t.insert(OTHER, {"id": 1})
        assert pipeline.stream(once=True) == [], "a batch, and no epoch"
    lsn = pipeline.publisher.commit_lsn + 8
    tell_progress(pipeline, kafka, lsn)
    for _ in range(2):
        port = free_port()
        pipeline.set_tables(http_port=port)
        url = f"http://127.0.0.1:{port}"
        with Running(pipeline) as run:
            serves(run, port)
            found = awaited(url, lsn)
            assert found == (2, [])
            run.sound()
    pipeline.set_tables(http_port=None)
    assert pipeline.stream() == [], "it ends when idle"
    assert len(pipeline.rows("one")) == 2


@pytest.mark.long
def test_a_start_does_not_claim_what_was_read_of_a_former_topic(
    new_pipeline: NewPipeline, kafka: Broker
) -> None:
    port, pipeline = free_port(), new_pipeline()
    publisher = pipeline.publisher
    publisher.announce(ONE)
    for number in range(2):
        with publisher.transaction() as t:
            t.insert(ONE, {"id": number, "v": "v"})
    pipeline.stream(once=True)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    name = transaction_topic(pipeline.kafka.topic_prefix)
    admin.delete_topics([name])[name].result(patient(30))
    eventually(lambda: name not in admin.list_topics(timeout=patient(20)).topics, what="it is gone")
    publisher.announce()
    for number in range(2, 4):
        with publisher.transaction() as t:
            t.insert(ONE, {"id": number, "v": "v"})
    tell_progress(pipeline, kafka, publisher.commit_lsn + 8)
    pipeline.set_tables(http_port=port)
    lsn = format_lsn(publisher.commit_lsn + 8)
    with Running(pipeline) as run:
        serves(run, port)
        with pytest.raises(Retryable, match="the tables do not have"):
            wait_for(f"http://127.0.0.1:{port}", lsn, within="tables", timeout_s=15)
    with pytest.raises(OperatorNeeded, match="deleted and made again"):
        run.sound()
    assert len(pipeline.rows("one")) == 2
