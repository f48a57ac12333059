"""The ledger only moves forward; each disagreement of the witnesses is its own error."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.acceptance import Acceptance, Everything
from schemas.errors import ExitCode, OperatorNeeded, Retryable, SlotbridgeError
from schemas.events import DivergenceRecord
from schemas.progress import ProgressRecord
from services.bridge.progress.consistency import (
    Selection,
    Witnesses,
    check_timeline,
    is_lost,
    set_back,
    unjudged,
)
from services.bridge.progress.errors import Diverged, SequenceSetBack
from services.bridge.progress.ledger import (
    Ledger,
    Position,
    check_beginning,
    check_witnesses,
    resume_at,
)
from services.bridge.progress.wal_commit import NO_COMMIT, WalCommit
from services.postgres.server import Server
from services.postgres.slots import Slot
from tests.providers.progress_records import altered, progress_record

SERVER = Server(
    system_identifier="7000",
    timeline=2,
    version=180006,
    database="bank",
    in_recovery=False,
    wal_level="logical",
    synchronized_standby_slots="standby_1",
    wal_sender_timeout_ms=60_000,
)
SLOT = Slot(
    slot_name="s",
    plugin="pgoutput",
    slot_type="logical",
    database="bank",
    temporary=False,
    active_pid=None,
    restart_lsn=900,
    confirmed_flush_lsn=1000,
    wal_status="reserved",
    two_phase=False,
    failover=True,
    synced=False,
    invalidation_reason=None,
)
HISTORY = {1: 800}
NOW = Selection("p", 16400, "any")
RECORD = progress_record(
    slot="s",
    system_identifier="7000",
    timeline=2,
    commit_lsn=1900,
    xid=745,
    commit_time_us=5_000_000,
    end_lsn=2000,
    seq=0,
    ts_ms=0,
    history=HISTORY,
    lsn=1500,
    wal_lsn=1600,
    publication="p",
    publication_oid=16400,
    source_origin="any",
)
COMMIT = WalCommit(745, 5_000_000, 1940)
SEEN = Witnesses(SLOT, 1500, SERVER, HISTORY, 2100, NOW, commit=COMMIT)


def record(**changes: object) -> ProgressRecord:
    return altered(RECORD, **changes)


def earlier(**changes: object) -> ProgressRecord:
    """Of timeline 1, which the server left at 800."""
    known = {"timeline": 1, "history": {}, "end_lsn": 800, "commit_lsn": 700}
    return record(**{**known, "lsn": 600, "wal_lsn": 650, **changes})


AT_700 = replace(SEEN, slot=replace(SLOT, confirmed_flush_lsn=750), origin_lsn=700)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (RECORD, SEEN),
        (RECORD, replace(SEEN, origin_lsn=2000)),
        (RECORD, replace(SEEN, wal_lsn=2000)),
        # Flushed WAL may end inside a record, which a crash takes away.
        (record(wal_lsn=2101), SEEN),
        (record(lsn=0, wal_lsn=0), replace(SEEN, origin_lsn=None)),
        (RECORD, replace(SEEN, commit=None)),
        (RECORD, replace(SEEN, commit=COMMIT._replace(xid=0))),
        (record(xid=0), replace(SEEN, commit=NO_COMMIT)),
        (earlier(), AT_700),
        # The standby had not received the origin's last move: nothing is known of it.
        (earlier(lsn=790, wal_lsn=801), AT_700),
    ],
)
def test_witnesses_that_agree(given: ProgressRecord, seen: Witnesses) -> None:
    check_witnesses(given, seen, "s")


def test_what_a_record_does_not_know_is_not_judged() -> None:
    assert not [*unjudged(RECORD, SEEN)]
    assert [*unjudged(RECORD, replace(SEEN, commit=None))] == [
        "the last transaction's commit in the WAL"
    ]
    assert [*unjudged(earlier(lsn=790, wal_lsn=801), AT_700)] == [
        "the replication origin's position"
    ]


def test_a_beginning_needs_a_server_that_knows_of_none() -> None:
    for found in (None, SLOT):
        check_beginning(replace(SEEN, slot=found, origin_lsn=None), "s")
    with pytest.raises(OperatorNeeded, match="no progress record"):
        check_beginning(SEEN, "s")


W, D, T = ExitCode.WITNESSES_DISAGREE, ExitCode.WRONG_DATABASE, ExitCode.TIMELINE


@pytest.mark.parametrize(
    ("given", "seen", "kind", "code", "text"),
    [
        (RECORD, replace(SEEN, origin_lsn=2001), OperatorNeeded, W, "Kafka lost committed data"),
        (
            RECORD,
            replace(SEEN, slot=replace(SLOT, confirmed_flush_lsn=2001)),
            *(OperatorNeeded, W, "can't be decoded again"),
        ),
        (RECORD, replace(SEEN, slot=None), OperatorNeeded, W, "the slot is gone"),
        (
            RECORD,
            replace(SEEN, slot=replace(SLOT, invalidation_reason="wal_removed")),
            *(OperatorNeeded, W, "wal_removed"),
        ),
        (
            RECORD,
            replace(SEEN, server=replace(SERVER, system_identifier="1")),
            *(OperatorNeeded, D, "the database has system identifier 1"),
        ),
        (
            RECORD,
            replace(SEEN, server=replace(SERVER, timeline=1), switch_points={}),
            *(Retryable, T, "old primary"),
        ),
        (earlier(end_lsn=801), AT_700, Diverged, T, "left it at 0/320, so it never had"),
        (earlier(end_lsn=700, commit_lsn=800, seq=3), AT_700, Diverged, T, "never had"),
        (record(history={1: 790}), SEEN, Diverged, T, "same number: they part at 0/316"),
        (RECORD, replace(SEEN, wal_lsn=1999), Diverged, T, "set back.*its WAL ends at 0/7CF"),
        (RECORD, replace(SEEN, origin_lsn=1499), Diverged, T, "set back.*origin is at 0/5DB"),
        (earlier(), replace(AT_700, origin_lsn=599), Diverged, T, "set back"),
        (RECORD, replace(SEEN, origin_lsn=None), OperatorNeeded, W, "origin has no position"),
        (
            RECORD,
            replace(SEEN, selection=Selection("q", 16401, "any")),
            *(OperatorNeeded, W, "of publication q now"),
        ),
        (
            RECORD,
            replace(SEEN, selection=Selection("p", 16401, "any")),
            *(OperatorNeeded, W, "dropped and made again"),
        ),
        (
            RECORD,
            replace(SEEN, selection=Selection("p", 16400, "none")),
            *(OperatorNeeded, W, "source.origin is none now"),
        ),
        (
            record(seq=3),
            replace(SEEN, selection=Selection("q", 16401, "any"), accepted=Everything()),
            *(OperatorNeeded, W, "numbered differently"),
        ),
    ],
)
def test_witnesses_that_disagree(
    given: ProgressRecord,
    seen: Witnesses,
    kind: type[SlotbridgeError],
    code: ExitCode,
    text: str,
) -> None:
    with pytest.raises(kind, match=text) as caught:
        check_witnesses(given, seen, "s")
    assert caught.value.exit_code is code
    assert caught.value.hint


SEQUENCE = replace(SEEN, witness="sequence", origin_lsn=1499)
OF_SEQUENCE = record(kind="sequence")


@pytest.mark.parametrize("given", [OF_SEQUENCE, record(kind="sequence", wal_lsn=1940)])
def test_a_sequence_that_was_set_back_alone_is_told_with_its_remedy(given: ProgressRecord) -> None:
    """The WAL has the sequence's move, or a commit behind it: the server was not set back."""
    with pytest.raises(SequenceSetBack, match="the server was not") as caught:
        check_witnesses(given, SEQUENCE, "s")
    assert caught.value.exit_code is W
    assert "SELECT setval('slotbridge.witness_s', 1500)" in str(caught.value.hint)
    assert "recover" not in str(caught.value.hint)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (OF_SEQUENCE, replace(SEQUENCE, commit=None)),
        (record(kind="sequence", xid=0), SEQUENCE),
        (OF_SEQUENCE, replace(SEQUENCE, commit=COMMIT._replace(xid=0))),
        # The record's commit is from before the move, which a restored volume may lack.
        (record(kind="sequence", wal_lsn=1941), SEQUENCE),
        (
            record(kind="sequence", wal_lsn=1941),
            replace(SEQUENCE, slot=replace(SLOT, confirmed_flush_lsn=1999)),
        ),
    ],
)
def test_a_sequence_or_a_server_that_was_set_back(given: ProgressRecord, seen: Witnesses) -> None:
    """Neither an accepted divergence nor when_needed decides what only an operator knows."""
    with pytest.raises(SequenceSetBack, match="either it was set back alone") as caught:
        check_witnesses(given, seen, "s")
    hint = str(caught.value.hint)
    assert "SELECT setval('slotbridge.witness_s', 1500)" in hint and "slotbridge recover" in hint


@pytest.mark.parametrize(
    "seen", [replace(SEQUENCE, wal_lsn=1999), replace(SEQUENCE, commit=NO_COMMIT)]
)
def test_a_server_that_was_set_back_with_its_sequence(seen: Witnesses) -> None:
    with pytest.raises(Diverged, match="set back to an earlier state"):
        check_witnesses(OF_SEQUENCE, seen, "s")


def test_a_change_of_publication_is_accepted_by_its_name_alone() -> None:
    other = replace(SEEN, selection=Selection("q", 16401, "any"))
    with pytest.raises(OperatorNeeded) as caught:
        check_witnesses(RECORD, other, "s")
    token = caught.value.token
    assert token is not None and token.bound.startswith("q/16401/any@")
    check_witnesses(RECORD, replace(other, accepted=Acceptance([token])), "s")
    for slot, record_ in (("t", RECORD), ("s", record(end_lsn=RECORD.position.end_lsn + 1))):
        with pytest.raises(OperatorNeeded):
            check_witnesses(record_, replace(other, accepted=Acceptance([token])), slot)


def test_a_server_that_was_set_back_shares_what_slot_and_origin_had() -> None:
    """Kafka had all that they were told of, so nothing before it is lost or sent again."""
    for confirmed, origin, agreed in ((1000, 1400, 1400), (1300, 1200, 1300)):
        back = replace(SLOT, confirmed_flush_lsn=confirmed)
        with pytest.raises(Diverged) as caught:
            check_witnesses(RECORD, replace(SEEN, slot=back, origin_lsn=origin), "s")
        assert caught.value.switch_lsn == agreed


def test_a_part_of_a_transaction_that_both_have_stays_where_kafka_is_set_back() -> None:
    part = record(end_lsn=1000, commit_lsn=1200, seq=7, counts={"public.t": 7}, ahead_lsn=1900)
    back = set_back(part, 1300)
    assert back.position == part.position.model_copy(update={"ahead_lsn": 1300})
    assert (back.witness.lsn, back.witness.wal_lsn) == (0, 0)
    for switch, end_lsn in ((1200, 1000), (900, 900)):
        gone = set_back(part, switch).position
        assert (gone.commit_lsn, gone.end_lsn, gone.seq, gone.counts) == (0, end_lsn, 0, {})


def test_accepted_divergences_lose_what_is_between_their_two_ends_alone() -> None:
    accepted = DivergenceRecord(
        slot="s",
        system_identifier="7000",
        lost_timeline=2,
        timeline=2,
        switch_lsn=1000,
        reached_lsn=1200,
        count=1,
        transactions=[],
        ts_ms=0,
    )
    for timeline in (0, 2):
        lost = [lsn for lsn in (999, 1000, 1199, 1200) if is_lost(timeline, lsn, SEEN, [accepted])]
        assert lost == [1000, 1199]


@pytest.mark.parametrize(
    ("history", "points", "fork_lsn"),
    [
        ({1: 800}, {1: 700}, 700),
        # Of the same ancestors up to 800, then of other numbers: the next end tells nothing.
        ({1: 800, 2: 900}, {1: 800, 3: 950}, 800),
        ({1: 800, 3: 850}, {1: 800, 2: 900}, 800),
    ],
)
def test_histories_part_where_the_last_timeline_of_both_ends(
    history: dict[int, int], points: dict[int, int], fork_lsn: int
) -> None:
    server = replace(SERVER, timeline=5)
    seen = replace(SEEN, server=server, switch_points=points)
    with pytest.raises(Diverged) as found:
        check_timeline(record(timeline=4, history=history), seen, "s")
    assert found.value.switch_lsn == fork_lsn


timelines = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), max_size=4)


def _path(steps: list[tuple[int, int]]) -> tuple[dict[int, int], int]:
    """A history and the timeline that it leads to, from (how much higher, how far) steps."""
    history, timeline, lsn = {}, 1, 0
    for higher, further in steps:
        lsn += further
        history[timeline] = lsn
        timeline += higher
    return history, timeline


@given(timelines, timelines, st.integers(1, 40))
def test_of_two_histories_only_what_both_share_is_agreed(
    kafka: list[tuple[int, int]], server: list[tuple[int, int]], end_lsn: int
) -> None:
    """By the timeline that each says the WAL just before `end_lsn` to be of."""
    history, timeline = _path(kafka)
    points, current = _path(server)
    seen = replace(SEEN, server=replace(SERVER, timeline=current), switch_points=points)

    def at(path: dict[int, int], last: int, lsn: int) -> list[tuple[int, int]]:
        """The beginnings (timeline, LSN) of all timelines that have WAL before `lsn`."""
        since, found = 0, []
        for one, left in [*sorted(path.items()), (last, 10**6)]:
            if since < lsn:
                found.append((one, since))
            since = left
        return found

    given = record(timeline=timeline, history=history, end_lsn=end_lsn, seq=0)
    try:
        check_timeline(given, seen, "s")
    except Retryable:
        assert timeline > current
    except Diverged as error:
        assert error.switch_lsn is not None
        assert at(history, timeline, error.switch_lsn) == at(points, current, error.switch_lsn)
        further = error.switch_lsn + 1
        assert at(history, timeline, further) != at(points, current, further)
    else:
        assert timeline == current or timeline in points
        if timeline == current:
            assert history == points


@given(st.lists(st.sampled_from(["publish", "commit", "report", "origin"]), max_size=30))
def test_the_ledger_never_passes_what_kafka_has(actions: list[str]) -> None:
    ledger = Ledger(Position(0, 100, 0), 60)
    reported, recorded_lsn = 0, 60
    for step, action in enumerate(actions):
        if action == "publish":
            ledger.publish(Position(200 + 10 * step, 205 + 10 * step, 0))
        elif action == "commit":
            ledger.commit()
            recorded_lsn = ledger.durable.end_lsn
        elif action == "report":
            assert ledger.report() >= reported
            reported = ledger.report()
        else:
            assert ledger.mark_origin() == recorded_lsn, "of the record, wherever it began"
        assert ledger.received >= ledger.published.end_lsn >= ledger.durable.end_lsn
        assert ledger.durable.end_lsn >= max(ledger.flushed, ledger.origin)


def test_the_slot_may_be_ahead_of_the_record_as_far_as_that_announces() -> None:
    announced = record(ahead_lsn=2500)
    for confirmed in (2000, 2001, 2500):
        ahead = replace(SLOT, confirmed_flush_lsn=confirmed)
        check_witnesses(announced, replace(SEEN, slot=ahead), "s")
    beyond = replace(SLOT, confirmed_flush_lsn=2501)
    with pytest.raises(OperatorNeeded, match="can't be decoded again"):
        check_witnesses(announced, replace(SEEN, slot=beyond), "s")


lsns = st.integers(0, 100)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("publish"), lsns),
            st.tuples(st.just("commit"), lsns),
            st.tuples(st.just("report"), lsns),
        )
    )
)
def test_only_announced_timelines_are_followed(steps: list[tuple[str, int]]) -> None:
    ledger = Ledger(Position(0, 0, 0), 0)
    reported = 0
    announced = 0
    for step, lsn in steps:
        if step == "publish":
            ledger.publish(Position(0, max(lsn, ledger.published.end_lsn), 0))
        elif step == "commit":
            announced = max(announced, ledger.published.end_lsn + lsn)
            ledger.commit(ledger.published.end_lsn + lsn)
        else:
            told = ledger.report(follow=bool(lsn % 2))
            assert reported <= told <= ledger.published.end_lsn
            assert told <= max(ledger.durable.end_lsn, announced)
            reported = told


def test_the_start_is_where_the_slot_is_when_that_is_ahead() -> None:
    ahead = replace(SLOT, confirmed_flush_lsn=2300)
    assert resume_at(RECORD, SLOT) == resume_at(RECORD, None) == Position(1900, 2000, 0)
    assert resume_at(RECORD, ahead) == Position(1900, 2300, 0)
    assert resume_at(record(commit_lsn=2400, seq=7), ahead) == Position(2400, 2300, 7)
