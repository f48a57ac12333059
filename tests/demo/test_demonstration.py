"""The verdict's exit code; tests/promises/end_to_end has the real parts that lead to it."""

import pytest
from typer.testing import CliRunner

from schemas.errors import ExitCode
from services.bridge.cli.app import app
from services.demo import demonstration
from services.demo.demonstration import Outcome


@pytest.mark.parametrize(("ok", "code"), [(True, ExitCode.OK), (False, ExitCode.CHECK_FAILED)])
def test_exit_code_is_0_only_if_all_copies_agree(
    monkeypatch: pytest.MonkeyPatch, ok: bool, code: ExitCode
) -> None:
    monkeypatch.setattr(demonstration, "run_demonstration", lambda _: Outcome({"ok": ok}, []))
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == code, done.output
