"""Messages in and records out, many for one step of the interpreter; messages.pyx has it."""

from collections.abc import Callable

from services.bridge.events.event import Event

class Messages:
    """As a list of them, which are kept one behind the other."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[int, bytes]: ...
    def append(self, message: tuple[int, bytes], /) -> None: ...
    def clear(self) -> None: ...

def gather(function: int, connection: int, messages: Messages) -> tuple[int, bytes, int]:
    """Append to `messages` what PQgetCopyData gives of `connection`, while it is XLogData.

    Both are addresses. Returns (length, data) of the first that is none, data is empty where
    length <= 0; and how many bytes were appended, with their headers.
    """

def send(
    produce: Callable[..., None],
    events: list[Event],
    index: int,
    end: int,
    ready: set[str],
    not_taken: tuple[type[Exception], ...],
) -> int:
    """Produce events[index:end], up to the first that calls for care; its index.

    That is one with headers, for every partition, of a topic that is not in `ready`, or one that
    `produce` refuses with one of `not_taken`.
    """
