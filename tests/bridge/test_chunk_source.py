"""What a chunk from a standby waits for, and what that costs. No servers."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.bridge.snapshot.chunk_source import ChunkSource
from services.bridge.snapshot.reader_thread import ReaderThread
from services.bridge.snapshot.row_reader import NotNow
from services.bridge.snapshot.tables import Chunk
from services.bridge.snapshot.visibility import PublishedXids, Sight

WAIT_S = 0.2
TABLE: Any = SimpleNamespace(
    shape=SimpleNamespace(name="t", relation=SimpleNamespace(oid=1)),
    before=None,
    last=None,
    where="",
    asked=False,
)


class Server:
    """Stands for the primary and for its standby, which lags."""

    name = "s"

    def __init__(self) -> None:
        self.lags = False
        self.versions = {"c": "1"}
        self.patience: list[float] = []

    def await_replay(self, _lsn: int, patience_s: float) -> bool:
        self.patience.append(patience_s)
        time.sleep(WAIT_S * (not self.lags))
        if self.lags:
            raise NotNow("behind")
        return True

    approach = await_replay

    def read(self, *_: Any, **_limits: Any) -> Chunk:
        return Chunk([], None, 0, ends=True)

    def begin(self, _: Any) -> Sight:
        return Sight(9, 9, frozenset())

    def shape(self, _: int) -> Any:
        return TABLE.shape

    def order_versions(self, *_: Any) -> dict[str, str]:
        return self.versions

    def finish(self) -> int:
        return 5

    def end(self) -> None:
        return

    def mark(self, _: str) -> int:
        return 5

    def search_path(self) -> str:
        return "public"

    def set_search_path(self, search_path: str) -> None:
        self.searched = search_path

    flushed_lsn = finish

    def has_standbys_up_to(self, _: int) -> bool:
        return True


@pytest.fixture
def thread() -> Iterator[ReaderThread]:
    thread = ReaderThread(lambda: None)
    yield thread
    thread.close()


def source_of(thread: ReaderThread, standby: Any, standby_wait_s: float = 5) -> ChunkSource:
    primary: Any = Server()
    return ChunkSource(primary, standby, thread, standby_wait_s=standby_wait_s)


def test_the_wait_for_a_replay_does_not_count_as_reading(thread: ReaderThread) -> None:
    source = source_of(thread, Server())
    began = time.monotonic()
    seen = source.take(TABLE, PublishedXids(), rows_max=1, bytes_max=1)
    assert WAIT_S <= seen.waited_s <= time.monotonic() - began
    assert seen.read_from == "standby"


def test_a_standby_that_always_lags_is_waited_for_longer_each_time(thread: ReaderThread) -> None:
    standby = Server()
    standby.lags = True
    source = source_of(thread, standby)
    for _ in range(5):
        with pytest.raises(NotNow, match="behind"):
            source.mark("token", TABLE).result()
    assert standby.patience == [1, 2, 4, 5, 5]
    standby.lags = False
    source.mark("token", TABLE).result()
    source.mark("token", TABLE).result()
    assert standby.patience[-2:] == [5, 2.5]
    assert standby.searched == "public", "that of the primary"


def test_a_standby_that_is_always_late_is_waited_for_as_long_as_the_settings_say(
    thread: ReaderThread,
) -> None:
    standby = Server()
    standby.lags = True
    source = source_of(thread, standby, standby_wait_s=30)
    for _ in range(7):
        with pytest.raises(NotNow, match="behind"):
            source.mark("token", TABLE).result()
    assert standby.patience == [1, 2, 4, 8, 16, 30, 30]
    for _ in range(7):
        with pytest.raises(NotNow, match="behind"):
            source.take(TABLE, PublishedXids(), rows_max=1, bytes_max=1)
    assert standby.patience[7:] == [0.5, 1, 2, 4, 8, 16, 30]


def test_a_table_that_the_standby_orders_otherwise_is_read_from_the_primary(
    thread: ReaderThread,
) -> None:
    standby = Server()
    standby.versions = {"c": "2"}
    source = source_of(thread, standby)
    for _ in range(2):
        seen = source.take(TABLE, PublishedXids(), rows_max=1, bytes_max=1)
        assert seen.read_from == "primary"
    assert len(standby.patience) == 1, "it is not waited for again"
