"""Timelines and what is noted of them: a server that descends from what was met, and no other."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.failover.model import statements
from services.failover.model.destination import Destination, destination_in, named, without_mark
from services.failover.model.timelines import (
    History,
    Milestone,
    Provenance,
    contradiction,
    milestone_in,
    parse_history,
    without_milestone,
)
from services.failover.model.view import View
from services.failover.plan.request import Request
from services.failover.watch.assessment import assess
from services.failover.watch.decision import Memory, Rules, Verdict, decide, remember
from tests.promises.failover.views import node, slot, state, subscriber, subscription

SYSTEM = "7000"
switches = st.lists(st.integers(1, 2**40), max_size=5, unique=True).map(sorted)
comments = st.text(st.characters(codec="utf-8", exclude_characters="\0[]"), max_size=30).map(
    str.strip
)
milestones = st.builds(
    Milestone,
    st.integers(1, 2**63).map(str),
    st.integers(0, 500),
    st.one_of(st.none(), st.integers(1, 2**60)),
    st.sampled_from(["10.0.0.2:5432", "::1:5432", "/run/postgresql:5432", "db.example:1"]),
).map(lambda found: found if found.timeline else replace(found, began=None))


def history_of(points: list[int]) -> History:
    """Timeline 1, 2 … each left at the next point."""
    return tuple((number, lsn) for number, lsn in enumerate(points, 1))


names = st.one_of(st.sampled_from(["a", "b:1", "[x]"]), comments).map(named)
destinations = st.one_of(
    milestones.map(lambda met: replace(met, address="", timeline=met.timeline or 1)).flatmap(
        lambda met: st.builds(Destination, st.just(met.system), names, st.just(met))
    ),
    st.builds(
        Destination,
        st.integers(1, 2**63).map(str),
        names,
        st.none(),
        st.integers(1, 500),
        st.one_of(st.none(), st.integers(1, 2**60)),
    ),
)


@given(comments, milestones, milestones, st.one_of(st.none(), destinations))
def test_a_note_is_read_as_it_was_written_and_leaves_the_comment_alone(
    comment: str, first: Milestone, second: Milestone, destination: Destination | None
) -> None:
    given_ = statements.marked(comment, destination) if destination else comment
    noted = statements.noted(statements.noted(given_, first), second)
    assert milestone_in(noted) == second
    assert destination_in(noted) == destination
    assert without_milestone(without_mark(noted)) == comment
    assert statements.noted(given_, None) == given_


def test_a_timeline_is_met_though_nobody_knows_where_it_began() -> None:
    noted = subscription("s1", comment=Milestone("7000", 2, None, "db:5002").note)
    view = View((node("a", state(slot("s1"), standby=False)),), (subscriber("sub", noted),))
    assert [met.timeline for _, met in view.met()] == [2]


def test_a_comment_with_an_impossible_position_is_read_as_any_other() -> None:
    for text in ("timeline 2 from FFFFFFFFFFFFFFFFFF/0", f"timeline {'9' * 5000}"):
        led = f"[slotfailover leads to b: system 7, {text}]"
        assert destination_in(f"{led} [disabled by slotfailover]") == Destination()
    assert milestone_in("[slotfailover: system 7, timeline 2 from FFFFFFFFFF/0, at db:1]") is None


@given(switches, st.data())
def test_a_server_descends_from_every_timeline_of_its_own_history(
    points: list[int], data: st.DataObject
) -> None:
    history = history_of(points)
    timeline = len(points) + 1
    met = data.draw(st.integers(1, timeline))
    began = points[met - 2] if met > 1 else None
    assert contradiction(Milestone(SYSTEM, met, began), timeline, history) == ""
    assert contradiction(Milestone(SYSTEM, timeline + 1, 7), timeline, history)
    if met > 1:
        another = Milestone(SYSTEM, met, points[met - 2] + 1)
        assert "another branch" in contradiction(another, timeline, history)
    if timeline > 1:
        assert "can't be read" in contradiction(Milestone(SYSTEM, met, began), timeline, None)


def test_a_history_file_is_read_as_the_server_writes_it() -> None:
    text = "1\t0/3000148\tno recovery target specified\n\n2\t1/0\tbefore 2026-01-01\n# told\n"
    assert parse_history(text) == ((1, 0x3000148), (2, 0x100000000))


def promoted(began: int, *, timeline: int = 2, history: History | None = None) -> View:
    """b takes writes; a subscription that leads to a has met timeline 2 from 1000."""
    known = ((1, began),) if history is None else history
    new = replace(
        state(slot("s1"), standby=False, timeline=timeline, switch_lsn=began),
        provenance=Provenance(history=known),
    )
    note = Milestone(SYSTEM, 2, 1000, "db:5001").note
    found = subscription("s1", comment=note)
    return View((node("a", None), node("b", new)), (subscriber("sub", found),))


def test_watch_follows_the_timeline_that_was_met_and_no_branch_of_that_number() -> None:
    rules = Rules(True, 2, 0.0, 0.0, 0.0, 10.0, first_s=0.0)
    for view, verdict in (
        (promoted(1000), Verdict.ACT),
        (promoted(2000), Verdict.FORBID),
        (promoted(2000, timeline=3, history=((1, 1000), (2, 2000))), Verdict.ACT),
        (promoted(2000, timeline=3, history=((1, 2000),)), Verdict.FORBID),
        (promoted(1000, timeline=1, history=()), Verdict.FORBID),
    ):
        memory = Memory()
        for moment in range(3):
            memory = remember(memory, assess(view, Request()), float(moment), rules)
        found = decide(memory, 2.0, rules, paused=False, leading=True)
        assert found.verdict is verdict, found.reason


def test_watch_never_acts_on_an_unknown_timeline() -> None:
    """An unreadable history, nothing remembered with a node that is down, an unknown publisher."""
    rules = Rules(True, 2, 0.0, 0.0, 0.0, 10.0, first_s=100.0)
    sound = promoted(1000)
    blind_node = replace(
        sound.nodes[1],
        state=replace(sound.nodes[1].state, provenance=Provenance(history=None)),  # type: ignore[type-var]
    )
    unread = replace(sound, nodes=(sound.nodes[0], blind_node))
    plain = subscription("s1")
    forgotten = replace(sound, subscribers=(subscriber("sub", plain),))
    strange = replace(sound, subscribers=(subscriber("sub", subscription("s1", at="proxy")),))
    for view in (unread, forgotten, strange):
        memory = Memory()
        for moment in range(20):
            memory = remember(memory, assess(view, Request()), float(moment), rules)
            found = decide(memory, float(moment), rules, paused=False, leading=True)
            assert found.verdict is not Verdict.ACT, found.reason
