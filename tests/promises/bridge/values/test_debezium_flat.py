"""Flat rows beside those of a real Debezium with ExtractNewRecordState: schemas and values."""

from typing import Any

import pytest

from schemas.shaping import POSITION, field_name
from tests.promises.bridge.values.two_publishers import Record, Source, published
from tests.providers.interface import Broker, Provider

FIELDS = "op,table,lsn,txId,db,schema,name,connector,snapshot,source.ts_ms,source.ts_us,source.lsn"
OF_THE_READING = {"__source_version", "__name", "__lsn", "__source_lsn", "__ts_ms", "__snapshot"}
"""Fields with values of their own: `lsn` is another one for them, `snapshot` null for "false"."""
OURS = {field_name(name) for name in POSITION} - {"__op"}
UNWRAP = {
    "transforms": "unwrap",
    "transforms.unwrap.type": "io.debezium.transforms.ExtractNewRecordState",
    "transforms.unwrap.delete.tombstone.handling.mode": "rewrite-with-tombstone",
    "transforms.unwrap.add.fields": f"{FIELDS},ts_ms,source.version",
}


@pytest.fixture(scope="module")
def copies(
    pair: Provider, database: str, kafka: Broker, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Source]:
    return published(
        *(pair.primary.conninfo(database), database, kafka, tmp_path_factory.mktemp("debezium")),
        tables={},
        formats=dict.fromkeys(("key_format", "value_format"), "json_schema_envelope"),
        converters={
            f"{part}.converter.schemas.enable": "true" for part in ("key", "value", "header")
        },
        transforms=UNWRAP,
        shaping={
            "flat": {"fields": [*FIELDS.split(","), "ts_ms", "source.version"]},
            "skip": {"*.*": ["t"]},
        },
    )


def columns(document: dict[str, Any], *without: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in without}


@pytest.mark.long
def test_rows_and_schemas_are_the_same(copies: dict[str, Source]) -> None:
    theirs, ours = copies["default"].theirs, copies["default"].ours
    topics = theirs.keys() & ours.keys() - {"message"}
    assert len(topics) == 5
    for topic in topics:
        their, our = theirs[topic], ours[topic]
        assert [one.value is None for one in their] == [one.value is None for one in our], topic
        for one, other in zip(their, our, strict=True):
            compare(one, other)


def compare(their: Record, our: Record) -> None:
    if our.value is None:
        return
    their_row, our_row = their.value["payload"], our.value["payload"]
    assert columns(our_row, *OURS, *OF_THE_READING) == columns(their_row, *OF_THE_READING)
    assert our_row.keys() - OURS == their_row.keys()
    of_theirs, of_ours = (
        {field["field"]: field for field in record.value["schema"]["fields"]}
        for record in (their, our)
    )
    assert columns(of_ours, *OURS) == of_theirs
    assert {**our.value["schema"], "fields": [], "name": ""} == {
        **their.value["schema"],
        "fields": [],
        "name": "",
    }
