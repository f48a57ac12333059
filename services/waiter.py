"""One object for all that waits in a session: what the session does meanwhile, and the waiting.

    turn    do the session's other work once         pause   and then sleep
    wait    until futures are done                    each    between items, now and then

Its owner makes it once, sets `work` as soon as there is any, and hands it to the constructors of
whatever waits. So Kafka's clients and SQL sessions need not know a session, and no function passes
a callback on. As in psycopg (generators, waiting), waiting is one thing, the protocol another.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Item = TypeVar("Item")


def _nothing() -> None:
    """There is no session yet, or a command that does nothing else."""


class Waiter:
    """`work` is what is done meanwhile, often; what it raises ends the wait.

    For one thread, whose work that is.
    """

    def __init__(self, work: Callable[[], None] = _nothing) -> None:
        self.work = work

    def turn(self) -> None:
        """Do the other work once. Raise what ends the wait."""
        self.work()

    def pause(self, seconds: float) -> None:
        """Do the other work, then sleep."""
        self.work()
        time.sleep(seconds)

    def wait(self, futures: Iterable["Future[Any]"], look_s: float) -> None:
        """Return once all are done; do the other work each `look_s` until then."""
        pending = {*futures}
        while pending := wait(pending, look_s).not_done:
            self.work()

    def each(self, items: Iterable[Item], count: int) -> Iterator[Item]:
        """Yield `items`, and do the other work before each `count` of them, and at the end."""
        for number, item in enumerate(items):
            if number % count == 0:
                self.work()
            yield item
        self.work()
