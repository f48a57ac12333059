"""INT, TERM and HUP during a run: noted when they come, heeded where the run can be broken off.

An exception raised out of a signal handler could end a run anywhere: with a statement half asked on
a connection that other threads use, or between an order and its record. So a handler only notes
the signal, and the run asks `check` between steps and while it waits. The second signal of a run is
noted like the first: what takes things back is not broken off.

    before the promotion is ordered   the run is broken off, and taken back
    from then on                      INT, TERM: it stops once the promotion is seen to be done;
                                      HUP (the terminal is gone): it goes on to its end
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

from schemas.errors import ExitCode, Retryable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Retryable):
    """A signal, or the loss of a Lease, asked for the end of the run."""


class Interruption:
    """Records the signals of one run between `__enter__` and `__exit__`."""

    def __init__(self) -> None:
        self.signal = ""
        """The first that came; "" while there was none."""
        self.no_way_back = False
        """The promotion was ordered."""
        self._shields = 0
        self._raises = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._note) for each in SIGNALS}
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)  # type: ignore[arg-type]
        self._before = {}

    def check(self) -> None:
        """Raise Interrupted if a signal came that is heeded here."""
        if not self.signal or self._shields:
            return
        if self.no_way_back and self.signal == signal.SIGHUP.name:
            return
        raise Interrupted(
            f"the run was interrupted by {self.signal}",
            operation="run",
            hint="go on with: slotfailover resume",
            exit_code=ExitCode.DEADLINE,
        )

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """Ignore signals inside the block."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1

    @contextlib.contextmanager
    def ends_what_runs(self) -> Iterator[None]:
        """Let a signal raise at once inside the block: for a program of ours that takes its time.

        Nothing else may be at work in the block, no thread and no connection. Raise Interrupted.
        """
        self.check()
        self._raises = True
        try:
            yield
        except KeyboardInterrupt:
            self.check()
            raise
        finally:
            self._raises = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number).name
        if self._raises and not self._shields:
            raise KeyboardInterrupt


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Run the handlers of SIGNALS that arrive inside only after the block.

    For a block that must not be broken off half-way, such as starting a program: a handler that
    raises between the program's start and the return of its handle leaves it running for ever.
    Outside the main thread, where no handler runs, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {each: handler for each in SIGNALS if callable(handler := signal.getsignal(each))}
    for each in handlers:
        signal.signal(each, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)


class sigterm_interrupts:
    """Treat SIGTERM as Ctrl-C, for commands that clean up when they are interrupted."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, _interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
