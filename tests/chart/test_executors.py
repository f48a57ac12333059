"""Spark's executors as pods: what the chart makes for their driver, without a cluster."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.chart.helm import Helm, documents, helm_program, kinds_of
from tools.generate import CHART

pytestmark = pytest.mark.long  # a machine's first test builds helm
VALUES: Final = CHART / "ci/executors-values.yaml"
KUBERNETES: Final[dict[str, Any]] = {"enabled": True, "spark": {"mode": "kubernetes"}}


@pytest.fixture(scope="module")
def helm() -> Helm:
    return Helm(helm_program())


def test_executors_hold_pod_security_restricted_and_have_no_token(helm: Helm) -> None:
    import kubernetes_validate

    pod = executor_of(helm.render(VALUES))
    kubernetes_validate.validate(pod, "1.34", strict=True)
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == "r-slotbridge"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {each["name"] for each in container["volumeMounts"]} == {"tmp", "tls-kafka"}
    assert "envFrom" not in container, "an executor has no need of the Secret"


def test_sparks_driver_may_make_pods_and_nothing_else(helm: Helm) -> None:
    found = kinds_of(helm.render(VALUES))
    (role,) = found["Role"]
    (rule,) = role["rules"]
    assert (rule["apiGroups"], rule["resources"]) == ([""], ["pods"])
    (binding,) = found["RoleBinding"]
    (subject,) = binding["subjects"]
    (driver,) = found["Deployment"]
    spec = driver["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == subject["name"] == "r-slotbridge-tables"
    (maintain,) = found["CronJob"]
    pod = maintain["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "r-slotbridge"


def test_driver_and_executors_find_and_reach_each_other(helm: Helm) -> None:
    text = helm.render(VALUES)
    found = kinds_of(text)
    (service,) = found["Service"]
    options = driver_of(found)["spark_options"]
    assert options["spark.driver.host"] == f"{service['metadata']['name']}.cdc.svc"
    assert options["spark.executor.memoryOverhead"] == "1g", "ours give way to the values' own"
    ports = {int(options["spark.driver.port"]), int(options["spark.blockManager.port"])}
    assert {each["port"] for each in service["spec"]["ports"]} == ports
    (policy,) = [
        each["spec"]
        for each in found["NetworkPolicy"]
        if each["metadata"]["name"].endswith("spark")
    ]
    for rule in (*policy["ingress"], *policy["egress"]):
        assert {each["port"] for each in rule["ports"]} == ports
    (one_of,) = policy["podSelector"]["matchExpressions"]
    labels = [
        executor_of(text)["metadata"]["labels"],
        found["Deployment"][0]["spec"]["template"]["metadata"]["labels"],
    ]
    wanted = policy["podSelector"]["matchLabels"].items()
    for each in labels:
        assert each[one_of["key"]] in one_of["values"]
        assert wanted <= each.items()
    selector = found["Deployment"][0]["spec"]["selector"]["matchLabels"].items()
    assert not selector <= labels[0].items(), "the Deployment would take executors for its own"


def test_only_run_has_executors_of_its_own(helm: Helm) -> None:
    found = kinds_of(helm.render(VALUES))
    (config,) = [each for each in found["Secret"] if "slotbridge.yaml" in each["stringData"]]
    others = yaml.safe_load(config["stringData"]["slotbridge.yaml"])["tables"]
    assert "spark.master" not in others["spark_options"]
    assert driver_of(found)["spark_options"]["spark.master"].startswith("k8s://")
    (driver,) = found["Deployment"]
    assert (
        "/etc/slotbridge/spark/driver.yaml"
        in (driver["spec"]["template"]["spec"]["containers"][0]["args"])
    )


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"tables": {"spark": {"mode": "yarn"}}}, "mode"),
        ({"tables": {"spark": {"executors": {"count": 0}}}}, "count"),
        ({"tables": {"spark": {"executors": {"memory": "2Gi"}}}}, "memory"),
        ({"tables": {"spark": {"executors": {"core": 1}}}}, "core"),
        ({"tables": KUBERNETES}, "tables.persistence.accessModes lacks ReadWriteMany"),
        (
            {"tables": {**KUBERNETES, "persistence": {"enabled": False}}},
            "config.tables.warehouse is a folder of one pod",
        ),
        (
            {
                "config": {"tables": {"spark_options": {"spark.master": "local[2]"}}},
                "tables": KUBERNETES,
            },
            "config.tables.spark_options has spark.master",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:50],
)
def test_wrong_values_are_refused_by_name(
    helm: Helm, values: dict[str, Any], told: str, tmp_path: Path
) -> None:
    assert told in helm.refuse_values(values, tmp_path)


def driver_of(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The section `tables` of what Spark's driver reads."""
    (config,) = [each for each in found["Secret"] if "driver.yaml" in each["stringData"]]
    tables: dict[str, Any] = yaml.safe_load(config["stringData"]["driver.yaml"])["tables"]
    return tables


def executor_of(rendered: str) -> dict[str, Any]:
    """The pod that Spark makes its executors by."""
    (text,) = [
        each["stringData"]["executor.yaml"]
        for each in documents(rendered)
        if "executor.yaml" in each.get("stringData", {})
    ]
    pod: dict[str, Any] = yaml.safe_load(text)
    return pod
