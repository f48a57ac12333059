"""What proves that no server runs in a data folder."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.settings import MachineSettings
from services.failover.execute.data_folder import DataFolder
from services.failover.model.conninfo import Address
from services.failover.model.host_commands import machine_of

_MODE, _CREATE, _REMOVE = 0o600, 0o1000, 0
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.shmat.restype = ctypes.c_void_p
LIBC.shmdt.argtypes = [ctypes.c_void_p]


@pytest.fixture
def key() -> Iterator[int]:
    """The key of a segment of shared memory, as a server makes one."""
    found = os.getpid() * 16 + 5
    segment = LIBC.shmget(found, 56, _CREATE | _MODE)
    assert segment >= 0
    yield found
    LIBC.shmctl(segment, _REMOVE, None)


def folder_of(path: Path) -> DataFolder:
    given = MachineSettings(data_folder=path)
    return DataFolder(machine_of("a", given, Address("h", "", "5432")), "fence")


def test_a_folder_without_a_lock_file_has_no_server(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert not folder.is_off(), "no cluster either: nothing is mounted there"
    (tmp_path / "PG_VERSION").write_text("18\n")
    assert folder.is_off()


def test_a_process_that_is_not_seen_may_run(tmp_path: Path, key: int) -> None:
    """In another container, say, or as another user's."""
    (tmp_path / "PG_VERSION").write_text("18\n")
    segment = LIBC.shmget(key, 56, _MODE)
    lines = [str(2**22 + 1), str(tmp_path), "1700000000", "5432", "", "*"]
    pid_file = tmp_path / "postmaster.pid"
    folder = folder_of(tmp_path)
    for shared in ([], [""], ["        1         1"], [f"{key} {segment + 1}"]):
        pid_file.write_text("\n".join([*lines, *shared]))
        assert not folder.is_off(), shared
    pid_file.write_text("\n".join([*lines, f"{key:9} {segment:9}", "ready"]))
    assert folder.is_off(), "nobody is attached to what the server had"
    at = LIBC.shmat(segment, None, 0)
    assert not folder.is_off()
    LIBC.shmdt(at)
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:], f"{key} {segment}"]))
    assert folder.is_off(), "the pid was given to another process"


def test_only_the_owner_of_a_folder_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "PG_VERSION").write_text("18\n")
    owner = tmp_path.stat().st_uid
    assert folder_of(tmp_path).is_off()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert not folder_of(tmp_path).is_off()
