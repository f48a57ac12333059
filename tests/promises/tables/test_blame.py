"""`slottables blame`: the versions of a row, with the transactions that made them."""

import pytest
from structlog.testing import capture_logs

from schemas.errors import SettingsError
from schemas.events import UNAVAILABLE
from spark_consumers.blame import Version, blame
from tests.promises.tables.conftest import Pipeline, mark_incomplete
from tests.promises.tables.publisher import SourceTable

COLUMNS = {"a": ("text", -1), "day": ("date", -1), "n": ("int4", -1), "big": ("text", -1)}
FORMER = SourceTable("items", {"id": ("int4", -1), "n": ("int4", -1)}, oid=1)
ITEMS = SourceTable("items", COLUMNS, key=("a", "day"), oid=2)
ADDED = SourceTable("items", COLUMNS | {"more": ("bool", -1)}, key=("a", "day"), oid=2)
EMPTY = SourceTable("empty", {"id": ("int4", -1)})
LOG = SourceTable("log", {"b": ("int4", -1)}, key=(), identity="nothing")


def told(version: Version) -> tuple[str, dict[str, object]]:
    """What was done, and the values that are new."""
    return version.operation, {name: version.row[name] for name in version.changed}


def test_each_version_of_a_row_is_told_with_its_transaction(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(FORMER, LOG)
    with publisher.transaction() as t:
        t.insert(FORMER, {"id": 1, "n": 7})
        t.insert(LOG, {"b": 1})
    publisher.reshape(ITEMS)
    row = {"a": "x", "day": 1, "n": 1, "big": "long"}
    with publisher.transaction() as t:
        t.insert(ITEMS, row | {"day": 2})
        t.insert(ITEMS, row)
        t.update(ITEMS, row | {"n": 2, "big": UNAVAILABLE})
    with publisher.transaction() as t:
        t.delete(ITEMS, row)
        t.insert(ITEMS, row | {"n": 3})
    publisher.reshape(ADDED)
    with publisher.transaction() as t:
        t.update(ADDED, row | {"n": 3, "more": True})
        t.truncate(ADDED)
    pipeline.apply()
    with publisher.transaction() as t:  # no epoch has it yet
        t.insert(ADDED, row | {"more": False})

    with capture_logs() as logs:
        found = blame(pipeline.spark, pipeline.settings, "public.items", ["x", "1970-01-02"])
    assert not logs
    mark_incomplete(pipeline, "items")
    with capture_logs() as logs:
        blame(pipeline.spark, pipeline.settings, "public.items", ["x", "1970-01-02"])
    assert [log["event"] for log in logs] == ["versions may be missing"]
    whole = {"a": "x", "day": "1970-01-02", "n": 1, "big": "long"}
    assert [told(version) for version in found] == [
        ("insert", whole | {"more": None}),
        ("update", {"n": 2}),
        ("delete", {}),
        ("insert", whole | {"n": 3, "more": None}),
        ("update", {"more": True}),
        ("truncate", {}),
    ]
    assert found[1].row["big"] == "long"
    assert found[1].unchanged == ("big",)
    lsns = [version.commit_lsn for version in found]
    first = lsns[0]
    assert [lsn - first for lsn in lsns] == [0, 0, 100, 100, 200, 200]
    assert [version.xid for version in found] == lsns
    assert "update n=2" in found[1].line()
    assert found[0].document()["row"]["day"] == "1970-01-02"


@pytest.mark.long
def test_a_row_that_is_not_there_is_an_error(pipeline: Pipeline) -> None:
    def refused(table: str, *key: str) -> str:
        with pytest.raises(SettingsError) as caught:
            blame(pipeline.spark, pipeline.settings, table, key)
        return str(caught.value)

    assert "no epoch" in refused("public.items", "1")
    pipeline.publisher.announce(FORMER, LOG, EMPTY)
    with pipeline.publisher.transaction() as t:
        t.insert(FORMER, {"id": 1, "n": 7})
    pipeline.apply()
    assert "does not have the table" in refused("public.empty", "1")
    assert "no event" in refused("public.items", "2")
    for key in (("one",), ("1", "1")):
        assert "the key is id (int)" in refused("public.items", *key)
    assert "has no key" in refused("public.log", "1")
    assert "is not in" in refused("public.nowhere", "1")
