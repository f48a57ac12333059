"""Arrays to JSON arrays of their elements' form. Pure.

    {1,NULL,3}  {{a,b},{c,d}}  {"x y","a\\"b",""}  [0:1]={5,6}     bounds are left out

Source: PostgreSQL documentation 8.15.6 "Array Input and Output Syntax"; arrayfuncs.c array_out.
"""

import re
from typing import Final

from services.bridge.events.values.plain import Encode

_BOUNDS: Final = re.compile(rb"(?:\[[+-]?\d+:[+-]?\d+\])+=")
_ESCAPE: Final = re.compile(rb"\\(.)", re.DOTALL)


def array(element: Encode, delimiter: bytes = b",") -> Encode:
    """Return the encoder of arrays whose elements have the encoder `element`.

    `delimiter`: the element type's pg_type.typdelim, which CREATE TYPE chooses.
    """
    mark = re.escape(delimiter)
    tokens = re.compile(rb'([{}]|%b)|"((?:[^"\\]|\\.)*)"|([^{}"\\%b]+)' % (mark, mark), re.DOTALL)

    def encode(value: bytes) -> str:
        if value[:1] == b"[":
            value = _BOUNDS.sub(b"", value, count=1)
        if value[:1] != b"{" or value[-1:] != b"}":
            raise ValueError("no array")
        body = value[1:-1]
        if b"{" in body or b'"' in body or b"\\" in body:
            return _nested(value, tokens, element, delimiter)
        if not body:
            return "[]"
        return (
            "["
            + ",".join(
                ["null" if part == b"NULL" else element(part) for part in body.split(delimiter)]
            )
            + "]"
        )

    return encode


def _nested(value: bytes, tokens: re.Pattern[bytes], element: Encode, delimiter: bytes) -> str:
    """Encode an array token by token: brackets, delimiters, quoted and bare elements."""
    out: list[str] = []
    position = depth = 0
    while position < len(value):
        match = tokens.match(value, position)
        if match is None:
            raise ValueError("no array")
        position = match.end()
        mark, quoted, bare = match.groups()
        if mark is None:
            if quoted is not None:
                out.append(element(_ESCAPE.sub(rb"\1", quoted)))
            else:
                out.append("null" if bare == b"NULL" else element(bare))
        elif mark == delimiter:
            out.append(",")
        else:
            depth += 1 if mark == b"{" else -1
            out.append("[" if mark == b"{" else "]")
            if depth == 0 and position < len(value):
                raise ValueError("no array")
    if depth:
        raise ValueError("no array")
    return "".join(out)
