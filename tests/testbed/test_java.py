"""Either Java runs Kafka: the system's, where there is one, and the packaged one."""

import subprocess
from pathlib import Path

import pytest

from services.testbed import java
from services.testbed.jars import class_path
from tests.providers.waiting import patient

pytestmark = pytest.mark.usefixtures("servers")


@pytest.mark.long
def test_the_packaged_java_runs_kafkas_storage_tool_with_sparks_flag() -> None:
    home = java.packaged_java_home()
    done = subprocess.run(
        [
            *(home / "bin" / "java", "--add-modules=jdk.incubator.vector"),
            *("-cp", class_path("kafka"), "kafka.tools.StorageTool"),
            "random-uuid",
        ],
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 22


@pytest.mark.long
def test_the_packaged_java_is_taken_where_the_system_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "with 'quote"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert java.system_java_home() is None
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert java.find_java_home() is not None
    assert java.java_version(java.packaged_java_home() / "bin" / "java") == 21


@pytest.mark.long
@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_392"', 1),
        ("no Java here", None),
    ],
)
def test_the_version_is_asked_of_java_itself(
    tmp_path: Path, says: str, version: int | None
) -> None:
    program = tmp_path / "java"
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n", encoding="utf-8")
    program.chmod(0o755)
    assert java.java_version(program) == version


@pytest.mark.long
def test_a_java_home_of_the_wrong_version_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'openjdk version \"11.0.1\"'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java.find_java_home() != tmp_path
    assert java.java_version(java.find_java_home() / "bin" / "java") in java.SUPPORTED
