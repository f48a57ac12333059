"""A throw-away copy of a standby on this machine: copied, isolated, promoted, removed.

    <folder>/slotfailover-drill-<system_identifier>/
        data/     the copy, with a configuration of its own: nothing of production's files counts
        socket/   its only way in; it listens to no network
        log

It runs without archiving, subscriptions, preloaded libraries and synchronous standbys, and asks
nobody but the primary, of which it is a standby until it is promoted.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ExitCode, SettingsError, SetupError
from services.failover.execute import host_programs
from services.failover.model.conninfo import Conninfo
from services.failover.observe.server_link import ServerLink

SLOT = "slotfailover_drill"
"""The clone's physical slot on the primary."""
_SOCKET_PATH_MAX = 100
_STOP_S = 60.0
_ISOLATED: dict[str, str] = {
    "listen_addresses": "",
    "port": "5432",
    "ssl": "off",
    "archive_mode": "off",
    "archive_command": "",
    "restore_command": "",
    "archive_cleanup_command": "",
    "recovery_end_command": "",
    "shared_preload_libraries": "",
    "session_preload_libraries": "",
    "local_preload_libraries": "",
    "max_logical_replication_workers": "0",
    "synchronous_standby_names": "",
    "synchronized_standby_slots": "",
    "sync_replication_slots": "off",
    "hot_standby": "on",
    "hot_standby_feedback": "on",
    "wal_level": "logical",
    "event_triggers": "off",
    "autovacuum": "off",
    "fsync": "off",
    "shared_buffers": "64MB",
    "huge_pages": "off",
    "cluster_name": SLOT,
    "primary_slot_name": SLOT,
    "logging_collector": "off",
    "log_destination": "stderr",
}
LIMITS = (
    "max_connections",
    "max_worker_processes",
    "max_wal_senders",
    "max_prepared_transactions",
    "max_locks_per_transaction",
    "max_replication_slots",
)
"""A standby's must not be below the primary's."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Where PostgreSQL's programs are, and whom they run as."""

    bin_folder: Path | None
    os_user: str

    def path(self, name: str) -> str:
        return str(self.bin_folder / name) if self.bin_folder is not None else name


class Clone:
    """A clone of a standby. `remove` works at any time, also for the clone of a killed drill."""

    def __init__(self, folder: Path, system_identifier: str, programs: Programs) -> None:
        self.folder = folder / f"slotfailover-drill-{system_identifier}"
        self._data = self.folder / "data"
        self._socket = self.folder / "socket"
        self._programs = programs

    @property
    def exists(self) -> bool:
        """Whether any part of a clone is on this machine."""
        return self.folder.exists()

    def require_room(self, size_bytes: int) -> None:
        """Raise SettingsError or SetupError (DISK_FULL) if the folder can't hold the clone."""
        if os.geteuid() == 0 and not self._programs.os_user:
            raise SettingsError(
                "PostgreSQL does not run as root",
                operation="drill",
                hint="set failover.drill.os_user, or run the drill as another user",
            )
        host_programs.account(self._programs.os_user)
        if len(str(self._socket)) > _SOCKET_PATH_MAX:
            raise SettingsError(
                f"{self._socket} is too long for a Unix-domain socket",
                operation="drill",
                hint="choose a shorter failover.drill.folder",
            )
        try:
            free = shutil.disk_usage(self.folder.parent).free
        except OSError as error:
            raise SettingsError(
                f"can't use {self.folder.parent}: {error.strerror}",
                operation="drill",
                hint="correct failover.drill.folder",
            ) from error
        if free < size_bytes * 11 // 10:
            raise SetupError(
                f"{self.folder.parent} has {free // 2**20} MB of free space, the databases have "
                f"{size_bytes // 2**20} MB",
                operation="drill",
                hint="choose another failover.drill.folder",
                exit_code=ExitCode.DISK_FULL,
            )

    def copy(self, source: Conninfo, deadline_s: float) -> None:
        """Copy the server at `source` by a base backup."""
        for path in (self.folder, self._data, self._socket):
            path.mkdir(mode=0o700)
            host_programs.own(path, self._programs.os_user)
        with host_programs.service_file(source, self._programs.os_user) as environment:
            self._run(
                (
                    *(
                        self._programs.path("pg_basebackup"),
                        "-d",
                        f"service={host_programs.SERVICE}",
                    ),
                    *("-D", str(self._data), "--checkpoint=fast", "--wal-method=stream"),
                    *("--no-sync", "--no-manifest"),
                ),
                "copy the standby",
                deadline_s,
                environment,
            )

    def isolate(
        self, primary: Conninfo, limits: Mapping[str, str], own_settings: Mapping[str, str]
    ) -> None:
        """Write a configuration that makes the clone a standby which nobody else can reach."""
        values = {
            **_ISOLATED,
            **limits,
            **own_settings,
            "unix_socket_directories": str(self._socket),
            "unix_socket_permissions": "0700",
            "primary_conninfo": primary.text,
        }
        lines = [f"{name} = {_quoted(value)}" for name, value in values.items()]
        self._write("postgresql.conf", "\n".join(lines) + "\n")
        self._write("postgresql.auto.conf", "")
        self._write("pg_hba.conf", "local all all trust\n")
        self._write("pg_ident.conf", "")
        self._write("standby.signal", "")

    def start(self, deadline_s: float) -> None:
        """Start the clone. Raise SetupError with the last lines of its log."""
        command = (
            *(self._programs.path("pg_ctl"), "start", "-D", str(self._data), "-w"),
            *("-t", str(int(deadline_s)), "-l", str(self.folder / "log")),
        )
        try:
            self._run(command, "start the clone", deadline_s + 10)
        except SetupError as error:
            raise SetupError(
                self._last_words() or error.message,
                operation="start the clone",
                subject=str(self.folder),
                hint="set failover.drill.settings for settings with which the clone can't start",
            ) from error

    def cut_off(self) -> None:
        """Disconnect the clone from the primary for good."""
        path = self._data / "postgresql.conf"
        with host_programs.acting_as(self._programs.os_user):  # who may have put a link there
            lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not line.startswith("primary_")]
        self._write("postgresql.conf", "\n".join(kept) + "\n")

    @contextlib.contextmanager
    def link(self, user: str, dbname: str, deadline_s: float) -> Iterator[ServerLink]:
        """Connect to one of the clone's databases."""
        pairs = (("host", str(self._socket)), ("port", "5432"), ("user", user), ("dbname", dbname))
        link = ServerLink(
            "the clone", Conninfo(pairs).text, connect_timeout_s=30, deadline_s=deadline_s
        )
        try:
            yield link
        finally:
            link.close()

    def remove(self) -> None:
        """Stop the clone at once and delete it; do nothing where there is none."""
        if (self._data / "postmaster.pid").exists():
            command = (self._programs.path("pg_ctl"), "stop", "-D", str(self._data), "-w")
            with contextlib.suppress(SetupError):  # what a killed server leaves: it does not run
                self._run((*command, "-m", "immediate"), "stop the clone", _STOP_S)
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _write(self, name: str, text: str) -> None:
        """Write a file of the clone as its user. Raise SetupError where that fails."""
        path = self._data / name
        try:
            with host_programs.acting_as(self._programs.os_user):
                path.write_text(text, encoding="utf-8")
                path.chmod(0o600)
        except OSError as error:
            raise SetupError(
                f"can't write {path}: {error.strerror}",
                operation="drill",
                hint="free space there, or choose another failover.drill.folder",
                exit_code=ExitCode.DISK_FULL,
            ) from error

    def _last_words(self) -> str:
        """Return the last FATAL line of the clone's log, "" if there is none."""
        log, text = self.folder / "log", ""
        with host_programs.acting_as(self._programs.os_user), contextlib.suppress(OSError):
            text = log.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        fatal = [line for line in lines if "FATAL" in line or "PANIC" in line]
        if fatal and "contains errors" in fatal[-1]:  # what is wrong there is said before
            fatal = [line for line in lines if 'parameter "' in line] or fatal
        return fatal[-1].partition("  ")[2][:300] if fatal else ""

    def _run(
        self,
        command: tuple[str, ...],
        operation: str,
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Run a command as the clone's user, which ends with this process."""
        host_programs.run_command(
            command,
            operation=operation,
            subject=str(self.folder),
            deadline_s=deadline_s,
            os_user=self._programs.os_user,
            environment=environment,
            ends_with_us=True,
        )


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
