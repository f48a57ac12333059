"""How often to read. Pure: time (time.monotonic) is an argument.

Who reads faster than the walsender sends is woken by each few messages, and takes a turn of the
loop for them. So where many come there is a rest before each read, in which more gather.
"""

from typing import Final

REST_S: Final = 0.001
MANY_PER_S: Final = 40_000
"""So many messages in a second are worth it; a client waits at most REST_S longer."""
WINDOW_S: Final = 0.02
"""Of what came in so long, the rate is taken."""
BEHIND_MESSAGES: Final = 100
"""As many at once say that the server has sent faster than we have read."""
BEHIND_AFTER_REST_MESSAGES: Final = 1_000


class Pace:
    """One session's."""

    def __init__(self) -> None:
        self._since = 0.0
        self._messages = 0
        self._rests = False

    def rest_s(self, now: float) -> float:
        """How long to rest before the next read; 0.0: not at all."""
        passed_s = now - self._since
        if passed_s >= WINDOW_S:
            self._rests = self._messages > MANY_PER_S * passed_s
            self._since, self._messages = now, 0
        return REST_S if self._rests else 0.0

    def behind(self, messages: int) -> bool:
        """`messages` were read at once: whether there may be more to read than that."""
        self._messages += messages
        return messages >= (BEHIND_AFTER_REST_MESSAGES if self._rests else BEHIND_MESSAGES)
