"""The tokens that refusals print, as an operator copies them."""

import re

_OFFER = re.compile(r"--accept ([a-z-]+:[^\s:;,)\"]*:[^\s:;,)\"]+)")


def tokens_of(text: str) -> list[str]:
    """Return the tokens that a text offers, in its order, each once."""
    return list(dict.fromkeys(_OFFER.findall(text)))


def token_of(text: str) -> str:
    """Return the last token that a text offers."""
    found = tokens_of(text)
    assert found, text
    return found[-1]
