"""Records as CloudEvents, as the SDK of the CNCF reads them."""

import json
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka_event
from pydantic import ValidationError

from schemas.errors import SettingsError
from schemas.kafka import KafkaSettings
from schemas.settings import Settings
from schemas.shaping import ShapingSettings
from services.bridge.events.event import Ended, Event
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.messages import (
    AnyMessage,
    Begin,
    Commit,
    Delete,
    Insert,
    Truncate,
    Update,
)
from services.bridge.recovery.event_positions import EventPosition, KafkaRecord, position_of_record
from services.bridge.sink.cloud_events import events_of
from services.bridge.transactions.assembler import EventBatch
from spark_consumers.terminal import readable
from tests.bridge.events.test_row_encoders import JSON, LSN, NOW_US, ROW, TABLE, assembler
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.wire import encode
from tests.providers.interface import Broker, Provider

TYPE = "io.debezium.connector.postgresql.DataChangeEvent"


def batch(kafka: KafkaSettings) -> EventBatch:
    """Two transactions: an insert and a change of its key; a delete and a truncate."""
    machine, decoder = assembler(ShapingSettings(), metadata=True, kafka=kafka), Decoder()
    decoder.decode(encode(TABLE), LSN)
    changes: list[list[AnyMessage]] = [
        [Insert(TABLE, ROW), Update(TABLE, "K", [b"1", None, None, None], [b"2", *ROW[1:]])],
        [Delete(TABLE, "O", ROW), Truncate((TABLE,), False, False)],
    ]
    events: list[Event] = []
    ended: list[Ended] = []
    for number, some in enumerate(changes, 1):
        machine.feed(Begin(200 * number, NOW_US + number, 77), LSN, NOW_US)
        for change in some:
            machine.feed(change, LSN, NOW_US)
        one = machine.feed(Commit(200 * number, 200 * number + 48, NOW_US), LSN, NOW_US)
        assert one is not None and one.stamp is not None
        events += one.events
        ended.append(Ended(len(events), one.stamp, one.position.end_lsn))
        whole = one
    return whole._replace(events=events, ended=ended)


def read(
    key: bytes | None, value: bytes | None, headers: dict[str, str | bytes | None]
) -> BaseCloudEvent:
    """Return what the SDK reads of a record."""
    as_bytes = {name: v.encode() if isinstance(v, str) else v or b"" for name, v in headers.items()}
    return from_kafka_event(KafkaMessage(as_bytes, key, value or b""))


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_each_row_is_a_cloud_event_with_the_event_as_its_data(mode: str) -> None:
    kafka = JSON.model_copy(update={"cloudevents": mode})
    made = batch(kafka)
    sent = events_of(kafka, "", 3)(made)
    ids = []
    for before, after in zip(made.events, sent, strict=True):
        assert (after.topic, after.key, after.broadcast) == (
            *(before.topic, before.key, before.broadcast),
        )
        if not before.table or before.value is None:
            assert after == before
            continue
        event, data = (
            read(after.key, after.value, dict(after.headers or ())),
            json.loads(before.value),
        )
        source = data["source"]
        assert event.get_data() == data
        assert (event.get_type(), event.get_source()) == (TYPE, "/debezium/postgresql/bank")
        assert event.get_id() == f"{source['timeline']}:{source['commit_lsn']}:{source['seq']}"
        assert event.get_subject() == "public.people"
        time = event.get_time()
        assert time is not None and time == datetime.fromtimestamp(source["ts_us"] / 1e6, UTC)
        assert event.get_datacontenttype() == "application/json"
        assert event.get_dataschema() is None
        assert (before.headers or []) == [*(after.headers or ())][: len(before.headers or ())]
        record = KafkaRecord(after.topic, 0, after.key, after.value, after.headers)
        place = EventPosition(source["commit_lsn"], source["seq"], 3)
        assert position_of_record(record, "b", outbox=False) == place
        ids.append(event.get_id())
    assert len(ids) == len(set(ids)) == 5
    if mode == "binary":
        assert [event.value for event in sent] == [event.value for event in made.events]


@pytest.mark.parametrize("form", ["avro", "protobuf"])
def test_a_registered_value_names_its_schema(form: str) -> None:
    kafka = JSON.model_copy(update={"cloudevents": "binary", "value_format": form})
    made = batch(kafka)
    rows = [event for event in events_of(kafka, "http://r:8081/", 1)(made) if event.table]
    values = [event for event in rows if event.value is not None]
    assert len(values) == 5
    for event in values:
        headers = dict(event.headers or ())
        assert headers["content-type"] == f"application/{form}"
        assert headers["ce_dataschema"] == f"http://r:8081/schemas/ids/{0xC3_28_7F_80}"


def test_outbox_messages_and_schema_events_stay_as_they_are() -> None:
    kafka = JSON.model_copy(update={"cloudevents": "structured"})
    made = batch(kafka)
    outbox = Event("o", b"k", b"text", [("commit_lsn", "7"), ("seq", "0")], False, "s.outbox", 0)
    shape = Event("bank.schema", b"k", b"{}", None, False, "s.t", 0)
    one = made._replace(events=[outbox, shape], ended=())
    assert events_of(kafka, "", 1)(one) == [outbox, shape]
    assert events_of(JSON, "", 1)(made) is made.events


@pytest.mark.parametrize(
    ("mode", "form"),
    [("structured", "avro"), ("structured", "json_schema_envelope"), ("binary", "json_schema")],
)
def test_values_that_can_not_be_data_are_refused_by_name(mode: str, form: str) -> None:
    with pytest.raises(ValidationError, match="cloudevents"):
        KafkaSettings.model_validate(
            {**JSON.model_dump(), "cloudevents": mode, "value_format": form}
        )


def test_the_tables_read_binary_ones_alone() -> None:
    def settings(mode: str | None) -> Settings:
        return Settings(kafka=JSON.model_copy(update={"cloudevents": mode}))

    assert readable(settings("binary")) and readable(settings(None))
    with pytest.raises(SettingsError, match="structured") as raised:
        readable(settings("structured"))
    assert "binary" in raised.value.hint


@pytest.mark.long
def test_kafkas_records_are_read_by_the_sdk_in_both_modes(
    pair: Provider, fresh_database: str, kafka: Broker, new_bridge: NewBridge, topic_prefix: str
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    modes = ("binary", "structured")
    found: dict[str, dict[str, Any]] = {}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute('CREATE TABLE "größe 5%" (id int PRIMARY KEY, note text)')
        bridges = [
            new_bridge(conninfo, prefix=f"{topic_prefix}{mode}", formats={"cloudevents": mode})
            for mode in modes
        ]
        for bridge in bridges:
            bridge.start().streaming()
        connection.execute("INSERT INTO \"größe 5%\" SELECT i, 'ä' FROM generate_series(1, 50) i")
        connection.execute('UPDATE "größe 5%" SET id = 99 WHERE id = 1')
        connection.execute('DELETE FROM "größe 5%" WHERE id = 2')
        connection.execute('TRUNCATE "größe 5%"')
    for mode, bridge in zip(modes, bridges, strict=True):
        bridge.caught_up()
        start = f"{bridge.prefix}.public."
        topics = [name for name in bridge.topics() if name.startswith(start)]
        records = [one for one in read_committed(kafka.bootstrap_servers, topics) if one.value]
        events = [read(one.key, one.value, one.headers) for one in records]
        assert {event.get_subject() for event in events} == {"public.größe 5%"}
        assert len(events) == 50 + 2 + 1 + 2
        found[mode] = {event.get_id(): event.get_data() for event in events}
        assert len(found[mode]) == 50 + 2 + 1 + 1, "the truncate's copies are one event"
    for name, data in found["binary"].items():
        other = found["structured"][name]
        assert (other["op"], other["before"], other["after"]) == (
            *(data["op"], data["before"], data["after"]),
        )
