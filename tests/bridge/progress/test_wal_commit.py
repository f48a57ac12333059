"""What WAL has at the position of a commit, in pages made here; real ones: evidence/."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bridge.pgoutput.decoder import POSTGRES_EPOCH_US
from services.bridge.progress.wal_commit import (
    NO_COMMIT,
    PAGE_BYTES,
    WalCommit,
    commit_at,
    page_of,
)

MAGIC = 0xD118
SEGMENT = 2**24
TIME = struct.Struct("<q")


def paged(record: bytes, lsn: int, magic: int = MAGIC) -> bytes:
    """The pages from that of `lsn` on, with `record` at `lsn`."""
    address, wal = page_of(lsn), b""
    gap = lsn - address
    while record or not wal:
        long = address % SEGMENT == 0
        header = struct.pack("<HHIQ", magic, 2 if long else 0, 1, address)
        page = header.ljust(40 if long else 24, b"\0")
        page = page.ljust(gap, b"x")
        room = PAGE_BYTES - len(page)
        wal += (page + record[:room]).ljust(PAGE_BYTES, b"\0")
        record, address, gap = record[room:], address + PAGE_BYTES, 0
    return wal


def commit(
    xid: int, time: int, *, operation: int = 0, origin: int | None = None, rest: bytes = b""
) -> bytes:
    data = TIME.pack(time)
    flags = 1 << 5 if origin is not None else 0
    if flags or rest:
        data += struct.pack("<I", flags) + rest
        operation |= 0x80
    if origin is not None:
        data += struct.pack("<Qq", 4711, origin)
    size = bytes([255, len(data)]) if len(data) < 256 else b"\xfe" + struct.pack("<I", len(data))
    body = (b"\xfd\x07\0" if origin is not None else b"") + size + data
    return struct.pack("<IIQBBHI", 24 + len(body), xid, 0, operation, 1, 0, 0) + body


LSNS = (
    st.integers(0, 4 * PAGE_BYTES)
    .map(lambda n: SEGMENT - 2 * PAGE_BYTES + n // 8 * 8)
    .filter(lambda lsn: lsn % PAGE_BYTES >= 40)
)
TIMES = st.integers(0, 2**60)
XIDS = st.integers(3, 2**32 - 1)


@given(LSNS, XIDS, TIMES, st.none() | TIMES, st.binary(max_size=2 * PAGE_BYTES))
def test_a_commit_is_read_wherever_pages_part_it(
    lsn: int, xid: int, time: int, origin: int | None, rest: bytes
) -> None:
    record = commit(xid, time, origin=origin, rest=rest)
    wal = paged(record, lsn)
    told = time if origin is None else origin
    found = commit_at(wal, lsn)
    assert found is not None and found[:2] == (xid, told + POSTGRES_EPOCH_US)
    assert lsn + len(record) <= found.end_lsn < lsn + len(record) + 8
    other = commit_at(paged(commit(xid, time + 1, rest=rest), lsn), lsn)
    assert other is not None and other.time_us == time + 1 + POSTGRES_EPOCH_US


def test_the_commit_of_a_prepared_transaction_has_no_xid() -> None:
    wal = paged(commit(9, 5, operation=0x30), 800)
    assert commit_at(wal, 800) == WalCommit(0, 5 + POSTGRES_EPOCH_US, 840)


@given(st.binary(min_size=100, max_size=200), LSNS)
def test_record_that_is_not_a_commit_is_never_read_as_one(record: bytes, lsn: int) -> None:
    found = commit_at(paged(record, lsn), lsn)
    assert found is None or found == NO_COMMIT or record[21] == 1


@pytest.mark.parametrize("operation", [0x10, 0x20, 0x40])
def test_an_abort_a_prepare_and_others_are_not_commits(operation: int) -> None:
    assert commit_at(paged(commit(9, 5, operation=operation), 800), 800) == NO_COMMIT


def test_a_segment_that_ends_in_zeros_hides_no_commit_before_them_and_has_none_in_them() -> None:
    """pg_switch_wal leaves pages without headers behind the record that was last."""
    wal, zeros = paged(commit(9, 5), 800), bytes(2 * PAGE_BYTES)
    assert commit_at(wal + zeros, 800) == WalCommit(9, 5 + POSTGRES_EPOCH_US, 840)
    assert commit_at(zeros, PAGE_BYTES + 800) == NO_COMMIT
    long = paged(commit(9, 5, rest=bytes(PAGE_BYTES)), 800)
    assert commit_at(long[:PAGE_BYTES] + zeros, 800) is None, "its end is not there"


@given(LSNS, st.integers(0, 600))
def test_wal_that_ends_where_the_commit_ends_is_enough(lsn: int, size: int) -> None:
    record = commit(9, 5, rest=bytes(size))
    wal, last = paged(record, lsn), lsn - page_of(lsn) + len(record)
    parted = last > PAGE_BYTES
    end = last + (40 if (page_of(lsn) + PAGE_BYTES) % SEGMENT == 0 else 24) * parted
    found = commit_at(wal[:end], lsn)
    assert found is not None and found[:2] == (9, 5 + POSTGRES_EPOCH_US)
    assert commit_at(wal[: end - 1], lsn) is None


def test_pages_of_another_version_or_place_are_not_judged() -> None:
    record = commit(9, 5)
    assert commit_at(paged(record, 800, 0xD119), 800) is None
    assert commit_at(paged(record, 800), 800 + PAGE_BYTES) is None
    assert commit_at(paged(record, 800)[: 800 + 20], 800) is None
    assert commit_at(b"", 800) is None
