"""From a row's pgoutput bytes straight to its record: code made once per shape of a table. Pure.

    I|U oid         'N' n { 't' length:u32 bytes | 'n' | 'u' }    ->    Event(topic, key, value, …)
    U   oid 'O' n { … } 'N' n { … }                               ->    the same, with `before`

An insert, or an update without a change of key, needs no object for message or row. The generated
function has the types' encoders resolved and the JSON text between the values prepared; tables of
the same shape share its code. What it does not take (None) goes the long way, by Decoder and
Envelope, which also says what is wrong with it. Two ways through the bytes:

    short    every value is there, ASCII, under 256 bytes: split at `t 0 0 0`, which is in no text
             (PostgreSQL's texts have no zero byte), so that as many parts as columns, and the last
             one of its own length, can't be anything else
    any      value by value; not where an old row is told
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from json.encoder import encode_basestring as quoted
from math import isfinite
from struct import Struct
from struct import error as StructError
from types import CodeType
from typing import Any, Final, NamedTuple

from schemas import wire
from schemas.events import UNAVAILABLE, UNAVAILABLE_BASE64
from services.bridge import compiled
from services.bridge.events.formats.table_format import Serialize
from services.bridge.events.values import datetimes, plain
from services.bridge.events.values.plain import Encode

Write = Callable[..., Any]
"""(data, at, lsn, seq, total, events, head, order, tail, flat) -> Event or None.

`at`: where the first value begins."""
_SHAPES_MAX: Final = 2048


def holds_placeholder(unavailable: str) -> bool:
    """Tell whether what stands for an unchanged value has the placeholder's text, or its base64.

    Numbers are never stored apart: null or 0 stands for theirs, which says nothing.
    """
    return UNAVAILABLE in unavailable or UNAVAILABLE_BASE64 in unavailable


class Column(NamedTuple):
    """A published column: its source_index among the server's, `"name":`, and how it is written."""

    source_index: int
    name: str
    encode: Encode
    unavailable: str
    key: bool

    @property
    def placeholder(self) -> str:
        """The text that stands for an unchanged value, empty where no value can be that text."""
        return self.unavailable if holds_placeholder(self.unavailable) else ""


class Frame(NamedTuple):
    """The JSON text around a row, apart from the fields of its transaction.

    `op`: the events' operation. `closing` stands behind these, `key_opening` and `key_closing` around the key. `flat`: the
    fields of the row itself (text, kind), which stand between `opening`, those of the transaction,
    and the row's columns; None: the event has an envelope. `placed_by`: that of each event where
    the key does not choose it. `serialize_key`, `serialize_value`: what makes a binary form of the
    JSON text, None: it stays text. `places_by_bytes`: a key's binary form chooses the partition.
    """

    op: str
    opening: str
    names: str
    metadata: bool
    old: bool = False
    closing: str = ""
    key_opening: str = ""
    key_closing: str = ""
    flat: tuple[tuple[str, str], ...] | None = None
    placed_by: int | None = None
    serialize_key: Serialize | None = None
    serialize_value: Serialize | None = None
    places_by_bytes: bool = False


_SHORT: Final[dict[Encode, str]] = {
    plain.string: "{c} = quoted({v}[1:])",
    plain.integer: "{c} = {v}[1:]\nif not {c}.isdigit(): {c} = {e}({c}.encode())",
    plain.boolean: "{c} = BOOLEANS[{v}]",
    plain.floating: "{c} = {v}[1:]\nif not finite(float({c})): {c} = {e}({c}.encode())",
    datetimes.instant: (
        "{c} = f'\"{{{v}[1:11]}}T{{{v}[12:27]}}Z\"'"
        " if len({v}) == 30 and {v}[5] == '-' and {v}[27:] == '+00' else {e}({v}[1:].encode())"
    ),
}
"""Statements for encoders that can be written out; `v` has the value behind its length."""
_NO_PLACEHOLDERS: Final = frozenset(_SHORT) - {plain.string}
"""Encoders that never write the text which stands for an unchanged value."""
_SHORT_OTHER: Final = "{c} = {e}({v}[1:].encode())"
_COMPILED: Final[dict[Encode, str]] = {
    plain.string: "string",
    plain.integer: "integer",
    plain.boolean: "boolean",
    plain.floating: "floating",
    datetimes.instant: "instant",
    datetimes.timestamp_us: "timestamp",
    datetimes.timestamp_us_of_64_bits: "timestamp",
    datetimes.date_days: "date",
}
"""Encoders that the compiled twin has a form of its own for."""
_ANY: Final[dict[Encode, str]] = {
    plain.string: "quoted(data[p:q].decode())",
}
_ANY_OTHER: Final = "e{i}(data[p:q])"
_GLOBALS: Final[dict[str, Any]] = {
    "quoted": quoted,
    "BOOLEANS": {"\1t": "true", "\1f": "false"},
    "finite": isfinite,
    "head_of": Struct("!BI").unpack_from,
    "new": tuple.__new__,
    "StructError": StructError,
}


def writer(
    event: type, topic: str, table: str, columns: Sequence[Column], count: int, frame: Frame
) -> Write:
    """Return the function that encodes rows of a table with `count` columns on the server.

    `event` is the Event type. The function is of services.bridge.compiled where that was built,
    else Python code made here.
    """
    if (engine := compiled.engine) is not None:
        kinds = engine.forms.KINDS
        forms = [kinds.get(_COMPILED.get(column.encode, ""), 0) for column in columns]
        made: Write = engine.rows.RowWriter(event, topic, table, columns, count, frame, forms)
        return made
    variables: dict[str, Any] = {
        **_GLOBALS,
        "Event": event,
        "TOPIC": topic,
        "TABLE": table,
        "OPENING": frame.opening,
        "NAMES": frame.names,
        "CLOSING": frame.closing,
        "KEY_OPENING": wire.text_as_bytes(frame.key_opening),
        "KEY_CLOSING": frame.key_closing.encode(),
        "PLACED_BY": frame.placed_by,
        "OP": frame.op,
    }
    for index, column in enumerate(columns):
        variables[f"e{index}"] = column.encode
        variables[f"u{index}"] = column.unavailable
        variables[f"p{index}"] = column.placeholder
        variables[f"k{index}"] = ("," if index or frame.flat is not None else "") + column.name
    keys = [index for index, column in enumerate(columns) if column.key]
    for number, index in enumerate(keys):
        variables[f"j{index}"] = ("," if number else "{") + columns[index].name
    encoders = tuple((column.source_index, column.encode) for column in columns)
    variables["BETWEEN"] = f"N{chr(count >> 8)}{chr(count & 255)}"
    framed = bool(frame.closing), bool(frame.key_opening or frame.key_closing)
    code = _code(encoders, tuple(keys), count, frame.metadata, frame.old, framed, frame.flat)
    exec(code, variables)  # noqa: S102 - our own text
    made = variables["write"]
    binary = frame.serialize_key is not None or frame.serialize_value is not None
    return _serialized(made, frame) if binary else made


def _serialized(write: Write, frame: Frame) -> Write:
    """Return a writer whose events have the binary forms of `frame` in place of JSON."""
    _key, _value = frame.serialize_key, frame.serialize_value

    def written(*row: object) -> Any:
        event = write(*row)
        if event is None:
            return None
        try:
            if _value is not None:
                event = event._replace(value=_value(event.value.decode()))
            if _key is not None and event.key is not None:
                placed_by = None if frame.places_by_bytes else event.key
                event = event._replace(key=_key(event.key.decode()), placed_by=placed_by)
        except ValueError:
            return None  # the long way says which row it is
        return event

    return written


@lru_cache(_SHAPES_MAX)
def _code(
    columns: tuple[tuple[int, Encode], ...],
    keys: tuple[int, ...],
    count: int,
    metadata: bool,
    old: bool,
    framed: tuple[bool, bool],
    flat: tuple[tuple[str, str], ...] | None,
) -> CodeType:
    short, other = _short(columns, count, keys, old=old), _any(columns, count)
    value = (
        _value(len(columns), metadata=metadata, old=old)
        if flat is None
        else _flat(len(columns), flat)
    )
    parts = 2 * count if old else count
    source = "\n".join(
        [
            "def write(data, at, lsn, seq, total, events, head, order, tail, flat):",
            " try:",
            "  text = data[at:]",
            "  parts = text.decode('ascii').split('t\\0\\0\\0') if text.isascii() else ()",
            f"  if len(parts) == {parts + 1} and len(parts[-1]) == ord(parts[-1][0]) + 1:",
            *("   " + line for line in short),
            "  else:",
            *("   " + line for line in (["return None"] if old else other)),
            " except (ValueError, LookupError, StructError):",
            "  return None",
            *(" " + line for line in _record(value, keys, framed=framed)),
        ]
    )
    return compile(source, "<a table's writer>", "exec")


def _short(
    columns: tuple[tuple[int, Encode], ...], count: int, keys: tuple[int, ...], *, old: bool
) -> list[str]:
    new_names = "".join(f", v{source_index}" for source_index in range(count))
    if not old:
        return [f"_{new_names} = parts", *_short_values(columns, "c", "v")]
    last = f"o{count - 1}"
    return [
        f"_{new_names.replace('v', 'o')}{new_names} = parts",
        f"if not {last}.endswith(BETWEEN) or len({last}) != ord({last}[0]) + 4: return None",
        f"{last} = {last}[:-3]",
        *_short_values(columns, "b", "o"),
        *_short_values(columns, "c", "v"),
        *(f"if b{index} != c{index}: return None" for index in keys),
    ]


def _short_values(columns: tuple[tuple[int, Encode], ...], to: str, of: str) -> list[str]:
    lines = []
    for index, (source_index, encode) in enumerate(columns):
        template = _SHORT.get(encode, _SHORT_OTHER)
        lines += template.format(c=f"{to}{index}", e=f"e{index}", v=f"{of}{source_index}").split(
            "\n"
        )
        if encode not in _NO_PLACEHOLDERS:
            lines.append(f"if {to}{index} == p{index}: return None")
    return lines


def _any(columns: tuple[tuple[int, Encode], ...], count: int) -> list[str]:
    published = {
        source_index: (index, encode) for index, (source_index, encode) in enumerate(columns)
    }
    lines = ["end = len(data)", "data += b'\\0\\0\\0\\0'", "q = at"]
    for source_index in range(count):
        lines += ["kind, length = head_of(data, q)", "p = q + 5"]
        if source_index in published:
            index, encode = published[source_index]
            value = _ANY.get(encode, _ANY_OTHER).format(i=index)
            lines += [
                "if kind == 116:",
                f" q = p + length; c{index} = {value}",
                f" if c{index} == p{index}: return None",
                f"elif kind == 110: q += 1; c{index} = 'null'",
                f"elif kind == 117: q += 1; c{index} = u{index}",
                "else: return None",
            ]
        else:
            lines += [
                "if kind == 116: q = p + length",
                "elif kind == 110 or kind == 117: q += 1",
                "else: return None",
            ]
    return [*lines, "if q != end: return None"]


def _value(columns: int, *, metadata: bool, old: bool) -> str:
    row = "".join(f"{{k{index}}}{{c{index}}}" for index in range(columns))
    if old:
        before = "".join(f"{{k{index}}}{{b{index}}}" for index in range(columns))
        row = f'{before}}}}},"after":{{{{{row}'
    order = '{order}{total},"data_collection_order":{events}}}' if metadata else "{order}"
    return (
        f'{{OPENING}}{row}}}}},{{head}}{{at_lsn}}\\\\"]",{{NAMES}}'
        f'"lsn":{{at_lsn}},"seq":{{seq}}}}}},{order},{{tail}}'
    )


def _flat(columns: int, fields: tuple[tuple[str, str], ...]) -> str:
    row = "".join(f"{{k{index}}}{{c{index}}}" for index in range(columns))
    return "{OPENING}{flat}" + "".join(f"{text}{{{kind}}}" for text, kind in fields) + row + "}}"


def _record(value: str, keys: tuple[int, ...], *, framed: tuple[bool, bool]) -> list[str]:
    """`framed`: whether something stands behind the value, and around the key."""
    key = "".join(f"{{j{index}}}{{c{index}}}" for index in keys) + "}}"
    value_framed, key_framed = framed
    value += "{CLOSING}" if value_framed else ""
    placed_by = "key" if keys and key_framed else "PLACED_BY"
    whole = "KEY_OPENING + key + KEY_CLOSING" if keys and key_framed else "key"
    as_bytes = f"encode('utf-8', '{wire.ERRORS}')"
    return [
        "at_lsn = str(lsn)",
        f"key = f'{key}'.{as_bytes}" if keys else "key = None",
        f"value = f'{value}'.{as_bytes}",
        f"return new(Event, (TOPIC, {whole}, value, None, False, TABLE, seq, lsn, {placed_by}, OP))",
    ]
