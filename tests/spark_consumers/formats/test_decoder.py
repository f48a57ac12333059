"""Records of any format to plain JSON, without Spark and without a registry."""

import base64
import json

import pytest

from schemas.errors import ExitCode, Retryable, SetupError
from services.bridge.events.formats import avro, connect, protobuf
from spark_consumers.failures import translated
from spark_consumers.formats.decoder import Decoder, WriterSchema
from spark_consumers.formats.registry_failure import failure_in, failure_text

SCHEMA = connect.key("b.s.t", {"id": connect.plain("int32"), "note": connect.STRING})
TEXT = '{"id":1,"note":"é"}'
KNOWN = {
    1: WriterSchema("AVRO", avro.schema_text(SCHEMA)),
    2: WriterSchema("PROTOBUF", protobuf.schema_text(SCHEMA)),
    3: WriterSchema("JSON", "{}"),
    4: WriterSchema("XML", "<a/>"),
}
RECORDS = {
    "avro": avro.serializer(SCHEMA, 1)(TEXT),
    "protobuf": protobuf.serializer(SCHEMA, 2)(TEXT),
    "json_schema": b"\0\0\0\0\3" + TEXT.encode(),
    "json": TEXT.encode(),
}


@pytest.mark.parametrize("form", RECORDS)
def test_a_record_is_read_by_its_own_bytes(form: str) -> None:
    asked: list[int] = []

    def schema_of(schema_id: int) -> WriterSchema | None:
        asked.append(schema_id)
        return KNOWN.get(schema_id)

    decoder = Decoder(schema_of)
    for _ in range(2):
        found = decoder.decoded(RECORDS[form], RECORDS[form])
        assert found == (TEXT.encode(), TEXT.encode())
    assert decoder.decoded(None, RECORDS[form]) == (None, TEXT.encode())
    assert len(asked) == (0 if form == "json" else 1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\0\0", "no schema's id"),
        (b"\0\0\0\0\x09x", "the registry has no schema 9"),
        (b"\0\0\0\0\4x", "another kind"),
        (b"\0\0\0\0\1\xff", "do not fit"),
        (b"\0\0\0\0\2\0\xff", "do not fit"),
        (b"\0\0\0\0\2\2\2", "not the first"),
        (b"\0\0\0\0\3\xff", "not UTF-8"),
        (RECORDS["avro"] + b"x", "bytes behind"),
    ],
)
def test_a_record_that_can_not_be_read_says_why_and_keeps_its_bytes(data: bytes, why: str) -> None:
    for key, value in ((data, RECORDS["json"]), (RECORDS["json"], data)):
        found = [json.loads(part or b"") for part in Decoder(KNOWN.get).decoded(key, value)]
        assert [base64.b64decode(part["base64"]) for part in found] == [key, value]
        assert all(why in part["why"] for part in found)
        assert all({*part} == {"slotbridge", "why", "base64"} for part in found)


def test_a_failure_of_the_registry_comes_through_an_error_of_spark() -> None:
    error = Retryable("no answer: \"x\"\n|", subject="http://r", hint="look",
                      exit_code=ExitCode.REGISTRY_UNREACHABLE)  # fmt: skip
    text = f"org.apache.spark.SparkException: RuntimeError: {failure_text(error)}\n\tat x"
    found = translated(RuntimeError(text), "apply an epoch")
    assert isinstance(found, Retryable) and found.exit_code == ExitCode.REGISTRY_UNREACHABLE
    told = (found.message, found.subject, found.hint, found.operation)
    assert told == (error.message, "http://r", "look", "apply an epoch")
    denied = SetupError("denied", exit_code=ExitCode.PRIVILEGE_MISSING)
    again = failure_in(failure_text(denied), "x")
    assert isinstance(again, SetupError) and again.exit_code == ExitCode.PRIVILEGE_MISSING
    assert failure_in("another error", "x") is None
