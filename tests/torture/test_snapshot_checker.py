"""The checker of snapshots finds what is planted, each kind as itself, and nothing else."""

import json
from collections.abc import Callable, Hashable

import pytest

from schemas.snapshot import SnapshotProgress, SnapshotRequest
from tests.promises.bridge.reading import Record
from tests.torture.checker import Repair
from tests.torture.snapshot_checker import (
    Told,
    Versions,
    check_snapshots,
    incomplete,
    unfinished,
)

SIGNALS = ("s1",)


def row(lsn: int, key: int, offset: int, table: str = "t") -> Record:
    source = {"commit_lsn": lsn, "seq": offset, "table": table}
    event = {"op": "r", "after": {}, "source": source}
    return Record("p.t", 0, offset, b"%d" % key, json.dumps(event).encode(), {})


def boundary(lsn: int, status: str, offset: int, count: int = 0, others: int = 0) -> Record:
    counts = {"public.t": count, "public.u": others}
    collections = [{"data_collection": name, "event_count": n} for name, n in counts.items() if n]
    value = {"status": status, "id": f"0:{lsn}", "commit_lsn": lsn}
    content = json.dumps(value | {"data_collections": collections or None}).encode()
    return Record("p.transaction", 0, offset, None, content, {})


def chunk(lsn: int, offset: int, *keys: int) -> list[Record]:
    rows = [row(lsn, key, offset + number) for number, key in enumerate(keys)]
    return [
        *(boundary(lsn, "BEGIN", offset), *rows),
        boundary(lsn, "END", offset + 1, len(keys)),
    ]


def progress(
    lsn: int, chunks: int, rows: int, *, done: bool = False, table: str = "t"
) -> SnapshotProgress:
    return SnapshotProgress.model_validate(
        {"slot": "s", "schema": "public", "table": table, "oid": 1, "key": ["id"], "last": ["1"]}
        | {"rows": rows, "chunks": chunks, "done": done, "timeline": 1, "commit_lsn": lsn}
        | {"seq": 0, "ts_ms": 0, "waiting": 0}
    )


def request(lsn: int, kind: str = "read", where: str = "") -> SnapshotRequest:
    return SnapshotRequest.model_validate(
        {"slot": "s", "id": "s1", "type": kind, "tables": "public.t", "where": where}
        | {"timeline": 1, "commit_lsn": lsn, "seq": 0, "ts_ms": 0}
    )


def good() -> tuple[list[Record], Told]:
    """Two chunks, a request, and all anew; markers are at the offsets between."""
    records = [*chunk(10, 0, 1, 2), *chunk(20, 10, 3), *chunk(40, 20, 1, 2, 3)]
    told = [progress(10, 1, 2), progress(20, 2, 3, done=True), progress(40, 1, 3, done=True)]
    return records, Told(told, [request(30)])


def of_tens(_topic: str, _partition: int, offset: int) -> Hashable:
    return offset // 10


def kinds(
    records: list[Record],
    told: Told,
    kafka_transaction_of: Callable[[str, int, int], Hashable] = of_tens,
) -> set[str]:
    return {one.kind for one in check_snapshots(records, told, SIGNALS, kafka_transaction_of)}


def test_complete_topics_have_no_finding() -> None:
    assert kinds(*good()) == set()


def test_a_chunk_of_two_tables_has_progress_of_both() -> None:
    records, told = good()
    rows = [row(50, 1, 30), row(50, 1, 30, "u"), row(50, 2, 31, "u")]
    records += [boundary(50, "BEGIN", 30), *rows, boundary(50, "END", 31, 1, 2)]
    told = Told(
        [*told.progress, progress(50, 1, 1), progress(50, 1, 2, table="u")],
        [*told.requests, request(45).model_copy(update={"id": "s2"})],
    )
    assert kinds(records, told) == set()
    assert kinds(records, Told(told.progress[:-1], told.requests)) == {"torn"}


def test_a_key_that_is_read_twice() -> None:
    records, told = good()
    records[5] = row(20, 2, 10)
    assert kinds(records, told) == {"duplicated"}


def test_a_snapshot_that_begins_anew_though_nobody_asked() -> None:
    records, told = good()
    found = check_snapshots(records, Told(told.progress, []), (), of_tens)
    assert "duplicated" in {one.kind for one in found}


def test_a_chunk_without_its_progress() -> None:
    records, told = good()
    del told.progress[1]
    assert kinds(records, told) == {"torn"}


def test_progress_without_its_rows() -> None:
    records, told = good()
    assert kinds(
        [one for one in records if b'"commit_lsn": 20' not in (one.value or b"")], told
    ) == {"lost"}


def test_a_chunk_that_is_left_out() -> None:
    records, told = good()
    told.progress[1] = progress(20, 3, 3, done=True)
    assert kinds(records, told) == {"lost"}


def test_a_chunk_in_two_kafka_transactions() -> None:
    assert kinds(*good(), lambda _topic, _partition, offset: offset // 10 + (offset == 22)) == {
        "torn"
    }


@pytest.mark.parametrize("missing", [0, 3])
def test_a_chunk_without_a_boundary(missing: int) -> None:
    records, told = good()
    del records[missing]
    assert kinds(records, told) == {"torn"}


def test_a_signal_that_is_not_heard_or_twice() -> None:
    records, told = good()
    assert kinds(records, Told(told.progress, [request(30), request(30)])) == {"duplicated"}
    found = check_snapshots(records, told, ("s1", "s2"), of_tens)
    assert [one.kind for one in found] == ["lost"]


def test_tables_that_are_not_read_yet_are_unfinished() -> None:
    _, told = good()
    assert unfinished(told, ["t"]) == []
    assert unfinished(told, ["t", "u"]) == ["u"]
    assert unfinished(Told(told.progress, [request(50)]), ["t"]) == ["t"]
    assert unfinished(Told(told.progress[:1], []), ["t"]) == ["t"]
    assert unfinished(Told(told.progress[:1], [request(15, "stop")]), ["t"]) == []


def test_stopped_or_partial_reads_are_incomplete() -> None:
    _, told = good()
    assert incomplete(told, ["t"]) == []
    assert incomplete(Told(told.progress, [request(50, "stop")]), ["t"]) == ["t"]
    assert incomplete(Told(told.progress, [request(50, where="x")]), ["t"]) == ["t"]


def test_a_repair_completes_a_snapshot_and_its_signals_are_not_heard() -> None:
    records, told = good()
    told.progress[2:] = [progress(35, 1, 3, done=True), progress(40, 1, 3, done=True)]
    told.requests[:] = [request(38)]
    source = {"commit_lsn": 35, "seq": 0, "table": "signals", "snapshot": "repair"}
    event = {"op": "c", "source": source, "after": {"id": "s2"}}
    repair = Record("p.signals", 0, 0, b"s2", json.dumps(event).encode(), {})
    end = boundary(35, "END", 15, 1)
    found = check_snapshots(
        [*records, repair, end], told, ("s1", "s2"), of_tens, [Repair(25, 36, 35)]
    )
    assert found == []


def change(lsn: int, op: str, tid: str = "", key: bytes | None = b"1") -> Record:
    after = {"tid": tid} if tid else None
    event = {"op": op, "after": after, "source": {"commit_lsn": lsn, "seq": 0, "table": "t"}}
    return Record("p.t", 0, lsn, key, json.dumps(event).encode(), {})


@pytest.mark.parametrize(
    ("changes", "stale"),
    [
        ([], False),
        ([change(10, "u", "old")], False),
        ([change(10, "u", "old"), change(20, "u", "other")], True),
        ([change(10, "u", "other"), change(30, "u", "old")], False),
        ([change(10, "c", "old"), change(20, "d")], True),
        ([change(10, "c", "old"), change(20, "t", key=None)], True),
        ([change(20, "t", key=None), change(30, "c", "old")], False),
    ],
)
def test_a_row_that_is_older_than_a_change_before_it(changes: list[Record], stale: bool) -> None:
    versions = Versions()
    for one in [*changes, change(25, "r", "old")]:
        assert one.value is not None
        versions.take(one, json.loads(one.value))
    assert [one.kind for one in versions.stale()] == ["stale"] * stale
