"""helm, built from its Go modules once a user, and what it makes of the chart."""

import faulthandler
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from services.testbed.jars import cache_folder
from services.testbed.locking import locked
from tests.chart.generate import CHART
from tests.providers.waiting import patient

VERSION: Final = "v3.22.0"
KUBERNETES: Final = "1.34.0"
NAMESPACE: Final = "cdc"
_OF_PROMETHEUS: Final = "monitoring.coreos.com/v1"
_BUILD_TIMEOUT_S: Final = patient(500)


def helm_program() -> Path:
    """Return helm, which is built where the cache lacks it; skip the test where Go is missing."""
    program = cache_folder().with_name("tools") / f"helm-{VERSION}"
    if program.exists():
        return program
    go = shutil.which("go") or shutil.which("/usr/local/go/bin/go")
    if go is None:
        pytest.skip(
            "NOT TESTED: the chart. helm is built with Go, and there is no `go` on the PATH"
        )
    program.parent.mkdir(parents=True, exist_ok=True)
    with locked(program.parent / ".lock", purpose="build helm", timeout_s=_BUILD_TIMEOUT_S):
        if not program.exists():
            build(go, program)
    return program


def build(go: str, program: Path) -> None:
    """Compile helm with the versions that it would tell if it were a release.

    Takes minutes, on a busy machine more than pytest's watchdog allows a test: it is called off.
    """
    faulthandler.cancel_dump_traceback_later()
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
    run(
        [*command, f"helm.sh/helm/v3/cmd/helm@{VERSION}"],
        environment={"GOBIN": str(folder), "CGO_ENABLED": "0", "GOFLAGS": ""},
    )
    (folder / "helm").rename(program)


def run(
    command: list[str], *, environment: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it said."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
        timeout=_BUILD_TIMEOUT_S,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


class Helm:
    """helm on the chart of this checkout."""

    def __init__(self, program: Path) -> None:
        self._program = str(program)

    def lint(self, values: Path) -> subprocess.CompletedProcess[str]:
        """`helm lint --strict`."""
        return run(
            [self._program, "lint", "--strict", str(CHART), "--values", str(values)], check=False
        )

    def render(self, values: Path, *options: str) -> str:
        """`helm template`, as for a cluster with the Prometheus operator."""
        return self._template(values, *options, check=True).stdout

    def refuse(self, values: Path, *options: str) -> str:
        """`helm template` that must fail; return what it said."""
        done = self._template(values, *options, check=False)
        assert done.returncode != 0, "it was accepted"
        return done.stderr

    def refuse_values(self, values: dict[str, Any], folder: Path) -> str:
        """`helm template` of the smallest release with these values, which must fail."""
        wrong = folder / "wrong.yaml"
        wrong.write_text(yaml.safe_dump(values), encoding="utf-8")
        return self.refuse(CHART / "ci/minimal-values.yaml", "--values", str(wrong))

    def _template(
        self, values: Path, *options: str, check: bool
    ) -> subprocess.CompletedProcess[str]:
        command = [self._program, "template", "r", str(CHART), "--namespace", NAMESPACE]
        command += ["--kube-version", KUBERNETES, "--api-versions", _OF_PROMETHEUS]
        return run([*command, "--values", str(values), *options], check=check)


def documents(rendered: str) -> list[dict[str, Any]]:
    """Return the manifests in the order of their names."""
    found = [document for document in yaml.safe_load_all(rendered) if document]
    return sorted(found, key=lambda document: (document["kind"], document["metadata"]["name"]))


def kinds_of(rendered: str) -> dict[str, list[dict[str, Any]]]:
    """kind -> its manifests."""
    found: dict[str, list[dict[str, Any]]] = {}
    for manifest in documents(rendered):
        found.setdefault(manifest["kind"], []).append(manifest)
    return found
