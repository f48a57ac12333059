"""The thread that the snapshot's SQL runs in, while the session does its other work."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from services.waiter import Waiter

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
LOOK_S: Final = 0.01
"""How often the session does its other work meanwhile."""


class ReaderThread:
    """One session's, which does its other work meanwhile."""

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")

    def close(self) -> None:
        """Wait until the call that is in progress has ended."""
        self._pool.shutdown(wait=True)

    def submit(
        self,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Future[Result]:
        """Call it in the thread, after whatever was submitted before; do not wait."""
        return self._pool.submit(function, *args, **kwargs)

    def call(
        self,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Call it in the thread and return its result."""
        return self.result(self.submit(function, *args, **kwargs))

    def result(self, future: Future[Result]) -> Result:
        """Wait for the result of what was submitted."""
        self.waiter.wait([future], LOOK_S)
        return future.result()
