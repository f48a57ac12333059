"""The progress record: one form in Kafka, of which schemas/progress_record.json is an example."""

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import OperatorNeeded
from schemas.progress import ProgressRecord
from services.kafka.records import parse_record

EXAMPLE = Path(__file__).parents[2] / "schemas" / "progress_record.json"
RECORD: dict[str, Any] = json.loads(EXAMPLE.read_text())
PARTS = ("position", "server", "witness", "kafka", "settings")


def test_the_example_has_every_field_and_is_written_as_it_was_read() -> None:
    record = ProgressRecord.model_validate(RECORD)
    assert json.loads(record.model_dump_json()) == RECORD
    assert [*RECORD] == [*ProgressRecord.model_fields]
    for part in PARTS:
        assert [*RECORD[part]] == [*type(getattr(record, part)).model_fields]


def test_no_field_is_in_two_parts() -> None:
    names = [name for part in PARTS for name in RECORD[part]]
    assert len({*names, *RECORD}) == len(names) + len(RECORD)


FLAT = {name: RECORD[name] for name in ("slot", "ts_ms")} | RECORD["position"] | RECORD["server"]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (FLAT, "position: Field required"),
        ({name: part for name, part in RECORD.items() if name != "witness"}, "witness: Field"),
        (RECORD | {"version": 2}, "version: Extra inputs"),
        (RECORD | {"server": RECORD["server"] | {"region": "eu"}}, "server.region: Extra inputs"),
        (RECORD | {"witness": {"kind": "secret row"}}, "witness.kind: Input should be 'origin'"),
        ("secret row", "the record: Input should be an object"),
    ],
)
def test_another_form_is_refused_and_the_error_names_what_differs(
    document: object, text: str
) -> None:
    value = json.dumps(document).encode()
    with pytest.raises(OperatorNeeded, match="is not a ProgressRecord as this release") as found:
        parse_record(ProgressRecord, "bank.progress", 7, value)
    assert text in found.value.message and "secret row" not in str(found.value)
    assert found.value.subject == "bank.progress[0]@7"
    assert "start the release that wrote it" in (found.value.hint or "")
