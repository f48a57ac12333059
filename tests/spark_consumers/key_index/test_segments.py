"""Segments of keys, and deletion vectors, against the plain things that they stand for: pure."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_consumers.key_index import keys as keys_module
from spark_consumers.key_index import segment_files
from spark_consumers.key_index import segments as search
from spark_consumers.key_index.deletion_vectors import blob, puffin, vector_of
from spark_consumers.key_index.keys import Keys, is_indexable, keys_of
from spark_consumers.key_index.segments import Segment, find, merged, places_in

NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(max_size=4)
POSITIONS = st.sets(st.integers(0, 2**31 - 2), min_size=1)
PAIRS = st.tuples(NUMBERS | st.integers(0, 3), TEXTS, TEXTS)


def pair_keys(rows: list[tuple[int, str, str]]) -> Keys:
    numbers, first, second = ([row[n] for row in rows] for n in range(3))
    return keys_of([pa.array(numbers, pa.int64()), pa.array(first, "string"), pa.array(second)])


def text_keys(rows: list[str]) -> Keys:
    return keys_of([pa.array(rows, pa.string())])


@given(st.lists(PAIRS, min_size=1))
def test_keys_are_the_same_where_their_values_are(rows: list[tuple[int, str, str]]) -> None:
    found = pair_keys(rows)
    assert found.texts is not None
    each = found.texts.to_pylist()
    assert len(set(each)) == len(set(rows))
    assert len(set(zip(each, found.numbers.tolist(), strict=True))) == len(set(rows))


@given(st.lists(st.binary(max_size=40), min_size=1), st.data())
def test_a_hash_is_of_the_text_alone(texts: list[bytes], data: st.DataObject) -> None:
    whole = pa.array(texts, pa.large_binary())
    first = data.draw(st.integers(0, len(texts)))
    assert (keys_module.hashed(whole)[first:] == keys_module.hashed(whole[first:])).all()
    assert len(set(keys_module.hashed(whole).tolist())) == len(set(texts))


def test_one_integer_is_its_own_number_whatever_its_width_in_the_file() -> None:
    for kind in (pa.int32(), pa.int64()):
        assert keys_of([pa.array([3, -1], kind)]).numbers.tolist() == [3, -1]
    assert keys_of([pa.array([3], pa.int32()).cast(pa.date32())]).numbers.tolist() == [3]
    with pytest.raises(ValueError, match="NULL"):
        keys_of([pa.array([1, None])])
    assert is_indexable(["int", "string"])
    assert not is_indexable(["double"])
    assert not is_indexable([])


@given(
    st.lists(st.dictionaries(TEXTS, st.integers(0, 2), max_size=8), min_size=1, max_size=5),
    st.sets(st.integers(0, 2)),
    st.sampled_from([1, 3, 2**62]),
    st.data(),
)
def test_the_newest_segment_has_the_place_also_where_hashes_collide(
    batches: list[dict[str, int]], dead: set[int], kinds: int, data: st.DataObject
) -> None:
    """`kinds`: so many different hashes there are."""
    with pytest.MonkeyPatch.context() as patch:
        hashed = keys_module._hashed
        patch.setattr(keys_module, "_hashed", lambda texts: hashed(texts) % kinds)
        truth: dict[str, int] = {}
        segments: list[Segment] = []
        for position, batch in enumerate(batches):
            rows = list(batch)
            places = [places_in(batch[row], np.array([position]))[0] for row in rows]
            truth |= dict(zip(rows, places, strict=True))
            segments.insert(0, Segment.of(text_keys(rows), np.array(places, np.int64)))
        live = np.array([number not in dead for number in range(3)])
        first = data.draw(st.integers(0, len(segments) - 1))
        last = data.draw(st.integers(first + 1, len(segments)))
        if data.draw(st.booleans()):
            whole = last == len(segments)
            segments[first:last] = [merged(segments[first:last], live if whole else None)]
        wanted = [*truth, "never there"]
        expected = [truth.get(row, search.NOWHERE) for row in wanted]
        for n, place in enumerate(expected):
            if place != search.NOWHERE and not live[place >> search.POSITION_BITS]:
                expected[n] = search.NOWHERE
        assert find(text_keys(wanted), segments, live).tolist() == expected


def test_an_older_place_of_a_key_is_left_out_behind_a_key_of_the_same_hash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newest place is in a file that is not live: the older one does not come to light."""
    monkeypatch.setattr(keys_module, "_hashed", lambda texts: np.zeros(len(texts), np.int64))
    old = Segment.of(text_keys(["b", "a"]), places_in(1, np.array([0, 1])))
    new = Segment.of(text_keys(["a"]), places_in(0, np.array([2])))
    live = np.array([False, True])
    both = merged([new, old])
    assert not both.has_twice()
    for segments in ([new, old], [both], [merged([new, old], live)]):
        found = find(text_keys(["a", "b"]), segments, live).tolist()
        assert found == [search.NOWHERE, places_in(1, np.array([0]))[0]]


@pytest.mark.parametrize(
    "keys",
    [text_keys(["b", "", "a", "é" * 30]), text_keys([""]), keys_of([pa.array([5, -7, 2**62])])],
    ids=["texts", "an empty text", "integers"],
)
def test_a_segment_is_read_as_it_was_written(keys: Keys, tmp_path: Path) -> None:
    places = np.arange(len(keys.numbers), dtype=np.int64)
    segment_files.write_segment(tmp_path / "one", Segment.of(keys, places))
    read = segment_files.read(tmp_path / "one", texts=keys.texts is not None)
    assert read.find(keys).tolist() == places.tolist()
    assert not read.has_twice()
    segment_files.remove_others(tmp_path, {"another"})
    assert not list(tmp_path.iterdir())
    assert read.find(keys).tolist() == places.tolist()


def test_a_key_that_is_there_twice_is_told() -> None:
    both = Segment.of(text_keys(["a", "b", "a"]), np.arange(3, dtype=np.int64))
    assert both.has_twice()
    assert not merged([both]).has_twice()


@given(st.sets(st.integers(0, 2**40 - 1)))
def test_a_vector_is_read_as_it_was_written(positions: set[int]) -> None:
    assert vector_of(blob(BitMap64(positions))) == BitMap64(positions)


@given(st.binary(max_size=60))
def test_other_bytes_are_not_a_deletion_vector(noise: bytes) -> None:
    with pytest.raises(ValueError, match="not a deletion vector"):
        vector_of(noise)


@given(st.dictionaries(st.text(min_size=1), POSITIONS, max_size=3))
def test_pyiceberg_reads_the_puffin_file(vectors: dict[str, set[int]]) -> None:
    from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    from pyiceberg.table.puffin import PuffinFile

    content, blobs = puffin({path: BitMap64(found) for path, found in vectors.items()})
    read = deletion_vectors_from_puffin_file(PuffinFile(content))
    found = {one.referenced_data_file: set(one.to_vector().to_pylist()) for one in read}
    assert found == vectors
    for path, place in blobs.items():
        part = content[place.offset : place.offset + place.length]
        assert set(vector_of(part)) == vectors[path]
        assert place.rows == len(vectors[path])


def test_a_segment_is_asked_only_for_keys_between_its_first_and_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    before = Segment.find

    def counted(segment: Segment, wanted: Keys) -> keys_module.Numbers:
        asked.append(len(wanted.numbers))
        return before(segment, wanted)

    monkeypatch.setattr(Segment, "find", counted)
    parts = [np.arange(first, first + 10, dtype=np.int64) for first in (20, 10, 0)]
    segments = [Segment(Keys(part), part) for part in parts]
    wanted = Keys(np.array([25, 3, 14, 99], np.int64))
    found = find(wanted, segments, np.ones(1, bool))
    assert found.tolist() == [25, 3, 14, search.NOWHERE]
    assert asked == [1, 1, 1]
