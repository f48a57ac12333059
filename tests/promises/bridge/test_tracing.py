"""Traces of a bridge, as a collector gets them, beside what Kafka has."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from prometheus_client import CollectorRegistry, Counter

from schemas.errors import SettingsError
from schemas.lsn import parse_lsn
from schemas.tracing import TracingSettings, trace_id
from services.runtime.tracing import open_spans
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_metrics import await_series
from tests.providers.interface import Provider
from tests.providers.otlp import Collector, Received, collector
from tests.providers.waiting import eventually


@pytest.fixture
def receiver() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture
def outcomes() -> Counter:
    return Counter("spans", "Spans.", ["outcome"], registry=CollectorRegistry())


def ends(bridge: Bridge) -> list[tuple[int, int, str]]:
    """(commit_lsn, ts_ms, traceparent) of each committed END."""
    topic = f"{bridge.prefix}.transaction"
    found = []
    for record in read_committed(bridge.kafka.bootstrap_servers, [topic]):
        value = json.loads(record.value or b"")
        if value["status"] == "END":
            found.append((value["commit_lsn"], value["ts_ms"], text(record.headers)))
    return found


def text(headers: dict[str, Any]) -> str:
    return bytes(headers.get("traceparent") or b"").decode()


def span_of(header: str, spans: list[Received]) -> Received:
    (found,) = [span for span in spans if header.split("-")[1:3] == [span.trace, span.span]]
    return found


def test_a_trace_goes_from_the_commit_to_kafka_and_is_the_same_after_a_kill(
    pair: Provider,
    fresh_database: str,
    new_bridge: NewBridge,
    receiver: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed with the first transaction in Kafka, undecided, and between two parts of another."""
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = new_bridge(conninfo, transaction_bytes_max=65536)
    for name, value in receiver.environment.items():
        monkeypatch.setenv(name, value)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge.start(SLOTBRIDGE_FAILPOINT="sent:1").streaming()
        connection.execute("INSERT INTO t SELECT generate_series(1, 20)")
        assert bridge.exit_code() == -9
        assert not receiver.spans, "what Kafka aborts is not exported"
        bridge.start(SLOTBRIDGE_FAILPOINT="between parts:1").streaming()
        eventually(lambda: len(receiver.spans) == 1, what="the collector has its span")
        connection.execute("INSERT INTO t SELECT generate_series(1000, 3000)")
        assert bridge.exit_code() == -9
        bridge.start().streaming()
        bridge.caught_up()
        identifier = connection.execute("SELECT system_identifier FROM pg_control_system()")
        (system,) = identifier.fetchone() or ()
    assert bridge.stop() == 0, bridge.output
    told = ends(bridge)
    assert len(told) == 2
    for commit_lsn, ts_ms, header in told:
        span = span_of(header, receiver.spans)
        assert span.trace == f"{trace_id(system, commit_lsn):032x}"
        assert (span.service, span.name) == ("slotbridge", "slotbridge transaction")
        assert span.start_ns // 1_000_000 == ts_ms < span.end_ns / 1_000_000
        assert parse_lsn(str(span.attributes["slotbridge.first_commit_lsn"])) == commit_lsn
        assert parse_lsn(str(span.attributes["slotbridge.last_commit_lsn"])) == commit_lsn
        assert span.attributes["slotbridge.slot"] == bridge.slot
    small, large = (f"{trace_id(system, commit_lsn):032x}" for commit_lsn, _, _ in told)
    rows = {small: 0, large: 0}
    for span in receiver.spans:
        rows[span.trace] += int(span.attributes["slotbridge.rows"])
    assert rows[small] == 20, "exported once"
    assert 1000 < rows[large] <= 2001, "the parts are of one trace; that of the kill may be lost"
    assert len({span.span for span in receiver.spans}) == len(receiver.spans)
    bridge.assert_kafka_equals(conninfo, "t")


@pytest.mark.long
def test_a_collector_that_hangs_costs_spans_and_neither_time_nor_rows(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, receiver: Collector
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    receiver.frozen = True
    small = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "3",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
    }
    bridge = new_bridge(conninfo, http_port=0).start(**receiver.environment, **small).streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        for number in range(6):
            connection.execute("INSERT INTO t VALUES (%s)", [number])
            bridge.caught_up()
    dropped = 'slotbridge_spans_total{outcome="dropped"}'
    found = await_series(bridge, lambda seen: seen.get(dropped, 0) >= 3, "spans are dropped")
    assert 'slotbridge_spans_total{outcome="exported"}' not in found
    assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")


def test_a_collector_that_is_down_is_told_once(
    receiver: Collector,
    outcomes: Counter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from opentelemetry.trace import SpanKind

    def count(outcome: str) -> float:
        return float(outcomes.labels(outcome)._value.get())

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    spans = open_spans(TracingSettings(enabled=True), "test", outcomes)
    assert spans is not None
    spans.start("a", SpanKind.INTERNAL, 1, 0).end()
    eventually(lambda: count("failed") == 1, what="the span is given up")
    spans.close()
    printed = capsys.readouterr()
    assert "the collector takes no spans" in printed.out + printed.err


def test_an_unsampled_transaction_has_no_header(
    receiver: Collector, outcomes: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.trace import SpanKind

    from services.runtime.otlp import traceparent

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    spans = open_spans(TracingSettings(enabled=True), "test", outcomes)
    assert spans is not None
    made = [spans.start("a", SpanKind.INTERNAL, trace_id("7", lsn), 0) for lsn in range(1, 65)]
    headers = [traceparent(span) for span in made]
    again = [spans.start("a", SpanKind.INTERNAL, trace_id("7", lsn), 0) for lsn in range(1, 65)]
    for span in made:
        span.end()
    spans.close()
    assert [bool(header) for header in headers] == [bool(traceparent(span)) for span in again]
    assert 16 < len(receiver.spans) == sum(map(bool, headers)) < 48


@pytest.mark.parametrize(
    "name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"]
)
def test_another_protocol_is_refused(
    name: str, outcomes: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "grpc")
    with pytest.raises(SettingsError, match=f"{name} is grpc") as caught:
        open_spans(TracingSettings(enabled=True), "test", outcomes)
    assert caught.value.hint == "set it to http/protobuf, or tracing.enabled to false"
    assert open_spans(TracingSettings(), "test", outcomes) is None


def test_an_invalid_otel_variable_is_reported(
    outcomes: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    with pytest.raises(SettingsError, match="a variable OTEL_\\* has an invalid value"):
        open_spans(TracingSettings(enabled=True), "test", outcomes)


def test_a_missing_package_is_named(outcomes: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "services.runtime.otlp", raising=False)
    with pytest.raises(SettingsError, match=r"needs the Python package opentelemetry\.sdk") as e:
        open_spans(TracingSettings(enabled=True), "test", outcomes)
    assert "slotbridge[otel]" in (e.value.hint or "")


def test_opentelemetry_is_not_imported_while_tracing_is_off() -> None:
    program = "import services.bridge.cli.app, services.bridge.session.start;"
    program += "import spark_consumers.command, sys;"
    program += "print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
