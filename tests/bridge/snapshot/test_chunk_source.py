"""What a chunk from a standby waits for, and what that costs. No servers."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import pytest

from services.bridge.snapshot.chunk_source import ChunkSource
from services.bridge.snapshot.next_chunk import NextChunk
from services.bridge.snapshot.reader_thread import ReaderThread
from services.bridge.snapshot.row_reader import NotNow
from services.bridge.snapshot.tables import Chunk
from services.bridge.snapshot.visibility import PublishedXids, Sight
from services.waiter import Waiter

WAIT_S = 0.2


def table(name: str, oid: int) -> Any:
    return SimpleNamespace(
        shape=SimpleNamespace(name=name, relation=SimpleNamespace(oid=oid)),
        before=None,
        last=None,
        where="",
        asked=False,
    )


TABLE, *OTHERS = [table(name, oid) for oid, name in enumerate("tuvw", 1)]
ALONE = NextChunk(TABLE, None, [])


class Server:
    """Stands for the primary and for its standby, which lags."""

    name = "s"

    def __init__(self) -> None:
        self.lags = False
        self.versions = {"c": "1"}
        self.patience: list[float] = []
        self.begun: list[list[str]] = []
        self.locked: str | None = None
        self.broken: str | None = None

    def await_replay(self, _lsn: int, patience_s: float) -> bool:
        self.patience.append(patience_s)
        time.sleep(WAIT_S * (not self.lags))
        if self.lags:
            raise NotNow("behind")
        return True

    approach = await_replay

    def read(self, *_: Any, **_limits: Any) -> Chunk:
        return Chunk([], None, 4, ends=True, bytes=40)

    def read_each(self, tables: Any, *, rows_max: int, bytes_max: int) -> list[Chunk]:
        if self.broken in [shape.name for shape, *_ in tables]:
            raise NotNow("it takes too long")
        tables = tables[:rows_max]
        looked_at = min(4, rows_max // max(1, len(tables)))
        return [Chunk([], None, looked_at, ends=True, bytes=40) for _ in tables]

    def begin(self, *shapes: Any) -> Sight:
        self.begun.append([shape.name for shape in shapes])
        if self.locked in self.begun[-1]:
            raise NotNow("a lock is held")
        return Sight(9, 9, frozenset())

    def shapes(self, oids: Any) -> list[Any]:
        return [one.shape for one in (TABLE, *OTHERS) if one.shape.relation.oid in oids]

    def order_versions(self, shape: Any, _: Any) -> dict[str, str]:
        return {"c": "1"} if shape.name == "t" else self.versions

    def finish(self) -> int:
        return 5

    def end(self) -> None:
        return

    def mark(self, _: str) -> int:
        return 5

    flushed_lsn = finish

    def has_standbys_up_to(self, _: int) -> bool:
        return True


@pytest.fixture
def thread() -> Iterator[ReaderThread]:
    thread = ReaderThread(Waiter())
    yield thread
    thread.close()


def source_of(
    thread: ReaderThread,
    standby: Any,
    standby_wait_s: float = 5,
    *,
    primary: Any = None,
    hold_s: float = 60,
) -> ChunkSource:
    primary = primary or Server()
    wait: dict[str, Any] = {"standby_wait_s": standby_wait_s, "hold_s": hold_s}
    return ChunkSource(primary, standby, thread, **wait, workers=2)


def taken(source: ChunkSource, *, rows_max: int = 100, bytes_max: int = 1000) -> str:
    wanted = NextChunk(TABLE, None, OTHERS)
    seen = source.take("token", wanted, PublishedXids(), rows_max, bytes_max)
    return "".join(one.shape.name for one, _ in seen.chunks)


def test_a_call_that_ends_just_after_a_look_gives_its_result(
    thread: ReaderThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Future.done

    def done_a_little_later(future: Future[Any]) -> bool:
        wait((future,), 30)
        return ended(future)

    monkeypatch.setattr(Future, "done", done_a_little_later)
    assert thread.call(slow) == "read"
    with pytest.raises(TimeoutError, match="of PostgreSQL"):
        thread.call(fails, TimeoutError("of PostgreSQL"))


def slow() -> str:
    time.sleep(0.05)
    return "read"


def fails(error: Exception) -> None:
    raise error


def test_the_wait_for_a_replay_does_not_count_as_reading(thread: ReaderThread) -> None:
    source = source_of(thread, Server())
    began = time.monotonic()
    seen = source.take("token", ALONE, PublishedXids(), 1, 1)
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
            source.take("token", ALONE, PublishedXids(), 1, 1)
    assert standby.patience[7:] == [0.5, 1, 2, 4, 8, 16, 30]


def test_a_table_that_the_standby_orders_otherwise_is_read_from_the_primary(
    thread: ReaderThread,
) -> None:
    standby: Any = Server()
    standby.order_versions = lambda *_: {"c": "2"}
    source = source_of(thread, standby)
    for _ in range(2):
        seen = source.take("token", ALONE, PublishedXids(), 1, 1)
        assert seen.read_from == "primary"
    assert len(standby.patience) == 1, "it is not waited for again"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, "tuvw"),
        ({"rows_max": 5}, "tu"),
        ({"rows_max": 12}, "tuv"),
        ({"bytes_max": 100}, "tuv"),
        ({"rows_max": 4}, "t"),
    ],
)
@pytest.mark.parametrize("on_standby", [False, True])
def test_tables_behind_one_that_ends_are_read_with_it_within_the_limits_of_a_chunk(
    limits: dict[str, int], expected: str, on_standby: bool, thread: ReaderThread
) -> None:
    standby = Server() if on_standby else None
    assert taken(source_of(thread, standby), **limits) == expected


def test_no_other_table_is_begun_once_the_stream_has_stood_still_long_enough(
    thread: ReaderThread,
) -> None:
    assert taken(source_of(thread, None, hold_s=0)) == "t"


def test_tables_that_can_not_all_be_locked_are_read_one_by_one_for_a_time(
    thread: ReaderThread,
) -> None:
    primary = Server()
    primary.locked = "v"
    source = source_of(thread, None, primary=primary)
    with pytest.raises(NotNow, match="a lock is held"):
        taken(source)
    assert taken(source) == "t"
    assert primary.begun == [["t", "u", "v", "w"], ["t"]]


def test_an_error_of_another_table_takes_nothing_from_the_first_one(thread: ReaderThread) -> None:
    """On a standby the transaction is needed to the end: the chunk is read again without others."""
    primary = Server()
    primary.broken = "u"
    source = source_of(thread, None, primary=primary)
    assert [taken(source), taken(source)] == ["t", "t"]
    assert primary.begun[-1] == ["t"]
    standby = Server()
    standby.broken = "u"
    source = source_of(thread, standby)
    with pytest.raises(NotNow, match="another table"):
        taken(source)
    assert taken(source) == "t"


def test_other_tables_that_the_standby_orders_otherwise_are_left_out(thread: ReaderThread) -> None:
    standby = Server()
    standby.versions = {"c": "2"}
    primary: Any = Server()
    primary.order_versions = lambda *_: {"c": "1"}
    source = source_of(thread, standby, primary=primary)
    assert taken(source) == "t"
    assert primary.begun == [["t", "u", "v", "w"]]
    assert taken(source) == "t"
    assert primary.begun[-1] == ["t"], "the others are read from the primary"


def test_a_chunk_that_is_read_ahead_is_taken_where_it_shows_all_that_was_published(
    thread: ReaderThread,
) -> None:
    """Its database snapshot sees xids below 9, as any here."""
    primary = Server()
    source, published = source_of(thread, None, primary=primary), PublishedXids()
    source.read_ahead("token", ALONE, 1, 1)
    published.add([8])
    assert source.take("token", ALONE, published, 1, 1).chunks
    assert len(primary.begun) == 1
    source.read_ahead("token", ALONE, 1, 1)
    published.add([9])
    with pytest.raises(NotNow, match="not visible yet"):
        source.take("token", ALONE, published, 1, 1)
    assert len(primary.begun) > 2, "it was read again"


@pytest.mark.parametrize(
    ("token", "wanted"),
    [
        ("other", ALONE),
        ("token", NextChunk(OTHERS[0], None, [])),
        ("token", NextChunk(TABLE, ["7"], [])),
    ],
)
def test_another_chunk_than_the_one_that_is_read_ahead_is_read(
    token: str, wanted: NextChunk, thread: ReaderThread
) -> None:
    primary = Server()
    source = source_of(thread, None, primary=primary)
    source.read_ahead("token", ALONE, 1, 1)
    ((table, _),) = source.take(token, wanted, PublishedXids(), 1, 1).chunks
    assert table is wanted.table
    assert len(primary.begun) == 2
    source.take("token", ALONE, PublishedXids(), 1, 1)
    assert len(primary.begun) == 3, "what was read ahead is good for one mark"


def test_what_keeps_a_chunk_from_being_read_ahead_postpones_it(thread: ReaderThread) -> None:
    primary = Server()
    primary.locked = "t"
    source = source_of(thread, None, primary=primary)
    source.read_ahead("token", ALONE, 1, 1)
    with pytest.raises(NotNow, match="a lock is held"):
        source.take("token", ALONE, PublishedXids(), 1, 1)
