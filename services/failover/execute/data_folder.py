"""A node's data folder on this machine: its state by pg_controldata, without its server.

    pg_controldata   system identifier, timeline, state, whether pg_rewind can work on it
    pg_waldump       where its WAL ends, and the commits in it
    postmaster.pid   pid, data folder, start in seconds, port, …   one a line

Source: PostgreSQL's pg_controldata.c, pg_waldump.c, miscadmin.h (LOCK_FILE_LINE_…).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ExitCode, SettingsError, SetupError
from schemas.lsn import format_lsn, parse_lsn
from services.failover.execute import host_programs
from services.failover.model.host_commands import Machine

_CLEAN = ("shut down", "shut down in recovery")
_SPARE = 1.1
_WALDUMP_S = 60
_SPAN = re.compile(r"WAL statistics between \S+ and (\S+):")
_COMMITS = re.compile(r"^Transaction/COMMIT(?:_PREPARED)? +(\d+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ControlData:
    """The fields that are read from pg_controldata's output."""

    system_identifier: str
    state: str
    checksums: bool
    wal_log_hints: bool
    timeline: int = 0
    """The timeline of the latest checkpoint."""

    @property
    def clean(self) -> bool:
        """Whether the server was shut down cleanly."""
        return self.state in _CLEAN

    @property
    def rewindable(self) -> bool:
        """Whether pg_rewind can detect changed blocks."""
        return self.checksums or self.wal_log_hints


@dataclass(frozen=True, slots=True)
class Postmaster:
    """The server that runs in a folder."""

    pid: int
    started_s: int
    port: str


class DataFolder:
    """The folder of one node. Raises SetupError and SettingsError that name the folder."""

    def __init__(self, machine: Machine, operation: str) -> None:
        if machine.data_folder is None:
            raise LookupError(f"{machine.node} has no data_folder in the settings")
        self.path = machine.data_folder.resolve()
        self._machine = machine
        self._operation = operation

    @property
    def exists(self) -> bool:
        """Whether the folder has a cluster in it."""
        return (self.path / "PG_VERSION").exists()

    def control(self) -> ControlData:
        """Run pg_controldata and return its fields."""
        text = host_programs.run_command(
            (self._machine.program("pg_controldata"), "-D", str(self.path)),
            operation=self._operation,
            subject=self._machine.node,
            deadline_s=60,
            os_user=self._machine.os_user,
            environment={"LC_ALL": "C"},
        )
        found = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in text.splitlines())
        }
        return ControlData(
            found.get("Database system identifier", ""),
            found.get("Database cluster state", ""),
            found.get("Data page checksum version", "0") != "0",
            found.get("wal_log_hints setting", "off") == "on",
            int(found.get("Latest checkpoint's TimeLineID", "0")),
        )

    def wal_after(self, lsn: int, timeline: int) -> tuple[int, int]:
        """Return where the folder's WAL of a timeline ends, and how many commits it has after LSN.

        Raise SetupError or Retryable where pg_waldump can't read that WAL.
        """
        text = host_programs.run_command(
            (
                *(self._machine.program("pg_waldump"), f"--path={self.path}", "--stats=record"),
                *(f"--timeline={timeline}", f"--start={format_lsn(lsn)}"),
            ),
            operation=self._operation,
            subject=self._machine.node,
            deadline_s=_WALDUMP_S,
            os_user=self._machine.os_user,
            environment={"LC_ALL": "C"},
            succeeds_with=(0, 1),  # 1 also where it meets the end of the WAL
        )
        span = _SPAN.search(text)
        if span is not None:
            return parse_lsn(span.group(1)), sum(map(int, _COMMITS.findall(text)))
        if "could not find a valid record after" in text:
            return lsn, 0
        raise SetupError(
            f"pg_waldump can't read the WAL of timeline {timeline} from {format_lsn(lsn)} on: "
            f"{text.strip().splitlines()[-1] if text.strip() else 'it printed nothing'}",
            operation=self._operation,
            subject=self._machine.node,
            hint=f"read it by hand, in {self.path}/pg_wal",
        )

    def postmaster(self) -> Postmaster | None:
        """Return the server that runs in this folder now, None where none does."""
        try:
            lines = (self.path / "postmaster.pid").read_text(encoding="utf-8").splitlines()
            found = Postmaster(int(lines[0]), int(lines[2]), lines[3])
        except (OSError, ValueError, IndexError):
            return None
        try:
            os.kill(found.pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return found
        with contextlib.suppress(OSError):  # a pid that was given to another process meanwhile
            if Path(f"/proc/{found.pid}/cwd").resolve(strict=True) != self.path:
                return None
        return found

    def is_off(self) -> bool:
        """Tell whether it is certain that no server runs in this folder, as its owner sees it.

        A process that we don't see may run in another container. But a server is attached to its
        shared memory, which outlives it: nobody may be. Source: sysv_shmem.c, PGSharedMemoryAttach.
        """
        with host_programs.acting_as(self._machine.os_user):
            if not self.exists or self.path.stat().st_uid != os.geteuid():
                return False
            try:
                lines = (self.path / "postmaster.pid").read_text(encoding="utf-8").splitlines()
            except FileNotFoundError:
                return True
            with contextlib.suppress(OSError, IndexError):
                key_and_id = lines[6].split()
                segments = map(str.split, Path("/proc/sysvipc/shm").read_text().splitlines())
                attached = [one[6] for one in segments if one[:2] == key_and_id]
                return attached == ["0"] and self.postmaster() is None
        return False

    def require_user(self) -> None:
        """Raise SettingsError where PostgreSQL's programs would run as root."""
        if os.geteuid() == 0 and not self._machine.os_user:
            raise SettingsError(
                "PostgreSQL's programs do not run as root",
                operation=self._operation,
                subject=self._machine.node,
                hint=f"set failover.machines.{self._machine.node}.os_user",
            )
        host_programs.account(self._machine.os_user)

    def require_swappable(self, size_bytes: int) -> None:
        """Raise SetupError where a base backup has no room beside it, or can't take its place."""
        parent = self.path.parent
        reason = ""
        if self.path.exists() and os.path.ismount(self.path):
            reason = f"{self.path} is a mount point, so a copy can't be put in its place"
        elif not os.access(parent, os.W_OK):
            reason = f"our user may not write to {parent}, where the copy is made"
        if reason:
            raise SetupError(
                reason,
                operation=self._operation,
                subject=self._machine.node,
                hint=f"rebuild {self._machine.node} by hand with pg_basebackup",
            )
        free = shutil.disk_usage(parent).free
        if free < size_bytes * _SPARE:
            raise SetupError(
                f"{parent} has {free // 2**20} MB of free space; the base backup needs "
                f"{int(size_bytes * _SPARE) // 2**20} MB beside {self.path}",
                operation=self._operation,
                subject=self._machine.node,
                hint="free space there, or rebuild the node by hand",
                exit_code=ExitCode.DISK_FULL,
            )
