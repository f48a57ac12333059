"""Where a part of a rebuild ends: pure."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from spark_consumers.epochs.rebuild_topic import missing_partitions
from spark_consumers.events.shape import CommitPosition, Shape, last_replacement
from spark_consumers.iceberg.rebuild_parts import part_end, part_records
from spark_consumers.iceberg.table_note import NEVER, RebuildNote

FIRST = Shape("public", "t", (), (), oid=1)


def since(commit_lsn: int, oid: int = 1) -> Shape:
    return replace(FIRST, since=CommitPosition(commit_lsn, 3), oid=oid)


def test_a_part_ends_where_all_partitions_tell_all() -> None:
    assert part_end({0: 500, 1: 300}, [0, 1], [], NEVER, 1000) == 299
    assert part_end({0: 500, 1: 300}, [0], [], NEVER, 1000) == 499, "the other was read to its end"
    assert part_end({0: 500}, [], [], NEVER, 1000) == 1000
    assert part_end({0: 500, 1: 1300}, [1], [], NEVER, 1000) == 1000
    assert part_end({0: 500, 1: None}, [0, 1], [], 7, 1000) == 7, "no event: nothing is known"
    assert part_end({0: 500}, [0, 1], [], 7, 1000) == 7
    assert part_end({0: 500}, [0], [], 499, 1000) == 499, "one transaction, which goes on"


def test_a_part_ends_before_another_shape_or_begins_with_it() -> None:
    shapes = [since(300), since(600)]
    assert part_end({}, [], shapes, NEVER, 1000) == 299
    assert part_end({}, [], shapes, 299, 1000) == 599
    assert part_end({}, [], shapes, 599, 1000) == 1000
    assert part_end({0: 200}, [0], shapes, NEVER, 1000) == 199


def test_a_rebuild_of_many_records_has_few_parts() -> None:
    read = parts = 0
    while read < 1_000_000_000:
        read, parts = read + part_records(read, 0, 50_000), parts + 1
    assert parts < 250
    assert part_records(0, 40_000, 50_000) == 80_000


@given(
    st.dictionaries(st.integers(0, 5), st.none() | st.integers(0, 100), max_size=5),
    st.sets(st.integers(0, 5)),
    st.lists(st.integers(0, 100).map(since)),
    st.integers(-1, 100),
    st.integers(0, 100),
)
def test_a_part_never_ends_within_a_transaction_or_past_what_the_epochs_have(
    tails: dict[int, int | None],
    unread: set[int],
    shapes: list[Shape],
    after_lsn: int,
    more: int,
) -> None:
    limit = after_lsn + more
    end = part_end(tails, unread, shapes, after_lsn, limit)
    assert after_lsn <= end <= limit
    if end > after_lsn:
        assert all((tail := tails.get(n)) is not None and end < tail for n in unread)
        assert not any(after_lsn + 1 < s.since.commit_lsn <= end for s in shapes)


def test_the_last_other_table_counts() -> None:
    assert last_replacement([FIRST, since(5), since(9)]) is None
    assert last_replacement([FIRST, since(5, 2), since(9, 2)]) == (5, 3)
    assert last_replacement([FIRST, since(5, 2), since(9, 1)]) == (9, 3)
    assert last_replacement([since(0, 0), since(5, 2)]) is None, "an oid that is not known"


def test_partitions_that_were_read_must_be_there() -> None:
    note = RebuildNote("asked", topic_id="one", offsets={0: 5, 2: 7})
    assert missing_partitions((), "", None, None), "nobody tells whether it had events"
    assert not missing_partitions((0,), "", None, None)
    assert not missing_partitions((), "", {}, None), "the epochs have read that it has none"
    assert missing_partitions((0,), "one", {0: 9, 1: 8}, None) == {1: 8}
    assert missing_partitions((0,), "one", {0: 9, 1: 8}, note) == {1: 8, 2: 7}
    assert missing_partitions((), "", {2: 9}, note) == {0: 5, 2: 9}, "no broker knows it yet"
    assert not missing_partitions((0,), "another", {0: 9}, note), "it was made anew"
