"""What helm makes of the chart."""

import faulthandler
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.providers.waiting import patient
from tools import helm
from tools.generate import CHART
from tools.helm import KUBERNETES

NAMESPACE: Final = "cdc"
_OF_PROMETHEUS: Final = "monitoring.coreos.com/v1"
_TIMEOUT_S: Final = patient(500)


def helm_program() -> Path:
    """Return helm, which is built where the cache lacks it; skip the test where Go is missing.

    A build takes longer than pytest's watchdog allows a test: the watchdog is called off.
    """
    faulthandler.cancel_dump_traceback_later()
    try:
        return helm.helm_program()
    except helm.NoGoError as error:
        pytest.skip(f"NOT TESTED: the chart. {error}")


def run(command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
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
