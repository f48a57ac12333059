"""DuckDB as a reader of Iceberg tables."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import duckdb


@contextlib.contextmanager
def duckdb_reader() -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB with its Iceberg extension, which is installed as a package."""
    with duckdb.connect(config={"allow_unsigned_extensions": "true"}) as database:
        for name in ("avro", "iceberg"):
            spec = importlib.util.find_spec(f"duckdb_extension_{name}")
            assert spec is not None and spec.origin is not None
            file = next(Path(spec.origin).parent.rglob("*.duckdb_extension"))
            database.execute(f"INSTALL '{file}'")
            database.execute(f"LOAD {name}")
        yield database
