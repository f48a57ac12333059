"""Several `slottables` commands, one after another, in one process: Java starts once for all.

`python -m tests.promises.tables.one_java CONFIG '[["maintain", "--json"], …]'` prints a JSON line
for each: its exit code and stdout.
"""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from spark_consumers.command import app
from tests.providers.waiting import patient


class Done(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    log: str
    """The last that the process wrote to stderr."""


def run_all(config: Path, *commands: Sequence[str], timeout_s: float = 200) -> list[Done]:
    """Run them in a process of their own; none after one that ends with another code than 0."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, config, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(timeout_s),
    )
    log = done.stderr[-3000:]
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    found = [Done(code, stdout, log) for code, stdout in ends]
    assert found and (len(found) == len(commands) or found[-1].code), log
    return found


def main() -> None:
    """What the process does."""
    config, commands = sys.argv[1], json.loads(sys.argv[2])
    for command in commands:
        code, stdout = _call([*command, "--config", config])
        sys.stdout.write(json.dumps([code, stdout]) + "\n")
        if code:
            break


def _call(arguments: Sequence[str]) -> tuple[int, str]:
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            app(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue()


if __name__ == "__main__":
    main()
