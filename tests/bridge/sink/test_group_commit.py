"""How a session waits for its commits to Kafka. No servers."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.settings import BridgeSettings
from services.bridge.progress.ledger import Ledger, Position
from services.bridge.sink.group_commit import GroupCommit
from tests.promises.bridge.test_topics import record

LOOKS_MAX = 100


class Session:
    """Stands for all that a group commit works with; its commits raise `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.looks = 0
        producer: Any = SimpleNamespace(
            tails=SimpleNamespace(hurry=lambda: None),
            begin=lambda: None,
            commit=self.commit,
            cancel=lambda: None,
        )
        status: Any = SimpleNamespace(interval_s=0.01, answer=self.look, heard=lambda _now: None)
        self.group_commit = GroupCommit(
            *(producer, BridgeSettings(), status, SimpleNamespace()),  # type: ignore[arg-type]
            lambda _position, _counts, _commit: record(1),
            Ledger(Position(1, 1, 0), 1),
            record(1),
            subject="slot s",
            events_of=lambda batch: batch.events,
        )

    def commit(self, _record: object) -> None:
        raise self.error

    def look(self) -> None:
        self.looks += 1
        assert self.looks < LOOKS_MAX, "the commit has ended, and is waited for"


def test_a_commit_that_ends_with_a_time_out_is_not_waited_for_without_end() -> None:
    session = Session(TimeoutError("of a storage"))
    with (
        contextlib.closing(session.group_commit) as group_commit,
        pytest.raises(TimeoutError, match="of a storage"),
    ):
        group_commit.note()
