"""Copies of one cluster are clusters of their own."""

import struct
from pathlib import Path

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.testbed.bed import Bed
from services.testbed.template import crc32c, new_identifier, with_identifier


def test_the_check_value_of_crc_32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@given(st.binary(min_size=8, max_size=64), st.integers(0, 2**64 - 1))
def test_a_control_file_keeps_all_but_identifier_and_checksum(body: bytes, identifier: int) -> None:
    body = body[: len(body) // 4 * 4]
    content = (body + struct.pack("=I", crc32c(body))).ljust(128, b"\0")
    changed = with_identifier(content, identifier)
    assert changed[:8] == struct.pack("=Q", identifier)
    assert changed[8 : len(body)] == body[8:]
    assert changed[len(body) :] == struct.pack("=I", crc32c(changed[: len(body)])).ljust(
        128 - len(body), b"\0"
    )


def test_a_file_that_is_not_a_control_file_is_refused() -> None:
    with pytest.raises(OSError, match="no valid checksum"):
        with_identifier(bytes(range(1, 255)), 1)


@given(st.integers(0, 2**62), st.integers(0, 2**22))
def test_no_two_copies_have_one_identifier(now_ns: int, pid: int) -> None:
    made = new_identifier(now_ns, pid, 0)
    assert new_identifier(now_ns, pid, made) > made


@pytest.mark.long
@pytest.mark.usefixtures("servers")
def test_servers_of_a_bed_are_different_clusters(folder: Path) -> None:
    found = set()
    with Bed(folder / "bed", lazy=True) as bed:
        for name in ("one", "two"):
            server = bed.server(name)
            server.create()
            server.start()
            with psycopg.connect(server.conninfo()) as connection:
                row = connection.execute(
                    "SELECT system_identifier FROM pg_control_system()"
                ).fetchone()
            assert row is not None
            found.add(row[0])
            server.restart("immediate")
    assert len(found) == 2
