"""Events of Kafka's records in plain JSON, as `events.changes` reads them by Spark. Pure.

Only what is certainly right is read: for anything else, such as a record that is not an event, this
raises Unsuited, and Spark's way says what is wrong with it. It is stricter, never laxer.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final, NamedTuple

from schemas.events import UNAVAILABLE, UNAVAILABLE_BASE64
from spark_consumers.events.changes import ROW_OPERATIONS
from spark_consumers.events.unsuited import Unsuited
from spark_consumers.kafka.few_records import Record

TRUNCATE: Final = "t"
"""The operation of a truncate."""
_OPERATIONS: Final = {op: op for op in (*ROW_OPERATIONS, TRUNCATE)}
_PLACEHOLDERS: Final = tuple(f'"{form}"'.encode() for form in (UNAVAILABLE, UNAVAILABLE_BASE64))
_WORDS: Final = {True: "true", False: "false"}
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_SPACE: Final = re.compile(r"[ \t\n\r]*")
Image = Mapping[str, str | None]


class Real(str):
    """The text of a number that may have several forms."""

    __slots__ = ()


class RowEvent(NamedTuple):
    """A row's change, or a truncate.

    `image`: the row, of a delete the old one: column -> JSON form as text. `unchanged`: it may lack
    values that the UPDATE left unchanged. `keyed`: the record has a key.
    """

    commit_lsn: int
    seq: int
    op: str
    schema: str
    table: str
    lsn: int | None
    ts_us: int | None
    image: Image
    unchanged: bool
    keyed: bool


def event_of(record: Record) -> RowEvent:
    """Read a record; raise Unsuited where it is not an event of a table."""
    value = record.value
    try:
        text = value.decode()
        found = _DECODER.decode(text)
        op, source = found["op"], found["source"]
        image: Any = {}
        if op != TRUNCATE:
            side = "before" if op == "d" else "after"
            image = found[side]
            nested = any(isinstance(one, list | dict) for one in image.values())
            image = _raw_image(text, side) if nested else _texts(image)
        return RowEvent(
            _integer(source["commit_lsn"]),
            _integer(source["seq"]),
            _OPERATIONS[op],
            _word(source["schema"]),
            _word(source["table"]),
            _integer_or_none(source.get("lsn")),
            _integer_or_none(source.get("ts_us")),
            image,
            any(form in value for form in _PLACEHOLDERS),
            record.key is not None,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unsuited("a record is not a plain event") from error


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a member stands twice")
    return found


def _refuse(_word: str) -> None:
    raise ValueError("not JSON")


_DECODER: Final = json.JSONDecoder(
    parse_int=str, parse_float=Real, parse_constant=_refuse, object_pairs_hook=_object
)
"""Numbers keep their text."""


def _texts(image: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: _WORDS[one] if isinstance(one, bool) else one for name, one in image.items()}


def _raw_image(text: str, side: str) -> dict[str, str | None]:
    """Return a row whose nested values are texts, as Spark writes them.

    Spark may write the numbers and the escapes of nested values in other forms (`1e+20`: `1.0E20`):
    only what has one form is read.
    """
    start = next(at for name, _, at, _ in _members(text, 0) if name == side)
    return {
        name: _canonical(text[first:end]) if isinstance(one, list | dict) else _texts({"": one})[""]
        for name, one, first, end in _members(text, start)
    }


def _canonical(text: str) -> str:
    found = json.loads(text, parse_float=_refuse, parse_constant=_refuse)
    if "\\u" in text or json.dumps(found, ensure_ascii=False, separators=(",", ":")) != text:
        raise ValueError("another form of JSON")
    return text


def _members(text: str, start: int) -> Iterable[tuple[str, Any, int, int]]:
    """Yield the members of the JSON object at `start`: name, value, and where the value stands."""
    at = _after_space(text, _after_space(text, start) + 1)
    while text[at] != "}":
        name, at = scanstring(text, at + 1)
        at = _after_space(text, _after_space(text, at) + 1)
        value, end = _DECODER.raw_decode(text, at)
        yield name, value, at, end
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _integer(given: Any) -> int:
    if not isinstance(given, str) or _INTEGER.fullmatch(given) is None:
        raise ValueError("not a number")
    return int(given)


def _integer_or_none(given: Any) -> int | None:
    return None if given is None else _integer(given)


def _word(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError("not a text")
    return given
