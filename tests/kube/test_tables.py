"""Iceberg tables in a pod follow Kafka, also through the death of their pod."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.kube.cluster import CONFIG, Release, awaited, read, tell
from tests.kube.stage import Stage

pytestmark = pytest.mark.timeout(3600)


VOLUME: Final = """
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {name}}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteOnce]
  storageClassName: {name}
  local: {{path: {folder}}}
  nodeAffinity:
    required:
      nodeSelectorTerms:
        - matchExpressions:
            - {{key: kubernetes.io/hostname, operator: In, values: [node1]}}
"""


@pytest.fixture
def storage_class(stage: Stage, tmp_path: Path) -> Iterator[str]:
    """The class of one local volume, which gets the pod's fsGroup; a hostPath volume does not."""
    name = f"warehouse-{stage.release.namespace}"
    stage.cluster.kubectl("apply", "-f", "-", stdin=VOLUME.format(name=name, folder=tmp_path))
    yield name
    stage.cluster.try_kubectl("delete", "pv", name, "--wait=false")


def test_rows_flow_to_iceberg_tables_and_their_pod_is_killed(
    stage: Stage, images: Callable[[str], None], storage_class: str
) -> None:
    images("tables")
    release = stage.release
    chosen = stage.values(
        failover={"enabled": False},
        tables={
            "enabled": True,
            "persistence": {"size": "1Gi", "storageClassName": storage_class},
            "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {}},
        },
    )
    chosen["config"]["tables"] = {"trigger_interval_ms": 1000}
    tell(f"\nhelm install --wait: {release.helm('install', chosen):.1f} s")
    release.await_streaming()
    with stage.ledger.load():
        stage.ledger.await_more(300)
    _await_epochs(release)
    release.delete_pod(_pod(release)["metadata"]["name"])
    with stage.ledger.load():
        stage.ledger.await_more(300)
    tell(stage.ledger.compare())
    _await_epochs(release)
    rows = sum(stage.ledger.acknowledged.values())
    found = _await_rows(release, rows)
    tell(f"slottables verify in the pod: {json.dumps(found)}")
    assert [(table["equal"], table["table_rows"]) for table in found] == [(True, rows)]
    release.helm("uninstall")


def _pod(release: Release) -> dict[str, Any]:
    (pod,) = release.pods("tables")
    return pod


def _await_epochs(release: Release) -> None:
    """Wait until this pod has applied an epoch with rows: asked of its metrics, which is cheap."""

    def applied() -> bool:
        metrics = read(_pod(release)["status"].get("podIP"), "/metrics", 9189)
        return any(
            line.startswith("slottables_rows_total ") and float(line.split()[1]) > 0
            for line in metrics.splitlines()
        )

    awaited(applied, what="the tables' pod has applied rows", timeout_s=400, interval_s=2)


def _await_rows(release: Release, rows: int) -> list[dict[str, Any]]:
    """Wait until the table has so many rows, as `slottables verify` counts; return its report."""

    def verified() -> list[dict[str, Any]]:
        order = ("slottables", "verify", "--json", "--config", CONFIG)
        _code, said = release.execute(_pod(release)["metadata"]["name"], *order)
        lines = [line for line in said.splitlines() if line.startswith("{")]
        tables = json.loads(lines[-1]).get("tables", []) if lines else []
        return tables if tables and tables[0]["table_rows"] >= rows else []

    return awaited(verified, what=f"the Iceberg table has {rows} rows", timeout_s=400, interval_s=5)
