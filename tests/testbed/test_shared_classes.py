"""Java's classes kept for the next start: made once, used, and made anew for another Java."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from services.testbed import cds_archive
from services.testbed.jars import class_path
from services.testbed.java import find_java_home, version_text

pytestmark = pytest.mark.usefixtures("servers")

VERSION = ("kafka.Kafka", "--version")


@pytest.fixture
def java() -> Path:
    """A Java that runs; the system's can keep classes."""
    return find_java_home() / "bin" / "java"


@pytest.fixture
def options(java: Path, tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """`options(run, *java_options)`, with a cache of its own."""

    def ask(run: Callable[[str], None], *given: str) -> tuple[str, ...]:
        return cds_archive.options(
            "kafka", java, given, class_path("kafka"), run, cache=tmp_path / "classes"
        )

    return ask


def sources(java: Path, *options: str) -> str:
    """Where Java took its classes from."""
    command: list[str | Path] = [
        java,
        *options,
        "-Xlog:class+load",
        "-cp",
        class_path("kafka"),
        *VERSION,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_classes_are_kept_once_and_used(
    java: Path, options: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    runs: list[str] = []

    def run(option: str) -> None:
        runs.append(option)
        sources(java, option)

    found = options(run)
    assert options(run) == found
    if not found:  # the package's Java
        assert "sharing" not in version_text(java)
        assert not runs
        return
    assert len(runs) == 1
    loaded = [line for line in sources(java, *found).splitlines() if " kafka.Kafka$ " in line]
    assert loaded and all("shared objects file (top)" in line for line in loaded)
    other = options(run, "-Xmx200m")
    assert other != found
    assert len(runs) == 2
    assert [f"-XX:SharedArchiveFile={path}" for path in tmp_path.glob("classes/*.jsa")] == [*other]


@pytest.mark.long
def test_a_run_that_leaves_no_archive_does_no_harm(
    options: Callable[..., tuple[str, ...]],
) -> None:
    assert options(lambda _: None) == ()


@pytest.mark.long
def test_a_java_without_classes_of_its_own_shared_goes_without(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"21\"' >&2\n", encoding="utf-8")
    java.chmod(0o755)
    assert cds_archive.options("x", java, (), "", pytest.fail, cache=tmp_path) == ()


@pytest.mark.long
def test_a_cache_that_cannot_be_written_is_not_an_error(java: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "classes"
    assert cds_archive.options("x", java, (), "", pytest.fail, cache=cache) == ()
