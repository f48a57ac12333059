"""Waiting for what a server will do soon, with a deadline."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

Answer = TypeVar("Answer")
PATIENCE: Final = 3.0
"""Each wait lasts so many times what it is given: the tests' servers share a few processors."""


def eventually(
    ask: Callable[[], Answer], *, what: str, timeout_s: float = 30.0, interval_s: float = 0.02
) -> Answer:
    """Call `ask` until its answer is true and return it.

    Fails, naming `what`, after PATIENCE * `timeout_s`.
    """
    timeout_s *= PATIENCE
    deadline = time.monotonic() + timeout_s
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what} (last answer: {answer!r})")
        time.sleep(interval_s)
    return answer
