"""Works on several tables at once."""

import contextlib
import queue
from collections.abc import Callable, Iterable
from typing import TypeVar

from pyspark import InheritableThread

from spark_consumers.liveness import tick

_TABLES_AT_ONCE = 4
Item = TypeVar("Item")


def at_once(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Do `work` for each of `items`, several at once; then raise the first failure, if any.

    These threads give their connections to Java back when they end, those of an executor do not.
    """
    waiting: queue.SimpleQueue[Item] = queue.SimpleQueue()
    failures: list[Exception] = []

    def take() -> None:
        with contextlib.suppress(queue.Empty):
            while not failures:
                item = waiting.get_nowait()
                try:
                    work(item)
                except Exception as error:
                    failures.append(error)
                tick()

    for item in items:
        waiting.put(item)
    threads = [InheritableThread(target=take) for _ in range(min(_TABLES_AT_ONCE, waiting.qsize()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
