"""The suite's own rules: who may start a server, and which Pythons are tried."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import shards
from tests.providers.interface import Provider
from tests.providers.waiting import patient
from tests.serverless import NEEDS_SERVERS
from tools.interpreters import folders, interpreters

ROOT = Path(__file__).parents[2]


def test_a_test_without_the_fixture_servers_can_not_start_one(tmp_path: Path) -> None:
    program = tmp_path / "postgres"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.raises(AssertionError, match="starts postgres: let it request `servers`"):
        subprocess.run([program], check=True)


def test_a_fixture_that_provides_servers_marks_the_test(
    provider: Provider, request: pytest.FixtureRequest
) -> None:
    assert request.node.get_closest_marker(NEEDS_SERVERS) is not None


def test_each_version_of_python_is_tried_once_and_a_broken_one_is_named(tmp_path: Path) -> None:
    usual, broken = tmp_path / "usual", tmp_path / "broken"
    for folder in (usual, broken):
        folder.mkdir()
    for name in ("python3", "python3.11"):
        (usual / name).symlink_to(sys.executable)
    (usual / "python3-config").symlink_to("/bin/false")
    (broken / "python3.12").symlink_to("/bin/false")
    places = folders({"PATH": f"{usual}{os.pathsep}{broken}"}, tmp_path)
    assert places == [usual, broken, Path("/usr/bin"), Path("/usr/local/bin")]
    usable, silent = interpreters(places[:2])
    assert usable == {sys.version_info[:3]: usual / "python3"}
    assert silent == [broken / "python3.12"]


def test_make_test_has_each_test_that_the_table_of_promises_names() -> None:
    table = (ROOT / "docs/contributing/tests.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", table))
    kept: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        tests = re.findall(r"^((?:@.*\n|[ )\]].*\n)*)def (test_\w+)", text, re.MULTILINE)
        kept |= {name for marks, name in tests if "@pytest.mark.long\n" not in marks}
    assert named and not named - kept


def test_shards_have_all_files_once_and_about_equal_seconds() -> None:
    seconds = {f"test_{number}.py": float(number) for number in range(40)}
    cuts = shards.cut([*seconds, "test_new.py"], seconds, 3)
    assert sorted(file for files in cuts for file in files) == sorted([*seconds, "test_new.py"])
    sums = [sum(seconds.get(file, shards.AVERAGE_S) for file in files) for files in cuts]
    assert max(sums) - min(sums) <= 2
    assert shards.cut(reversed(list(seconds)), seconds, 3) == shards.cut(seconds, seconds, 3)


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "a/2", "1/2/3", "-1/2"])
def test_what_is_not_a_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no shard"):
        shards.parse(text)


@pytest.mark.long
def test_the_suite_goes_on_after_a_worker_has_crashed(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "conftest.py").write_text(
        "from tests.scheduling import ByFile\n"
        "def pytest_xdist_make_scheduler(config, log):\n"
        "    return ByFile(config, log)\n"
    )
    for name in ("first", "second"):
        (tmp_path / f"test_{name}.py").write_text(
            "import os, pytest\n"
            "@pytest.mark.parametrize('number', range(4))\n"
            "def test_it(number):\n"
            f"    if number == 2 and {name == 'first'}:\n"
            "        os._exit(1)\n"
        )
    command = "-m pytest -p no:randomly -p no:cacheprovider -n 2 --dist loadscope -q"
    ended = subprocess.run(
        [sys.executable, *command.split(), tmp_path],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    assert "crashed while running 'test_first.py::test_it[2]'" in ended.stdout, ended.stdout
    assert "1 failed, 7 passed" in ended.stdout


@pytest.mark.parametrize("file", ["requirements/install.py", "Dockerfile"])
def test_what_is_imported_outside_of_python_files_is_there(file: str) -> None:
    imports = re.findall(
        r"['\"]from (services\S+) import (\w+)", (ROOT / file).read_text(encoding="utf-8")
    )
    assert imports
    for module, name in imports:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
