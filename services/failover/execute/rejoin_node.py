"""An old primary made a standby again, where its data folder is on this machine.

    preflight   whose folder it is, access, rights, space: nothing is stopped or changed before
    stop        its server, if it runs
    rewind      recover what a crash left, pg_rewind -n, pg_rewind
    copy        only if allowed: pg_basebackup into <data_folder>.copying, swapped in at the end
    configure   its own configuration files, with where to stream from
    start

`<data_folder>.rejoining` holds the configuration meanwhile, and how far it is: `changing` once
pg_rewind changes data (a folder that is broken off then can only be copied anew), `rewound` and
`copied` once that is done, with the source's cluster and timeline in it: what was made for another
source counts for nothing. `lock` there is held by us and by the programs that we start: a program
that outlives us keeps a second rejoin away. The folder that a copy replaces is kept beside it
(`<data_folder>.before-<time>`). Root works on files as the machine's `os_user`: links that this
user has put there lead nowhere that it may not go by itself. Only the folders beside its own are
made and moved by root, where that user may not write to their parent.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from schemas.errors import ExitCode, Retryable, SetupError, naming
from services.failover.execute import host_programs
from services.failover.execute.data_folder import DataFolder
from services.failover.execute.rejoin_preflight import Source, discarded, preflight
from services.failover.model.conninfo import Conninfo
from services.failover.model.host_commands import Machine
from services.failover.observe.cluster import Cluster
from services.failover.observe.server_link import Unreachable
from services.failover.plan.steps.step import Step
from services.failover.plan.steps.topology import OF_PRIMARIES, OF_STANDBYS, upstream_of

_CONFIGURATION = ("postgresql.conf", "postgresql.auto.conf", "pg_hba.conf", "pg_ident.conf")


def perform_rejoin(
    step: Step,
    cluster: Cluster,
    deadline_s: float,
    report: Callable[[str], None] = lambda _text: None,
) -> None:
    """Perform the rejoin `step`. Raise SetupError, SettingsError, Retryable."""
    machine = cluster.machines[step.server]
    if step.command:
        cluster.nodes[step.server].close()
        host_programs.run_command(
            step.command,
            operation=step.text,
            subject=step.server,
            deadline_s=deadline_s,
            os_user=machine.os_user,
            passed=machine.environment,
            ends_with_us=True,
        )
        return
    try:
        source = preflight(step, cluster)
    except Unreachable as error:
        raise Retryable(
            f"{step.node} stopped answering: {error.detail}",
            operation=step.text,
            subject=step.server,
            hint=f"go on once it answers: slotfailover rejoin {step.server}",
        ) from error
    cluster.nodes[step.server].close()
    upstream = upstream_of(cluster.address(step.node), source.replication, step.subject)
    _Rebuild(machine, step, source, deadline_s, report).run(upstream)


class _Rebuild:
    """One rejoin of a data folder on this machine."""

    def __init__(
        self,
        machine: Machine,
        step: Step,
        source: Source,
        deadline_s: float,
        report: Callable[[str], None],
    ) -> None:
        self._machine = machine
        self._step = step
        self._source = source
        self._report = report
        self._deadline = time.monotonic() + deadline_s
        self._folder = DataFolder(machine, step.text)
        self._data = self._folder.path
        self._kept = self._data.with_name(self._data.name + ".rejoining")
        self._copying = self._data.with_name(self._data.name + ".copying")
        self._lock = 0
        with host_programs.acting_as(machine.os_user):
            self._may_write = os.access(self._data.parent, os.W_OK, effective_ids=True)

    def run(self, upstream: Conninfo) -> None:
        """Stop the node, rewind or copy it, and start it as a standby; repeatable after a break."""
        with self._locked():
            if self._is_done("copied") and not self._data.exists():
                with self._files(in_parent=True):
                    self._copying.rename(self._data)
            self._stop()
            self._keep_configuration()
            with host_programs.service_file(self._source.conninfo, self._machine.os_user) as found:
                self._rebuild(found, upstream)
            self._run(self._machine.command("start"))
        with self._files(in_parent=True):
            shutil.rmtree(self._kept)

    def _rebuild(self, environment: dict[str, str], upstream: Conninfo) -> None:
        """Rewind the data folder; where that fails, copy it if the step allows. Configure it.

        Raise SetupError where it was neither rewound nor copied.
        """
        if self._is_done("rewound") or self._is_done("copied"):
            self._configure(self._data, upstream)
            return
        self._report_discarded()
        reason = self._rewind(environment)
        if not reason:
            self._note_done("rewound")
            self._configure(self._data, upstream)
        elif self._step.copies:
            self._report(f"pg_rewind can't do it ({reason}): a base backup is taken")
            self._copy(environment, upstream)
        else:
            node = self._step.server
            changed = (self._kept / "changing").exists()
            state = "its data is half changed" if changed else "its data was not changed"
            raise SetupError(
                f"pg_rewind can't make {node} a standby: {reason}; {state}. A base backup of "
                f"{self._source.size_bytes // 2**20} MB does it: slotfailover rejoin {node} --copy",
                operation=self._step.text,
                subject=node,
                hint=f"mend what it names, or slotfailover rejoin {node} --copy",
            )

    def _report_discarded(self) -> None:
        if kept_folder := discarded(self._step, self._machine, self._source):
            self._report(kept_folder)

    def _is_done(self, what: str) -> bool:
        """Tell whether an earlier attempt did this part, with the same source."""
        marker = self._kept / what
        with self._files():
            made_from = marker.read_text(encoding="utf-8") if marker.exists() else ""
        return bool(made_from) and made_from == self._source.identity

    def _note_done(self, what: str) -> None:
        with self._files():
            _write(self._kept / what, self._source.identity.encode())

    def _rewind(self, environment: dict[str, str]) -> str:
        """Rewind the folder; return why that can't be done, "" where it was done."""
        if (self._kept / "changing").exists():
            return "an earlier pg_rewind was broken off while it changed data"
        if not self._folder.exists:
            return f"there is no cluster in {self._data}"
        control = self._folder.control()
        if not control.rewindable:
            return "the cluster has neither data checksums nor wal_log_hints"
        if not control.clean:
            if (self._data / "standby.signal").exists():
                return f"it was a standby and did not shut down in order ({control.state})"
            reason = self._attempt((*self._single(),))
            if reason:
                return f"its recovery fails: {reason}"
        source = f"--source-server=service={host_programs.SERVICE}"
        program = (self._machine.program("pg_rewind"), f"--target-pgdata={self._data}", source)
        reason = self._attempt((*program, "-n"), environment)
        if reason:
            return reason
        with self._files():
            (self._kept / "changing").touch()
        reason = self._attempt(program, environment)
        if not reason:
            with self._files():
                (self._kept / "changing").unlink()
        return reason

    def _single(self) -> tuple[str, ...]:
        """Recover what a crash has left, as pg_rewind does: nothing is archived meanwhile."""
        program = (self._machine.program("postgres"), "--single", "-F", "-D", str(self._data))
        return (*program, "-c", "archive_mode=on", "-c", "archive_command=false", "template1")

    def _stop(self) -> None:
        """Stop the node's server. Raise SetupError where it still runs."""
        if self._folder.postmaster() is None:
            return
        self._run(self._machine.command("stop"))
        running = self._folder.postmaster()
        if running is not None:
            raise SetupError(
                f"the server of {self._step.server} still runs (pid {running.pid}) after `stop`",
                operation=self._step.text,
                subject=self._step.server,
                hint="stop that server, then run this command again",
            )

    def _keep_configuration(self) -> None:
        with self._files():
            for name in _CONFIGURATION:
                if (self._data / name).exists() and not (self._kept / name).exists():
                    _write(self._kept / name, (self._data / name).read_bytes())

    def _copy(self, environment: dict[str, str], upstream: Conninfo) -> None:
        """Take a base backup beside the folder; swap them once it is complete."""
        with self._files(in_parent=True):
            if self._copying.exists():
                shutil.rmtree(self._copying)
            self._copying.mkdir(mode=0o700)
            host_programs.own(self._copying, self._machine.os_user)
        program = self._machine.program("pg_basebackup")
        where = ("-d", f"service={host_programs.SERVICE}", "-D", str(self._copying))
        self._run((program, *where, "--checkpoint=fast", "--wal-method=stream"), environment)
        self._configure(self._copying, upstream)
        self._note_done("copied")
        before = self._data.with_name(f"{self._data.name}.before-{time.time_ns()}")
        kept = self._data.exists()
        with self._files(in_parent=True):
            if kept:
                self._data.rename(before)
            self._copying.rename(self._data)
        if kept:
            self._report(f"the folder from before is {before}: delete it once it is not needed")

    def _configure(self, folder: Path, upstream: Conninfo) -> None:
        """Restore the node's own configuration, without the settings of a primary."""
        with self._files():
            self._write_configuration(folder, upstream)

    def _write_configuration(self, folder: Path, upstream: Conninfo) -> None:
        """Restore the node's own configuration, and set what a standby of `upstream` needs."""
        for name in _CONFIGURATION:
            if (self._kept / name).exists():
                _write(folder / name, (self._kept / name).read_bytes())
        auto = folder / "postgresql.auto.conf"
        values = {
            **dict.fromkeys(OF_PRIMARIES, None),
            "primary_conninfo": upstream.text,
            "primary_slot_name": self._step.subject,
            **OF_STANDBYS,
        }
        lines = [
            line
            for line in auto.read_text(encoding="utf-8").splitlines()
            if line.partition("=")[0].strip() not in values
        ]
        lines += [f"{k} = {_quoted(v)}" for k, v in values.items() if v]
        _write(auto, "\n".join([*lines, ""]).encode())
        _write(folder / "standby.signal", b"")

    @contextlib.contextmanager
    def _files(self, *, in_parent: bool = False) -> Iterator[None]:
        """Run the block as the machine's user. Raise SetupError where that user may not.

        `in_parent`: the block makes or moves folders beside the data folder, which root does where
        that user may not write there.
        """
        user = "" if in_parent and not self._may_write else self._machine.os_user
        try:
            with host_programs.acting_as(user):
                yield
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP):
                raise
            raise SetupError(
                f"{user or 'our user'} can't use {error.filename}: {error.strerror}",
                operation=self._step.text,
                subject=self._step.server,
                hint=f"let that user own all files of {self._data}, and remove foreign ones",
            ) from error

    def _attempt(self, command: tuple[str, ...], environment: dict[str, str] | None = None) -> str:
        """Run a command; return its error, "" if it succeeds."""
        try:
            self._run(command, environment)
        except SetupError as error:
            return error.message
        return ""

    def _run(self, command: tuple[str, ...], environment: dict[str, str] | None = None) -> None:
        """Run a command as the machine's user; all but the server end with this process."""
        starts = command == self._machine.command("start")
        host_programs.run_command(
            command,
            operation=self._step.text,
            subject=self._step.server,
            deadline_s=max(1.0, self._deadline - time.monotonic()),
            os_user=self._machine.os_user,
            environment=environment,
            passed=self._machine.environment,
            ends_with_us=not starts,
            inherited=() if starts else (self._lock,),
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the data folder's rebuilding. Raise Retryable while another has it."""
        with self._files(in_parent=True):
            if not self._kept.exists():
                self._kept.mkdir()
                host_programs.own(self._kept, self._machine.os_user)
        with self._files():
            file = (self._kept / "lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Retryable(
                    f"another rejoin of {self._data} runs, or a program that one has started",
                    operation=self._step.text,
                    subject=self._step.server,
                    hint=f"wait for its end; fuser {self._kept / 'lock'} names it",
                    exit_code=ExitCode.LOCKED,
                ) from None
            self._lock = file.fileno()
            yield


def _write(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.slotfailover")  # a full disk leaves the old one whole
    with naming(new):
        new.write_bytes(content)
    new.chmod(0o600)
    new.replace(path)


def _quoted(value: str) -> str:
    """Quote a value as ALTER SYSTEM writes it: a backslash escapes in configuration files."""
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
