"""What an exit code says of what was changed is so: by the product's table, and in the docs."""

import re
from pathlib import Path

import pytest

from schemas.errors import (
    NOTHING,
    ExitCode,
    OperatorNeeded,
    SetupError,
    SlotbridgeError,
    changed_after,
)
from services.failover.checks.blockers import Blocker
from services.failover.execute import run as run_module
from services.failover.execute.run import Result, Run
from services.failover.model.view import View
from services.failover.plan.request import Plan, Request
from services.failover.plan.steps.step import Action
from services.failover.plan.switchover import plan_switchover
from tests.failover.plan.test_resume import Fake, run_of
from tests.failover.plan.test_switchover import pair

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_of_exit_codes_says_what_was_changed() -> None:
    text = (DOCS / "reference/exit-codes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d, ]+) \| [A-Z_, ]+ \|.*\| (.*?) \|$", text, re.MULTILINE)
    told = {int(code): what for codes, what in rows for code in codes.split(",")}
    assert told == {int(code): changed_after(code) for code in ExitCode}
    for code in ExitCode:
        page = text.split(f"\n## Exit code {int(code)}: ")[1].split("\n## ")[0]
        if re.search(r"Nothing was (changed|started)|refuses to promote", page):
            assert changed_after(code) == NOTHING, code


@pytest.mark.parametrize("code", list(ExitCode))
def test_one_exit_code_tells_that_something_is_left(code: ExitCode) -> None:
    left = (Blocker("sub/s1", "why", "what", code),)
    assert Result("b", (), (), left, (), 1.0).exit_code is ExitCode.CHECK_FAILED
    assert Result("b", (), (), (), (), 1.0).exit_code is ExitCode.OK


@pytest.mark.parametrize("error", [OperatorNeeded, SetupError])
@pytest.mark.parametrize("undo", [True, False])
def test_no_run_that_has_changed_something_ends_as_a_refusal(
    monkeypatch: pytest.MonkeyPatch, undo: bool, error: type[SlotbridgeError]
) -> None:
    """A planner that refuses after each step, as something has come up meanwhile."""
    monkeypatch.setattr(run_module, "require_nothing_ordered", lambda *_, **__: None)
    whole = plan_switchover(pair(hands=False), Request())
    for number in range(1, len(whole.steps)):
        fake = Fake(pair(hands=False))
        run = run_of(fake, monkeypatch, lambda _view: None)

        def planner(view: View, request: Request, run: Run = run, number: int = number) -> Plan:
            ordered = [each.step.action for each in run.performed]
            run.interruption.no_way_back = Action.PROMOTE in ordered
            if len(ordered) >= number:
                raise error("it can't go on", operation="test")
            return plan_switchover(view, request)

        with pytest.raises(SlotbridgeError, match="it can't go on") as caught:
            run.carry_out(fake.view, Request(target="b"), planner, undo=undo)
        promoted = Action.PROMOTE in [each.step.action for each in run.performed]
        as_before = [n.name for n in fake.view.writable] == ["a"]
        as_before = as_before and all(found.enabled for _, found in fake.view.ours())
        refused = changed_after(caught.value.exit_code) == NOTHING
        assert refused == (undo and not promoted)
        assert as_before or not refused
        assert caught.value.exit_code is (error.exit_code if refused else ExitCode.CHECK_FAILED)
