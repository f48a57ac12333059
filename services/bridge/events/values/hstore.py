"""hstore to JSON text. Pure.

    text    "\\"a\\"=>\\"1\\", \\"b\\"=>NULL", PostgreSQL's text in a JSON string
    json    "{\\"a\\":\\"1\\",\\"b\\":null}", an object in a JSON string
    map     {"a":"1","b":null}

Source: contrib/hstore/hstore_io.c hstore_out.
"""

import re
from json.encoder import encode_basestring
from typing import Final

from services.bridge.events.values.plain import Encode, string

_PAIR: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"=>(?:NULL|"((?:[^"\\]|\\.)*)")(?:, |\Z)', re.DOTALL)
_ESCAPE: Final = re.compile(rb"\\(.)", re.DOTALL)


def hstore(mode: str) -> Encode:
    """Return the encoder of hstore in `mode` text, json or map."""
    return {"text": string, "json": json_string, "map": mapping}[mode]


def json_string(value: bytes) -> str:
    """Encode an hstore as a JSON string that holds a JSON object."""
    return encode_basestring(mapping(value))


def mapping(value: bytes) -> str:
    """Encode hstore text as a JSON object."""
    pairs = []
    position = 0
    while position < len(value):
        match = _PAIR.match(value, position)
        if match is None:
            raise ValueError("no hstore")
        position = match.end()
        key, item = match.groups()
        pairs.append(f"{_text(key)}:{'null' if item is None else _text(item)}")
    return "{" + ",".join(pairs) + "}"


def _text(escaped: bytes) -> str:
    return encode_basestring(_ESCAPE.sub(rb"\1", escaped).decode("utf-8"))
