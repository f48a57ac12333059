"""Annotations: logical messages at the beginning of a transaction -> headers of its events. Pure.

A message is at the beginning if all numbers (seq) before it are of annotations. It is not published
itself, but takes its number, so that a resumption in the middle finds the same ones. Later
messages of the prefix are ordinary ones.
"""

from collections.abc import Sequence

from schemas.shaping import AnnotationSettings
from services.bridge.events.event import Event
from services.bridge.events.shaping.outbox import Headers
from services.bridge.pgoutput.messages import Message


class Annotations:
    """The annotations of the transaction that is open. `settings` None: there are none."""

    def __init__(self, settings: AnnotationSettings | None) -> None:
        self._settings = settings
        self.headers: Headers = []
        """Headers of each event of the transaction."""
        self.bytes = 0
        """Bytes of these headers."""

    def begin(self) -> None:
        """Forget those of the last transaction."""
        if self.headers:
            self.headers, self.bytes = [], 0

    def take(self, message: Message, seq: int) -> bool:
        """Take a transactional message with number `seq`; False: it is not an annotation."""
        settings = self._settings
        if settings is None or message.prefix != settings.message_prefix:
            return False
        if seq != len(self.headers):
            return False
        self.headers = [*self.headers, (settings.header, message.content)]
        self.bytes += len(settings.header) + len(message.content)
        return True

    def on(self, events: Sequence[Event]) -> list[Event]:
        """Return the events with these headers behind their own."""
        if not self.headers:
            return [*events]
        return [event._replace(headers=[*(event.headers or ()), *self.headers]) for event in events]
