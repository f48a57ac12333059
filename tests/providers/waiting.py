"""Waiting for what a server will do soon, as patiently as this machine is slow."""

import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

Answer = TypeVar("Answer")
LEAST: Final = 3.0
"""Each wait may last at least so many times what it is given: servers share a few processors."""
MOST: Final = 20.0
_WORK: Final = range(400_000)
_USUAL_S: Final = 0.02
"""What `_WORK` takes on a processor that has nothing else to do."""


def factor(work_s: float, load: float, processors: int) -> float:
    """How many times longer than on a quiet machine a wait may last.

    `work_s`: what the fixed piece of work took; `load`: how many processes want a processor.
    """
    return min(MOST, LEAST * max(1.0, work_s / _USUAL_S, load / processors))


def measured() -> float:
    """The factor of this machine now. Wall time counts: of a slow processor and of a shared one."""
    since = time.perf_counter()
    sum(number * number for number in _WORK)
    work_s = time.perf_counter() - since
    return factor(work_s, os.getloadavg()[0], os.cpu_count() or 1)


class Machine:
    """How slow this machine is: measured once, and again where a wait runs out."""

    def __init__(self, measure: Callable[[], float] = measured) -> None:
        self._measure = measure
        self._factor = 0.0

    def patient(self, seconds: float) -> float:
        """How long to wait here for what takes at most `seconds` on a quiet machine."""
        if not self._factor:
            self._factor = self._measure()
        return seconds * self._factor

    def look_again(self) -> None:
        """Measure again; a wait never becomes shorter."""
        self._factor = max(self._factor, self._measure())

    def eventually(
        self,
        ask: Callable[[], Answer],
        *,
        what: str,
        timeout_s: float = 30.0,
        interval_s: float = 0.02,
    ) -> Answer:
        """Call `ask` until its answer is true and return it.

        Fails, naming `what`, after `patient(timeout_s)`.
        """
        since = time.monotonic()
        while not (answer := ask()):
            waited_s = time.monotonic() - since
            if waited_s > self.patient(timeout_s):
                self.look_again()  # a load may have come later
            if waited_s > self.patient(timeout_s):
                raise AssertionError(
                    f"not within {waited_s:.0f} s: {what} (last answer: {answer!r})"
                )
            time.sleep(interval_s)
        return answer


_this: Final = Machine()
patient = _this.patient
"""For a time-out that must end only what hangs: `subprocess.run(…, timeout=patient(60))`."""
eventually = _this.eventually


def patient_ms(milliseconds: float) -> int:
    """`patient`, for settings in milliseconds."""
    return round(patient(milliseconds))
