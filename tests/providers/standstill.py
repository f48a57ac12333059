"""A witness of the machine: for how long has nothing run here?"""

import threading
import time
from typing import Final, Self

_TICK_S: Final = 0.05


class Standstill:
    """Notes the longest time that this process was not let run, until the block is left.

    A session that is lost while nothing runs tells nothing about the program.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="standstill", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        since = time.monotonic()
        while not self._ended.wait(_TICK_S):
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - since - _TICK_S)
            since = now
