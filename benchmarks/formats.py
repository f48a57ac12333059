"""Processor time a row in each format, and as shaped: encoding, and handing over to librdkafka.

python -m benchmarks.formats [--rows 20000] [--rounds 5]

In this process alone, without servers: inserts of one transaction, of six columns, as the bridge's
main thread has them. The schema registry knows each schema already. Best of the rounds.
"""

import argparse
import struct
import time
from typing import Any, get_args

import typer
from confluent_kafka import Producer

from schemas.kafka import Format, KafkaSettings
from schemas.registry import SubjectNaming
from schemas.shaping import ShapingSettings
from services.bridge.compiled import new_messages
from services.bridge.events.description import Described
from services.bridge.events.envelope import Envelope
from services.bridge.events.formats.table_format import Formats, encoders_for
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.messages import Begin, Commit, Message
from services.bridge.progress.ledger import Position
from services.bridge.sink.batch_produce import sender
from services.bridge.sink.cloud_events import events_of
from services.bridge.transactions.assembler import Assembler, EventBatch

COLUMNS = {"id": 20, "owner": 20, "note": 25, "amount": 1700, "open": 16, "changed": 1184}
ROW = [b"17", b"Ada Lovelace", b"12345.67", b"t", b"2026-01-01 10:00:00.123456+00"]
LSN, OID, TIME_US = 5_000, 7, 1_700_000_000_000_000
MODES = ("binary", "structured")
SHAPED: dict[str, dict[str, Any]] = {
    "a filter": {"filters": {"*.*": "note != 'nobody'"}},
    "a column for the partition": {"partition_by": {"*.*": ["owner"]}},
    "a computed column": {"computed": {"*.*": {"shout": "note + '!'"}}},
    "an annotation": {"annotations": {"message_prefix": "audit"}},
}


class Known:
    """A registry that knows every schema by the same id."""

    subject_naming: SubjectNaming = "topic"

    def register(self, _subject: str, _schema: str, _kind: str) -> int:
        return 1

    def schema_text(self, _schema_id: int) -> str:
        raise LookupError("nobody asks")


def relation_message() -> bytes:
    """Return pgoutput's message about the table."""
    columns = [
        struct.pack("!B", name == "id") + name.encode() + struct.pack("!xIi", oid, -1)
        for name, oid in COLUMNS.items()
    ]
    head = struct.pack("!cI", b"R", OID) + b"public\0accounts\0d"
    return head + struct.pack("!H", len(columns)) + b"".join(columns)


def insert_message(number: int) -> bytes:
    """Return pgoutput's message of a row."""
    values = [b"t" + struct.pack("!I", len(one)) + one for one in (b"%d" % number, *ROW)]
    return struct.pack("!cIcH", b"I", OID, b"N", len(COLUMNS)) + b"".join(values)


def encode(
    kafka: KafkaSettings, rows: list[bytes], settings: ShapingSettings
) -> tuple[EventBatch, float]:
    """Return the events of `rows`, and the processor seconds that they took."""
    shaping, encoders = Shaping(settings, kafka.topic_prefix), encoders_for(kafka)()
    formats = Formats(kafka, shaping.naming, encoders, Known())

    def describe(relation: Any, _stamp: object, _seq: int) -> Described:
        plan = shaping.plan(relation)
        return Described(plan, form=formats.of(plan))

    envelope = Envelope(
        *(kafka.topic_prefix, "db", 1, describe),
        tombstones=True,
        transaction_metadata=True,
        encoders=encoders,
    )
    start, annotations = Position(0, 100, 0), shaping.annotations
    assembler, decoder = Assembler(envelope, start, 2**40, shaping=shaping), Decoder()
    decoder.decode(relation_message(), LSN)
    assembler.feed(Begin(200, TIME_US, 77), LSN, TIME_US)
    if annotations is not None:
        assembler.feed(Message(True, LSN, annotations.message_prefix, b"ada"), LSN, TIME_US)
    messages = new_messages()
    for row in rows:
        messages.append((LSN, row))
    began, index = time.process_time(), 0
    while index < len(rows):
        if (after := assembler.rows(messages, index, decoder)) == index:
            assembler.take(decoder, rows[index], LSN, TIME_US)
            after = index + 1
        index = after
    took_s = time.process_time() - began
    batch = assembler.feed(Commit(200, 248, TIME_US), LSN, TIME_US)
    assert batch is not None
    return batch, took_s


def hand_over(kafka: KafkaSettings, batch: EventBatch) -> float:
    """Return the processor seconds until librdkafka has the events."""
    producer = Producer({"log_level": 0, "queue.buffering.max.messages": 2 * len(batch.events)})
    send, ready = sender(producer), {event.topic: 3 for event in batch.events}
    began = time.process_time()
    events = list(events_of(kafka, "http://registry:8081", 1)(batch))
    sent = send(events, 0, len(events), ready, set())
    took_s = time.process_time() - began
    assert sent == len(events)
    producer.purge()
    return took_s


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    rows = [insert_message(number) for number in range(chosen.rows)]
    cases: list[tuple[str, Format, str | None, dict[str, Any]]] = [
        *((form, form, None, {}) for form in get_args(Format)),
        *((f"json, CloudEvents {mode}", "json", mode, {}) for mode in MODES),
        *((f"json, {name}", "json", None, settings) for name, settings in SHAPED.items()),
    ]
    typer.echo(
        "| format | microseconds a row, encoding | handing over | bytes a row |\n|---|---|---|---|"
    )
    for name, form, mode, settings in cases:
        shaping = ShapingSettings.model_validate(settings)
        kafka = KafkaSettings.model_validate(
            {
                "bootstrap_servers": "none:9092",
                "topic_prefix": "bank",
                "cloudevents": mode,
                **dict.fromkeys(("key_format", "value_format"), form),
            }
        )
        took = []
        for _ in range(chosen.rounds):
            batch, encoding_s = encode(kafka, rows, shaping)
            took.append((encoding_s, hand_over(kafka, batch)))
        encoding, handing = (min(part) / len(rows) * 1e6 for part in zip(*took, strict=True))
        events = events_of(kafka, "", 1)(batch)
        values = [event.value or b"" for event in events if event.table]
        size = sum(map(len, values)) // len(values)
        typer.echo(f"| {name} | {encoding:.1f} | {handing:.1f} | {size} |")


if __name__ == "__main__":
    main()
