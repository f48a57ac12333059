"""What had Kafka decided? services.bridge.hanging.decision."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.events import DivergenceRecord, PreparedRecord
from schemas.progress import ProgressRecord
from services.bridge.events.shaping.outbox import Headers
from services.bridge.hanging.decision import Ending, covered, how_to_end, was_committed
from services.bridge.progress.consistency import Selection, Witnesses, is_lost
from services.bridge.recovery.event_positions import (
    LAST_SEQ,
    EventPosition,
    KafkaRecord,
    has,
    position_in_headers,
    position_of,
    position_of_record,
    remaining,
)
from services.bridge.transactions.staging import tombstones
from services.postgres.server import Server
from tests.providers.progress_records import progress_record


def record(
    commit_lsn: int, end_lsn: int, seq: int = 0, ahead_lsn: int = 0, producer: int = 0
) -> ProgressRecord:
    return progress_record(
        slot="s",
        system_identifier="1",
        timeline=1,
        commit_lsn=commit_lsn,
        end_lsn=end_lsn,
        seq=seq,
        ts_ms=0,
        ahead_lsn=ahead_lsn,
        producer=producer,
    )


WHOLE = record(100, 110)
PART = record(200, 110, seq=5)


def test_a_record_covers_whole_transactions_and_the_first_part_of_one() -> None:
    assert has(WHOLE, EventPosition(100, 3))
    assert not has(WHOLE, EventPosition(110, 0))
    assert has(PART, EventPosition(200, 4))
    assert not has(PART, EventPosition(200, 5))
    assert not has(PART, EventPosition(150, 0))
    assert not has(None, EventPosition(1, 0))


def test_a_hanging_transaction_without_a_witness_is_aborted() -> None:
    after = record(120, 130)
    assert not was_committed(
        *(WHOLE, after), confirmed_lsn=110, origin_lsn=110, shown=[EventPosition(100, 0)]
    )
    assert not was_committed(None)
    assert not was_committed(record(100, 110, ahead_lsn=500), record(600, 610), confirmed_lsn=500)
    assert not was_committed(WHOLE, record(200, 110, seq=5), confirmed_lsn=110), "a part's"


def test_each_witness_alone_is_enough() -> None:
    after, waiting = record(120, 130), record(100, 110, ahead_lsn=500)
    assert was_committed(WHOLE, after, confirmed_lsn=111)
    assert was_committed(WHOLE, after, confirmed_lsn=110, origin_lsn=111)
    assert was_committed(waiting, after, confirmed_lsn=130), "told of its end, and all in it"
    assert was_committed(waiting, after, confirmed_lsn=120, origin_lsn=111)
    assert not was_committed(waiting, after, confirmed_lsn=129), "what was announced, no more"
    assert was_committed(WHOLE, after, shown=[EventPosition(120, 0)])
    assert was_committed(PART, record(200, 110, seq=9), shown=[EventPosition(200, 5)])
    part, next_part = record(200, 110, seq=9), record(200, 110, seq=14, producer=1)
    assert was_committed(PART, part, confirmed_lsn=110, behind=[part, next_part])
    assert not was_committed(PART, part, confirmed_lsn=110, behind=[part])


def test_a_slot_that_a_repair_has_made_anew_proves_nothing() -> None:
    """It begins behind what the repair publishes, whether Kafka has committed that or not."""
    noted, repaired = WHOLE.model_copy(update={"repairing": True}), record(499, 500)
    assert was_committed(WHOLE, repaired, confirmed_lsn=500)
    assert not was_committed(noted, repaired, confirmed_lsn=500, origin_lsn=110)
    assert was_committed(noted, repaired, confirmed_lsn=500, shown=[EventPosition(499, 7)])
    assert was_committed(noted, repaired, confirmed_lsn=500, origin_lsn=500)


HEADS = [b"", b"\0", b"\0\0\0\0\1{", b"\0\0\0\0\1\0", b"\0\0\0\0\1\0\x0a\1c\x10"]


@given(st.none() | st.builds(bytes.__add__, st.sampled_from(HEADS), st.binary()))
def test_value_that_is_not_an_event_has_no_position(value: bytes | None) -> None:
    assert position_of(value, "p") is None or isinstance(position_of(value, "p"), EventPosition)


def test_events_and_ends_of_transactions_have_a_place() -> None:
    event = json.dumps({"op": "c", "source": {"name": "p", "commit_lsn": 7, "seq": 2}}).encode()
    assert position_of(event, "p") == EventPosition(7, 2)
    assert position_of(event, "another") is None
    row = b'{"__op":"c","__commit_lsn":7,"__timeline":1,"__seq":2,"specversion":"1.0","data":{}}'
    assert position_of(row, "p") == EventPosition(7, 2, 1)  # of a table that has such columns
    assert position_of(b'{"payload":%s,"schema":{}}' % event, "p") == EventPosition(7, 2)
    assert position_of(b'{"status": "END", "commit_lsn": 9}', "p") == EventPosition(9, LAST_SEQ)
    assert position_of(b'{"status": "BEGIN", "commit_lsn": 9}', "p") == EventPosition(9, 0)
    assert position_of(b'{"slot": "s", "gid": "g", "prepare_lsn": 8}', "p") == EventPosition(8, 0)


def test_a_part_of_a_transaction_does_not_cover_its_end() -> None:
    end = position_of(b'{"status": "END", "commit_lsn": 200}', "p")
    assert end is not None and not has(PART, end) and has(record(200, 210), end)


def test_the_removal_of_a_staging_is_covered_from_the_end_of_the_decision_on() -> None:
    staged = PreparedRecord(
        slot="s",
        gid="g",
        xid=1,
        prepare_lsn=50,
        end_lsn=60,
        prepare_ts_ms=0,
        streamed=False,
        parts=1,
        changes=1,
    )
    for topic, key, value, headers, *_ in tombstones("p.prepared", staged, 110):
        found = position_of_record(KafkaRecord(topic, 0, key, value, headers), "p", outbox=False)
        assert found is not None and has(WHOLE, found) and not has(record(90, 109), found)


def test_a_message_of_an_outbox_has_its_place_in_its_headers() -> None:
    assert position_in_headers(
        [("id", b"1"), ("commit_lsn", b"70"), ("seq", b"3")]
    ) == EventPosition(70, 3)
    assert position_in_headers([("commit_lsn", b"x"), ("seq", b"3")]) is None
    assert position_in_headers([("seq", b"3")]) is None
    assert position_in_headers(None) is None


LOOKALIKES = [
    b'{"op":"c","source":{"name":"p","commit_lsn":7,"seq":2,"timeline":1}}',
    b'{"__op":"c","__commit_lsn":7,"__seq":2,"__timeline":1}',
    b'{"commit_lsn":7,"seq":2}',
    b'{"prepare_lsn":7}',
]


@pytest.mark.parametrize("value", LOOKALIKES)
def test_a_payload_that_looks_like_an_event_has_no_place_beside_its_headers(value: bytes) -> None:
    headers: Headers = [("id", b"1"), ("type", b"x"), ("commit_lsn", b"70"), ("seq", b"3")]
    headers += [("__op", b"c"), ("__commit_lsn", b"7"), ("__seq", b"2"), ("__timeline", b"1")]
    record = KafkaRecord("p.orders", 0, b"1", value, headers)
    assert position_of_record(record, "p", outbox=True) == EventPosition(70, 3)


@pytest.mark.parametrize(
    "value",
    [
        *LOOKALIKES[2:],
        b'{"source":{"name":"p","commit_lsn":7,"seq":2}}',
        b'{"op":"x","source":{"name":"p","commit_lsn":7,"seq":2}}',
        b'{"op":"c","source":{"commit_lsn":7,"seq":2}}',
        b'{"op":"c","source":{"name":"p","commit_lsn":0,"seq":2}}',
        b'{"op":"c","source":{"name":"p","commit_lsn":-7,"seq":2}}',
        b'{"__commit_lsn":7,"__seq":2,"__timeline":1}',
        b'{"__op":"c","__commit_lsn":0,"__seq":2,"__timeline":1}',
    ],
)
@pytest.mark.parametrize("outbox", [False, True])
def test_what_another_program_writes_has_no_place(value: bytes, outbox: bool) -> None:
    assert position_of_record(KafkaRecord("p.orders", 0, b"1", value), "p", outbox=outbox) is None


PROGRESS, TABLE, ENDS = ("p.progress", 0), ("p.public.t", 1), ("p.transaction", 0)
HIDDEN = record(120, 130, producer=1)


def test_visible_record_proves_a_commit_of_its_producer_or_the_one_before() -> None:
    last = record(100, 110, producer=1)
    ours = {TABLE: EventPosition(100, 2), ENDS: None}
    stuck = {TABLE: 7, ENDS: 8, ("p.other", 0): 9}
    first = how_to_end(ours, stuck, last, None, set(), commit=None)
    assert first == Ending({TABLE: 7, ENDS: 8}, (1,), commit=True)
    again = how_to_end(ours, stuck, last, None, {TABLE, ENDS}, commit=None)
    assert again == Ending({TABLE: 7, ENDS: 8}, (0,), commit=True)


def test_a_marker_that_is_late_lets_nothing_of_a_later_transaction_be_committed() -> None:
    """The other producer's: its marker would also reach what it has written since."""
    ours = {TABLE: EventPosition(100, 2), ENDS: EventPosition(120, 0)}
    stuck = {TABLE: 7, ENDS: 8}
    for record in (HIDDEN, None):
        for tried in (set(), {TABLE}, {TABLE, ENDS}):
            found = how_to_end(ours, stuck, WHOLE, record, tried, commit=None)
            assert found == Ending({TABLE: 7}, (0,), commit=True)


def test_what_was_published_again_and_hangs_is_ended_by_its_own_producer() -> None:
    """Its record is no further than the visible one, of whichever producer that is."""
    ours = {PROGRESS: None, TABLE: EventPosition(100, 2)}
    stuck = {PROGRESS: 3, TABLE: 7}
    for visible, repeated in ((0, 0), (0, 1), (1, 0)):
        last, hidden = record(100, 110, producer=visible), record(100, 110, producer=repeated)
        first = how_to_end(ours, stuck, last, hidden, set(), commit=None)
        assert first == Ending({TABLE: 7}, (repeated,), commit=True)
        again = how_to_end(ours, stuck, last, hidden, {TABLE}, commit=None)
        assert again == Ending({TABLE: 7}, (1 - repeated,), commit=True)


def test_of_two_hanging_transactions_the_covered_one_is_ended_first() -> None:
    """Whatever is decided about the next one must not touch it."""
    ours = {PROGRESS: None, TABLE: EventPosition(100, 2), ENDS: EventPosition(120, 0)}
    stuck = {PROGRESS: 3, TABLE: 7, ENDS: 8}
    first = how_to_end(ours, stuck, WHOLE, HIDDEN, set(), commit=None)
    assert first == Ending({TABLE: 7}, (0,), commit=True)


def test_a_hidden_record_tells_whose_it_is() -> None:
    ours = {PROGRESS: None, TABLE: EventPosition(120, 2)}
    stuck = {PROGRESS: 3, TABLE: 7, ("p.other", 0): 9}
    committed = how_to_end(ours, stuck, WHOLE, HIDDEN, set(), commit=True)
    assert committed == Ending({PROGRESS: 3, TABLE: 7}, (1,), commit=True)
    aborted = how_to_end(ours, stuck, WHOLE, HIDDEN, set(), commit=False)
    assert aborted == Ending(stuck, (0, 1), commit=False)


def test_transaction_beyond_the_committed_record_is_not_committed() -> None:
    """An abort of the same producer's earlier transaction may have been told to fewer, too."""
    beyond = ("p.public.t", 2)
    hidden = {PROGRESS: None, TABLE: EventPosition(120, 2), beyond: EventPosition(130, 0)}
    stuck = {PROGRESS: 3, TABLE: 7, beyond: 9}
    committed = how_to_end(hidden, stuck, WHOLE, HIDDEN, set(), commit=True)
    assert committed == Ending({PROGRESS: 3, TABLE: 7}, (1,), commit=True)
    visible = {ENDS: None, TABLE: EventPosition(100, 2), beyond: EventPosition(130, 0)}
    stuck = {ENDS: 3, TABLE: 7, beyond: 9}
    committed = how_to_end(visible, stuck, WHOLE, None, set(), commit=None)
    assert committed == Ending({ENDS: 3, TABLE: 7}, (0,), commit=True)


def test_events_of_a_lost_timeline_tell_nothing_of_what_was_decided_since() -> None:
    """After an accepted divergence they stay in the topics, beyond the record: xid 1 and 2."""
    server = Server(
        system_identifier="1",
        timeline=2,
        version=180006,
        database="d",
        in_recovery=False,
        wal_level="logical",
        synchronized_standby_slots="",
        wal_sender_timeout_ms=60_000,
    )
    seen = Witnesses(None, None, server, {1: 105}, 200, Selection("p", 1, "any"))
    accepted = DivergenceRecord(
        slot="s",
        system_identifier="1",
        lost_timeline=1,
        timeline=2,
        switch_lsn=105,
        reached_lsn=150,
        count=1,
        transactions=[],
        ts_ms=0,
    )

    def lost(timeline: int, commit_lsn: int) -> bool:
        return is_lost(timeline, commit_lsn, seen, [accepted])

    def left(*positions: EventPosition) -> list[EventPosition | None]:
        return [position for position in positions if remaining(position, lost)]

    last = record(100, 105)
    event, end_of_it = EventPosition(130, 0, 1), EventPosition(130, 0)
    assert was_committed(last, shown=[event]) and was_committed(last, shown=[end_of_it])
    assert left(event, end_of_it) == []
    for present in (
        EventPosition(120, 0, 2),
        EventPosition(100, 0, 1),
        EventPosition(100, 0),
        EventPosition(150, 0),
    ):
        assert left(present) == [present]
    later = record(140, 145)
    assert covered({TABLE: event}, later)
    assert not covered({TABLE: remaining(event, lost)}, later)


def test_of_one_timeline_that_was_set_back_what_may_be_lost_is_no_witness() -> None:
    server = Server(
        system_identifier="1",
        timeline=1,
        version=180006,
        database="d",
        in_recovery=False,
        wal_level="logical",
        synchronized_standby_slots="",
        wal_sender_timeout_ms=60_000,
    )
    seen = Witnesses(None, None, server, {}, 200, Selection("p", 1, "any"))
    accepted = DivergenceRecord(
        slot="s",
        system_identifier="1",
        lost_timeline=1,
        timeline=1,
        switch_lsn=105,
        reached_lsn=150,
        count=1,
        transactions=[],
        ts_ms=0,
    )
    found = [is_lost(1, lsn, seen, [accepted]) for lsn in (104, 105, 149, 150)]
    assert found == [False, True, True, False]
