"""A real Prometheus that scrapes what a test names, as often as the machine is quick."""

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.testbed.ports import free_port
from tests.providers.waiting import eventually, patient, patient_ms


class Prometheus:
    """One that runs; `ask` evaluates PromQL now."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, query: str) -> list[float]:
        """The values of an instant query, one for each series; NaN is left out."""
        found = self._get("/api/v1/query", query=query)
        values = [float(series["value"][1]) for series in found["data"]["result"]]
        return [value for value in values if value == value]

    def scrapes(self, jobs: int) -> bool:
        """Whether it runs and has scraped as many jobs without an error."""
        with contextlib.suppress(OSError):
            return self.ask("sum(up)") == [jobs]
        return False

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=patient(30)) as answer:
            return json.load(answer)


@contextlib.contextmanager
def prometheus(folder: Path, targets: Mapping[str, int]) -> Iterator[Prometheus]:
    """Run Prometheus with a job for each (name, port of /metrics); skip where there is none."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("NOT TESTED: queries of dashboards. There is no prometheus (Debian has one)")
    port = free_port()
    config = folder / "prometheus.yaml"
    every = f"{patient_ms(170)}ms"
    document = {
        "global": {"scrape_interval": every, "scrape_timeout": every},
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
            for name, target in targets.items()
        ],
    }
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    options += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=log)
    try:
        found = Prometheus(port)
        eventually(
            lambda: found.scrapes(len(targets)), what="Prometheus scrapes all jobs", timeout_s=120
        )
        yield found
    finally:
        process.terminate()
        process.wait(timeout=patient(60))
