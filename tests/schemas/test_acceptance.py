"""schemas.acceptance: a token takes the refusal that printed it, and nothing else."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from schemas.acceptance import Acceptance, Everything, Kind, Token, of_bytes, short_digest
from schemas.config_option import acceptance_of
from schemas.errors import OperatorNeeded, SettingsError
from schemas.lsn import LSN_MAX
from schemas.settings import BridgeSettings
from tests.providers.tokens import token_of

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
TOKENS = st.builds(Token, st.sampled_from(Kind), TEXT, TEXT)
LSNS = st.integers(0, LSN_MAX)


@given(TOKENS)
def test_a_token_is_read_back_from_hint_file_and_setting(token: Token) -> None:
    text = str(token)
    assert Token.parse(text) == token
    hint = OperatorNeeded("refused", hint="look", token=token).hint
    assert hint.startswith("look; or accept this") and token_of(hint) == text
    assert yaml.safe_load(f"accept: [{text}]") == {"accept": [text]}
    assert BridgeSettings(accept=(text,)).acceptance.tokens == {token}


@given(TOKENS, TOKENS)
def test_a_token_takes_its_own_refusal_and_no_other(token: Token, other: Token) -> None:
    given_ = Acceptance([token])
    assert given_.takes(token) and not given_.unused
    assert given_.takes(other) is (other == token)
    unused = Acceptance([token])
    assert not unused.takes(None)
    for changed in (
        token._replace(subject=f"{token.subject}x"),
        token._replace(bound=f"{token.bound}x"),
        token._replace(kind=next(kind for kind in Kind if kind is not token.kind)),
    ):
        assert not unused.takes(changed)
    assert unused.unused == (str(token),)
    assert Everything().takes(other)


@given(LSNS, st.integers(0, 10**12), LSNS, st.integers(0, 10**12))
def test_lost_wal_is_taken_up_to_its_bytes_from_its_position_on(
    since: int, count: int, at: int, lacking: int
) -> None:
    token, refused = (
        Token(Kind.LOST_WAL, "b@1", of_bytes(*bound)) for bound in ((since, count), (at, lacking))
    )
    assert token.covers(refused) is (since <= at and lacking <= count)
    assert not token.covers(refused._replace(subject="c@1"))
    assert not token._replace(kind=Kind.UNKNOWN_WAL).covers(refused)
    assert not token._replace(bound="by hand").covers(refused)


@pytest.mark.parametrize(
    "text", ["", "divergence", "divergence:a", "nothing:a:b", "divergence:a:b:c"]
)
def test_what_is_no_token_is_refused_before_anything_is_done(text: str) -> None:
    with pytest.raises(SettingsError, match="is not a token"):
        acceptance_of([text])
    with pytest.raises(ValueError, match="is not a token"):
        BridgeSettings(accept=(text,))


def test_the_order_of_parts_makes_no_difference() -> None:
    assert short_digest(["a", "b"]) == short_digest(["b", "a"]) != short_digest(["a", "c"])
