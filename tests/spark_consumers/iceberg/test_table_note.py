"""The note on a table's state: three states and a flag, as pure transitions and as JSON."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import OperatorNeeded
from spark_consumers.events.shape import CommitPosition
from spark_consumers.iceberg.table_note import (
    FOLLOWING,
    NEVER,
    PROPERTY,
    Incomplete,
    LostBeginningError,
    MissingEventsError,
    Parked,
    RebuildNote,
    TableFailedError,
    TableNote,
    TakenOverError,
    UntrustedRowsError,
    note_from,
    note_of,
    parked_by,
)

EXAMPLE = Path(__file__).parents[3] / "schemas" / "table_note.json"
LSNS = st.integers(-1, 2**63)
POSITIONS = st.builds(CommitPosition, st.integers(-1, 9), st.integers(-1, 9))
INCOMPLETE = st.none() | st.builds(Incomplete, LSNS, st.text(), st.booleans())
PARKED = st.builds(
    Parked,
    *(st.integers(-1, 99), LSNS, LSNS, st.integers(0, 2**50), st.text(), st.text()),
    anew=st.booleans(),
    missing=st.integers(0, 9),
    lost_beginning=st.booleans(),
    taken_over_lsn=LSNS,
)
REBUILDS = st.builds(
    RebuildNote,
    request=st.text(),
    anew=st.booleans(),
    accepted_lsn=LSNS,
    lost_beginning=st.booleans(),
    topic_id=st.text(),
    commit_lsn=LSNS,
    offsets=st.none() | st.dictionaries(st.integers(0, 9), st.integers(0, 2**40)),
    shape=POSITIONS,
    replaced=POSITIONS,
    settled=st.booleans(),
    whole=st.booleans(),
    incomplete=INCOMPLETE,
)
NOTES = st.builds(TableNote, st.none() | PARKED, st.none() | REBUILDS, INCOMPLETE)
REFUSED = parked_by(OperatorNeeded("no", hint="do"), (7, 700), 800, 1, None)
LACKS = Incomplete(500, "an event is in _quarantine")


@given(NOTES)
def test_a_note_comes_back_as_it_was(note: TableNote) -> None:
    properties = {PROPERTY: note.text()} if note.text() else {}
    assert note_of(properties) == note
    assert bool(note.text()) == (note != FOLLOWING)


def test_the_example_of_the_schemas_is_a_note() -> None:
    document = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    note = note_from(document)
    assert json.loads(note.text()) == document
    assert (note.state, note.made_anew) == ("rebuilding", False)
    assert note.parked is not None
    assert note.parked.described()["has"] == "0/16C2F48"
    assert note.incomplete is not None
    assert note.incomplete.text() == "incomplete since 0/16C1320: 1 event is in _quarantine"


@given(NOTES)
def test_a_table_is_in_one_of_three_states_whatever_happens(note: TableNote) -> None:
    assert note.park(REFUSED).state == "parked"
    assert note.ask("a", 5).state == "rebuilding"
    assert note.cancel().state == ("following" if note.parked is None else "parked")
    assert note.brought(None, rebuilt=True) == FOLLOWING
    assert note.brought(LACKS, rebuilt=False).incomplete == LACKS
    assert note.brought(None, rebuilt=False).state == (
        "rebuilding" if note.made_anew else "following"
    )


@given(NOTES, st.integers(0, 99))
def test_a_parking_before_the_table_s_epoch_is_not_believed(note: TableNote, epoch: int) -> None:
    found = note.of_epoch(epoch)
    assert found.parked is None or found.parked.epoch >= epoch
    assert found.incomplete == note.incomplete
    assert found == note or (found.rebuild is None) != note.made_anew


def test_a_parked_table_goes_on_from_its_rows_and_another_one_is_made_anew() -> None:
    assert FOLLOWING.ask("a", 5).made_anew
    assert not FOLLOWING.park(REFUSED).ask("a", 5).made_anew
    untrusted = parked_by(UntrustedRowsError("rolled back"), (7, 700), 800, 1, None)
    assert FOLLOWING.park(untrusted).ask("a", 5).made_anew
    rebuild = FOLLOWING.park(REFUSED).ask("a", 5).rebuild
    assert rebuild is not None
    assert (rebuild.accepted_lsn, rebuild.commit_lsn, rebuild.start(3)) == (5, NEVER, 0)


def test_what_a_rebuild_may_do_without_is_kept_from_parking_to_parking() -> None:
    missing = MissingEventsError("2 are missing")
    missing.count = 2
    first = parked_by(missing, (7, 700), 800, 1, None)
    again = parked_by(missing, (7, 700), 900, 2, first)
    assert (first.missing, again.missing) == (2, 4)
    lost = parked_by(LostBeginningError("it is gone"), (7, 700), 900, 2, again)
    taken = parked_by(TakenOverError("it was another", lsn=850), (7, 700), 900, 2, lost)
    last = parked_by(OperatorNeeded("no"), (7, 700), 900, 3, taken)
    assert (last.missing, last.lost_beginning, last.taken_over_lsn) == (4, True, 850)
    ready = FOLLOWING.park(lost).ask("a", 5).rebuild
    assert ready is not None
    assert ready.lost_beginning


@pytest.mark.parametrize(("before", "anew"), [(None, False), (REFUSED, True)])
def test_a_table_that_fails_when_it_goes_on_from_its_rows_is_made_anew(
    before: Parked | None, *, anew: bool
) -> None:
    assert parked_by(TableFailedError("no file"), (7, 700), 800, 1, before).anew == anew
    assert not parked_by(OperatorNeeded("no"), (7, 700), 800, 1, before).anew
