"""Tables as others read them."""

import datetime as dt
from decimal import Decimal
from pathlib import Path

import pytest

from benchmarks.tables.duckdb_reader import duckdb_reader
from spark_consumers.iceberg import catalog
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable

TABLE = SourceTable(
    "things",
    {
        "id": ("int8", -1),
        "price": ("numeric", (12 << 16 | 2) + 4),
        "day": ("date", -1),
        "at": ("timestamptz", -1),
        "name": ("text", -1),
        "raw": ("bytea", -1),
    },
)
FORMS = {"price": "12.34", "day": 1, "at": "2026-01-31T12:00:00Z", "name": "é", "raw": "AP8="}
VALUES = {
    "price": Decimal("12.34"),
    "day": dt.date(1970, 1, 2),
    "at": dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC),
    "name": "é",
    "raw": b"\x00\xff",
}


def load(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two epochs, the second with delete files; the tag of the first."""
    monkeypatch.setattr("spark_consumers.iceberg.tables.COPIED_BYTES_MAX", 0)
    pipeline.publisher.announce(TABLE)
    with pipeline.publisher.transaction() as t:
        for number in (1, 2, 3):
            t.insert(TABLE, {"id": number, **FORMS})
    pipeline.apply()
    first = catalog.tag_name(pipeline.publisher.commit_lsn)
    with pipeline.publisher.transaction() as t:
        t.delete(TABLE, {"id": 2, **FORMS})
        t.update(TABLE, {"id": 3, **dict.fromkeys(FORMS)})
    pipeline.apply()
    deletes = pipeline.spark.table(f"{pipeline.identifier('things')}.delete_files")
    assert deletes.count() > 0
    return first


@pytest.mark.parametrize("key_index", [pytest.param(False, marks=pytest.mark.long), True])
def test_pyiceberg_and_duckdb_read_the_rows_of_now_and_of_a_tag(
    new_pipeline: NewPipeline, warehouse: Path, monkeypatch: pytest.MonkeyPatch, key_index: bool
) -> None:
    pipeline = new_pipeline(key_index=key_index)
    tag = load(pipeline, monkeypatch)
    uri = f"sqlite:///{warehouse / 'catalog.db'}"
    from pyiceberg.catalog.sql import SqlCatalog

    others = SqlCatalog("slotbridge", uri=uri, init_catalog_tables="false")
    try:
        table = others.load_table((pipeline.kafka.topic_prefix, "things"))
        now = sorted(table.scan().to_arrow().to_pylist(), key=lambda row: row["id"])
        assert [row["id"] for row in now] == [1, 3]
        assert {name: now[0][name] for name in VALUES} == VALUES
        assert not any(now[1][name] for name in VALUES)
        snapshot = table.snapshot_by_name(tag)
        assert snapshot is not None
        then = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().to_pylist()
        assert sorted(row["id"] for row in then) == [1, 2, 3]
        with duckdb_reader() as database:
            database.execute("SET TimeZone = 'UTC'")
            place = f"iceberg_scan('{table.metadata_location}'"
            read = {name: f'"{name}"' for name in VALUES} | {"at": "\"at\" AT TIME ZONE 'UTC'"}
            columns = ", ".join(read.values())
            expected = VALUES | {"at": dt.datetime(2026, 1, 31, 12)}  # noqa: DTZ001 - as read
            query = f"SELECT {columns} FROM {place}) ORDER BY id"
            assert database.execute(query).fetchall()[0] == tuple(expected.values())
            query = f"SELECT count(*) FROM {place}, snapshot_from_id = {snapshot.snapshot_id})"
            assert database.execute(query).fetchall() == [(3,)]
    finally:
        others.engine.dispose()
