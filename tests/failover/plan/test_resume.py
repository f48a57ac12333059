"""What lets an old primary write again, and what a fence may be relied on for, without servers."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from schemas.acceptance import Kind
from schemas.errors import ExitCode, OperatorNeeded, Retryable, SlotbridgeError
from schemas.settings import MachineSettings
from services.failover.execute import perform_step, promotion_order
from services.failover.execute.journal import Journal
from services.failover.execute.lock import Lock
from services.failover.execute.rejoin_node import _Rebuild
from services.failover.execute.rejoin_preflight import Source
from services.failover.execute.run import Run
from services.failover.model import statements
from services.failover.model.conninfo import Address, Conninfo
from services.failover.model.destination import MARK
from services.failover.model.host_commands import Machine, machine_of
from services.failover.model.timelines import Milestone, Provenance
from services.failover.model.view import Node, Reach, View
from services.failover.observe.cluster import Cluster
from services.failover.plan.failover import plan_failover
from services.failover.plan.rejoin import plan_repoint
from services.failover.plan.request import Request
from services.failover.plan.resume import Intent, choose, offering_way_back
from services.failover.plan.steps.step import Action, Step
from services.failover.plan.switchover import plan_rollback, plan_switchover
from services.failover.watch import loop
from services.failover.watch.assessment import assess
from tests.failover.plan.test_switchover import actions, pair
from tests.promises.failover.views import RECEIVED, node, slot, state, subscriber, subscription
from tests.providers.tokens import Willing

LEAK = "the prepared transaction x in bank"


def unanswered(view: View, name: str, reach: Reach) -> View:
    """The view in which that node does not answer so."""
    return replace(
        view,
        nodes=tuple(
            replace(n, state=None, reach=reach, detail="no answer") if n.name == name else n
            for n in view.nodes
        ),
    )


def with_machine(view: View, name: str, hands: MachineSettings) -> View:
    """The view with these commands for that node."""
    machine = machine_of(name, hands, Address("db", "", "1"))
    return replace(
        view,
        nodes=tuple(replace(n, machine=machine) if n.name == name else n for n in view.nodes),
    )


@pytest.mark.parametrize("reach", [Reach.SILENT, Reach.CLOSED, Reach.BARRED, Reach.REFUSED])
def test_a_fence_stays_while_a_standby_that_may_have_been_promoted_is_not_seen(
    reach: Reach,
) -> None:
    view = unanswered(pair(fenced=True), "b", reach)
    with pytest.raises(OperatorNeeded, match="b does not answer as a standby") as caught:
        plan_rollback(view, Request())
    assert caught.value.exit_code is ExitCode.SPLIT_BRAIN
    assert "slotfailover resume --rollback" in caught.value.hint
    itself = Request(found_writable=frozenset("a"))
    assert actions(plan_rollback(view, itself))[0] == "unfence"


def test_a_fence_stays_while_a_standby_is_on_a_newer_timeline() -> None:
    view = pair(fenced=True, standby={"timeline": 2})
    with pytest.raises(OperatorNeeded, match="b is on timeline 2, a on 1"):
        plan_rollback(view, Request())
    assert "unfence" in actions(plan_rollback(pair(fenced=True), Request()))


class Fake:
    """A cluster whose steps have their effect at once."""

    recorded_at = ""

    def __init__(self, view: View) -> None:
        self.view = view
        self.nodes = {each.name: each.name for each in view.nodes}

    def observe(self) -> View:
        """What is so."""
        return self.view


def run_of(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, hold: Callable[[View], None], fails: str = ""
) -> Run:
    """A run on it, in which the step that begins with `fails` does not succeed."""

    def perform(step: Step, *_: Any, **__: Any) -> View:
        if fails and step.action == fails:
            raise Retryable("it failed", operation="test", hint="try again")
        fake.view = step.effect(fake.view)
        return fake.view

    monkeypatch.setattr(perform_step, "perform", perform)
    cluster = cast("Cluster", fake)
    journal = Journal(None, cluster, "postgres", "switchover")
    monkeypatch.setattr(journal, "_to_table", lambda _primary: None)
    return Run(cluster, journal, 1.0, lambda _d: None, lambda _t: None, 0.0, hold=hold)


@pytest.mark.parametrize("command", [plan_switchover, plan_failover])
def test_a_lock_that_another_command_has_got_leaves_everything_as_it_is(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(pair())

    def hold(_view: View) -> None:
        if run.begun and run.begun[-1].action is Action.MARK:
            raise Retryable(
                "another slotfailover command is at work (on a: x)",
                operation="take the lock",
                hint="wait for it",
                exit_code=ExitCode.LOCKED,
            )

    run = run_of(fake, monkeypatch, hold)
    request = Request(target="b", fence=command is plan_failover, subscribers_may_stay=True)
    with pytest.raises(Retryable, match="nothing was taken back") as caught:
        run.carry_out(fake.view, request, command, undo=True)
    assert caught.value.exit_code is ExitCode.LOCKED
    assert "(on a: x)" in caught.value.message
    assert "Now a is the primary, fenced" in caught.value.message
    assert "slotfailover resume" in caught.value.hint
    assert fake.view.node("a").fenced
    first = [Action.CHECKPOINT, Action.SETTLE] if command is plan_switchover else []
    assert [step.action for step in run.begun] == [*first, Action.FENCE, Action.MARK]


def test_an_error_while_an_error_is_told_hides_neither_it_nor_the_journals_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Fake(pair(hands=False))
    run = run_of(fake, monkeypatch, lambda _view: None, fails="disable")
    observe, ended = fake.observe, []
    monkeypatch.setattr(run.journal, "end", lambda _view, outcome, _s: ended.append(outcome))

    def blind() -> View:
        if any(step.action is Action.DISABLE for step in run.begun):
            raise SlotbridgeError("nothing can be seen", operation="observe")
        return observe()

    monkeypatch.setattr(fake, "observe", blind)
    with pytest.raises(Retryable, match="it failed; and it could not be taken back") as caught:
        run.carry_out(fake.view, Request(target="b"), plan_switchover, undo=True)
    assert "nothing can be seen" in caught.value.message
    assert caught.value.hint.startswith("try again; or let a take writes again: slotfailover")
    (outcome,) = ended
    assert "it failed" in outcome


@pytest.mark.parametrize(
    ("ordered", "goes_on"), [(True, False), (False, True), (None, True)], ids=str
)
def test_rollback_asks_every_standby_for_a_promotion_order(
    ordered: bool | None, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion_order, "promotion_ordered", lambda _link: ordered)
    fake = Fake(pair(hands=False))
    run = run_of(fake, monkeypatch, lambda _view: None, fails="disable")
    with pytest.raises(SlotbridgeError) as caught:
        run.carry_out(fake.view, Request(target="b"), plan_switchover, undo=True)
    assert ("b has been told to promote itself" in caught.value.message) is not goes_on
    assert fake.view.node("a").fenced is not goes_on


def test_an_older_timeline_is_not_compared_in_bytes() -> None:
    behind = {"timeline": 1, "received": RECEIVED, "streams": False}
    alive = pair(hands=False, timeline=2, received=900, standby=behind)
    fenced = pair(hands=False, timeline=2, received=900, standby=behind, fenced=True)
    for planner, view, request in (
        (plan_failover, alive, Request(fence=True)),
        (plan_failover, fenced, Request(fence=True)),
        (plan_switchover, alive, Request()),
        (plan_switchover, fenced, Request()),
    ):
        with pytest.raises(OperatorNeeded, match="b is on timeline 1, and the primary a on 2"):
            planner(view, request)


def test_wal_that_the_primary_never_wrote_is_not_compared_in_bytes() -> None:
    more = pair(hands=False, received=900, standby={"streams": False})
    with pytest.raises(OperatorNeeded, match="b has 100 bytes of WAL that a never wrote"):
        plan_failover(more, Request(fence=True))

    def since(each: Node, lsn: int) -> Node:
        assert each.state is not None
        return replace(each, state=replace(each.state, provenance=Provenance(history=((1, lsn),))))

    view = pair(hands=False, timeline=2, standby={"timeline": 2})
    view = replace(view, nodes=(since(view.nodes[0], 300), since(view.nodes[1], 200)))
    with pytest.raises(OperatorNeeded, match="timeline 2 of b began elsewhere"):
        plan_failover(view, Request(fence=True))


def test_the_mark_never_stands_without_the_fence() -> None:
    on, mark, reload = statements.fenced("timeline 1 by x")
    assert "default_transaction_read_only = on" in on
    assert "slotfailover.fenced" in mark
    unmark, off, again = statements.UNFENCED
    assert "slotfailover.fenced" in unmark
    assert "default_transaction_read_only" in off
    assert reload == again == statements.RELOAD


@pytest.mark.parametrize("fenced", [False, True])
def test_a_switchover_past_a_leak_asks_for_a_stop_command(fenced: bool) -> None:
    view = pair(hands=False, leaks=(LEAK,), fenced=fenced)
    armed = with_machine(view, "a", MachineSettings(fence="stonith {node}"))
    with pytest.raises(OperatorNeeded, match="a could still be written") as caught:
        plan_switchover(armed, Request())
    assert "`stop` command" in caught.value.hint
    stops = with_machine(view, "a", MachineSettings(stop="stop {node}"))
    assert "promote" in actions(plan_switchover(stops, Request()))
    assert "shoot" in actions(plan_failover(armed, Request(fence=True)))


def test_resume_does_not_wait_for_wal_that_does_not_come() -> None:
    lacks = pair(
        hands=False, fenced=True, consumer=500, standby={"streams": False, "received": 900}
    )
    planner, request = choose(lacks, Request(), Intent("failover", "b"))
    with pytest.raises(OperatorNeeded, match="b lacks 100 bytes of WAL that a has") as caught:
        planner(lacks, request)
    assert "slotfailover resume --rollback" in caught.value.hint
    has = pair(hands=False, fenced=True, standby={"streams": False})
    planner, request = choose(has, Request(), Intent("failover", "b"))
    assert "promote" in actions(planner(has, request))


def test_a_note_of_a_subscription_that_was_led_elsewhere_since_is_not_the_newest() -> None:
    def seen(address: str, *milestones: tuple[str, Milestone], end: str = "") -> bool:
        note = Milestone("7000", 1, None, address).note + end
        s1 = subscription("s1", at="b", comment=note, enabled=not end)
        there = subscriber("sub", s1)
        promoted = state(slot("s1"), standby=False, timeline=2)
        promoted = replace(promoted, provenance=Provenance(history=((1, 900),)))
        view = View((node("a", None), node("b", promoted)), (there,), milestones=milestones)
        return assess(view, Request()).remembered

    leads_to = str(Conninfo((("host", "db"), ("port", "5002"))).address)
    assert seen(leads_to)
    assert not seen(leads_to, end=f" {MARK}")  # `repoint` has moved the note, too
    assert not seen("db:5001")
    assert seen("db:5001", ("Kafka", Milestone("7000", 2, None)))
    assert not seen("db:5001", ("Kafka", Milestone("another", 2, None)))


@pytest.mark.parametrize(
    ("noted", "answers", "goes_on"), [(1, True, True), (2, False, False), (2, True, True)]
)
def test_of_a_half_moved_subscription_an_unseen_node_may_be_the_newer_primary(
    noted: int, answers: bool, goes_on: bool
) -> None:
    """The journal on this primary knows no other: whoever moved it met or made a newer one."""
    note = f"{Milestone('7000', noted, None, 'db:5002').note} {MARK}"
    there = subscriber("sub", subscription("s1", at="b", comment=note, enabled=False))
    primary = state(slot("s1"), standby=False, timeline=2)
    primary = replace(primary, provenance=Provenance(history=((1, 900),)))
    journal = ("the journal", Milestone("7000", 2, None))
    standby = state(slot("s1")) if answers else None
    view = View((node("a", primary), node("b", standby)), (there,), milestones=(journal,))
    assert (assess(view, Request()).forbidden == "") is goes_on
    if goes_on:
        assert "enable" in actions(plan_repoint(view, Request()))
        return
    for command in (plan_repoint, plan_rollback, lambda v, r: choose(v, r, None)):
        with pytest.raises(OperatorNeeded, match="a may be an old primary that came back") as seen:
            command(view, Request())
        assert seen.value.exit_code is ExitCode.SPLIT_BRAIN
    vouched = plan_repoint(view, Request(Willing(Kind.NOT_PROMOTED)))
    assert "enable" in actions(vouched)


def test_a_primary_behind_its_standby_feeds_no_subscription() -> None:
    old = state(slot("s1"), standby=False)
    there = subscriber("sub", subscription("s1", at="b"))
    view = View((node("a", old), node("b", state(slot("s1"), timeline=2))), (there,))
    with pytest.raises(OperatorNeeded, match="b is a standby on timeline 2, a a primary on 1"):
        plan_repoint(view, Request())
    assert "b is a standby on timeline 2" in assess(view, Request()).forbidden
    disabled = subscriber("sub", subscription("s1", at="a", comment=MARK, enabled=False))
    marked = replace(view, subscribers=(disabled,))
    for command in (plan_rollback, lambda v, r: choose(v, r, None)):
        with pytest.raises(OperatorNeeded, match="b is a standby on timeline 2, a a primary on 1"):
            command(marked, Request())


def test_while_no_primary_answers_a_rollback_leads_nothing_to_an_old_one() -> None:
    there = subscriber("sub", subscription("s1", at="a", marked=True))
    view = View((node("a", None), node("b", None)), (there,))
    with pytest.raises(OperatorNeeded, match="b does not answer as a standby"):
        plan_rollback(view, Request())
    older = subscriber("sub", subscription("s1", at="a", comment=MARK, enabled=False))
    plan = plan_rollback(replace(view, subscribers=(older,)), Request())
    assert (plan.steps, [left.subject for left in plan.left]) == ((), ["sub/s1"])


@pytest.mark.parametrize("marker", ["rewound", "copied"])
def test_a_rejoin_believes_only_what_was_made_for_the_same_source(
    marker: str, tmp_path: Path
) -> None:
    class Rebuild(_Rebuild):
        def __init__(self, identity: str) -> None:
            self._kept = self._data = tmp_path
            self._machine = Machine("a", Address("", "", ""), {})
            self._may_write = True
            self._source = Source(Conninfo(()), Conninfo(()), 0, identity)

        done: list[str]

        def _report_discarded(self) -> None:
            """There is no data folder."""

        def _rewind(self, _environment: dict[str, str]) -> str:
            self.done.append("rewound")
            return ""

        def _configure(self, _folder: Path, _upstream: Conninfo) -> None:
            self.done.append("configured")

    def does(identity: str) -> list[str]:
        rebuild = Rebuild(identity)
        rebuild.done = []
        rebuild._rebuild({}, Conninfo(()))
        return rebuild.done

    (tmp_path / marker).touch()  # it does not tell of which source
    assert does("7000 2 0/3000148") == ["rewound", "configured"]
    (tmp_path / "rewound").unlink()
    Rebuild("7000 2 0/3000148")._note_done(marker)
    assert does("7000 2 0/3000148") == ["configured"]
    assert does("7000 4 0/9000000") == ["rewound", "configured"]
    Rebuild("")._note_done(marker)
    (tmp_path / "rewound").unlink()
    assert does("") == ["rewound", "configured"]


def test_a_refused_resume_names_the_way_back_while_writes_are_fenced() -> None:
    view = pair(fenced=True)
    planner, request = choose(view, Request(), Intent("switchover", "b"))
    gone = unanswered(view, "b", Reach.REFUSED)
    with pytest.raises(Retryable) as caught:
        offering_way_back(planner)(gone, request)
    assert "or let a take writes again: slotfailover resume --rollback" in caught.value.hint
    lacks = pair(fenced=True, standby={"received": RECEIVED - 8, "streams": False})
    told = replace(request, final_lsn=RECEIVED)
    with pytest.raises(OperatorNeeded) as once:
        offering_way_back(planner)(lacks, told)
    assert once.value.hint.count("--rollback") == 1
    with pytest.raises(Retryable) as writable:
        offering_way_back(planner)(unanswered(pair(), "b", Reach.REFUSED), request)
    assert "--rollback" not in writable.value.hint


def test_a_resume_that_fails_in_a_step_names_the_way_back_while_writes_are_fenced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Fake(pair(fenced=True))
    run = run_of(fake, monkeypatch, lambda _view: None, fails=Action.DISABLE)
    with pytest.raises(Retryable, match="it failed") as caught:
        run.carry_out(fake.view, Request(target="b"), plan_switchover)
    assert "or let a take writes again: slotfailover resume --rollback" in caught.value.hint


def test_watch_sees_before_each_step_that_its_lock_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    def run(*_: Any, **values: Any) -> Any:
        given.update(values)
        return SimpleNamespace(carry_out=lambda *_: None)

    monkeypatch.setattr(loop, "Run", run)
    view = View((), ())
    seen: list[View] = []
    watch = SimpleNamespace(
        _cluster=None,
        _settings=SimpleNamespace(step_deadline_ms=1000),
        _request=Request(),
        _elsewhere=lambda: "",
    )
    repoint: Any = loop.Watch._repoint
    repoint(watch, view, None, cast("Lock", SimpleNamespace(hold=seen.append)))
    given["hold"](view)
    assert seen == [view]


def test_a_primary_that_answers_and_was_fenced_by_this_run_goes_on_beside_a_dead_standby(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Fake(pair(hands=False))
    run = run_of(fake, monkeypatch, lambda _view: None)
    perform = perform_step.perform

    def dies(step: Step, *given: Any, **more: Any) -> View:
        if step.action is Action.DISABLE:
            fake.view = unanswered(fake.view, "b", Reach.REFUSED)
            raise Retryable("b is gone", operation="test")
        return perform(step, *given, **more)

    monkeypatch.setattr(perform_step, "perform", dies)
    with pytest.raises(Retryable, match="it was taken back, a goes on"):
        run.carry_out(fake.view, Request(target="b"), plan_switchover, undo=True)
    assert fake.view.node("a").writable


def test_a_subscription_that_was_given_up_is_not_disabled_again_and_again() -> None:
    assert "disable" in actions(plan_switchover(pair(), Request()))
    before = actions(plan_switchover(pair(), Request(given_up=frozenset({"sub/s1"}))))
    assert "disable" not in before[: before.index("promote")]


def test_an_order_to_promote_is_on_disk_before_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lets an old primary write again relies on it, also after a power cut of this machine."""
    path = tmp_path / "journal"
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    journal = Journal(path, cast("Any", SimpleNamespace(recorded_at="")), "postgres", "switchover")
    for step in plan_switchover(pair(), Request()).steps:
        journal.started(step, View((), ()))
        assert synced == ([path.stat().st_size] if step.action is Action.PROMOTE else [])
        if step.action is Action.PROMOTE:
            return
