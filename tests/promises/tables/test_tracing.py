"""The span of an epoch, linked to those of the Kafka transactions that it brought."""

import psycopg
import pytest

from schemas.lsn import parse_lsn
from schemas.tracing import TracingSettings, trace_id
from tests.promises.bridge.conftest import NewBridge
from tests.promises.tables.conftest import NewPipeline
from tests.promises.tables.test_transactions import end, taken
from tests.providers.interface import Provider
from tests.providers.otlp import collector


def test_an_epoch_names_each_kafka_transaction_once_and_so_many() -> None:
    ends = [end(n, t=1)._replace(trace=f"00-{n // 2:032x}-1-01") for n in range(1, 400)]
    cut = taken([end(0, t=1), *ends]).cut(1000)
    assert cut is not None
    assert list(cut.traces) == [f"00-{n:032x}-1-01" for n in range(128)]


@pytest.mark.long
def test_an_epoch_is_linked_to_its_kafka_transactions(
    pair: Provider,
    fresh_database: str,
    topic_prefix: str,
    new_bridge: NewBridge,
    new_pipeline: NewPipeline,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    bridge = new_bridge(conninfo)
    pipeline = new_pipeline(conninfo, publication=bridge.publication)
    pipeline.settings = pipeline.settings.model_copy(
        update={"tracing": TracingSettings(enabled=True)}
    )
    with collector() as receiver, psycopg.connect(conninfo, autocommit=True) as connection:
        bridge.start().streaming()
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute("INSERT INTO t VALUES (0)")  # nothing is told of this one
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        bridge.start().streaming()
        for number in (1, 2, 3):
            connection.execute("INSERT INTO t VALUES (%s)", [number])
            bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        (report,) = pipeline.stream(once=True)
    told = [span for span in receiver.spans if span.service == "slotbridge"]
    (epoch,) = [span for span in receiver.spans if span.service == "slottables"]
    assert [span.attributes["slotbridge.rows"] for span in told] == [1, 1, 1]
    assert epoch.links == [(span.trace, span.span) for span in told]
    assert epoch.name == "slottables epoch"
    assert epoch.attributes["slotbridge.rows"] == 4
    assert epoch.attributes["slotbridge.epoch"] == report.epoch
    assert parse_lsn(str(epoch.attributes["slotbridge.last_commit_lsn"])) == report.commit_lsn
    names = ("epoch", topic_prefix, pipeline.runner.namespace, report.commit_lsn)
    assert epoch.trace == f"{trace_id(*names):032x}"
    assert epoch.start_ns < epoch.end_ns
