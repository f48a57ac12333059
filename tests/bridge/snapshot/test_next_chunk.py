"""Which table is read next, and which share its chunk."""

from services.bridge.compiled import Messages
from services.bridge.snapshot.next_chunk import NextChunk, may_end, next_chunk
from services.bridge.snapshot.places import RowsBefore
from services.bridge.snapshot.progress import SnapshotPlan, TableProgress
from services.bridge.snapshot.tables import Chunk
from services.bridge.snapshot.visibility import Sight
from tests.bridge.snapshot.test_progress import shape


def test_tables_with_keys_follow_one_that_may_end() -> None:
    tables = [TableProgress(shape(f"public.{name}", "id")) for name in "abcde"]
    one, done, paused, keyless, last = tables
    done.done, paused.paused, keyless.before = True, True, RowsBefore(Sight(1, 1, frozenset()), 1)
    found = SnapshotPlan({table.shape.name: table for table in tables})
    assert next_chunk(found, (), {}, 10) == NextChunk(one, None, [last])
    assert next_chunk(found, (), {"public.a": 11}, 10) == NextChunk(one, None, [])
    assert may_end(0, -1, 10) and may_end(0, 10, 10) and not may_end(0, 11, 10)
    assert may_end(7, 17, 10) and not may_end(7, 18, 10)
    assert not may_end(7, -1, 10) and not may_end(7, 7, 10), "it has more than was thought"


def test_the_chunk_behind_one_that_is_not_in_kafka_yet() -> None:
    tables = [TableProgress(shape(f"public.{name}", "id")) for name in "ab"]
    one, two = tables
    found = SnapshotPlan({table.shape.name: table for table in tables})
    rows: list[Messages] = [[(0, b"row")] * 8]
    part, end = Chunk(rows, ["8"], 8, ends=False), Chunk([], None, 0, ends=True)
    assert next_chunk(found, [(one, part)], {"public.a": 19}, 10) == NextChunk(one, ["8"], [])
    assert next_chunk(found, [(one, part)], {"public.a": 18}, 10) == NextChunk(one, ["8"], [two])
    one.last = ["8"]
    empty = Chunk([], None, 0, ends=False)
    assert next_chunk(found, [(one, empty)], {}, 10) == NextChunk(one, ["8"], [two])
    assert next_chunk(found, [(one, end)], {}, 10) == NextChunk(two, None, [])
    assert next_chunk(found, [(one, end), (two, part)], {}, 10) == NextChunk(two, ["8"], [])
    assert next_chunk(found, [(one, end), (two, end)], {}, 10) is None
