"""The SQLite file of a JDBC catalog, read without the catalog: one statement for all tables."""

import contextlib
import sqlite3
from pathlib import Path

_POINTERS = "SELECT table_name, metadata_location FROM iceberg_tables WHERE table_namespace = ?"


def pointers(database: Path, namespace: str) -> dict[str, Path]:
    """The metadata file of each table; none before the catalog is made."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=20)
        ) as connection:
            found = connection.execute(_POINTERS, (namespace,)).fetchall()
    except sqlite3.OperationalError:
        return {}
    return {name: Path(place.removeprefix("file:")) for name, place in found}
