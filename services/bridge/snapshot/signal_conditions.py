"""Which conditions a signal may have: those that can only compare a table's columns. Pure.

    state IN ('a', 'b') AND (id % 2 = 0 OR "Note" IS NULL) AND made_at < CURRENT_DATE

The server evaluates a condition as the bridge's role. That role may drop and make slots, also in a
read-only transaction, and whoever may insert a signal may not. So a condition has no function, no
subquery, no schema, and no type but built-in ones: any name could be of somebody else's function.
Source: PostgreSQL documentation 4.1 "Lexical Structure".
"""

import re
from typing import Final

from services.bridge.pgoutput.pg_types import TYPE_NAMES

_TOKEN: Final = re.compile(
    r"""[ \t\n\r\f]*(?:
      (?P<literal>'[^'\\\0]*')
    | (?P<quoted>"[^"\0]+")
    | (?P<word>[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*)
    | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    | (?P<cast>::)
    | (?P<operator>(?:(?!--|/\*)[-+*/<>=~!@\#%^&|?])+)
    | (?P<mark>[(),\[\]])
    )[ \t\n\r\f]*""",
    re.VERBOSE,
)
_BEFORE: Final = frozenset(
    (
        *("and", "or", "not", "in", "any", "all", "between", "symmetric", "like", "ilike"),
        *("to", "escape", "from", "when", "then", "else"),
    )
)
"""Words that may stand before `(` or a literal: no function or type has such a name, unquoted."""
_TYPES: Final = frozenset(TYPE_NAMES.values()) | frozenset(
    ("int", "integer", "bigint", "smallint", "boolean", "decimal", "real", "float")
)
_NEVER: Final = frozenset(("select", "table"))


def forbidden_part(condition: str) -> str:
    """Return which part of a condition a signal may not have; "" where it may have all."""
    at, depth = 0, 0
    kind, before = "", ""
    while at < len(condition):
        found = _TOKEN.match(condition, at)
        if found is None:
            return repr(condition[at : at + 10])
        at = found.end()
        was, last = kind, before
        kind = found.lastgroup or ""
        text = found[kind]
        before = text.lower() if text.isascii() else text
        depth += (before == "(") - (before == ")")
        named = was == "quoted" or (was == "word" and last not in _BEFORE)
        if depth < 0 or before in _NEVER or (was == "cast" and before not in _TYPES):
            return repr(text)
        if named and (before == "(" or kind == "literal"):
            return repr(last + text)
    return repr(condition[-10:]) if depth else ""
