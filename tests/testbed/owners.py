"""A program that owns a test bed, run as a process of its own so that tests may kill it."""

import subprocess
import sys
from pathlib import Path

from tests.providers.waiting import eventually, patient

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import signal, sys
from pathlib import Path
from services.testbed.bed import Bed

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" has it ignored
with Bed(Path(sys.argv[1]), lazy=True) as bed:
    bed.start(*sys.argv[2].split(","))
    bed.spawn("child", ["sleep", "600"])
    print("up", flush=True)
    sys.stdin.read()
"""


class Owner:
    """Starts `parts` in `folder` and a child `sleep`, then waits; `process` is the program."""

    def __init__(self, folder: Path, parts: str, *, log: Path, user: int | None = None) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(folder), parts],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=patient(180))

    def await_up(self) -> None:
        """Wait until its servers are up."""
        eventually(
            lambda: "up\n" in self.output or self.process.poll() is not None,
            what="the owner is up",
            timeout_s=90,
        )
        assert self.process.poll() is None, self.output

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(encoding="utf-8")


def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that mention `folder`, but not of owners and keepers."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            where = str((path / "cwd").readlink())
        except OSError:
            continue
        mine = where.startswith(str(folder)) or str(folder) in command
        if mine and "services.testbed" not in command:
            found.append(f"{path.name} {command}")
    return found
