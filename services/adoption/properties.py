"""Java's properties files, as Kafka Connect's workers and standalone connectors have them. Pure.

    # a comment, also with !
    key=value         or `key: value`, or `key value`
    list=a,\\
         b            a line goes on behind a backslash
    pattern=a\\\\.b     a backslash is written twice

Source: java.util.Properties.load.
"""

import re
from collections.abc import Iterator
from typing import Final

_ESCAPED: Final = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_KEY: Final = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*", re.DOTALL)
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_BLANKS: Final = " \t\f"


def read_properties(text: str) -> dict[str, str]:
    """Return the keys and their values, without blanks around these."""
    found = {}
    for line in _lines(text):
        match = next(_KEY.finditer(line))  # it matches the empty text, too
        found[_unescaped(match[1])] = _unescaped(line[match.end() :]).strip()
    return found


def _lines(text: str) -> Iterator[str]:
    """Yield each line with those that it goes on in, without comments."""
    begun = ""
    for natural in re.split(r"\r\n|\r|\n", text):
        part = natural.lstrip(_BLANKS)
        if not begun and (not part or part[0] in "#!"):
            continue
        if (len(part) - len(part.rstrip("\\"))) % 2:
            begun += part[:-1]
            continue
        yield begun + part
        begun = ""
    if begun:
        yield begun


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(
        lambda one: chr(int(one[1][1:], 16)) if len(one[1]) > 1 else _CONTROLS.get(one[1], one[1]),
        text,
    )
