"""Messages in, many for one step of the interpreter; messages.pyx has it."""

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

def copy_lines(
    function: int,
    connection: int,
    nonblocking: bool,
    messages: Messages,
    head: bytes,
    width: int,
    keys: int,
    filtered: bool,
    rows_max: int,
    bytes_max: int,
    /,
) -> tuple[int, int, int, bytes]:
    """As services.bridge.snapshot.copied_rows.plain_lines; the first two are addresses.

    Without the GIL, also while it waits for the server.
    """
