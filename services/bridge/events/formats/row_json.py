"""Reads an event's JSON for a binary form. Pure.

PostgreSQL has a negative zero among its floating-point numbers, and writes it `-0`. Python's json
takes that for an integer, which has none.
"""

import json
import re
from typing import Any, Final

_NEGATIVE_ZERO: Final = re.compile(r"[:,\[]-0[,\]}]")


def document_of(text: str) -> Any:
    """Return the document that an event's JSON text is. Raise ValueError for other text."""
    if "-0" in text and _NEGATIVE_ZERO.search(text):
        return json.loads(text, parse_int=_number)
    return json.loads(text)


def _number(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)
