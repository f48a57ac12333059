"""Events of tables as CloudEvents 1.0, as their binding for Kafka says. Pure.

    binary       attributes as headers (ce_id, ce_source, …), the value is the data
    structured   the value is one JSON document of attributes and data

    id               timeline:commit_lsn:seq of the event; copies of a truncate have one
    source, type     those of Debezium's CloudEventsConverter, whose data ours equals
    subject, time    schema.table; when the transaction was committed

Tombstones, messages of outboxes and the bridge's own topics stay as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from json.encoder import encode_basestring as quoted
from operator import attrgetter
from typing import Final

from schemas.events import schema_topic
from schemas.kafka import REGISTERED, Format, KafkaSettings
from schemas.wire import schema_id
from services.bridge.events.event import Event, Stamp
from services.bridge.events.shaping.outbox import PLACE_HEADER
from services.bridge.transactions.assembler import EventBatch

EventsOf = Callable[[EventBatch], Sequence[Event]]
_TYPE: Final = "io.debezium.connector.postgresql.DataChangeEvent"
_DATA: Final[dict[Format, str]] = {
    "json": "application/json",
    "json_schema_envelope": "application/json",
    "avro": "application/avro",
    "protobuf": "application/protobuf",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_STRUCTURED: Final = "application/cloudevents+json"


def events_of(kafka: KafkaSettings, registry_url: str, timeline: int) -> EventsOf:
    """Return the function from a batch to its events as they are sent."""
    if kafka.cloudevents is None:
        return attrgetter("events")
    return CloudEvents(kafka, registry_url, timeline).of


class CloudEvents:
    """Makes CloudEvents of the events of one prefix."""

    def __init__(self, kafka: KafkaSettings, registry_url: str, timeline: int) -> None:
        self._timeline = timeline
        self._structured = kafka.cloudevents == "structured"
        self._source = f"/debezium/postgresql/{kafka.topic_prefix}"
        self._content_type = _DATA[kafka.value_format]
        self._schema_topic = schema_topic(kafka.topic_prefix)
        self._schemas = ""
        if kafka.value_format in REGISTERED:
            self._schemas = f"{registry_url.rstrip('/')}/schemas/ids/"

    def of(self, batch: EventBatch) -> list[Event]:
        """Return the events of a batch, in their order."""
        return [
            event for events, stamp in batch.transactions() for event in self._each(events, stamp)
        ]

    def _each(self, events: Sequence[Event], stamp: Stamp) -> Iterator[Event]:
        """Yield the events, those of rows as CloudEvents."""
        at = _EPOCH + timedelta(microseconds=stamp.commit_time_us)
        time = at.isoformat().replace("+00:00", "Z")
        for event in events:
            if event.value is None or not self._is_row(event):
                yield event
            else:
                yield self._made(
                    event, f"{self._timeline}:{stamp.commit_lsn}:{event.seq}", time, event.value
                )

    def _is_row(self, event: Event) -> bool:
        of_outbox = any(name == PLACE_HEADER for name, _ in event.headers or ())
        return bool(event.table) and event.topic != self._schema_topic and not of_outbox

    def _made(self, event: Event, name: str, time: str, value: bytes) -> Event:
        """Return a row's event as a CloudEvent: wrapped in JSON, or with `ce_` headers."""
        headers = [*(event.headers or ())]
        if self._structured:
            opening = (
                f'{{"specversion":"1.0","id":"{name}","source":"{self._source}","type":"{_TYPE}",'
                f'"subject":{quoted(event.table)},"time":"{time}",'
                f'"datacontenttype":"{self._content_type}","data":'
            )
            headers.append(("content-type", _STRUCTURED))
            return event._replace(value=opening.encode() + value + b"}", headers=headers)
        headers += [
            ("content-type", self._content_type),
            ("ce_specversion", "1.0"),
            ("ce_id", name),
            ("ce_source", self._source),
            ("ce_type", _TYPE),
            ("ce_subject", event.table),
            ("ce_time", time),
        ]
        found = schema_id(value) if self._schemas else None
        if found is not None:
            headers.append(("ce_dataschema", f"{self._schemas}{found}"))
        return event._replace(headers=headers)
