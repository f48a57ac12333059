"""The samples of all types that fit a schema: what the bridge refuses with each format left out."""

import re

from tests.promises.bridge.values import samples
from tests.promises.bridge.values.two_publishers import Tables

Kind = tuple[str, str]
UNFIT: frozenset[Kind] = frozenset(
    {
        ("int4[]", "{{1,2},{3,4}}"),
        ("text[]", "{{a,b},{c,d}}"),
        ("timestamp", "294276-12-31 23:59:59.999999"),
    }
)
"""What no schema has a place for: the bridge refuses it."""
_SAMPLES: Tables = {"scalars": samples.SCALARS, "arrays": samples.ARRAYS}
NOT_FINITE: frozenset[Kind] = frozenset(
    (kind, text)
    for types in _SAMPLES.values()
    for kind, texts in types.items()
    for text in texts
    if text is not None and re.search("NaN|Infinity", text)
)
"""Numbers that JSON can't hold: formats in JSON with a schema refuse them."""


def without(left_out: frozenset[Kind]) -> Tables:
    """The samples, with null in place of those left out."""
    return {
        table: {
            kind: tuple(None if (kind, text) in left_out else text for text in texts)
            for kind, texts in types.items()
        }
        for table, types in _SAMPLES.items()
    }


FITTING = without(UNFIT)
FINITE = without(UNFIT | NOT_FINITE)
