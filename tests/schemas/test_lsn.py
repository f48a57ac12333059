"""LSNs as text and as numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.lsn import LSN_MAX, format_lsn, parse_lsn


@given(st.integers(0, LSN_MAX))
def test_text_and_number_agree(lsn: int) -> None:
    assert parse_lsn(format_lsn(lsn)) == lsn


def test_postgres_writes_it_so() -> None:
    assert format_lsn(0x1_016B3748) == "1/16B3748"


@pytest.mark.parametrize("text", ["", "1", "0/", "/1", "0/123456789", "x/1", "0/1 ", "-1/1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an LSN"):
        parse_lsn(text)


@pytest.mark.parametrize("number", [-1, LSN_MAX + 1])
def test_a_number_beyond_64_bits_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="is not an LSN"):
        format_lsn(number)
