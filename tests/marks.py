"""Which cases of a test `make test` leaves to `make test-long`."""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def long_but(kept: Any, values: Iterable[Any]) -> list[Any]:
    """Return `values` as parameters, all of them marked `long` but the one that equals `kept`."""
    return [value if value == kept else _long(value) for value in values]


def _long(value: Any) -> Any:
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.long], id=value.id)
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.long)
