"""The same changes through a real Debezium and through the bridge, event by event, field by field.

What differs on purpose is in tests.promises.bridge.values.differences, and nothing else may.
"""

import json
from typing import Any

import pytest

from tests.promises.bridge.values import samples
from tests.promises.bridge.values.differences import SOURCE, Cell, expected
from tests.promises.bridge.values.two_publishers import MODES, TABLES, Record, Source, published
from tests.providers.interface import Broker, Provider


@pytest.fixture(scope="module")
def copies(
    pair: Provider, database: str, kafka: Broker, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Source]:
    """Mode -> what both have published."""
    folder = tmp_path_factory.mktemp("debezium")
    return published(pair.primary.conninfo(database), database, kafka, folder)


@MODES
def test_events_are_the_same(copies: dict[str, Source], mode: str) -> None:
    """Keys, operations, tombstones, headers, the source's fields, and how many there are."""
    theirs, ours = copies[mode].theirs, copies[mode].ours
    if mode == "default":
        assert len(ours.pop("public.special")) == len(samples.rows(samples.SPECIAL))
    assert theirs.keys() == ours.keys()
    for topic in theirs:
        pairs = list(zip(theirs[topic], ours[topic], strict=True))
        assert [_outline(their) for their, _ in pairs] == [_outline(our) for _, our in pairs], topic
        for their, our in pairs:
            if our.value is not None:
                _assert_same_source(their.value["source"], our.value["source"])
                assert their.value.get("message") == our.value.get("message")


@MODES
def test_values_are_the_same(copies: dict[str, Source], mode: str) -> None:
    """Every value of every type, but for the differences on purpose: all of those, no others."""
    assert differing_cells(copies[mode]) == expected(mode)


def differing_cells(source: Source) -> set[Cell]:
    """The values that differ, as tests.promises.bridge.values.differences has them."""
    theirs, ours = source.theirs, source.ours
    found = set()
    for topic in theirs.keys() & ours.keys():
        table = topic.removeprefix("public.")
        for number, (their, our) in enumerate(zip(theirs[topic], ours[topic], strict=True)):
            for image in ("before", "after"):
                for column in _differing(
                    (their.value or {}).get(image), (our.value or {}).get(image)
                ):
                    found.add(_cell(table, column, number, column in their.value[image]))
    return found


def _outline(record: Record) -> tuple[Any, ...]:
    headers = {
        name: value
        for name, value in record.headers.items()
        if not name.startswith("__debezium.context")
    }
    if record.value is None:
        return record.key, headers
    images = [record.value.get(image) is None for image in ("before", "after")]
    return record.key, headers, record.value["op"], record.value.get("transaction"), images


def _assert_same_source(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    differing = {n for n in theirs.keys() | ours.keys() if theirs.get(n, "") != ours.get(n, "")}
    assert differing - SOURCE.keys() == set()
    assert json.loads(theirs["sequence"])[1] == json.loads(ours["sequence"])[1]


def _differing(theirs: dict[str, Any] | None, ours: dict[str, Any] | None) -> set[str]:
    if theirs is None or ours is None:
        assert theirs is ours
        return set()
    assert theirs.keys() <= ours.keys()
    return {name for name in ours if name not in theirs or theirs[name] != ours[name]}


def _cell(table: str, column: str, number: int, known: bool) -> Cell:
    """(type, text) of a sample, (table.column, unchanged) of another; without a text if unknown."""
    if table in TABLES:
        return column, (TABLES[table][column][number] or "") if known else ""
    return f"{table}.{column}", "unchanged" if known else ""
