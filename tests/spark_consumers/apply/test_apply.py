"""Epochs that the driver applies: whatever the cut, the rows are the fold of all events."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_consumers.apply.apply import apply
from spark_consumers.apply.merging import FILES_MAX, ROWS_MAX, chosen
from spark_consumers.epochs.few_events import Bounds, own_events
from spark_consumers.events.unsuited import Unsuited
from spark_consumers.kafka.few_records import Record
from tests.spark_consumers.apply.in_memory import Files, layout, record

NUMBERS = layout({"id": "int8", "v": "text"}, ("id",))
PAIRS = layout({"a": "text", "day": "date", "v": "text"}, ("a", "day"))
NOTES = layout({"v": "text"}, ())
TOPIC = "p.public.t"
NOTHING, ALL = -1, 2**62
keys = st.integers(0, 7)
steps = st.lists(
    st.lists(
        st.tuples(st.sampled_from("ucdr"), keys, st.text(max_size=20)), min_size=1, max_size=6
    ),
    min_size=1,
    max_size=12,
)
"""Transactions of (operation, key, value)."""


def row(of: Any, number: int, text: str) -> dict[str, Any]:
    names = {"id": number, "a": "é" * (number % 3), "day": number - 3, "v": text}
    return {name: names[name] for name in of.shape.names}


def history(of: Any, transactions: Any) -> list[Record]:
    """The records of transactions, in order, with offsets."""
    found: list[Record] = []
    for place, changes in enumerate(transactions):
        for seq, (op, number, text) in enumerate(changes):
            one = row(of, number, text)
            found.append(record(op, one, 100 * (place + 1), seq, of.shape.key, offset=len(found)))
    return found


def fold(of: Any, records: list[Record]) -> set[tuple[Any, ...]]:
    """The rows that a table has after all events, by the events' own JSON."""
    rows: dict[Any, tuple[Any, ...]] = {}
    for number, one in enumerate(records):
        event = json.loads(one.value)
        image = event["before"] if event["op"] == "d" else event["after"]
        key = tuple(image[name] for name in of.shape.key) or number
        rows.pop(key, None)
        if event["op"] != "d":
            place = event["source"]["commit_lsn"], event["source"]["seq"]
            rows[key] = (*image.values(), *place)
    return set(rows.values())


def plain(found: dict[str, Any]) -> tuple[Any, ...]:
    day = found.get("day")
    values = found if day is None else found | {"day": day.toordinal() - 719163}
    return tuple(values.values())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([NUMBERS, PAIRS]), steps, st.data())
def test_any_cut_gives_the_fold_of_all_events(of: Any, transactions: Any, data: Any) -> None:
    records, files, at = history(of, transactions), Files(of), 0
    last = 100 * len(transactions)
    while at < last:
        upto = data.draw(st.integers(at // 100 + 1, len(transactions))) * 100
        again = data.draw(st.booleans())
        for commits in (False, True) if again else (True,):  # a kill before the commit leaves files
            given = records + data.draw(st.lists(st.sampled_from(records), max_size=3))
            own, summary = own_events(given, TOPIC, Bounds(at, upto, at))
            assert summary.distinct_rows == sum(
                at < 100 * (n + 1) <= upto for n, t in enumerate(transactions) for _ in t
            )
            small = files.small(data.draw(st.integers(0, 3)))
            applied = apply(of, files.table(), own, files.locate, small)
            if commits:
                files.commit(applied)
        at = upto
        found = [plain(one) for one in files.rows()]
        assert len(set(found)) == len(found)
        upto_now = [r for r in records if json.loads(r.value)["source"]["commit_lsn"] <= at]
        assert set(found) == fold(of, upto_now)


@settings(max_examples=50, deadline=None)
@given(steps)
def test_a_table_without_a_key_keeps_each_insert_once(transactions: Any) -> None:
    inserts = [[("c", n, text) for _, n, text in changes] for changes in transactions]
    records, files = history(NOTES, inserts), Files(NOTES)
    own, _ = own_events(records + records[:2], TOPIC, Bounds(NOTHING, ALL, NOTHING))
    files.commit(apply(NOTES, files.table(), own, files.locate))
    assert sorted(map(plain, files.rows())) == sorted(fold(NOTES, records))


def test_a_file_without_rows_is_removed_whole() -> None:
    files = Files(NUMBERS)
    for place, op in enumerate("cud"):
        one = record(op, row(NUMBERS, 1, op), 100 * (place + 1), 0, ("id",))
        own, _ = own_events([one], TOPIC, Bounds(100 * place, ALL, 100 * place))
        files.commit(apply(NUMBERS, files.table(), own, files.locate))
    assert not files.data
    assert not files.vectors


@pytest.mark.parametrize(
    "value",
    [
        *(b"x", b"[]", b"{}", b"null", b"\xff", b'{"op": "c", "op": "c"}', b'{"op": NaN}'),
        json.dumps({"op": "c", "source": None, "after": {}}).encode(),
    ],
)
def test_a_record_that_is_no_event_is_left_to_spark(value: bytes) -> None:
    with pytest.raises(Unsuited):
        own_events([Record(TOPIC, 0, 0, b"1", value)], TOPIC, Bounds(NOTHING, ALL, NOTHING))


@pytest.mark.parametrize(
    "change",
    [
        *({"id": None}, {"id": "1.5"}, {"id": 2**70}, {"id": "01"}, {"more": 1}, {"id": True}),
        {"v": "\ud800"},
    ],
)
def test_a_row_that_does_not_fit_is_left_to_spark(change: dict[str, Any]) -> None:
    given = row(NUMBERS, 1, "a") | change
    if "\ud800" in given["v"]:
        text = '{"op":"c","source":{"schema":"public","table":"t","commit_lsn":1,"seq":0},"after":'
        value = f'{text}{{"id":1,"v":"\\ud800"}}}}'.encode()
        one = Record(TOPIC, 0, 0, b"1", value)
    else:
        one = record("c", given, 100, 0, ("id",))
    with pytest.raises(Unsuited):
        own, _ = own_events([one], TOPIC, Bounds(NOTHING, ALL, NOTHING))
        apply(NUMBERS, Files(NUMBERS).table(), own, Files(NUMBERS).locate)


@given(st.lists(st.integers(1, 30_000), max_size=60))
def test_small_files_of_one_size_are_put_together(rows: list[int]) -> None:
    files = [{"record-count": count, "file-size-in-bytes": 10 * count} for count in rows]
    found = chosen(files)
    while found:
        assert len(found) >= FILES_MAX
        total = sum(file["record-count"] for file in found)
        files = [file for file in files if not any(file is one for one in found)]
        files.append({"record-count": total, "file-size-in-bytes": 10 * total})
        found = chosen(files)
    assert sum(file["record-count"] for file in files) == sum(rows)
    assert sum(file["record-count"] <= ROWS_MAX for file in files) <= 6 * FILES_MAX
