"""Every session with PostgreSQL is opened by services.postgres.sessions, with pinned settings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOOR = ROOT / "services" / "postgres" / "sessions.py"
OTHERS = (ROOT / "services" / "testbed", ROOT / "services" / "demo")
"""They play the server and its other users."""
CONNECTS = re.compile(
    r"psycopg\.(Async)?(Connection\.)?connect\b|\bConnection\.connect\(|PGconn\.connect\b"
    r"|PGconn\.connect_start|jdbc:postgresql|import connect\b.*psycopg|psycopg import connect"
)
ONLY_BEGINS = ROOT / "services" / "postgres" / "conninfo.py"
"""A connection that is begun and never made, to have libpq read a service file."""


def product() -> list[Path]:
    folders = ("services", "spark_consumers", "slotbridge", "schemas")
    found = [path for one in folders for path in (ROOT / one).rglob("*.py")]
    return [path for path in found if not any(path.is_relative_to(one) for one in OTHERS)]


def test_no_other_module_connects() -> None:
    connecting = {path for path in product() if CONNECTS.search(path.read_text(encoding="utf-8"))}
    assert connecting == {DOOR, ONLY_BEGINS} - ({DOOR} - connecting)


@pytest.mark.parametrize(
    "line",
    [
        "with psycopg.connect(conninfo) as connection:",
        "psycopg.AsyncConnection.connect(text)",
        "opened = Connection.connect(",
        "pq.PGconn.connect(text.encode())",
        'spark.read.jdbc(url="jdbc:postgresql://h/d")',
        "from psycopg import connect",
    ],
)
def test_what_connects_is_recognized(line: str) -> None:
    assert CONNECTS.search(line)


@pytest.mark.parametrize("path", sorted((ROOT / "sql").glob("*.sql")), ids=lambda path: path.name)
def test_a_script_finds_pg_catalog_alone_after_each_connection(path: Path) -> None:
    """What a weaker role has planted in `public` would run as the superuser of the script."""
    pinned = "SELECT pg_catalog.set_config('search_path', '', false)"
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("\\connect"):
            assert lines[number + 1].startswith(pinned), f"{path.name}:{number + 1}"
    statements = [line for line in lines if line and not line.startswith(("--", "\\"))]
    assert statements[0].startswith(pinned)
