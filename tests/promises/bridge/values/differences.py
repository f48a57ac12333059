"""What differs from Debezium 3.7.0 on purpose, and why: reason -> mode -> (type, text) pairs.

`default` is Debezium's default modes, `other` the alternatives of test_debezium. An empty text:
Debezium has no such column at all. `table.column` is of one of the other tables there.
"""

from typing import Final

Cell = tuple[str, str]
_BOTH: Final = ("default", "other")


def _everywhere(*cells: Cell) -> dict[str, set[Cell]]:
    return {mode: set(cells) for mode in _BOTH}


def _left_out(*kinds: str) -> set[Cell]:
    return {(kind, "") for kind in kinds}


DIFFERENCES: Final[dict[str, dict[str, set[Cell]]]] = {
    "Debezium leaves out what it has no schema for; we send text or arrays": (
        _everywhere(
            *_left_out("int4multirange", "tsquery", "pg_lsn", "pair", "xid8", "jsonpath"),
            *_left_out("regclass", "money[]", "name[]", "interval[]", "varbit[]"),
            *_left_out("int4multirange[]", "point[]", "positive[]", "pair[]"),
        )
    ),
    "Debezium fails to convert it, logs that, and sends null or an empty array": _everywhere(
        ("name", "nm"),
        ("int2vector", "1 2"),
        ("mood[]", '{sad,NULL,"ha ppy"}'),
        ("bit(8)[]", "{00000001}"),
        ("box[]", "{(3,4),(1,2)}"),
        ("timetz", "10:20:30+02:03:04"),
    ),
    "Debezium loses the inner arrays": _everywhere(
        ("text[]", "{{a,b},{c,d}}"), ("int4[]", "{{1,2},{3,4}}")
    ),
    "Debezium reads elements through java.sql: Julian calendar, milliseconds": _everywhere(
        ("date[]", "{infinity}"), ("date[]", "{0044-03-15 BC}"), ("time[]", "{10:20:30.123456}")
    ),
    "Debezium reads a negative scale as 2046; we send {scale, value}, or the number": _everywhere(
        ("numeric(5,-2)", "1200"), ("numeric(5,-2)", "-100")
    ),
    "the same float4; ours is the shortest text": _everywhere(("float4", "1e-45")),
    "Debezium takes an infinite interval for 0": _everywhere(
        ("interval", "infinity"), ("interval", "-infinity")
    ),
    "Debezium overflows 64 bits; our number has more": {
        "default": {("timestamp", "294276-12-31 23:59:59.999999")}
    },
    "in ISO 8601, infinity is a word and not a date, and 24:00 is not 00:00": {
        "other": {
            *((kind, "infinity") for kind in ("date", "timestamp", "timestamp(0)", "timestamp(3)")),
            *((kind, "-infinity") for kind in ("date", "timestamp", "timestamp(3)")),
            ("timestamp[]", "{infinity}"),
            ("time", "24:00"),
            ("time(3)", "24:00"),
        }
    },
    "ours are PostgreSQL's words NaN, Infinity": {
        "other": {
            *(("numeric", text) for text in ("NaN", "Infinity", "-Infinity")),
            ("numeric(10,2)", "NaN"),
        }
    },
    "an unchanged array is the placeholder in an array, not the numbers of its characters": (
        _everywhere(("toasted.ints", "unchanged"))
    ),
    "Debezium fails on an unchanged bytea[] in hexadecimal": {"other": {("toasted.blobs", "")}},
}
SOURCE: Final[dict[str, str]] = {
    "version": "ours",
    "name": "another prefix in this test",
    "sequence": "ours begins with the commit LSN of the transaction before; the second is the same",
    "origin": "not ours",
    "origin_lsn": "not ours",
    "commit_lsn": "only ours",
    "seq": "only ours",
    "timeline": "only ours",
}
"""Fields of `source` that differ."""


def expected(mode: str) -> set[Cell]:
    """All that differ in `mode`."""
    return set().union(*(cells.get(mode, set()) for cells in DIFFERENCES.values()))
