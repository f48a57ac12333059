"""Dead letters fit, and tell of what was cut off."""

import hashlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ExitCode, SetupError
from schemas.events import DeadLetter
from services.bridge.events.event import Event
from services.bridge.sink.dead_letters import (
    OneOrigin,
    Origin,
    Refused,
    Sent,
    identity,
    letter,
    may_be_dead,
    may_be_known,
    refusal,
)

ORIGIN = Origin(77, 0x1_0000_0010, 0x1_0000_0040)


@given(
    key=st.one_of(st.none(), st.binary(max_size=3000)),
    value=st.one_of(st.none(), st.binary(max_size=9000), st.text(max_size=3000).map(str.encode)),
    header=st.binary(max_size=500),
    bytes_max=st.integers(3000, 12_000),
)
def test_dead_letter_fits_its_limit_and_keeps_what_fits(
    key: bytes | None, value: bytes | None, header: bytes, bytes_max: int
) -> None:
    event = Event("bank.public.t", key, value, [("h", header)], False, "public.t", 4, 99)
    found = letter(event, ORIGIN, "too large", topic="bank.dead", bytes_max=bytes_max, now_ms=5)
    assert found.topic == "bank.dead"
    assert found.value is not None
    assert len(found.value) + len(found.key or b"") <= bytes_max
    told = DeadLetter.model_validate_json(found.value)
    assert (told.commit_lsn, told.end_lsn, told.seq, told.lsn, told.xid) == (
        ORIGIN.commit_lsn,
        ORIGIN.end_lsn,
        4,
        99,
        77,
    )
    for content, whole in ((told.key, key), (told.value, value), (told.headers["h"], header)):
        if whole is None:
            assert content is None
            continue
        assert content is not None
        assert content.bytes == len(whole)
        assert content.sha256 == hashlib.sha256(whole).hexdigest()
        if content.text is not None and not content.truncated:
            assert content.text.encode() == whole
    if len(value or b"") + len(key or b"") + len(header) < bytes_max // 8 - 300:
        assert told.value is None or not told.value.truncated


@pytest.mark.parametrize(
    ("unit", "text"), [("ä".encode(), "ä" * 100), (b"\xff", None)], ids=["text", "bytes"]
)
def test_dead_letter_of_a_huge_record_takes_little_memory(unit: bytes, text: str | None) -> None:
    """The value is not copied, whether it is valid UTF-8 or not."""
    event = Event("bank.public.t", b"k", unit * (40 * 2**20), None, False, "public.t", 4, 99)
    tracemalloc.start()
    try:
        found = letter(event, ORIGIN, "", topic="bank.dead", bytes_max=1_000_000, now_ms=5)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20, f"{peak >> 20} MiB"
    told = DeadLetter.model_validate_json(found.value or b"")
    assert told.value is not None and told.value.truncated
    assert told.value.bytes == len(event.value or b"")
    if text is None:
        assert told.value.base64 is not None and len(told.value.base64) > 500_000
    else:
        assert told.value.text is not None and told.value.text.startswith(text)


def test_the_error_names_the_record_and_keeps_the_cause() -> None:
    event = Event("bank.public.t", b"k", b"v" * 9, None, False, "public.t", 4, 0x99)
    text = str(refusal(event, ORIGIN, "too large", avoidable=True))
    for part in ("topic bank.public.t", "table public.t", "1/10", "seq 4", "10 bytes", "LSN 0/99"):
        assert part in text
    assert "on_refused: dead_letter" in text
    own = str(refusal(event, ORIGIN, "too large", avoidable=False))
    assert "on_refused" not in own and "max.message.bytes" in own
    denied = SetupError("denied", hint="allow it", exit_code=ExitCode.PRIVILEGE_MISSING)
    error = refusal(event, ORIGIN, "denied", denied, avoidable=True)
    assert isinstance(error, SetupError)
    assert error.exit_code is ExitCode.PRIVILEGE_MISSING
    assert "allow it" in str(error)


def test_the_bridge_goes_on_without_records_of_tables_and_messages_alone() -> None:
    for topic, seq, expected in (
        ("bank.public.t", 0, True),
        ("", 0, True),
        ("bank.message", 3, True),
        ("bank.schema", 0, False),
        ("bank.transaction", -1, False),
        ("bank.dead", -1, False),
        ("bank.progress", -1, False),
    ):
        event = Event(topic, None, b"", None, False, "public.t", seq)
        assert may_be_dead(event, "bank") is expected


def test_refusals_are_forgotten_once_progress_is_made() -> None:
    event = Event("t", None, None, None, False, "public.t", 4)
    refused = Refused(careful_until=100)
    refused.note(event, ORIGIN, "x")
    assert identity(event, ORIGIN) == ("t", "public.t", ORIGIN.commit_lsn, 4, True)
    assert not refused.passed(99, Sent(), 0)
    assert refused.records
    assert refused.passed(100, Sent(), 0)
    assert not refused.records
    assert not refused.passed(100, Sent(), 0)
    assert refused.topics == {"t"}


def test_a_row_of_a_snapshot_is_known_by_its_key_until_rows_of_one_are_through() -> None:
    """It is read at another place each time; other transactions pass meanwhile."""
    row = Event("t", b"k", b"v", None, False, "public.t", 4, 99)
    chunk, later = Origin(0, 100, None), Origin(0, 200, None)
    refused, sent = Refused(), Sent()
    sent.add([row], OneOrigin(chunk))
    refused.take_care(sent)
    refused.note(row, chunk, "too large")
    assert refused.reason(row._replace(seq=7), later) == "too large"
    assert refused.reason(row, ORIGIN) is None
    assert not refused.passed(300, Sent(), 0) and refused.records
    again = Sent()
    again.add([row], OneOrigin(later))
    assert refused.passed(200, again, 0) and not refused.records
    assert may_be_known(row, chunk, "bank")
    assert not may_be_known(row._replace(key=None), chunk, "bank")
    message = Event("bank.message", b"k", b"v", None, False, "", 4, 99)
    assert identity(message, chunk) != identity(message, later)


def test_only_rows_that_kafka_refused_are_dead_letters() -> None:
    """Not an equal key of another table in the topic, nor a row that was made smaller since."""
    large = Event("t", b"k", b"v" * 90, None, False, "public.a", 4, 99)
    chunk, later, refused = Origin(0, 100, None), Origin(0, 200, None), Refused()
    refused.note(large, chunk, "too large")
    for again, reason in (
        (large, "too large"),
        (large._replace(value=b"w" * 91), "too large"),
        (large._replace(value=b"v" * 89), None),
        (large._replace(table="public.b"), None),
        (large._replace(key=b"l"), None),
    ):
        assert refused.reason(again, later) == reason
    assert identity(large._replace(table="public.b"), chunk) != identity(large, chunk)
    assert refused.topics == {"t"}


def test_rows_of_a_snapshot_that_do_not_come_again_are_not_awaited_for_ever() -> None:
    """A pause, a lock or DROP TABLE keeps them away; the stream needs its full batches."""
    row, chunk = Event("t", b"k", b"v", None, False, "public.t", 4, 99), Origin(0, 100, None)
    refused, lost = Refused(), Sent()
    lost.add([row], OneOrigin(chunk))
    for wait_s in (60, 120):
        refused.take_care(lost)
        refused.note(row, chunk, "too large")
        former, session = Sent(), Sent()
        assert not refused.passed(99, session, 0)
        assert not refused.passed(300, former, 500)
        assert not refused.passed(300, session, 1_000)
        assert not refused.passed(400, session, 1_000 + wait_s - 1)
        assert refused.reason(row, chunk)
        assert refused.passed(500, session, 1_000 + wait_s)
        assert refused.careful_until is None and refused.reason(row, chunk) is None
    refused.take_care(lost)
    assert refused.passed(600, lost, 0)
    refused.take_care(lost)
    session = Sent()
    assert not refused.passed(700, session, 0) and refused.passed(700, session, 60)
