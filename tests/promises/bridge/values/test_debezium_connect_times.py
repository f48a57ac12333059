"""Dates and times as Kafka Connect's own types, beside a real Debezium with the mode `connect`."""

from typing import Any, Final

import pytest

from tests.promises.bridge.values import samples
from tests.promises.bridge.values.forms import DEBEZIUM
from tests.promises.bridge.values.test_debezium import differing_cells
from tests.promises.bridge.values.test_debezium_avro import CONVERTER, Reader, payloads
from tests.promises.bridge.values.two_publishers import (
    WITHOUT_SPECIAL,
    Source,
    published,
    published_by_registry,
)
from tests.providers.interface import Broker, Provider

KINDS: Final = ("date", "time", "time(0)", "time(3)", "timestamp", "timestamp(0)", "timestamp(3)")
TABLES: Final = {
    "scalars": {kind: samples.SCALARS[kind] for kind in (*KINDS, "timestamptz")},
    "arrays": {kind: samples.ARRAYS[kind] for kind in ("date[]", "time(3)[]", "timestamp[]")},
}
MODES: Final = {
    "connect": (
        {**DEBEZIUM, "time_precision": "connect"},
        {**WITHOUT_SPECIAL, "time.precision.mode": "connect"},
    )
}


@pytest.fixture(params=["json_schema_envelope", "avro"])
def copies(
    request: pytest.FixtureRequest,
    pair: Provider,
    fresh_database: str,
    kafka: Broker,
    tmp_path_factory: pytest.TempPathFactory,
) -> Source:
    conninfo = pair.primary.conninfo(fresh_database)
    folder = tmp_path_factory.mktemp("debezium")
    if request.param == "avro":
        return published_by_registry(
            *(conninfo, fresh_database, kafka, tmp_path_factory.mktemp("registry"), folder),
            modes=MODES,
            tables=TABLES,
            form="avro",
            converter=CONVERTER,
            transforms={
                "field.name.adjustment.mode": "avro",
                "schema.name.adjustment.mode": "avro",
            },
            decode=lambda client, _registry: Reader(client),
        )["connect"]
    return published(
        *(conninfo, fresh_database, kafka, folder),
        modes=MODES,
        tables=TABLES,
        formats=dict.fromkeys(("key_format", "value_format"), "json_schema_envelope"),
        converters={f"{part}.converter.schemas.enable": "true" for part in ("key", "value")},
    )["connect"]


@pytest.mark.long
def test_schemas_and_values_are_those_of_debezium(copies: Source) -> None:
    """But for arrays of dates, which Debezium reads through java.sql (differences.py)."""
    topics = [f"public.{table}" for table in TABLES]
    theirs, ours = (
        {topic: payloads(every)[topic] for topic in topics}
        for every in (copies.theirs, copies.ours)
    )
    found = differing_cells(Source(theirs, ours))
    assert found == {("date[]", "{infinity}"), ("date[]", "{0044-03-15 BC}")}
    for topic in topics:
        for their, our in zip(copies.theirs[topic], copies.ours[topic], strict=True):
            assert columns(our.value["schema"]) == columns(their.value["schema"])


def columns(envelope: dict[str, Any]) -> Any:
    """The schemas of a row's columns, of Kafka Connect or of Avro."""
    (after,) = [one for one in envelope["fields"] if "after" in (one.get("field"), one.get("name"))]
    return after["fields"] if "fields" in after else after["type"][1]["fields"]
