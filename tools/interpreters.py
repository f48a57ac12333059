"""Run the tests that need no servers on every supported Python that this machine has.

    python -m tools.interpreters         each version that is found beside its own

Interpreters are looked for on the PATH, in the system's folders, and where pyenv and uv keep
theirs. Each gets a virtual environment of its own (`.venv/pythons/VERSION`) without pyspark, so
that the tests of the Spark consumers are left out there. One that can't make an environment is
printed as not judged.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from rich.console import Console

ROOT: Final = Path(__file__).parents[1]
OLDEST: Final = (3, 11)
UNTRIED: Final = (3, 14)
"""As requires-python in pyproject.toml."""
_NAME: Final = re.compile(r"python3(\.\d+)?")
_SYSTEM: Final = ("/usr/bin", "/usr/local/bin")
_KEPT: Final = (".pyenv/versions/*/bin", ".local/share/uv/python/*/bin")
_ASK: Final = "import sys, venv, ensurepip; print(*sys.version_info[:3])"
_ASK_TIMEOUT_S: Final = 300.0
Version = tuple[int, ...]


def main() -> int:
    """Print and use each interpreter; return 1 if the tests of any failed."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    here = sys.version_info[:3]
    usable, silent = interpreters(folders(os.environ, Path.home()))
    for path in silent:
        console.print(f"not judged: {path} does not run, or can't make virtual environments")
    others = {version: path for version, path in usable.items() if version != here}
    names = [f"{text(version)} ({path})" for version, path in others.items()]
    console.print(f"tests without servers, beside {text(here)}: {', '.join(names) or 'none found'}")
    failed = [text(version) for version, path in others.items() if not _passes(version, path)]
    if failed:
        console.print(f"failed on Python {', '.join(failed)}")
    return 1 if failed else 0


def folders(environment: Mapping[str, str], home: Path) -> list[Path]:
    """Where interpreters may be, in the order in which they are preferred."""
    on_path = [part for part in environment.get("PATH", "").split(os.pathsep) if part]
    kept = [folder for pattern in _KEPT for folder in sorted(home.glob(pattern))]
    return [*map(Path, (*on_path, *_SYSTEM)), *kept]


def interpreters(places: Iterable[Path]) -> tuple[dict[Version, Path], list[Path]]:
    """One interpreter for each supported version, and those that can't be used."""
    usable: dict[Version, Path] = {}
    silent, seen = [], set()
    for folder in places:
        for path in sorted(folder.glob("python3*")) if folder.is_dir() else ():
            target = path.resolve()
            if not _NAME.fullmatch(path.name) or target in seen or "shims" in path.parts:
                continue
            seen.add(target)
            version = _version(path)
            if version is None:
                silent.append(path)
            elif OLDEST <= version < UNTRIED:
                usable.setdefault(version, path)
    return dict(sorted(usable.items())), silent


def text(version: Version) -> str:
    """3.11.2."""
    return ".".join(map(str, version))


def _version(path: Path) -> Version | None:
    try:
        done = subprocess.run(
            [path, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(map(int, done.stdout.split()))


def _passes(version: Version, path: Path) -> bool:
    make = [os.environ.get("MAKE", "make"), "--no-print-directory", "quick"]
    place = f".venv/pythons/{text(version)}"
    done = subprocess.run([*make, f"PYTHON={path}", f"VENV={place}", "SPARK="], cwd=ROOT)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
