"""Which conditions a signal may have: those that can only compare a table's columns. Pure.

    state IN ('a', 'b') AND (id % 2 = 0 OR "Note" IS NULL) AND made_at < CURRENT_DATE

The server evaluates a condition as the bridge's role. That role may drop and make slots, also in a
read-only transaction, and whoever may insert a signal may not. So a condition has no function, no
subquery, no schema, and no type but built-in ones: any name could be of somebody else's function.
Operators are found in pg_catalog alone, and a type's owner may let a cast of it call a function: so
each column must have a built-in type. Sources: PostgreSQL documentation 4.1 "Lexical Structure",
appendix C "SQL Key Words".
"""

import re
from collections.abc import Collection, Iterator
from typing import Final

from services.bridge.pgoutput.pg_types import TYPE_NAMES

_TOKEN: Final = re.compile(
    r"""[ \t\n\r\f]*(?:
      (?P<literal>'[^'\\\0]*')
    | (?P<quoted>"(?:[^"\0]|"")+")
    | (?P<word>(?![uU]&["'])[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*)
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
_INFIX: Final = frozenset(("between", "escape"))
"""Words that are names unless they follow a value."""
_KEYWORDS: Final = (_BEFORE - _INFIX) | frozenset(
    (
        *("is", "null", "isnull", "notnull", "true", "false", "distinct", "case", "end", "array"),
        *("asymmetric", "similar", "collate", "current_date", "current_time"),
        *("current_timestamp", "localtime", "localtimestamp"),
    )
)
"""Words that can't name a column, unquoted."""
_TYPES: Final = frozenset(TYPE_NAMES.values()) | frozenset(
    ("int", "integer", "bigint", "smallint", "boolean", "decimal", "real", "float")
)
_NEVER: Final = frozenset(("select", "table"))


def forbidden_part(condition: str) -> str:
    """Return which part of a condition a signal may not have; "" where it may have all."""
    depth = 0
    was, last = "", ""
    for kind, text in _parts(condition):
        if not kind:
            return repr(text)
        before = _folded(text) if kind == "word" else text
        depth += (before == "(") - (before == ")")
        named = was == "quoted" or (was == "word" and last not in _BEFORE)
        if depth < 0 or before in _NEVER or (was == "cast" and before not in _TYPES):
            return repr(text)
        if named and (before == "(" or kind == "literal"):
            return repr(last + text)
        was, last = kind, before
    return repr(condition[-10:]) if depth else ""


def foreign_name(condition: str, columns: Collection[str]) -> str:
    """Return a name in an allowed condition that is none of `columns`; "" where all are."""
    before, follows_value = "", False
    for kind, text in _parts(condition):
        name = text[1:-1].replace('""', '"') if kind == "quoted" else _folded(text)
        word = name if kind == "word" else ""
        keyword = word in _KEYWORDS or (word in _INFIX and follows_value)
        named = kind == "quoted" or (kind == "word" and not keyword)
        if named and before not in ("::", "collate") and name not in columns:
            return repr(text)
        if word != "not":  # a NOT BETWEEN b
            opens = kind in ("operator", "cast") or text in ("(", "[", ",")
            follows_value = not (opens or word in _BEFORE or word == "case")
        before = word or text
    return ""


def _parts(condition: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each token; "" and the beginning of what is none."""
    at = 0
    while at < len(condition):
        found = _TOKEN.match(condition, at)
        kind = (found and found.lastgroup) or ""
        yield kind, found[kind] if found and kind else condition[at : at + 10]
        if found is None:
            return
        at = found.end()


def _folded(word: str) -> str:
    """Return a word in the case in which a server looks for it; "" where its encoding decides."""
    folded = word.encode().lower().decode()
    return folded if folded == word.lower() else ""
