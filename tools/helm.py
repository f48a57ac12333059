"""The program helm, built from its Go modules once a user."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from services.testbed.jars import cache_folder
from services.testbed.locking import locked

VERSION: Final = "v3.22.0"
KUBERNETES: Final = "1.34.0"
_BUILD_TIMEOUT_S: Final = 3000.0
"""A build takes minutes, on a busy machine many."""


class NoGoError(Exception):
    """Helm has to be built, and the Go compiler is not on the PATH."""


def helm_program() -> Path:
    """Return helm's path, after building it where the cache lacks it. Raise NoGoError."""
    program = cache_folder().with_name("tools") / f"helm-{VERSION}"
    if program.exists():
        return program
    go = shutil.which("go") or shutil.which("/usr/local/go/bin/go")
    if go is None:
        raise NoGoError("helm is built with Go, and there is no `go` on the PATH")
    program.parent.mkdir(parents=True, exist_ok=True)
    with locked(program.parent / ".lock", purpose="build helm", timeout_s=_BUILD_TIMEOUT_S):
        if not program.exists():
            _build(go, program)
    return program


def _build(go: str, program: Path) -> None:
    """Compile helm with the versions that it would print if it were a release."""
    major, minor, _ = KUBERNETES.split(".")
    flags = " ".join(
        f"-X helm.sh/helm/v3/{name}={value}"
        for name, value in (
            ("internal/version.version", VERSION),
            ("pkg/chartutil.k8sVersionMajor", major),
            ("pkg/chartutil.k8sVersionMinor", minor),
            ("pkg/lint/rules.k8sVersionMajor", major),
            ("pkg/lint/rules.k8sVersionMinor", minor),
        )
    )
    folder = program.parent / "building"
    command = [go, "install", "-trimpath", "-ldflags", f"-s -w {flags}"]
    subprocess.run(
        [*command, f"helm.sh/helm/v3/cmd/helm@{VERSION}"],
        check=True,
        timeout=_BUILD_TIMEOUT_S,
        env={**os.environ, "GOBIN": str(folder), "CGO_ENABLED": "0", "GOFLAGS": ""},
    )
    (folder / "helm").rename(program)
