"""Values' usual text forms as JSON; forms.pyx has them."""

from collections.abc import Mapping
from typing import Final

KINDS: Final[Mapping[str, int]]
"""Name of a form -> what RowWriter knows it by."""
