"""When `watch` may act: properties of any sequence of observations."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from schemas.settings import WatchSettings
from services.failover.model.view import Reach, View
from services.failover.plan.request import Request
from services.failover.watch.assessment import Assessment, assess
from services.failover.watch.decision import Memory, Rules, Verdict, acted, decide, remember
from tests.promises.failover.views import node, slot, state, subscriber, subscription, views

RULES = Rules(automatic=True, quorum=3, settle_s=5.0, silence_s=30.0, cooldown_s=20.0, stale_s=10.0)
PENDING = ("point subscription s1 at sub to db:5002",)
PROMOTED = Assessment("b", 2, pending=PENDING)

sights = st.builds(
    Assessment,
    primary=st.sampled_from(["b", "b", "b", "c", ""]),
    timeline=st.sampled_from([2, 2, 2, 1, 3]),
    partial=st.sampled_from(["", "", "", "", "2 of 3 servers are silent"]),
    forbidden=st.sampled_from(["", "", "", "", "several nodes are writable"]),
    silent=st.sampled_from([(), (), ("a",)]),
    pending=st.sampled_from([PENDING, PENDING, ("another",), ()]),
)
looks = st.lists(
    st.tuples(
        st.one_of(st.just(PROMOTED), sights),
        st.floats(0.1, 12.0),
        st.sampled_from([False, False, False, False, True]),
        st.sampled_from([True, True, True, False]),
        st.booleans(),
    ),
    max_size=40,
)


@given(looks)
def test_watch_acts_only_on_a_whole_view_seen_often_and_long_enough(
    looks: list[tuple[Assessment, float, bool, bool, bool]],
) -> None:
    memory, now, acts = Memory(), 0.0, [(-1000.0, True)]
    row: list[tuple[float, Assessment]] = []
    timelines = [0]
    for assessment, passed, paused, leading, well in looks:
        now += passed
        row.append((now, assessment))
        memory = remember(memory, assessment, now, RULES)
        decision = decide(memory, now, RULES, paused=paused, leading=leading)
        free = decide(memory, now, RULES, paused=False, leading=True)
        if free.verdict is Verdict.ACT:
            by_hand = replace(RULES, automatic=False)
            for rules, pause, lead in (
                (RULES, True, True),
                (RULES, False, False),
                (by_hand, False, True),
            ):
                bound = decide(memory, now, rules, paused=pause, leading=lead)
                assert bound.verdict in (Verdict.PAUSED, Verdict.PASSIVE)
        if not assessment.partial:
            timelines.append(assessment.timeline)
        if decision.verdict is Verdict.ACT:
            assert assessment.actionable
            assert not paused
            assert leading
            assert assessment.timeline == max(timelines)
            last = [seen for seen in row if seen[0] > acts[-1][0]]
            while last and any(seen != assessment for _, seen in last):
                last = last[1:]
            gaps = [later - at for (at, _), (later, _) in pairwise(last)]
            while gaps and max(gaps) > RULES.stale_s:
                last, gaps = last[1:], gaps[1:]
            assert len(last) >= RULES.quorum
            wait_s = RULES.silence_s if assessment.silent else RULES.settle_s
            assert now - last[0][0] >= wait_s
            assert now - acts[-1][0] >= RULES.cooldown_s
            memory = acted(memory, now, RULES, well=well)
            acts.append((now, well))
        assert decision.reason


@given(st.lists(views(), max_size=4), st.booleans())
def test_of_real_views_none_with_two_primaries_or_someone_hidden_is_acted_on(
    seen: list[View], automatic: bool
) -> None:
    rules = replace(RULES, automatic=automatic, settle_s=0.0, silence_s=0.0)
    memory = Memory()
    for moment, view in enumerate([view for view in seen for _ in range(4)]):
        memory = remember(memory, assess(view, Request()), float(moment), rules)
        verdict = decide(memory, float(moment), rules, paused=False, leading=True).verdict
        if verdict is Verdict.ACT:
            assert automatic
            assert len(view.writable) == 1
            assert not any(found.reach is Reach.CLOSED for found in view.nodes)
            assert view.writable[0].name == memory.assessment.primary


def promoted_pair(**of_a: object) -> View:
    """`b` was promoted, `a` is down, a subscription still leads to `a`."""
    new = state(slot("s1"), standby=False, timeline=2, switch_lsn=1000)
    return View(
        (node("a", None, **of_a), node("b", new)),  # type: ignore[arg-type]
        (subscriber("sub", subscription("s1")),),
    )


def test_a_promotion_is_acted_on_after_the_quorum_and_not_again() -> None:
    view, memory = promoted_pair(), Memory()
    verdicts = []
    for moment in range(0, 12, 2):
        memory = remember(memory, assess(view, Request()), float(moment), RULES)
        verdicts.append(decide(memory, float(moment), RULES, paused=False, leading=True).verdict)
    assert verdicts == [Verdict.WAIT] * 3 + [Verdict.ACT] * 3
    memory = acted(memory, 10.0, RULES, well=False)
    for later in (12.0, 14.0, 16.0, 48.0):
        memory = remember(memory, assess(view, Request()), later, RULES)
        found = decide(memory, later, RULES, paused=False, leading=True)
        assert found.verdict is Verdict.WAIT
    assert "1 of 3" in found.reason  # after a failure, and after a row that was broken


def test_assessment_names_what_allows_and_forbids_a_repoint() -> None:
    assert assess(promoted_pair(), Request()).actionable
    silent = assess(promoted_pair(reach=Reach.SILENT), Request())
    assert silent.actionable
    assert silent.silent == ("a",)
    assert "does not let us in" in assess(promoted_pair(reach=Reach.CLOSED), Request()).forbidden
    view = promoted_pair()
    fed = (subscriber("sub", subscription("s1", fed=True)),)
    assert (
        "is connected to another server"
        in assess(replace(view, subscribers=fed), Request()).forbidden
    )
    gone = (subscriber("sub", reach=Reach.SILENT),)
    silent_too = replace(promoted_pair(reach=Reach.SILENT), subscribers=gone)
    assert "2 of 3 servers are silent" in assess(silent_too, Request()).partial
    two = (node("a", state(standby=False)), view.nodes[1])
    assert "several nodes are writable" in assess(replace(view, nodes=two), Request()).forbidden
    newer = (view.nodes[1], node("c", state(timeline=3, follows="b")))
    assert "a standby on timeline 3" in assess(replace(view, nodes=newer), Request()).forbidden
    elsewhere = (view.nodes[1], node("c", state(streams=True, follows="a")))
    assert "streams from a server" in assess(replace(view, nodes=elsewhere), Request()).forbidden


def test_an_old_primary_that_comes_back_alone_is_not_followed() -> None:
    memory = remember(Memory(), PROMOTED, 0.0, RULES)
    old = replace(PROMOTED, primary="a", timeline=1)
    for moment in range(1, 30):
        memory = remember(memory, old, float(moment), RULES)
    found = decide(memory, 29.0, RULES, paused=False, leading=True)
    assert found.verdict is Verdict.FORBID
    assert "an old one has come back" in found.reason


def test_rules_are_those_of_the_settings() -> None:
    rules = Rules.of(WatchSettings(interval_ms=1000, quorum=4, settle_ms=3000), 2.0)
    assert (rules.automatic, rules.quorum, rules.settle_s, rules.stale_s) == (False, 4, 3.0, 5.0)
    memory = remember(Memory(), PROMOTED, 0.0, rules)
    assert decide(memory, 0.0, rules, paused=False, leading=True).verdict is Verdict.PASSIVE
