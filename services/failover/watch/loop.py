"""The loop of `watch`: observe, remember, decide, and where that says so, repoint.

One thread owns the connections and everything that changes; others read `snapshot`, and may order
a pause. Every act holds the commands' lock and observes once more before its first step.
"""

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog

from schemas.errors import ExitCode, SlotbridgeError
from schemas.settings import FailoverSettings
from services.failover.checks.check_report import check_up
from services.failover.execute.history import read_history
from services.failover.execute.interruption import Interrupted
from services.failover.execute.journal import Entry, Journal, remembered
from services.failover.execute.lock import Lock, locked
from services.failover.execute.run import Performed, Result, Run
from services.failover.execute.subscription_note import note_feeding, notes_due
from services.failover.execute.timeline_memory import Asked, recall
from services.failover.model.view import View
from services.failover.observe.cluster import Cluster
from services.failover.observe.kafka_progress import ProgressReader
from services.failover.observe.server_link import Unreachable
from services.failover.plan.rejoin import plan_repoint
from services.failover.plan.request import Request
from services.failover.watch.assessment import Assessment, assess
from services.failover.watch.decision import (
    Decision,
    Memory,
    Rules,
    Verdict,
    acted,
    decide,
    remember,
)
from services.failover.watch.lease.elector import Elector, NoLease
from services.failover.watch.pause import Ordered, Pause, newer
from services.failover.watch.shared_state import SharedState, SharedStateStore
from services.failover.watch.snapshot import Event, Point, Snapshot, lags_of
from services.runtime.process import Stop

logger = structlog.get_logger(__name__)

_EVENTS_MAX = 50
_LEAD_IDLE_S = 60.0
_ORDER_S = 5.0
_JOURNAL_EVERY_S = 2.0
_ENTRIES_MAX = 200


class Watch:
    """One replica. `run` is called once; `snapshot`, `healthy` and `order` from any thread."""

    def __init__(
        self,
        settings: FailoverSettings,
        cluster: Cluster,
        request: Request,
        election: Elector | NoLease,
    ) -> None:
        self._settings = settings
        self._request = request
        self._cluster = cluster
        self._election = election
        watch = settings.watch
        self._interval_s = watch.interval_ms / 1000
        self._rules = Rules.of(watch, settings.connect_timeout_s * 4.0)
        self._patience_s = self._rules.stale_s + settings.step_deadline_ms / 1000
        # Nobody but the Lease's holder takes the lock of a session that idles through an act.
        stale_s = self._rules.stale_s
        idle_s = stale_s if watch.lease.name else max(_LEAD_IDLE_S, 2 * stale_s)
        self._kafka = ProgressReader(cluster.bridge)
        self._store = SharedStateStore(cluster, settings.journal_database, idle_s)
        self._points: deque[Point] = deque(maxlen=watch.history_points_max)
        self._events: deque[Event] = deque(maxlen=_EVENTS_MAX)
        self._memory = Memory()
        self._pause = self._logged_pause = Pause()
        self._pause_lock = threading.Lock()
        self._orders: tuple[tuple[Pause, Future[Ordered]], ...] = ()
        self._wake = threading.Event()
        self._acting = False
        self._unnoted: set[str] = set()
        self._remembered: dict[str, Any] = {}
        self._beat = time.monotonic()
        self._observed = False
        self._journal_due = 0.0
        self.snapshot = Snapshot(automatic=watch.repoint)

    def run(self, stop: Stop) -> None:
        """Observe and act until `stop` is set."""
        try:
            with contextlib.suppress(SlotbridgeError):  # it is done again before each act
                self._recall()
            while not stop.is_set():
                begun = time.monotonic()
                self._once()
                left_s = self._interval_s - (time.monotonic() - begun)
                while left_s > 0 and not stop.is_set() and not self._wake.wait(min(left_s, 0.2)):
                    left_s = self._interval_s - (time.monotonic() - begun)
                self._wake.clear()
        finally:
            self._store.close()

    def healthy(self) -> bool:
        """Tell whether the loop goes round."""
        return time.monotonic() - self._beat < self._patience_s

    def ready(self) -> bool:
        """Return whether the last observation succeeded and is fresh."""
        return self._observed and self.healthy()

    @property
    def fresh_view(self) -> View | None:
        """The last view, None if it is older than the interval of observations allows."""
        seen = self.snapshot
        return seen.view if time.time() - seen.at_s <= self._rules.stale_s else None

    def order(self, *, paused: bool, by: str, reason: str) -> Ordered:
        """Pause or resume, at once here; wait a moment until all replicas can know of it."""
        answer: Future[Ordered] = Future()
        with self._pause_lock:
            pause = Pause(paused, _now(), by[:200], reason[:500], self._pause.version + 1)
            self._pause = pause
            self._orders = (*self._orders, (pause, answer))
            self.snapshot = replace(self.snapshot, pause=pause)
        self._wake.set()
        try:
            return answer.result(_ORDER_S)
        except FutureTimeout:  # an act or a slow server holds the loop up
            return Ordered(pause, in_effect=False, shared=False)

    def _once(self) -> None:
        """Observe, judge, meet other replicas in the database, publish; repoint where decided."""
        begun = time.monotonic()
        view, problem = self._look()
        assessment = (
            assess(view, self._request) if view is not None else Assessment(partial=problem)
        )
        before = self.snapshot
        self._memory = remember(self._memory, assessment, time.monotonic(), self._rules)
        counts = replace(before.counts, observations=before.counts.observations + 1)
        if self._promoted(before.memory.timeline_max):
            counts = replace(counts, promotions=counts.promotions + 1)
        shared_state = self._meet(assessment.primary)
        if view is not None:
            self._points.append(Point(time.time(), lags_of(view)))
        self._beat = time.monotonic()
        self._observed = view is not None
        self._publish(
            replace(
                _judged(before, view, problem),
                at=_now(),
                at_s=time.time(),
                took_s=self._beat - begun,
                leading=shared_state.leading,
                lease=self._election.report(),
                at_work=shared_state.at_work,
                entries=shared_state.entries or self._journal_of(view) or before.entries,
                drilled=shared_state.drill or before.drilled,
                counts=counts,
                contacts=self._contacts(view),
            )
        )
        verdict = self.snapshot.decision.verdict
        if verdict is Verdict.ACT and view is not None:
            self._act(view)
        elif verdict is Verdict.REST and view is not None and self._may_change(shared_state):
            self._note(view, assessment)
            self._remember(view)

    def _journal_of(self, view: View | None) -> tuple[Entry, ...]:
        """Return the last entries of all nodes' journals and the file's while no primary writes.

        An unfinished run is known there first: it can't write to the table of a fenced primary.
        """
        now = time.monotonic()
        if view is None or now < self._journal_due:
            return ()
        self._journal_due = now + _JOURNAL_EVERY_S
        settings = self._settings
        found = read_history(self._cluster, view, settings.journal, settings.journal_database, [])
        return tuple(found[-_ENTRIES_MAX:])

    def _contacts(self, view: View | None) -> tuple[tuple[str, float], ...]:
        """Return when each server last answered: those in `view` now."""
        known = dict(self.snapshot.contacts)
        if view is not None:
            now = time.time()
            known |= {node.name: now for node in view.nodes if node.state is not None}
            known |= {found.name: now for found in view.subscribers if found.usable}
        return tuple(known.items())

    def _may_change(self, shared_state: SharedState) -> bool:
        leads = shared_state.leading and self._election.holds()
        return leads and self._rules.automatic and not self._is_paused()

    def _look(self) -> tuple[View | None, str]:
        """Return what can be seen, and the problems of servers that can't: they hide no others."""
        published = self._kafka.read()
        try:
            view, problems = self._cluster.survey_all()
        except SlotbridgeError as error:
            return None, str(error)
        view = self._kafka.complete(published, view)
        return view, "; ".join(f"{name}: {error}" for name, error in problems.items())

    def _remember(self, view: View) -> None:
        """Record the primary's timeline and slots in the journal, whenever they change."""
        found = remembered(view)
        if found and found != self._remembered:
            self._remembered = found
            settings = self._settings
            journal = Journal(settings.journal, self._cluster, settings.journal_database, "watch")
            journal.remember(view)

    def _recall(self) -> None:
        """Have the views remember what journals and Kafka tell; again before each act."""
        cluster, settings, unread = self._cluster, self._settings, list[str]()
        asked = Asked(cluster.bridge)
        view, _problems = cluster.observe_all()
        entries = read_history(cluster, view, settings.journal, settings.journal_database, unread)
        for note in recall(cluster, entries, asked.answer(), unread):
            self._log(note)
        cluster.milestones += self._kafka.known

    def _note(self, view: View, assessment: Assessment) -> None:
        """Have each subscription remember the timeline that feeds it, for whoever starts anew."""
        primary = view.primary
        if primary is None or assessment.partial or assessment.forbidden:
            return
        for subscriber, name, milestone, comment in notes_due(view, primary):
            where = f"{subscriber}/{name}"
            write = partial(note_feeding, name=name, comment=comment)
            try:
                noted = self._cluster.subscribers[subscriber].order(write)
            except (SlotbridgeError, Unreachable) as error:
                if where not in self._unnoted:
                    self._log(f"{where} can't remember {milestone}: {error}")
                self._unnoted.add(where)
            else:
                if noted:
                    self._log(f"{where} remembers {milestone} of {primary.name}")
                self._unnoted.discard(where)

    def _promoted(self, timeline_before: int) -> bool:
        """Tell of a promotion: a node out of recovery, on a newer timeline than any before."""
        now = self._memory.assessment
        if not timeline_before or self._memory.timeline_max <= timeline_before:
            return False
        self._log(f"{now.primary} was promoted: timeline {timeline_before} -> {now.timeline}")
        return True

    def _meet(self, primary: str) -> SharedState:
        """Read the shared state (leader, pause, commands at work), and share our own orders."""
        with self._pause_lock:
            ours, orders, self._orders = self._pause, self._orders, ()
        shared_state = self._store.look(
            primary, ours, may_lead=self._election.holds(), ordered=bool(orders)
        )
        if shared_state.problem:
            logger.warning("the journal's database can't be used", reason=shared_state.problem)
        pause = shared_state.pause
        with self._pause_lock:
            self._pause = newer(self._pause, pause)
            now = self._pause
        for wanted, answer in orders:
            answer.set_result(Ordered(now, now.paused == wanted.paused, shared_state.shared))
        if pause.at and pause != self._logged_pause:
            self._logged_pause = pause
            where = "" if shared_state.shared else " (this replica only)"
            self._log(f"{'paused' if pause.paused else 'resumed'} by {pause.by}{where}")
        if shared_state.leading != self.snapshot.leading:
            self._log(f"this replica {'leads' if shared_state.leading else 'does not lead'}")
        return shared_state

    def _act(self, view: View) -> None:
        """Repoint, under the lock and on what is seen once it is held."""
        settings = self._settings
        database, path = settings.journal_database, settings.journal
        self._log(f"repoint: {self.snapshot.decision.reason}")
        counts = self.snapshot.counts
        self._acting = True
        try:
            with locked(self._cluster, view, database, path) as lock:
                self._recall()
                view = self._cluster.observe()
                changed = assess(view, self._request) != self._memory.assessment
                if changed or self._is_paused() or not self._election.holds():
                    self._log("repoint not done: the cluster, or who leads, changed meanwhile")
                    return
                done = self._repoint(view, Journal(path, self._cluster, database, "watch"), lock)
        except SlotbridgeError as error:
            self._log(f"repoint failed: {error}")
            well = error.exit_code is ExitCode.LOCKED  # others at work: it does not count
            counts = replace(counts, failures=counts.failures + (not well))
        else:
            well = done.exit_code is ExitCode.OK
            for left in done.left:
                self._log(f"left: {left.line}")
            self._log(f"repointed to {done.new_primary} in {done.seconds:.1f} s")
            counts = replace(counts, repoints=counts.repoints + 1)
        finally:
            self._acting = False
        self._beat = now = time.monotonic()
        self._memory = acted(self._memory, now, self._rules, well=well)
        self._publish(replace(self.snapshot, counts=counts))

    def _repoint(self, view: View, journal: Journal, lock: Lock) -> Result:
        """Carry out a repointing; another replica's Lease interrupts it between two steps."""

        def hold(observed: View) -> None:
            lock.hold(observed)
            if elsewhere := self._elsewhere():
                raise Interrupted(
                    f"this replica does not go on: {elsewhere}",
                    operation="repoint",
                    hint="the replica that holds the Lease does the rest",
                    exit_code=ExitCode.LOCKED,
                )

        def narrate(done: Performed) -> None:
            self._log(f"{done.seconds:.1f} s {done.step.text}: {done.detail}")
            self._beat = time.monotonic()
            self._publish(self.snapshot)

        run = Run(
            self._cluster,
            journal,
            self._settings.step_deadline_ms / 1000,
            narrate=narrate,
            report=lambda text: logger.info("waiting", progress=text),
            started=time.monotonic(),
            hold=hold,
        )
        return run.carry_out(view, self._request, plan_repoint)

    def _publish(self, snapshot: Snapshot) -> None:
        """Decide by what is remembered, and show snapshot and decision to other threads."""
        with self._pause_lock:
            pause = self._pause
            before = self.snapshot.decision
            decision = before if self._acting else self._decide(snapshot.leading, pause)
            self.snapshot = replace(
                snapshot,
                memory=self._memory,
                decision=decision,
                pause=pause,
                points=tuple(self._points),
                events=tuple(self._events),
            )
        if before.verdict is not decision.verdict:
            logger.info("decision changed", verdict=str(decision.verdict), reason=decision.reason)

    def _decide(self, leading: bool, pause: Pause) -> Decision:
        elsewhere = self._elsewhere()
        return decide(
            self._memory,
            time.monotonic(),
            self._rules,
            paused=pause.paused,
            leading=leading and not elsewhere,
            elsewhere=elsewhere,
        )

    def _elsewhere(self) -> str:
        """Return why this replica does not hold the Lease, "" if it does or none elects."""
        lease = self._election.report()
        return lease.elsewhere if lease is not None and not lease.held else ""

    def _is_paused(self) -> bool:
        with self._pause_lock:
            return self._pause.paused

    def _log(self, text: str) -> None:
        logger.info("watch", event_text=text)
        self._events.append(Event(_now(), text))


def _judged(before: Snapshot, view: View | None, problem: str) -> Snapshot:
    """Return the snapshot with this observation and its judgement, without either if it failed."""
    if view is None:
        return replace(before, view=None, problem=problem, checkup=None)
    try:
        return replace(before, view=view, checkup=check_up(view), problem=problem)
    except SlotbridgeError as error:
        return replace(before, view=view, checkup=None, problem=str(error))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
