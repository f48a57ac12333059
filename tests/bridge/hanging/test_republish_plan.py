"""What an interrupted settling has lost. The pure part of services.bridge.hanging.republish."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.events import SETTLED_KEY, PreparedKey, PreparedRecord
from schemas.progress import HangingRange
from services.bridge.hanging.republish_plan import Judged, Terms, each_once, further, judge_range
from services.bridge.recovery.event_positions import NO_STAGING_KEY, KafkaRecord, position_of
from services.bridge.transactions.staging import staged_header, tombstones
from tests.bridge.hanging.test_decision import record

TOPIC = "p.public.t"
COVERS = record(100, 110)
TERMS = Terms("p", COVERS, lambda _timeline, _lsn: False)
NOTHING = Judged([])


def event(offset: int, lsn: int, seq: int = 0, *, of: str = "p", timeline: int = 1) -> KafkaRecord:
    source = {"name": of, "commit_lsn": lsn, "seq": seq, "timeline": timeline}
    return KafkaRecord(TOPIC, offset, b"key", json.dumps({"op": "c", "source": source}).encode())


def tombstone(offset: int, key: bytes = b"key", topic: str = TOPIC) -> KafkaRecord:
    return KafkaRecord(topic, offset, key, None)


def end(offset: int, lsn: int, status: str = "END") -> KafkaRecord:
    value = json.dumps({"status": status, "id": f"1:{lsn}", "commit_lsn": lsn}).encode()
    return KafkaRecord("p.transaction", offset, b"id", value)


def noted(there: list[KafkaRecord], records: int = -1) -> HangingRange:
    count = len(there) if records < 0 else records
    topic = there[0].topic if there else TOPIC
    return HangingRange(topic=topic, partition=0, start=0, end=99, records=count)


def again(
    there: list[KafkaRecord], seen: list[KafkaRecord], terms: Terms = TERMS
) -> list[KafkaRecord]:
    judged = judge_range(noted(there), there, seen, terms)
    assert not judged.problem
    return [*judged.again]


def test_unseen_records_are_written_again_in_order_with_their_tombstones() -> None:
    there = [event(3, 90), event(4, 100, 1), tombstone(5)]
    assert again(there, []) == there
    assert again(there, there) == []


def test_rewritten_records_are_not_written_again() -> None:
    there = [event(3, 100), tombstone(4)]
    copies = [record._replace(offset=record.offset + 7) for record in there]
    assert again(there, copies) == []
    assert again(there, copies[:1]) == there[1:]


def test_records_that_the_server_sends_again_are_not_written() -> None:
    there = [event(3, 100), event(4, 110), event(5, 120), tombstone(6)]
    assert again(there, []) == there[:1]
    part = TERMS._replace(covers=record(200, 110, seq=2))
    parts = [event(3, 200, 0), event(4, 200, 1), event(5, 200, 2)]
    assert again(parts, [], part) == parts[:2]
    ends = [end(0, 200, "BEGIN"), end(1, 200)]
    assert again(ends, [], part._replace(own=True)) == ends[:1]


def test_records_of_another_bridge_or_a_lost_timeline_are_left() -> None:
    foreign = [event(3, 100, of="q"), tombstone(4), KafkaRecord(TOPIC, 5, None, b"anything")]
    assert again(foreign, []) == []
    lost = TERMS._replace(lost=lambda timeline, lsn: timeline == 2 and lsn >= 95)
    mixed = [event(3, 100, timeline=2), event(4, 100, 1, timeline=3)]
    assert again(mixed, [], lost) == mixed[1:]


def test_record_that_only_ends_a_transaction_is_not_written() -> None:
    there = [tombstone(3, SETTLED_KEY, "p.transaction"), tombstone(4, NO_STAGING_KEY)]
    assert again(there, [], TERMS._replace(own=True)) == []


def test_without_a_record_the_server_sends_all_again() -> None:
    assert again([event(3, 100)], [], TERMS._replace(covers=None)) == []


STAGED = PreparedRecord(
    slot="s",
    gid="g",
    xid=1,
    prepare_lsn=90,
    end_lsn=95,
    prepare_ts_ms=0,
    streamed=False,
    parts=2,
    changes=1,
)


def staging(offset: int, staged: PreparedRecord = STAGED) -> list[KafkaRecord]:
    keys = [PreparedKey(slot="s", gid=staged.gid, part=n).model_dump_json() for n in (1, 2)]
    parts = [KafkaRecord("p.prepared", 0, key.encode(), b"\x78\x01") for key in keys]
    topic, key, value, *_ = staged_header("p.prepared", staged)
    whole = [*parts, KafkaRecord(topic, 0, key, value)]
    return [one._replace(offset=offset + n) for n, one in enumerate(whole)]


def test_a_staging_is_written_again_whole_or_not_at_all() -> None:
    own = TERMS._replace(own=True)
    assert again(staging(3), [], own) == staging(3)
    assert again(staging(3)[:2], [], own) == [], "its PREPARE comes again"
    later = staging(6, STAGED.model_copy(update={"gid": "h", "prepare_lsn": 120}))
    assert again([*staging(3), *later], [], own) == staging(3)


def test_the_removal_of_a_staging_is_written_again_where_its_decision_is_covered() -> None:
    own = TERMS._replace(own=True)
    removal = [
        KafkaRecord(topic, 3 + n, key, value, headers)
        for n, (topic, key, value, headers, *_) in enumerate(tombstones("p.prepared", STAGED, 105))
    ]
    assert again(removal, [], own) == removal
    assert again(removal, [], own._replace(covers=record(90, 104))) == []
    without = [record._replace(headers=None) for record in removal]
    told = judge_range(noted(without), without, [], own)
    assert "3 records do not tell" in told.problem, "an older release has written them"


def test_records_that_are_gone_are_a_problem_unless_readers_have_what_hung() -> None:
    there = [event(3, 100)]
    assert "1 of 2 records are gone" in judge_range(noted(there, 2), there, [], TERMS).problem
    assert "2 of 2 records are gone" in judge_range(noted([], 2), [], [], TERMS).problem
    first = [event(0, 100)]
    assert judge_range(noted(first, 2), first, first, TERMS) == NOTHING, "compacted"


def test_a_later_transaction_does_not_prove_that_readers_saw_lost_records() -> None:
    """Retention, or compaction, has removed what was aborted; the next one was committed."""
    later = [event(5, 105)]
    assert "5 of 6 records are gone" in judge_range(noted(later, 6), later, later, TERMS).problem


def test_records_in_several_notes_are_written_once_in_order() -> None:
    there = [event(3, 90), tombstone(4), event(5, 100)]
    copies = [record._replace(offset=record.offset + 7) for record in there]
    later = event(20, 105)
    ranges = [[later], there[:2], there, copies]
    found = [
        (noted(records), judge_range(noted(records), records, [], TERMS)) for records in ranges
    ]
    assert each_once(found) == [(0, record) for record in (*there, later)]


@pytest.mark.parametrize("value", [b'{"commit_lsn": 1e999}', b"[" * 100_000])
def test_a_foreign_record_is_not_an_error(value: bytes) -> None:
    assert position_of(value, "p") is None


def test_the_order_of_a_partition_is_not_broken() -> None:
    there = [event(3, 100)]
    later = [event(5, 130)]
    assert "the order" in judge_range(noted(there), there, later, TERMS).problem
    assert judge_range(noted(there), there, [*there, *later], TERMS) == NOTHING
    elsewhere = [event(5, 130, of="q")]
    assert again(there, elsewhere) == there


def test_messages_that_may_be_another_bridges_are_a_problem() -> None:
    headers: list[tuple[str, str | bytes | None]] = [("commit_lsn", b"100"), ("seq", b"0")]
    there = [KafkaRecord("messages", 3, b"k", b"{}", headers)]
    outbox = TERMS._replace(outbox=True)
    assert again(there, [], outbox) == there
    shared = outbox._replace(shared=True)
    assert "another bridge" in judge_range(noted(there), there, [], shared).problem
    assert judge_range(noted(there), there, there, shared) == NOTHING


@given(st.lists(st.tuples(st.integers(80, 120), st.booleans()), max_size=8), st.data())
def test_once_written_again_nothing_is_missing(
    lsns: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """Each covered record is seen once, whichever of them were seen before."""
    numbered = enumerate(sorted({lsn for lsn, _ in lsns}))
    there = [event(offset, lsn) for offset, lsn in numbered]
    shown = data.draw(st.integers(0, len(there)))
    seen = [
        one for one in there[:shown] if json.loads(one.value or b"")["source"]["commit_lsn"] < 110
    ]
    copies = [one._replace(offset=50 + one.offset) for one in again(there, seen)]
    assert again(there, [*seen, *copies]) == []
    covered = [one for one in there if json.loads(one.value or b"")["source"]["commit_lsn"] < 110]
    assert sorted(one.value or b"" for one in [*seen, *copies]) == sorted(
        one.value or b"" for one in covered
    )


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (COVERS, None, COVERS),
        (None, COVERS, COVERS),
        (COVERS, record(100, 110, producer=1), COVERS),
        (COVERS, record(120, 130), record(120, 130)),
        (COVERS, record(200, 110, seq=3), record(200, 110, seq=3)),
        (record(200, 110, seq=3), record(200, 110, seq=5), record(200, 110, seq=5)),
    ],
)
def test_the_further_of_two_records(one: object, other: object, expected: object) -> None:
    assert further(one, other) == expected  # type: ignore[arg-type]
