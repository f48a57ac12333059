"""The pauses between sessions, when no further one is tried, and the last one of a stop."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from schemas.errors import BadInput, ExitCode, Retryable
from schemas.settings import BridgeSettings, KafkaSettings
from services.bridge.progress.ledger import Position
from services.bridge.session.runner import PAUSE_MAX_S, PAUSE_MIN_S, Backoff, Runner
from services.bridge.session.stagnation import SESSIONS_MIN, Stagnation
from services.bridge.sink.markers import TransactionHangs
from services.bridge.source.server_errors import READ_THE_STREAM, server_error
from services.runtime.process import Stop


@pytest.fixture(autouse=True)
def _garbage() -> Iterator[None]:
    """A Runner lets much garbage gather, which other tests would count as theirs."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_pauses_double_up_to_a_cap_while_nothing_is_reached() -> None:
    backoff = Backoff(jitter=lambda _low, high: high)
    stuck = [backoff.pause_s(Position(1, 2, 0)) for _ in range(12)]
    assert stuck[:4] == [PAUSE_MIN_S * 2**n for n in range(4)]
    assert stuck[-1] == PAUSE_MAX_S == max(stuck)


def test_progress_makes_the_next_pause_short_again() -> None:
    backoff = Backoff(jitter=lambda _low, high: high)
    for _ in range(5):
        backoff.pause_s(Position(1, 2, 0))
    assert backoff.pause_s(Position(1, 2, 7)) == PAUSE_MIN_S
    assert backoff.pause_s(Position(1, 2, 0)) > PAUSE_MIN_S, "less than before is no progress"
    assert backoff.pause_s(Position(3, 4, 0)) == PAUSE_MIN_S


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))))
def test_pauses_differ_within_bounds(reached: list[tuple[int, int, int]]) -> None:
    backoff = Backoff()
    for position in reached:
        assert PAUSE_MIN_S / 2 <= backoff.pause_s(Position(*position)) <= PAUSE_MAX_S


HERE = Position(1, 2, 0)


def lost() -> Retryable:
    error = server_error("57P01", "terminating connection", READ_THE_STREAM, "slot s")
    assert isinstance(error, Retryable)
    return error


def test_a_passing_error_that_does_not_pass_ends_in_its_own_exit_code() -> None:
    stagnation = Stagnation(60.0)
    ended = [stagnation.ended(lost(), HERE, 10.0 * number) for number in range(7)]
    assert ended[:6] == [None] * 6
    assert isinstance(ended[6], Retryable)
    assert ended[6].exit_code is ExitCode.SERVER_UNREACHABLE
    assert "7 sessions in a row" in ended[6].message


@pytest.mark.parametrize(
    ("state", "code"), [("XX000", 40), ("53200", 40), ("53300", 10), ("57P01", 10), ("08006", 10)]
)
def test_repeated_error_at_one_lsn_needs_an_operator(state: str, code: int) -> None:
    stagnation = Stagnation(0.0)
    for _ in range(SESSIONS_MIN):
        error = server_error(state, "invalid memory alloc request", READ_THE_STREAM, "slot s")
        assert isinstance(error, Retryable)
        final = stagnation.ended(error, HERE, 1.0)
    assert final is not None
    assert final.exit_code == code
    assert isinstance(final, BadInput if code == 40 else Retryable)


def test_progress_or_another_error_counts_anew() -> None:
    stagnation = Stagnation(0.0)
    other = Retryable("no", operation="commit to Kafka", exit_code=ExitCode.KAFKA_UNREACHABLE)
    for number in range(3 * SESSIONS_MIN):
        assert stagnation.ended(lost(), Position(1, number, 0), 1.0) is None
        assert stagnation.ended(other, Position(1, number, 0), 1.0) is None
    for number in range(3 * SESSIONS_MIN):
        assert stagnation.ended(lost(), Position(2, number, 0), 1.0) is None


class Opened:
    """A session that streams until the stop is set, and then ends with `failure`."""

    over = False
    obstacle = ""
    server = None
    durable = HERE

    def __init__(self, failure: Retryable | None) -> None:
        self._failure = failure

    def stream(self, _stop: object) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        pass


def run_after_stop(
    monkeypatch: pytest.MonkeyPatch, *openings: Retryable | Opened
) -> tuple[int, Retryable | None]:
    """Run with a stop that is set in the first session; how many openings it took, its error."""
    stop, left = Stop(), [*openings]
    bridge = BridgeSettings()
    kafka = KafkaSettings(bootstrap_servers="localhost:9092", topic_prefix="p")
    settings: Any = SimpleNamespace(
        source=None, bridge=bridge, kafka=kafka, rows_since_lsn=0, _replace=lambda **_: settings
    )
    runner = Runner(settings, stop, None)

    def open_next() -> Opened:
        found = left.pop(0)
        if isinstance(found, Opened):
            stop.set()
            return found
        raise found

    monkeypatch.setattr(runner, "_open", open_next)
    monkeypatch.setattr(runner, "_sleep", lambda _seconds: None)
    monkeypatch.setattr("services.bridge.session.runner.LAST_SESSION_S", 0.2)
    try:
        runner.run()
    except Retryable as error:
        return len(openings) - len(left), error
    return len(openings) - len(left), None


HANGS = TransactionHangs("hangs", exit_code=ExitCode.KAFKA_UNREACHABLE)
USED = Retryable("in use", exit_code=ExitCode.SLOT_IN_USE)


@pytest.mark.parametrize(
    ("openings", "tried", "error"),
    [
        ([Opened(None), lost()], 1, None),
        ([Opened(lost()), lost()], 1, None),
        ([Opened(HANGS), Opened(None), lost()], 2, None),
        ([Opened(HANGS), lost(), USED, lost(), Opened(None)], 5, None),
        ([Opened(HANGS), Opened(HANGS), lost()], 2, HANGS),
    ],
)
def test_a_stop_waits_for_one_more_session_only_where_a_transaction_hangs(
    monkeypatch: pytest.MonkeyPatch,
    openings: list[Retryable | Opened],
    tried: int,
    error: Retryable | None,
) -> None:
    assert run_after_stop(monkeypatch, *openings) == (tried, error)


def test_the_same_failure_to_open_is_told_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with capture_logs() as lines:
        run_after_stop(monkeypatch, *[lost()] * 9, *[USED] * 3, lost(), Opened(None))
    told = [line["attempt"] for line in lines if line["event"] == "not streaming yet"]
    assert told == [1, 2, 4, 8, 10, 11, 13]


def test_a_stop_does_not_wait_for_ever_and_tells_what_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_after_stop(monkeypatch, Opened(HANGS), *[lost()] * 100_000)[1] is HANGS
    assert run_after_stop(monkeypatch, Opened(HANGS), *[USED] * 100_000)[1] is None
