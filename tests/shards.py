"""All tests in shards of about equal seconds, and which of the shards passed at which commit.

    make test-long SHARD=2/6     the second of six shards; without SHARD, all tests
    make test-long-status        which shards passed, at which commit

A file of tests is never divided: its servers are started once. tests/seconds.json has the seconds
that each file took when it was last measured; a file that is not in it counts as AVERAGE_S. Each
run of `make test-long` measures anew (MEASURED); `python -m tests.shards measure` puts what was
measured into tests/seconds.json. PASSED and MEASURED are in .cache and never committed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[1]
SECONDS: Final = ROOT / "tests/seconds.json"
MEASURED: Final = ROOT / ".cache/test-seconds.json"
PASSED: Final = ROOT / ".cache/test-long.jsonl"
AVERAGE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard `number` of `of`."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True, slots=True)
class Passed:
    """A shard whose tests all passed."""

    shard: str
    commit: str
    changed: bool
    """Whether the checkout had changes that were not committed."""
    seed: int | None
    minutes: float
    at: str


def parse(text: str) -> Shard:
    """Return the shard that a text such as "2/6" names; raise ValueError where it names none."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ValueError(f"{text!r} names no shard: write 2/6 for the second of six")
    return Shard(int(number), int(of))


def cut(files: Iterable[str], seconds: Mapping[str, float], of: int) -> list[set[str]]:
    """Return `of` sets of files whose sums of seconds differ little: the longest file goes first.

    The result depends on `files` and `seconds` alone, not on their order.
    """
    sets: list[set[str]] = [set() for _ in range(of)]
    sums = [0.0] * of
    for file in sorted(set(files), key=lambda file: (-seconds.get(file, AVERAGE_S), file)):
        least = sums.index(min(sums))
        sets[least].add(file)
        sums[least] += seconds.get(file, AVERAGE_S)
    return sets


class Sharding:
    """The pytest plugin that leaves out the tests of other shards, and notes what has passed."""

    def __init__(self, config: pytest.Config, shard: Shard) -> None:
        self._config = config
        self._shard = shard
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._commit, self._changed = _checkout()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests whose files are in the shard."""
        known: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.is_file() else {}
        files = cut(map(_file, items), known, self._shard.of)[self._shard.number - 1]
        others = [item for item in items if _file(item) not in files]
        items[:] = [item for item in items if _file(item) in files]
        self._config.hook.pytest_deselected(items=others)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the seconds of each file."""
        file = report.nodeid.partition("::")[0]
        self._seconds[file] = self._seconds.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Note what was measured, and that the shard has passed where no test was left out."""
        if hasattr(self._config, "workerinput"):
            return
        MEASURED.parent.mkdir(exist_ok=True)
        known = json.loads(MEASURED.read_text()) if MEASURED.is_file() else {}
        MEASURED.write_text(json.dumps(known | self._seconds))
        option = self._config.option
        part = option.keyword or option.markexpr or session.config.args != ["tests"]
        if exitstatus or part or option.collectonly:
            return
        passed = Passed(
            str(self._shard),
            self._commit,
            self._changed or _checkout() != (self._commit, self._changed),
            getattr(option, "randomly_seed", None),
            round((time.monotonic() - self._began) / 60, 1),
            time.strftime("%Y-%m-%d %H:%M"),
        )
        with PASSED.open("a") as file:
            file.write(json.dumps(asdict(passed)) + "\n")


def status(lines: Iterable[str]) -> list[Passed]:
    """Return the newest pass of each shard, in the order of the shards."""
    newest: dict[str, Passed] = {}
    for line in lines:
        passed = Passed(**json.loads(line))
        newest[passed.shard] = passed
    return sorted(newest.values(), key=lambda passed: (parse(passed.shard).of, passed.shard))


def measure() -> None:
    """Put what was measured last into tests/seconds.json, without files that are gone."""
    known = json.loads(SECONDS.read_text()) if SECONDS.is_file() else {}
    measured = known | json.loads(MEASURED.read_text())
    there = {file: round(measured[file], 1) for file in sorted(measured) if (ROOT / file).is_file()}
    SECONDS.write_text(json.dumps(there, indent=0) + "\n")


def main() -> int:
    """Print which shards have passed, or take over what was measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.shards")
    parser.add_argument("command", choices=["status", "measure"])
    if parser.parse_args().command == "measure":
        measure()
        return 0
    lines = PASSED.read_text().splitlines() if PASSED.is_file() else []
    write = sys.stdout.write
    write("" if lines else "no shard has passed in this checkout: make test-long SHARD=1/6\n")
    for passed in status(lines):
        behind = _git("rev-list", "--count", f"{passed.commit}..HEAD") or "?"
        note = ", with uncommitted changes" if passed.changed else ""
        write(
            f"{passed.shard} passed at {passed.commit[:8]}{note} ({behind} commits ago), "
            f"{passed.minutes} min, seed {passed.seed}, {passed.at}\n"
        )
    return 0


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _checkout() -> tuple[str, bool]:
    return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain"))


def _git(*arguments: str) -> str:
    done: Any = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return str(done.stdout).strip()


if __name__ == "__main__":
    sys.exit(main())
