"""Keys and values of Kafka's records as documents; refuses what the reader can't read. Pure."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from schemas.errors import BadInput, ExitCode
from schemas.events import DivergenceRecord
from schemas.shaping import field_name
from schemas.wire import MAGIC
from slotbridge.consumer.position import OPERATION, Partition


class RecordPlace(NamedTuple):
    """The partition and the offset of a record."""

    partition: Partition
    offset: int

    def __str__(self) -> str:
        topic, number = self.partition
        return f"{topic}[{number}]@{self.offset}"


class RowEvent(NamedTuple):
    """An event of a table, as its record has it; `key` is not parsed yet."""

    table: str
    commit_lsn: int
    seq: int
    document: Mapping[str, Any]


def parse_document(text: bytes | str, at: RecordPlace, part: str = "value") -> Any:
    """Parse the key or the value of a record. Raise BadInput where it is not JSON."""
    if _encoded(text)[:1] == MAGIC:
        raise _of_registry(at, part)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise foreign(at) from error
    if isinstance(document, dict) and document.keys() == {"schema", "payload"}:
        return document["payload"]
    return document


def row_event(document: Mapping[str, Any], at: RecordPlace) -> RowEvent:
    """Return the event of a table's record.

    Raise BadInput for a flat row, KeyError or TypeError for another program's record. An event of
    Debezium, from before an adoption, has its `lsn` alone.
    """
    if field_name("commit_lsn") in document:
        raise _flat(at)
    source = document["source"]
    commit_lsn = source["lsn"] if "commit_lsn" not in source else source["commit_lsn"]
    table = f"{source['schema']}.{source['table']}"
    place = whole_number(commit_lsn), whole_number(source.get("seq", 0))
    return RowEvent(table, *place, document)


def whole_number(value: Any) -> int:
    """Return a position, a number or a count of a record. Raise TypeError for anything else."""
    if type(value) is not int or not 0 <= value < 2**64:
        raise TypeError("it is not a whole number from 0 to 2^64 - 1")
    return value


def divergence(document: Mapping[str, Any], at: RecordPlace) -> DivergenceRecord:
    """Return an accepted divergence. Raise BadInput for another program's record."""
    try:
        return DivergenceRecord.model_validate(document)
    except ValueError as error:
        raise foreign(at) from error


def foreign(at: RecordPlace) -> BadInput:
    """Return the error for a record that is not of the bridge, or not in JSON."""
    return BadInput(
        "the record is not one of the bridge, or not in JSON",
        operation=OPERATION,
        subject=str(at),
        hint="only the bridge may write to its topics; kafka.value_format must be json or "
        "json_schema_envelope, and kafka.cloudevents not structured",
        exit_code=ExitCode.RECORD_REFUSED,
    )


def _encoded(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def _of_registry(at: RecordPlace, part: str) -> BadInput:
    return BadInput(
        f"the record's {part} begins with the magic byte of a schema registry: it is Avro, "
        "Protobuf or JSON Schema, which slotbridge.consumer does not read",
        operation=OPERATION,
        subject=str(at),
        hint=f"publish these tables by a bridge of its own with kafka.{part}_format: json, or read "
        "the topic with the registry's deserializer",
        exit_code=ExitCode.RECORD_REFUSED,
    )


def _flat(at: RecordPlace) -> BadInput:
    return BadInput(
        "the record is a flat row, which lacks what whole transactions need",
        operation=OPERATION,
        subject=str(at),
        hint="leave the table out of the bridge's shaping.flat.tables, or name the tables to read, "
        "without it, by `tables`",
        exit_code=ExitCode.RECORD_REFUSED,
    )
