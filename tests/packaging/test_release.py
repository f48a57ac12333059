"""`make release`: its notes are the changelog's, and each file has its sum."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from schemas.version import UNKNOWN, version
from tools import release
from tools.generate import version as developed
from tools.interpreters import OLDEST, UNTRIED, Version

ROOT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## 0.2.0\n\n- New.\n\n### Fixed\n\n- Old.\n\n## 0.1.0\n\n- All.\n"


def test_the_notes_have_the_versions_part_and_what_is_not_built() -> None:
    changes = release.changes_of("0.2.0", CHANGELOG)
    assert changes == "- New.\n\n### Fixed\n\n- Old."
    written = release.notes("0.2.0", changes, ["wheel for Python 3.12"])
    assert written.endswith("- Old.\n\n## Not built\n\n- wheel for Python 3.12\n")


@pytest.mark.parametrize("text", [CHANGELOG, "## Unreleased\n\n- New.\n\n## 0.3.0\n\n- a\n"])
def test_a_version_without_changes_of_its_own_is_not_released(text: str) -> None:
    with pytest.raises(release.NotReady):
        release.changes_of("0.3.0", text)


def test_the_changelog_has_the_version_that_is_developed() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("## Unreleased", "## new")
    assert release.changes_of(developed(), text)


def test_the_supported_pythons_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least, beyond = (".".join(map(str, one)) for one in (OLDEST, UNTRIED))
    assert project["requires-python"] == f">={least},<{beyond}"
    assert version() in (project["version"], UNKNOWN)


def test_one_interpreter_of_each_minor_version_builds() -> None:
    usable: dict[Version, Path] = {
        (3, 11, 2): Path("a"),
        (3, 11, 7): Path("b"),
        (3, 12, 1): Path("c"),
    }
    assert release.of_each_minor(usable) == {(3, 11): Path("b"), (3, 12): Path("c")}


def test_the_sums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("y")
    (tmp_path / "SHA256SUMS").write_text(release.sums(tmp_path), encoding="ascii")
    checked = ["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"]
    assert subprocess.run(checked, cwd=tmp_path, check=False).returncode == 0
