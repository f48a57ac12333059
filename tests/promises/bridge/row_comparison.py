"""Rows as events make them against rows as the database has them."""

import json
from collections import Counter
from typing import Any

Values = dict[str, Any]


def compare(name: str, truth: list[Values], rebuilt: list[Values]) -> int:
    """How many values of `rebuilt` are not known. Raises AssertionError for any difference."""
    left = Counter(_canonical(row) for row in truth)
    partial = []
    for row in rebuilt:
        text = _canonical(row)
        if left[text] > 0:
            left[text] -= 1
        else:
            partial.append(row)
    rest = [json.loads(text) for text in left.elements()]
    unknown = 0
    for row in partial:
        match = next((known for known in rest if row.items() <= known.items()), None)
        assert match is not None, (
            f"{name}: {str(row)[:500]} is not in the database: {str(rest)[:500]}"
        )
        rest.remove(match)
        unknown += len(match) - len(row)
    assert not rest, f"{name}: {len(rest)} rows are not in Kafka: {str(rest)[:500]}"
    return unknown


def _canonical(row: Values) -> str:
    return json.dumps(row, sort_keys=True)
