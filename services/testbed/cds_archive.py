"""Java's classes as a program has loaded them, kept for its next start (class-data sharing).

With them a broker of Kafka is there after two thirds of the time and of the processor's work, and
brokers share their memory. An archive is made once for a user, a Java and its jars, in the cache.

Source: JEP 350 "Dynamic CDS Archives".
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from services.testbed.jars import cache_folder
from services.testbed.java import version_text
from services.testbed.locking import locked

_WAIT_FOR_OTHER_S: Final = 600.0


def options(
    name: str,
    java: Path,
    java_options: Sequence[str],
    class_path: str,
    run: Callable[[str], None],
    *,
    cache: Path | None = None,
) -> tuple[str, ...]:
    """Return Java's options to start `name` with the classes that an earlier run loaded.

    `run` starts and ends the program once with the option that it is given, when there is no
    archive yet. `java_options`: those of every run. Return () where the Java has no archive of its
    own classes to build on, as the package's, when none was made, or when the cache can't be
    written: the program starts as well without. Raise what `run` raises, and Retryable when another
    process makes an archive for too long.
    """
    version = version_text(java)
    if "sharing" not in version:
        return ()
    folder = cache or cache_folder().with_name("classes")
    if not _writable(folder):
        return ()
    archive = folder / f"{name}-{_key(version, java_options, class_path)}.jsa"
    with locked(folder / ".lock", purpose="keep Java's classes", timeout_s=_WAIT_FOR_OTHER_S):
        if not archive.exists():
            _make(archive, run)
            _remove_others(archive, name)
    return (f"-XX:SharedArchiveFile={archive}",) if archive.exists() else ()


def _writable(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def _make(archive: Path, run: Callable[[str], None]) -> None:
    """Make an archive, which Java writes at its end; a run that is killed leaves none."""
    partial = archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    run(f"-XX:ArchiveClassesAtExit={partial}")
    with contextlib.suppress(FileNotFoundError):
        partial.replace(archive)


def _remove_others(archive: Path, name: str) -> None:
    """Remove the archives of other versions; a Java that has one open keeps it."""
    for other in archive.parent.glob(f"{name}-*.jsa"):
        if other != archive:
            other.unlink(missing_ok=True)


def _key(version: str, java_options: Sequence[str], class_path: str) -> str:
    """Return a digest of what an archive depends on: Java refuses it with any other jars."""
    jars = [(path, *_identity(Path(path))) for path in class_path.split(os.pathsep)]
    return hashlib.sha256(repr((version, *java_options, jars)).encode()).hexdigest()[:16]


def _identity(jar: Path) -> tuple[int, int]:
    status = jar.stat()
    return status.st_size, status.st_mtime_ns
