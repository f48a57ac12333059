"""The tokens that refusals print, as an operator copies them."""

import re
from collections.abc import Iterable

from schemas.acceptance import Acceptance, Kind, Token

_OFFER = re.compile(r"--accept ([a-z-]+:[^\s:;,)\"]*:[^\s:;,)\"]+)")


def tokens_of(text: str) -> list[str]:
    """Return the tokens that a text offers, in its order, each once."""
    return list(dict.fromkeys(_OFFER.findall(text)))


def token_of(text: str) -> str:
    """Return the last token that a text offers."""
    found = tokens_of(text)
    assert found, text
    return found[-1]


class Willing(Acceptance):
    """Takes the refusals of `kinds`, the loss of `slots`, and of up to so many bytes of WAL."""

    def __init__(self, *kinds: Kind, slots: Iterable[str] = (), lacking: int | None = None) -> None:
        super().__init__()
        self.kinds, self.slots, self.lacking = frozenset(kinds), frozenset(slots), lacking

    def __repr__(self) -> str:
        return f"Willing({self.kinds}, {self.slots}, {self.lacking})"

    def takes(self, refused: Token | None) -> bool:
        if refused is None:
            return False
        if refused.kind is Kind.LOST_SLOT:
            return refused.subject in self.slots
        if refused.kind in (Kind.LOST_WAL, Kind.UNKNOWN_WAL):
            count = int(refused.bound.partition("+")[2])
            return self.lacking is not None and count <= self.lacking
        return refused.kind in self.kinds
