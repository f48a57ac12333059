"""Jars are the locked ones or refused; the lock names everything it should."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schemas.errors import ExitCode, SetupError
from services.testbed import jars
from tests.providers.waiting import patient
from tests.testbed.owners import ROOT


@pytest.mark.parametrize("group", sorted(jars.WANTED))
def test_the_lock_has_the_roots_and_nothing_excluded(group: str) -> None:
    locked = jars.read_lock(jars.LOCK_FILE, group)
    coordinates = {jar.coordinate for jar in locked}
    assert coordinates >= set(jars.WANTED[group].coordinates)
    names = {coordinate.rpartition(":")[0] for coordinate in coordinates}
    assert not names & set(jars.WANTED[group].excluded)
    assert all(re.fullmatch("[0-9a-f]{64}", jar.sha256) for jar in locked)
    assert len({jar.filename for jar in locked}) == len(locked)


@pytest.mark.slow
def test_jars_are_had_once_and_by_several_at_a_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: jars.resolve("spark", cache=tmp_path), range(2))
    assert first == second
    assert all(path.stat().st_size > 10_000 for path in first)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in first} | {".lock"}


def test_a_corrupted_jar_is_refused(tmp_path: Path) -> None:
    for path in jars.resolve("kafka"):
        shutil.copy(path, tmp_path)
    victim = next(tmp_path.glob("kafka-clients-*.jar"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(SetupError, match="is not the locked jar") as refusal:
        jars.resolve("kafka", cache=tmp_path)
    assert str(victim) in str(refusal.value)
    assert "org.apache.kafka:kafka-clients" in str(refusal.value)


def test_no_repository_gives_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(jars.REPOSITORY_VARIABLE, "http://127.0.0.1:1/none/")
    with pytest.raises(SetupError, match=r"can't download .*jar") as refusal:
        jars.resolve("spark", cache=tmp_path)
    assert refusal.value.exit_code == ExitCode.PROGRAM_MISSING
    assert "\n" not in str(refusal.value)
    assert jars.REPOSITORY_VARIABLE in str(refusal.value)


def test_an_installed_slottables_brings_its_jars_without_jgo(tmp_path: Path) -> None:
    """From a Maven repository, here a folder that has the layout of all of them."""
    repository, into = tmp_path / "maven", tmp_path / "jars"
    for jar, path in zip(
        jars.read_lock(jars.LOCK_FILE, "spark"), jars.resolve("spark"), strict=True
    ):
        group, artifact, version = jar.coordinate.split(":")[:3]
        place = repository / group.replace(".", "/") / artifact / version
        place.mkdir(parents=True)
        shutil.copy(path, place)
    hidden = "import sys; sys.modules.update(dict.fromkeys(('jgo', 'requests'), None))"
    code = f"{hidden}; from spark_consumers.command import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", code, "jars", "--into", into],
        cwd=ROOT,
        env={**os.environ, jars.REPOSITORY_VARIABLE: repository.as_uri()},
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    key, _, named = done.stdout.strip().partition(": ")
    assert key == "spark.jars"
    wanted = [path.name for path in jars.resolve("spark")]
    assert [Path(one).name for one in named.split(",")] == wanted
    assert all(Path(one).is_file() for one in named.split(","))


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jars.cache_folder() == tmp_path / "slotbridge" / "jars"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert jars.cache_folder().is_relative_to(Path.home())


@pytest.mark.slow
def test_the_command_prints_a_class_path() -> None:
    done = _run("spark", "--separator", ",")
    assert [Path(path) for path in done.stdout.strip().split(",")] == jars.resolve("spark")


@pytest.mark.slow
def test_the_command_names_an_unknown_group() -> None:
    done = _run("flink")
    assert done.returncode == ExitCode.PROGRAM_MISSING
    assert done.stderr.startswith("error: read locked jars: jars.lock has no readable group")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.testbed.jars", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
