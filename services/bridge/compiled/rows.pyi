"""From a row's bytes to its event; rows.pyx has it."""

from collections.abc import Sequence

from services.bridge.events.row_encoders import Column, Frame

class RowWriter:
    """As services.bridge.events.row_encoders.Write; take_rows calls it. One thread at a time.

    `kinds`: of each column one of forms.KINDS, 0 for those whose encoder is to be called.
    """

    def __init__(
        self,
        event: type,
        topic: str,
        table: str,
        columns: Sequence[Column],
        count: int,
        frame: Frame,
        kinds: Sequence[int],
    ) -> None: ...
