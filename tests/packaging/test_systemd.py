"""The units of examples/systemd: what they start is there, and they heed the exit codes."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import ExitCode

UNITS = sorted((Path(__file__).parents[2] / "examples" / "systemd").glob("*.service"))


def read(unit: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    return parser


def test_there_is_a_unit_for_each_service() -> None:
    programs = {Path(read(unit)["Service"]["ExecStart"].split()[0]).name for unit in UNITS}
    assert programs == {"slotbridge", "slotfailover", "slottables"}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_does_not_restart_after_an_operators_exit_code(unit: Path) -> None:
    service = read(unit)["Service"]
    final = {code for code in ExitCode if code == ExitCode.SETTINGS or 20 <= code < 50}
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == final
    assert service["Restart"] == "on-failure"


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_line_is_one_that_the_program_takes(unit: Path, tmp_path: Path) -> None:
    program, *arguments = read(unit)["Service"]["ExecStart"].split()
    if program.endswith("/slottables"):
        pytest.importorskip("pyspark", reason="this environment is without the extra `spark`")
    missing = tmp_path / "missing.yaml"
    command = [
        str(Path(sys.executable).parent / Path(program).name),
        *(str(missing) if part.endswith(".yaml") else part for part in arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.SETTINGS, done.stderr
    assert "missing.yaml" in done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_itself_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not on this machine")
    service = read(unit)["Service"]["ExecStart"].split()[0]
    here = tmp_path / unit.name
    here.write_text(unit.read_text().replace(service, "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", str(here)], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, ours) == (0, []), done.stderr
