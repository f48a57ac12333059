"""Commands run on nodes' machines: no shell, a deadline, and their last words in the error.

What a command starts (a postmaster) lives on: it gets a session of its own, and none of our pipes.
"""

import contextlib
import os
import pwd
import signal
import subprocess
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

from schemas.errors import ExitCode, Retryable, SettingsError, SetupError
from services.failover.execute.interruption import deferred_signals
from services.failover.model.conninfo import Conninfo
from services.failover.model.host_commands import Command

_LAST_BYTES = 4000
_OUTPUT_BYTES = 100_000
GO_ON = "mend it, then go on: slotfailover resume"
INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "SSH_AUTH_SOCK"),
)
"""What a command gets of our environment. Passwords in ours (PGPASSWORD, SLOTBRIDGE_…) stay here:
a server that is started by one would show them to its own programs."""
SERVICE = "slotfailover"
"""The name by which `service_file` lets programs find a server."""


def run_command(
    command: Command,
    *,
    operation: str,
    subject: str,
    deadline_s: float,
    os_user: str = "",
    environment: Mapping[str, str] | None = None,
    passed: Iterable[str] = (),
    ends_with_us: bool = False,
    inherited: tuple[int, ...] = (),
    remedy: str = GO_ON,
    succeeds_with: Container[int] = (0,),
) -> str:
    """Run a command to its end; return its output (the last 100 KB).

    It gets INHERITED and `passed` of our environment, and `environment`: no more, as programs may
    show theirs to others. `ends_with_us`: an interruption of
    ours ends it, too. `inherited`: file descriptors that it keeps open. `succeeds_with`: the exit
    statuses that are not a failure.
    Raise SetupError if it fails, Retryable (DEADLINE) if it does not end.
    """
    entry = account(os_user)
    process: subprocess.Popen[bytes] | None = None
    with tempfile.TemporaryFile() as output:
        try:
            with deferred_signals():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**_own_environment(passed, entry), **(environment or {})},
                    cwd="/",
                    start_new_session=True,
                    pass_fds=inherited,
                    user=entry.pw_uid if entry is not None else None,
                    group=entry.pw_gid if entry is not None else None,
                    extra_groups=[] if entry is not None else None,
                )
            status = process.wait(deadline_s)
        except OSError as error:
            raise SetupError(
                f"can't run {command[0]}: {error.strerror}",
                operation=operation,
                subject=subject,
                hint=f"correct failover.machines.{subject}",
                exit_code=ExitCode.PROGRAM_MISSING,
            ) from error
        except subprocess.TimeoutExpired as error:
            _kill(process)
            raise Retryable(
                f"{command[0]} did not end within {deadline_s:.0f} s",
                operation=operation,
                subject=subject,
                hint="find out what the command waits for, then: slotfailover resume",
                exit_code=ExitCode.DEADLINE,
            ) from error
        except BaseException:
            if ends_with_us:
                _kill(process)
            raise
        if status not in succeeds_with:
            said = f"{command[0]} ended with {status}: {_last_words(output.fileno())}"
            raise SetupError(said, operation=operation, subject=subject, hint=remedy)
        return _printed(output.fileno(), _OUTPUT_BYTES)


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a program with all that it has started in its session."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def service_file(source: Conninfo, os_user: str) -> Iterator[dict[str, str]]:
    """Write a server's connection and its secrets into a service file while the block runs.

    Yield the environment in which programs find the server as SERVICE.
    """
    pairs = dict(source.pairs)
    pairs.setdefault("dbname", "postgres")
    with tempfile.NamedTemporaryFile("w", suffix=".conf", encoding="utf-8") as file:
        file.write(f"[{SERVICE}]\n" + "".join(f"{k}={v}\n" for k, v in pairs.items()))
        file.flush()
        own(Path(file.name), os_user)
        given = {name: value for name, value in os.environ.items() if name.startswith("PG")}
        yield {**given, "PGSERVICEFILE": file.name, "PGCONNECT_TIMEOUT": "10"}


def account(os_user: str) -> pwd.struct_passwd | None:
    """Return the account that programs run as, None for our own. Raise SettingsError if unknown."""
    if not os_user or os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(os_user)
    except KeyError:
        raise SettingsError(
            f"there is no user {os_user} here",
            operation="read settings",
            subject="failover.machines",
            hint="correct `os_user`",
        ) from None


@contextlib.contextmanager
def acting_as(os_user: str) -> Iterator[None]:
    """Work on files with no more rights than `os_user` has, whose links may lead anywhere.

    The whole process has that user's rights in the block: start no program there.
    """
    entry = account(os_user)
    if entry is None:
        yield
        return
    uid, gid, groups = os.geteuid(), os.getegid(), os.getgroups()
    try:
        os.setgroups([])
        os.setegid(entry.pw_gid)
        os.seteuid(entry.pw_uid)
        yield
    finally:
        os.seteuid(uid)
        os.setegid(gid)
        os.setgroups(groups)


def own(path: Path, os_user: str) -> None:
    """Make the user that the programs run as the owner of a file or folder that we have made."""
    entry = account(os_user)
    if entry is not None:
        os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)


def _own_environment(passed: Iterable[str], entry: pwd.struct_passwd | None) -> dict[str, str]:
    names = {*INHERITED, *passed, *(name for name in os.environ if name.startswith("LC_"))}
    own = {name: os.environ[name] for name in names if name in os.environ}
    return own if entry is None else {**own, "HOME": entry.pw_dir, "USER": entry.pw_name}


def _printed(descriptor: int, bytes_max: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, bytes_max, max(0, size - bytes_max)).decode(errors="replace")


def _last_words(descriptor: int) -> str:
    text = _printed(descriptor, _LAST_BYTES)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or line.startswith(("FATAL", "PANIC"))]
    return " ".join((errors[-1:] or lines or ["without a word"])[-3:])[-300:]
