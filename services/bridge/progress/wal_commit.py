"""Read which transaction commits at a position of the WAL, and when it did. Pure.

    page     magic:u16 info:u16 timeline:u32 address:u64 …       24 bytes; 40 where info has 2
    record   length:u32 xid:u32 previous:u64 info:u8 rmid:u8 pad:u16 crc:u32
             [253 origin:u16] [252 xid:u32] (255 size:u8 | 254 size:u32)
             time:i64 [flags:u32 …] [origin_lsn:u64 origin_time:i64]

A server that was set back and has written on since has something else there: another transaction,
the middle of a record, or the same xid at another time. Source: access/xlogrecord.h,
access/xlog_internal.h, access/xact.h of PostgreSQL 17 and 18.
"""

import struct
from typing import Final, NamedTuple

from services.bridge.pgoutput.decoder import POSTGRES_EPOCH_US

PAGE_BYTES: Final = 8192
RECORD_BYTES: Final = 2**16
"""Bytes to read first: most commit records are smaller."""
RECORD_BYTES_MAX: Final = 2**26
"""Of a commit record that is judged. Each subtransaction takes 4 bytes of it."""
RECORD_BYTES_MIN: Final = 34
_PAGE = struct.Struct("<HHIQ")
_PAGE_HEADER_BYTES: Final = (24, 40)
_LONG: Final = 2
_MAGICS: Final = frozenset({0xD116, 0xD118, 0xD122})
"""Of PostgreSQL 17, 18 and 19; a later one may have other records."""
_RECORD = struct.Struct("<IIQBBHI")
_XACT: Final = 1
_OPERATION, _COMMIT, _COMMIT_PREPARED, _HAS_FLAGS = 0x70, 0x00, 0x30, 0x80
_HAS_ORIGIN: Final = 1 << 5
_ORIGIN, _XID, _LONG_DATA, _DATA = 253, 252, 254, 255
_ALIGNED: Final = 8
_U32 = struct.Struct("<I")
_TIME = struct.Struct("<q")


class WalCommit(NamedTuple):
    """A commit record. `xid` 0: of a prepared transaction, whose record has none in its header.

    `time_us`: microseconds since 1970, of the origin's commit if there is one, as in pgoutput.
    `end_lsn`: where the record ends, or earlier by the pages' headers; 0: not known.
    """

    xid: int
    time_us: int
    end_lsn: int = 0


NO_COMMIT: Final = WalCommit(0, 0)
"""No commit record begins there."""


def page_of(lsn: int) -> int:
    """Return the LSN at which the page of `lsn` begins."""
    return lsn - lsn % PAGE_BYTES


def commit_at(wal: bytes, lsn: int) -> WalCommit | None:
    """Return the commit that begins at `lsn`, NO_COMMIT for another record, None if unknown.

    `wal` has been read from `page_of(lsn)` on.
    """
    if wal[: _PAGE_HEADER_BYTES[0]] == bytes(_PAGE_HEADER_BYTES[0]):
        return NO_COMMIT  # pg_switch_wal, archive_timeout: the rest of the segment has zeros
    header = _bytes_at(wal, lsn, _RECORD.size)
    if header is None:
        return None
    length, xid, _previous, info, rmid, _pad, _crc = _RECORD.unpack(header)
    operation = info & _OPERATION
    if rmid != _XACT or operation not in (_COMMIT, _COMMIT_PREPARED):
        return NO_COMMIT
    record = _bytes_at(wal, lsn, length)
    if record is None:
        return None
    try:
        at = _main_data(record)
        (time_us,) = _TIME.unpack_from(record, at)
        if info & _HAS_FLAGS and _U32.unpack_from(record, at + _TIME.size)[0] & _HAS_ORIGIN:
            (time_us,) = _TIME.unpack_from(record, length - _TIME.size)
    except (struct.error, IndexError):
        return NO_COMMIT
    end_lsn = lsn + -(-length // _ALIGNED) * _ALIGNED
    return WalCommit(xid if operation == _COMMIT else 0, time_us + POSTGRES_EPOCH_US, end_lsn)


def bytes_of_commit(wal: bytes, lsn: int) -> int:
    """Return about how many bytes from `page_of(lsn)` on hold the commit record at `lsn`.

    Return 0 if another record is there, or one too long to be judged. `wal`: as in `commit_at`.
    """
    header = _bytes_at(wal, lsn, _RECORD.size)
    if header is None:
        return 0
    length, _xid, _previous, info, rmid, _pad, _crc = _RECORD.unpack(header)
    commits = rmid == _XACT and info & _OPERATION in (_COMMIT, _COMMIT_PREPARED)
    if not commits or length > RECORD_BYTES_MAX:
        return 0
    pages = int(length) // (PAGE_BYTES - _PAGE_HEADER_BYTES[1]) + 2
    return lsn % PAGE_BYTES + int(length) + pages * _PAGE_HEADER_BYTES[1]


def _main_data(record: bytes) -> int:
    """Return where a record's data begins. Raise IndexError where it has none."""
    at = _RECORD.size
    while record[at] in (_ORIGIN, _XID):
        at += 3 if record[at] == _ORIGIN else 5
    if record[at] not in (_DATA, _LONG_DATA):
        raise IndexError
    return at + (2 if record[at] == _DATA else 5)


def _bytes_at(wal: bytes, lsn: int, count: int) -> bytes | None:
    """Return `count` bytes from `lsn` on, without the pages' headers.

    Return None where `wal` has fewer bytes, or where a page is not of a known form. Pages behind
    these bytes are not looked at.
    """
    page_lsn = page_of(lsn)
    found = b""
    for at in range(0, len(wal), PAGE_BYTES):
        if len(found) >= count:
            break
        page = wal[at : at + PAGE_BYTES]
        if len(page) < _PAGE.size:
            return None
        magic, info, _timeline, address = _PAGE.unpack_from(page)
        if magic not in _MAGICS or address != page_lsn + at:
            return None
        begins = _PAGE_HEADER_BYTES[bool(info & _LONG)]
        found += page[max(begins, lsn - address) :]
    return found[:count] if len(found) >= count else None
