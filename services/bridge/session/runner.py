"""Sessions one after another until a stop is asked for: every recovery is a new session."""

import gc
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import structlog
import tenacity

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SlotbridgeError
from schemas.registry import RegistrySettings
from schemas.settings import BridgeSettings, SourceSettings
from services.bridge import metrics
from services.bridge.descriptors import descriptors_needed
from services.bridge.progress.errors import DECIDED_BY_OPERATORS
from services.bridge.progress.ledger import Position
from services.bridge.session.session import Session
from services.bridge.session.settings import SessionSettings
from services.bridge.session.stagnation import Stagnation
from services.bridge.session.start import open_session
from services.bridge.sink.dead_letters import RefusalLearned, Refused
from services.bridge.sink.markers import TransactionHangs
from services.bridge.transactions.spool import SpoolFull, prepared_exceed_spool
from services.bridge.transactions.streams import MessageUnclear
from services.postgres.server import Server
from services.runtime.process import Stop
from services.waiter import Waiter

logger = structlog.get_logger(__name__)

HEALTHY_WITHIN_S = 90.0
GARBAGE_OBJECTS = 50_000
"""New objects between two collections of garbage, so that held events do not cause more."""
PAUSE_MIN_S = 0.2
PAUSE_MAX_S = 10.0
STANDBY_PAUSE_S = 0.5
LAST_SESSION_S = 30.0
SelfRepair = Callable[[SourceSettings, BridgeSettings, Waiter], None]
"""Where to repair, what an operator accepts by now, and whose work goes on, so that the probe and a
stop are heard."""
_GROWING = tenacity.wait_random_exponential(multiplier=0.2, max=3)


class Delivered(NamedTuple):
    """The LSN up to which Kafka has all that was committed, and the timeline that it is on.

    `history`: each ancestor of the timeline -> the LSN at which it was left.
    """

    lsn: int
    timeline: int
    history: Mapping[int, int]


class Backoff:
    """The pause after a session: doubled while none gets further than those before it. Pure."""

    def __init__(self, jitter: Callable[[float, float], float] = random.uniform) -> None:
        self._jitter = jitter
        self._reached: Position | None = None
        self._in_vain = 0

    def pause_s(self, reached: Position) -> float:
        """Return the seconds to wait after a session during which Kafka had `reached`."""
        if self._reached is None or reached > self._reached:
            self._reached = reached
            self._in_vain = 0
        longest = min(PAUSE_MAX_S, PAUSE_MIN_S * 2 ** min(self._in_vain, 30))
        self._in_vain += 1
        return self._jitter(longest / 2, longest)


class Runner:
    """Runs the bridge. `healthy` and `ready` answer the probes from another thread."""

    def __init__(
        self,
        settings: SessionSettings,
        stop: Stop,
        registry: RegistrySettings | None,
        repair: SelfRepair | None = None,
    ) -> None:
        """Connect nowhere yet; `repair` mends what slot and Kafka disagree about (when_needed)."""
        self._registry = registry if settings.kafka.needs_registry else None
        self._settings = settings
        self._source = settings.source
        """Where to go on; another thread may set it."""
        self._refused = Refused()
        self._repair = repair
        self._stop = stop
        self._session: Session | None = None
        self._moved = threading.Event()
        self.server: Server | None = None
        """The primary of the last session."""
        self._opening_since = time.monotonic()
        self._standing_by = False
        self._hangs: TransactionHangs | None = None
        """The error of the last session, until the next one has looked at it."""
        self._last_failure = ""
        self._repeated = 0
        """How many attempts to open a session have failed alike, one after another."""

    def healthy(self) -> bool:
        """Tell whether the loop turns: it streams, repairs, or may connect before the deadline."""
        session = self._session
        last = session.beat if session is not None else self._opening_since
        allowed = self._settings.bridge.connect_deadline_ms / 1000 if session is None else 0.0
        return time.monotonic() - last < HEALTHY_WITHIN_S + allowed

    def ready(self) -> bool:
        """Return whether changes flow now."""
        session = self._session
        return session is not None and not session.obstacle

    def waiting_for(self) -> str:
        """Return why changes do not flow: the last failure to open a session, or an obstacle."""
        session = self._session
        return self._last_failure if session is None else session.obstacle

    def available(self) -> bool:
        """Tell whether this bridge has a session, or waits to take over another bridge's."""
        return self._session is not None or self._standing_by

    def delivered(self) -> Delivered | None:
        """Return up to where Kafka has all that was committed; None while nothing streams."""
        session = self._session
        if session is None:
            return None
        return Delivered(session.durable.end_lsn, session.server.timeline, session.history)

    def move(self, source: SourceSettings) -> None:
        """Move to other hosts, called by another thread: end this session, and open the next there.

        Every session compares all witnesses again, so a wrong database or timeline is refused.
        """
        self._source = source
        self._moved.set()

    def is_set(self) -> bool:
        """Tell whether the session is to end: a stop was asked for, or a move."""
        return self._stop.is_set() or self._moved.is_set()

    def run(self) -> None:
        """Stream until the stop is set. Raise what no new session can mend.

        Where a transaction may hang in Kafka at the stop, one more session ends it. Raise
        TransactionHangs where that session can't be opened in time.
        """
        gc.freeze()  # what is there now stays; the rest is freed by count, and seldom in cycles
        gc.set_threshold(GARBAGE_OBJECTS, 20, 20)
        backoff = Backoff()
        stagnation = Stagnation(self._settings.bridge.connect_deadline_ms / 1000)
        while self._hangs is not None or not self._stop.is_set():
            session = self._open_with_retries()
            if session is None:
                if self._hangs is not None:
                    raise self._hangs
                return
            pause_s, over = 0.0, False
            last = self._hangs is not None and self._stop.is_set()
            self._hangs = None  # opening it has ended what hung
            try:
                self._session, self.server = session, session.server
                with descriptors_needed("stream"):
                    session.stream(self)
                over = session.over
            except Retryable as error:
                if error.exit_code is ExitCode.FENCED or (
                    last and isinstance(error, TransactionHangs)
                ):
                    raise
                self._learn(error)
                if isinstance(error, RefusalLearned):
                    pause_s = PAUSE_MIN_S
                else:
                    pause_s = backoff.pause_s(session.durable)
                    self._give_up(stagnation.ended(error, session.durable, time.monotonic()), error)
                self._log_loss(error, pause_s)
            finally:
                self._session = None
                self._opening_since = time.monotonic()
                fenced = _close(session)
                del session
                gc.collect()  # clients in cycles, such as an error's traceback, keep threads
            if fenced is not None:
                raise fenced
            if over:
                logger.warning(
                    "all rows are read (snapshot.mode: initial_only): from now on the slot keeps "
                    "WAL for what comes next",
                    slot=self._settings.source.slot,
                    hint="start with snapshot.mode: initial to go on from here, or `slotbridge "
                    "teardown`",
                )
                return
            if not self._moved.is_set():
                self._stop.wait(pause_s)

    def _learn(self, error: Retryable) -> None:
        """Let the next session differ by what ended this one. Raise what none can mend."""
        if isinstance(error, TransactionHangs):
            self._hangs = error
        elif isinstance(error, SpoolFull):
            self._stop_streaming(error)
        elif isinstance(error, MessageUnclear):
            self._settings = self._settings._replace(streaming=False)

    def _log_loss(self, error: Retryable, pause_s: float) -> None:
        """Log and count the end of a session, and whether another one follows."""
        goes_on = self._hangs is not None or not self._stop.is_set()
        logger.warning(
            "session lost: starting a new one" if goes_on else "session lost at the stop",
            reason=str(error),
            pause_s=round(pause_s, 1),
        )
        metrics.RECONNECTS.inc()

    def _give_up(self, final: SlotbridgeError | None, cause: Retryable) -> None:
        """Raise `final`, unless streaming was the cause: the next session goes without it."""
        if final is not None and not isinstance(cause, SpoolFull | MessageUnclear):
            raise final from cause

    def _stop_streaming(self, error: SpoolFull) -> None:
        """Let the server spill. If streaming is off, raise: only prepared transactions spool."""
        if not self._settings.streaming:
            raise prepared_exceed_spool(error) from error
        self._settings = self._settings._replace(streaming=False)

    def _open_with_retries(self) -> Session | None:
        """Open a session, with retries; return None if a stop is asked for first.

        Raise the last error when the deadline has passed, or one that a retry can't mend.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._may_retry),
            wait=self._pause_s,
            stop=self._gives_up,
            sleep=self._sleep,
            before_sleep=self._log_retry,
            reraise=True,
        )
        try:
            return retrying(self._open)
        except Retryable as error:
            if not self._stop.is_set():
                raise
            if error.exit_code is ExitCode.SLOT_IN_USE:
                self._hangs = None  # another bridge has opened its session, and ended what hung
            return None
        finally:
            self._standing_by = False

    def _pause_s(self, state: tenacity.RetryCallState) -> float:
        """Return the seconds until the next attempt; few for a stand-by, which is to take over."""
        return STANDBY_PAUSE_S if self._standing_by else _GROWING(state)

    def _sleep(self, seconds: float) -> None:
        """Wait for the next attempt, or for the stop; after the stop for the last session alone."""
        if not self._stop.wait(seconds) or self._hangs is None:
            return
        time.sleep(min(seconds, STANDBY_PAUSE_S))

    def _log_retry(self, state: tenacity.RetryCallState) -> None:
        """Log a failure to open a session, and its repetitions ever more rarely."""
        error = state.outcome.exception() if state.outcome is not None else None
        again = state.attempt_number > 1 and str(error) == self._last_failure
        self._repeated = self._repeated + 1 if again else 1
        self._last_failure = str(error)
        if not self._standing_by and self._repeated & (self._repeated - 1):  # not a power of two
            return
        logger.warning("not streaming yet", attempt=state.attempt_number, reason=self._last_failure)

    def _gives_up(self, state: tenacity.RetryCallState) -> bool:
        """Tell whether to end the retries: a stop was asked for, or the deadline has passed.

        After a stop, a session that ends what may hang is tried for LAST_SESSION_S.
        The deadline stands still while another bridge has the slot and `standby` says to wait for
        it.
        """
        if self._stop.is_set():
            late = time.monotonic() - self._opening_since > LAST_SESSION_S
            return late or self._hangs is None
        error = state.outcome.exception() if state.outcome is not None else None
        in_use = isinstance(error, Retryable) and error.exit_code is ExitCode.SLOT_IN_USE
        self._standing_by = self._settings.bridge.standby and in_use
        if self._standing_by:
            self._opening_since = time.monotonic()
            metrics.LIVE.stand_by()
        waited_s = time.monotonic() - self._opening_since
        return waited_s > self._settings.bridge.connect_deadline_ms / 1000

    def _open(self) -> Session:
        """Open a session; only the first one that opens goes on with what an operator accepts."""
        self._moved.clear()  # before the source is read: a move from here on ends the session
        settings = self._settings._replace(source=self._source)
        with descriptors_needed("open a session"):
            try:
                session = open_session(settings, self._refused, self._registry)
            except OperatorNeeded as error:
                self._mend(error, settings.source)
                session = open_session(settings, self._refused, self._registry)
        bridge = self._settings.bridge.model_copy(update={"accept": ()})
        self._settings = self._settings._replace(bridge=bridge)
        if self._settings.rows_since_lsn is None:
            since_lsn = session.durable.end_lsn
            self._settings = self._settings._replace(rows_since_lsn=since_lsn)
        return session

    def _mend(self, error: OperatorNeeded, source: SourceSettings) -> None:
        """Repair the topics where that is asked for, and all that keeps a session from opening."""
        decided = isinstance(error, DECIDED_BY_OPERATORS)
        if self._repair is None or decided or error.exit_code is not ExitCode.WITNESSES_DISAGREE:
            raise error
        logger.warning(
            "slot and Kafka disagree: the topics are repaired (snapshot.mode: when_needed)",
            slot=source.slot,
            reason=error.message,
        )
        self._repair(source, self._settings.bridge, Waiter(self._repairs))

    def _repairs(self) -> None:
        """Note that a repair goes on. Raise Retryable where a stop is asked for."""
        self._opening_since = time.monotonic()
        if self._stop.is_set():
            raise Retryable("a stop was asked for", operation="repair the topics")

    def _may_retry(self, error: BaseException) -> bool:
        return isinstance(error, Retryable) and error.exit_code is not ExitCode.FENCED


def _close(session: Session) -> Retryable | None:
    """End the session; return that Kafka has fenced us, if a commit in progress failed with that.

    A bridge that stood still for long finds its server gone before it hears from Kafka.
    """
    failure = session.close()
    if isinstance(failure, Retryable) and failure.exit_code is ExitCode.FENCED:
        return failure
    return None
