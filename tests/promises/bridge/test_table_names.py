"""The topic of the names under which settings hide something of a table, in a real Kafka."""

from dataclasses import replace

import pytest
import structlog

from schemas.events import table_names_topic
from schemas.naming import Naming
from schemas.settings import KafkaSettings
from schemas.shaping import ShapingSettings
from services.bridge.sink.table_names import TableNames, noted_names
from services.bridge.sink.topics import Topics
from services.kafka.delivery import deliver
from tests.bridge.progress.test_ledger import SERVER
from tests.providers.interface import Broker

NAMING = Naming("any", ShapingSettings(exclude=("hr.*",)))
MANY = 10


@pytest.fixture
def topics(kafka: Broker, topic_prefix: str) -> Topics:
    """The topics of a prefix, the bridge's own made."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix)
    found = Topics(settings)
    found.prepare()
    return found


def opened(topics: Topics, cluster: str = "1", *, make: bool = False) -> TableNames:
    server = replace(SERVER, system_identifier=cluster)
    found = noted_names(topics, NAMING, server, make=make)
    assert found is not None
    return found


@pytest.mark.long
def test_names_are_found_again_until_their_tables_are_gone(topics: Topics) -> None:
    assert not opened(topics).noted
    names = opened(topics, make=True)
    names.note((oid, ("hr", f"t{oid}")) for oid in range(MANY))
    (end,) = names.require_noted(100).values()
    assert end.offset == MANY
    assert not names.require_noted(100), "told a moment ago"
    names = opened(topics)
    assert names.noted == {(oid, ("hr", f"t{oid}")) for oid in range(MANY)}
    names.forget_dropped({1, 2}, 200)
    names.note([(MANY, ("hr", "last"))])
    names.require_noted(199)
    assert len(opened(topics).noted) == MANY + 1, "changes of these may still come"
    names.require_noted(200)
    assert opened(topics).noted == {(1, ("hr", "t1")), (2, ("hr", "t2")), (MANY, ("hr", "last"))}
    with structlog.testing.capture_logs() as told:
        restored = opened(topics, "2")
    assert not restored.noted
    (line,) = (one for one in told if "another cluster noted their names" in one["event"])
    assert line["names"] == 3
    restored.require_noted(0)
    assert not opened(topics, "1").noted


@pytest.mark.long
def test_settings_that_hide_nothing_need_no_names(topics: Topics) -> None:
    assert noted_names(topics, Naming("any", ShapingSettings()), SERVER, make=True) is None
    assert not topics.there(f"{topics.prefix}.table_names")


@pytest.mark.long
def test_more_records_than_the_client_queues_are_delivered(topics: Topics) -> None:
    """A database may have that many tables; see queue.buffering.max.messages of librdkafka."""
    topic = topics.prepare_late(table_names_topic, compacted=True)
    records = dict.fromkeys((b"%d" % number for number in range(100_100)), b"name")
    small = topics.settings.model_copy(update={"options": {"queue.buffering.max.kbytes": 1}})
    deliver(small, topic, records, operation="note", hint="see that Kafka runs")
    with topics.reader(topic) as reader:
        assert reader.bounds() == (0, len(records))
