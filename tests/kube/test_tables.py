"""Iceberg tables follow Kafka: by Spark in one pod, then by an upgrade with executors in pods.

Each test goes on where the one before it has ended. Pods die by force; the tables stay equal.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from tests.kube.cluster import CONFIG, Release, awaited, read, tell
from tests.kube.stage import Stage

EXECUTORS_KILLED: Final = 2
VOLUME: Final = """
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {name}}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteMany]
  storageClassName: {name}
  local: {{path: {folder}}}
  nodeAffinity:
    required:
      nodeSelectorTerms:
        - matchExpressions:
            - {{key: kubernetes.io/hostname, operator: In, values: [node1]}}
"""


@pytest.fixture(scope="module")
def storage_class(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The class of one local volume, which gets the pod's fsGroup; a hostPath volume does not.

    The node is one, so that what its pods share may be a folder of it.
    """
    name = f"warehouse-{stage.release.namespace}"
    folder = tmp_path_factory.mktemp("warehouse")
    stage.cluster.kubectl("apply", "-f", "-", stdin=VOLUME.format(name=name, folder=folder))
    yield name
    stage.cluster.try_kubectl("delete", "pv", name, "--wait=false")


@pytest.fixture(scope="module")
def values(stage: Stage, images: Callable[[str], None], storage_class: str) -> dict[str, Any]:
    """What the release is installed with: Spark inside the pod of `slottables`."""
    images("tables")
    chosen = stage.values(
        failover={"enabled": False},
        tables={
            "enabled": True,
            "persistence": {
                "size": "1Gi",
                "storageClassName": storage_class,
                "accessModes": ["ReadWriteMany"],
            },
            "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {}},
        },
    )
    chosen["config"]["tables"] = {"trigger_interval_ms": 1000}
    return chosen


def test_rows_flow_to_iceberg_tables_and_their_pod_is_killed(
    stage: Stage, values: dict[str, Any]
) -> None:
    release = stage.release
    tell(f"\nhelm install --wait: {release.helm('install', values):.1f} s")
    release.await_streaming()
    with stage.ledger.load():
        stage.ledger.await_more(300)
    _await_epochs(release)
    release.delete_pod(_pod(release)["metadata"]["name"])
    with stage.ledger.load():
        stage.ledger.await_more(300)
    _assert_equal(stage)


def test_tasks_run_in_pods_of_their_own_which_are_killed(
    stage: Stage, values: dict[str, Any]
) -> None:
    """The namespace enforces Pod Security `restricted`, of executors too."""
    release = stage.release
    executors = {"count": 1, "cpu": "100m", "memory": "1g"}
    values["tables"]["spark"] = {"mode": "kubernetes", "executors": executors}
    tell(f"\nhelm upgrade --wait: {release.helm('upgrade', values):.1f} s")
    killed: set[str] = set()
    with stage.ledger.load():
        for _ in range(EXECUTORS_KILLED):
            executor = _await_working_executor(release, killed)
            release.delete_pod(executor)
            killed.add(executor)
        last = _await_working_executor(release, killed)
    _assert_equal(stage)
    tell(f"equal after {len(killed)} executors were killed")
    driver = _pod(release)["metadata"]["name"]
    log = release.kubectl("logs", driver)
    assert log.count("Lost executor") >= len(killed), log[-2000:]
    release.delete_pod(driver)
    awaited(
        lambda: last not in _executors(release),
        what="the executor ends with its driver, which owns it",
        timeout_s=120,
    )
    with stage.ledger.load():
        _await_working_executor(release, {last, *killed})
        stage.ledger.await_more(100)
    _assert_equal(stage)


def test_sparks_driver_may_make_pods_and_nothing_else(stage: Stage) -> None:
    account = f"system:serviceaccount:{stage.release.namespace}:r-slotbridge-tables"

    def may(verb: str, what: str) -> bool:
        order = ("auth", "can-i", verb, what, "--as", account)
        code, _ = stage.cluster.try_kubectl("-n", stage.release.namespace, *order)
        return code == 0

    assert all(may(verb, "pods") for verb in ("create", "delete", "list", "watch"))
    assert not any(
        may(verb, what)
        for verb in ("get", "create", "delete")
        for what in ("secrets", "configmaps", "services", "deployments", "leases")
    )
    stage.release.helm("uninstall")


def _executors(release: Release) -> set[str]:
    """Names of the executors' pods."""
    return {pod["metadata"]["name"] for pod in release.pods("tables-executor")}


def _await_working_executor(release: Release, others: set[str]) -> str:
    """Wait until an executor works that is none of the `others`; return its pod's name."""

    def found() -> str:
        for name in _executors(release) - others:
            _code, log = release.cluster.try_kubectl("-n", release.namespace, "logs", name)
            if "Running task" in log:
                return name
        return ""

    return awaited(found, what="an executor works", timeout_s=240, interval_s=1)


def _assert_equal(stage: Stage) -> None:
    """Kafka has what the database has, and the Iceberg table has it too."""
    tell(stage.ledger.compare())
    _await_epochs(stage.release)
    rows = sum(stage.ledger.acknowledged.values())
    found = _await_rows(stage.release, rows)
    tell(f"slottables verify in the pod: {json.dumps(found)}")
    assert [(table["equal"], table["table_rows"]) for table in found] == [(True, rows)]


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
