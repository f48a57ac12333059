"""Looks at Iceberg tables from outside, and what the comparison of two ways makes of them."""

import contextlib
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.tables.catalog_file import pointers
from benchmarks.tables.duckdb_reader import duckdb_reader
from benchmarks.tables.looks import Growth, Look, Looks, files_of, rows_of
from benchmarks.tables.server_iceberg import arrivals, reached
from benchmarks.tables.ways import Commit


def test_looks_follow_what_a_catalog_points_to(tmp_path: Path) -> None:
    database = tmp_path / "catalog.db"
    assert pointers(database, "bench") == {}
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("any", uri=f"sqlite:///{database}", warehouse=str(tmp_path))
    catalog.create_namespace("bench")
    with contextlib.closing(catalog), Looks(database, "bench", tmp_path / "kept") as looks:
        table = catalog.create_table("bench.t", pa.schema([("at", pa.int64()), ("n", pa.int64())]))
        for at in (5, 9, 7):
            table.append(pa.table({"at": [at, 1], "n": [at, 1]}))
    places = [*(look.places["t"] for look in looks.looks), pointers(database, "bench")["t"]]
    assert rows_of(places[-1]) == 6
    assert files_of(places[-1])["data-files"] == 3
    growth = Growth("at")
    assert [growth.as_of(place) for place in places][-1] == 9
    with duckdb_reader() as reader:
        query = f"SELECT sum(n) FROM iceberg_scan('{places[-1]}')"
        assert reader.execute(query).fetchall() == [(24,)]
    steps = reached([Look(2.5, {"t": places[-1]})], "at")
    assert steps == [(9, 2.5)]


def test_a_transaction_is_there_once_the_last_table_has_it() -> None:
    steps = [(10, 1.0), (20, 4.0), (20, 5.0), (30, 8.0)]
    commits = [Commit(20, 3.5), Commit(21, 3.6), Commit(10, 0.5)]
    assert arrivals(commits, steps) == pytest.approx([0.5, 0.5, 4.4])
    with pytest.raises(IndexError):
        arrivals([Commit(31, 9.0)], steps)
