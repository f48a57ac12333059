"""WAL positions (LSN): a 64-bit int inside, PostgreSQL's ``X/X`` at the edges. Pure.

Source: PostgreSQL documentation 8.20 "pg_lsn Type"; src/backend/utils/adt/pg_lsn.c.
"""

import re

LSN_MAX = 2**64 - 1
_PATTERN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def format_lsn(lsn: int) -> str:
    """Return `lsn` (bytes into the WAL) as PostgreSQL prints it, e.g. ``0/16B3748``.

    Raise ValueError outside 0..2**64-1.
    """
    if not 0 <= lsn <= LSN_MAX:
        raise ValueError(f"{lsn} is not an LSN: it does not fit 64 bits")
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Return the byte position of ``X/X``. Raise ValueError for anything else."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an LSN: expected two hexadecimal halves as in 0/16B3748")
    return (int(match[1], 16) << 32) | int(match[2], 16)
