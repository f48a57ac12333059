"""A machine that stood still: time in which nothing ran proves nothing."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from schemas.errors import OperatorNeeded
from services.failover.execute import perform_step, run
from services.failover.execute.interruption import Interruption
from services.failover.execute.run import plan_patiently
from services.failover.model.view import Reach, View
from services.failover.observe.cluster import Cluster
from services.failover.plan.evidence import StillHeard
from services.failover.plan.request import Request
from tests.failover.plan.test_resume import unanswered
from tests.failover.plan.test_switchover import pair


class Standstill:
    """A clock that jumps by an hour after each look at it but the first; nobody sleeps."""

    def __init__(self) -> None:
        self._now = itertools.chain([0.0], itertools.count(3600.0, 3600.0))

    def monotonic(self) -> float:
        return next(self._now)

    def sleep(self, _seconds: float) -> None:
        """Take no time."""


def answers(*first: bool) -> Callable[[Any], bool]:
    """Whether the standby receives, at each question; the last answer again and again."""
    told: Iterator[bool] = itertools.chain(first, itertools.repeat(first[-1]))
    return lambda _question: next(told)


def test_a_standby_has_time_to_connect_anew_after_a_standstill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked whether a primary lives: that it has not connected in time must mean no."""
    monkeypatch.setattr(perform_step, "time", Standstill())
    monkeypatch.setattr(perform_step, "_lead", lambda *_given, **_more: None)
    step = SimpleNamespace(server="b", text="ask b")
    for connects_after in (1, 5, 20):
        link = SimpleNamespace(ask=answers(False, *[False] * connects_after, True))
        cluster = cast("Cluster", SimpleNamespace(nodes={"b": link}))
        with pytest.raises(OperatorNeeded, match="has just connected anew"):
            perform_step._ask_upstream(cast("Any", step), cluster, Interruption())
    link = SimpleNamespace(ask=answers(False))
    cluster = cast("Cluster", SimpleNamespace(nodes={"b": link}))
    perform_step._ask_upstream(cast("Any", step), cluster, Interruption())


def test_the_connection_of_a_dead_primary_has_time_to_end_after_a_standstill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "time", Standstill())
    dead = unanswered(pair(), "a", Reach.REFUSED)
    hears = itertools.count()

    def planner(_view: View, _request: Request) -> Any:
        if next(hears) < 10:
            raise StillHeard("b receives from a", operation="test")
        return "a plan"

    cluster = cast("Cluster", SimpleNamespace(observe=lambda: dead))
    with pytest.raises(StillHeard):
        plan_patiently(cluster, _always_heard, dead, Request(), lambda _text: None)
    plan, _ = plan_patiently(cluster, planner, dead, Request(), lambda _text: None)
    assert plan == cast("Any", "a plan")


def _always_heard(_view: View, _request: Request) -> Any:
    raise StillHeard("b receives from a", operation="test")
