"""Tests without servers: how they are told apart, and what keeps the distinction true.

The fixture `servers` marks the tests that start PostgreSQL, Kafka, Spark or Java (tests/conftest).
A test without that mark must not start one: Python's audit hook sees every process that the test's
own process starts, and refuses these. What a child starts in its turn is not seen.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

NEEDS_SERVERS: Final = "servers"
"""The name of the fixture and of the marker."""
_PROGRAMS: Final = frozenset(
    ("postgres", "initdb", "pg_ctl", "pg_basebackup", "java", "spark-submit", "dockerd")
)


class _Guard:
    """The test that must not start a server now; an audit hook can't be removed again."""

    test: str | None = None
    installed = False


@contextlib.contextmanager
def no_servers(test: str) -> Iterator[None]:
    """Raise AssertionError where this process starts a server while `test` runs."""
    if not _Guard.installed:
        sys.addaudithook(_audit)
        _Guard.installed = True
    _Guard.test = test
    try:
        yield
    finally:
        _Guard.test = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event != "subprocess.Popen" or _Guard.test is None:
        return
    program = Path(str(arguments[0])).name
    if program in _PROGRAMS:
        raise AssertionError(f"{_Guard.test} starts {program}: let it request `{NEEDS_SERVERS}`")
