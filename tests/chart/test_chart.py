"""The chart without a cluster: linted, rendered, judged by Kubernetes' schemas, compared."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from schemas.settings import load_settings
from tests.chart.helm import Helm, documents, helm_program, kinds_of
from tools.dashboards import DASHBOARDS, queries
from tools.generate import CHART
from tools.metrics_page import all_metrics

pytestmark = pytest.mark.long  # a machine's first test builds helm
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
GOLDEN = Path(__file__).parent / "golden"
KUBERNETES = ("1.29", "1.32", "1.34")
ACCEPT = "to accept what is rendered now: GOLDEN=write python -m pytest tests/chart"


@pytest.fixture(scope="module")
def helm() -> Helm:
    return Helm(helm_program())


@pytest.fixture(scope="module")
def rendered(helm: Helm) -> dict[str, str]:
    """Name of the values -> manifests."""
    return {path.name: helm.render(path) for path in VALUES}


def manifests(rendered: dict[str, str]) -> list[dict[str, Any]]:
    return [document for text in rendered.values() for document in documents(text)]


def pods(rendered: dict[str, str]) -> list[dict[str, Any]]:
    """The pod specs of all workloads; those of Spark's executors are Spark's to complete."""
    found = []
    for manifest in manifests(rendered):
        spec = manifest.get("spec", {})
        if manifest["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        if manifest["kind"] in ("CronJob", "Deployment", "Job"):
            spec = spec["template"]["spec"]
        if "containers" in spec:
            found.append(spec)
    return found


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.name)
def test_helm_lint_finds_nothing(helm: Helm, values: Path) -> None:
    done = helm.lint(values)
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_fits_the_schemas_of_kubernetes(
    rendered: dict[str, str], version: str
) -> None:
    import kubernetes_validate

    checked = 0
    for manifest in manifests(rendered):
        if not manifest["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(manifest, version, strict=True)
            checked += 1
    assert checked > 15


def test_a_manifest_with_a_mistyped_key_would_be_found(rendered: dict[str, str]) -> None:
    import kubernetes_validate

    (deployment,) = [
        manifest
        for manifest in documents(rendered["minimal-values.yaml"])
        if manifest["kind"] == "Deployment"
    ]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.34", strict=True)


def test_pods_hold_pod_security_restricted(rendered: dict[str, str]) -> None:
    found = pods(rendered)
    assert len(found) > 5
    for spec in found:
        # The failover manager's pods ask for their Lease, Spark's driver for its executors' pods.
        asks = spec.get("serviceAccountName") in ("r-slotbridge-failover", "r-slotbridge-tables")
        assert spec["automountServiceAccountToken"] is asks
        whole = spec["securityContext"]
        assert whole["runAsNonRoot"] is True
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.name)
def test_the_configuration_is_what_the_services_read(
    rendered: dict[str, str], values: Path, tmp_path: Path
) -> None:
    (config,) = [
        manifest
        for manifest in documents(rendered[values.name])
        if manifest["kind"] == "Secret" and "slotbridge.yaml" in manifest["stringData"]
    ]
    path = tmp_path / "slotbridge.yaml"
    document = yaml.safe_load(config["stringData"]["slotbridge.yaml"])
    given = yaml.safe_load(values.read_text(encoding="utf-8"))
    if given.get("existingSecret") and "source" in document:
        document["source"]["conninfo"] = "host=from-the-secret"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    settings = load_settings(path)
    assert settings.bridge.http_host == "0.0.0.0"
    assert settings.bridge.standby
    wanted = given["config"].get("bridge", {}).get("transaction_bytes_max", 16 * 2**20)
    assert settings.bridge.transaction_bytes_max == wanted


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"config": {"kafka": {"topic_prefx": "x"}}}, "topic_prefx"),
        ({"config": {"bridge": {"commit_interval_ms": "soon"}}}, "commit_interval_ms"),
        ({"config": {"bridge": {"http_port": 9187}}}, "http_port"),
        ({"config": {"failover": {"watch": {"lease": {"name": "mine"}}}}}, "name"),
        ({"config": {"bridge": {"token": "t" * 20}}}, "token"),
        ({"config": {"shaping": {"salt": "s" * 20}}}, "salt"),
        ({"config": {"source": {"slot": "Bad Slot"}}}, "slot"),
        ({"config": {"nonsense": {}}}, "nonsense"),
        ({"bridge": {"replicas": 0}}, "replicas"),
        ({"bridge": {"replica": 2}}, "replica"),
        ({"bridge": {"spool": {"size": "much"}}}, "size"),
        ({"existingSecret": "Not A Name"}, "existingSecret"),
        ({"config": {"source": {"conninfo": ""}}}, "config.source.conninfo is missing"),
        ({"config": {"kafka": {"topic_prefix": None}}}, "/config/kafka/topic_prefix"),
        ({"failover": {"enabled": True}}, "config.failover.nodes is missing"),
        ({"setup": {"enabled": True}}, "setup.existingSecret is missing"),
        ({"drill": {"enabled": True}}, "drill.enabled needs failover.enabled"),
        ({"maintain": {"enabled": True}}, "maintain.enabled needs tables.enabled"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:40],
)
def test_wrong_values_are_refused_by_name(
    helm: Helm, values: dict[str, Any], told: str, tmp_path: Path
) -> None:
    assert told in helm.refuse_values(values, tmp_path)


CONNINFO = "host=a user=u password=zq9"
ON_KUBERNETES: Final = {"spark": {"mode": "kubernetes"}}
SECRETS: dict[str, Any] = {
    "config.source.conninfo": CONNINFO,
    "config.snapshot.conninfo": "postgresql://u:zq9@a/db",
    "config.kafka.options.sasl\\.password": "zq9",
    "config.kafka.options.sasl\\.jaas\\.config": 'x required password="zq9";',
    "config.tables.catalog_options.s3\\.secret-access-key": "zq9",
    "config.tables.catalog_options.credential": "zq9",
    "config.tables.catalog_options.uri": "https://u:zq9@catalog/",
    "config.tables.spark_options.spark\\.hadoop\\.fs\\.s3a\\.secret\\.key": "zq9",
    "config.tables.spark_options.spark\\.hadoop\\.fs\\.azure\\.account\\.key\\.a\\.dfs": "zq9",
    "config.tables.spark_options.fs\\.s3a\\.encryption\\.key": "zq9",
    "config.tables.catalog_options.adls\\.sas-token\\.a\\.dfs\\.core\\.windows\\.net": "zq9",
    "bridges.b.source.conninfo": CONNINFO,
    "bridges.b.kafka.options.sasl\\.password": "zq9",
}


def test_passwords_are_rendered_into_secrets_alone(helm: Helm, tmp_path: Path) -> None:
    """Hadoop's and Iceberg's options have keys under any name, also with an account behind it."""
    values: dict[str, Any] = {
        "tables": {"enabled": True, **ON_KUBERNETES, "persistence": {"enabled": False}},
        "config": {"source": {"tables": ["public.a"]}, "tables": {"warehouse": "s3a://bank/w"}},
        "bridges": {"b": {"source": {"slot": "b", "publication": "b", "tables": ["public.b"]}}},
    }
    values["bridges"]["b"]["kafka"] = {"topic_prefix": "b"}
    for path, value in SECRETS.items():
        *above, last = path.replace("\\.", "\0").split(".")
        inner = values
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last.replace("\0", ".")] = value
    given = tmp_path / "given.yaml"
    given.write_text(yaml.safe_dump(values), encoding="utf-8")
    found = kinds_of(helm.render(CHART / "ci/minimal-values.yaml", "--values", str(given)))
    files = json.dumps(found.pop("Secret"))
    assert files.count("zq9") >= len(SECRETS)
    assert "zq9" not in json.dumps(found)


def test_the_setups_password_is_in_no_command_line(helm: Helm, tmp_path: Path) -> None:
    (job,) = kinds_of(helm.render(CHART / "ci/full-values.yaml"))["Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    for name, text in (
        ("slotbridge", "echo SQL"),
        ("psql", 'printf "%s\\n" "$@" "$PGSERVICE"; cat "$PGSERVICEFILE"'),
        ("python3", f'exec {sys.executable} "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    conninfo = "postgresql://su:zq%209@db/bank?sslmode=require"
    done = subprocess.run(
        ["sh", "-ec", script.replace("/tmp/", f"{tmp_path}/")],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SETUP_CONNINFO": conninfo},
        capture_output=True,
        text=True,
        check=True,
    )
    arguments, _, service = done.stdout.partition("setup\n[setup]\n")
    assert "zq" not in arguments and arguments.startswith("-X\n-v\nbridge="), arguments
    assert "password=zq 9\n" in service and "host=db\n" in service
    assert (tmp_path / "service.conf").stat().st_mode & 0o077 == 0


def test_the_first_missing_value_of_an_empty_file_is_named(helm: Helm, tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}", encoding="utf-8")
    assert "config.source.conninfo is missing" in helm.refuse(empty)
    source = ["--set", "config.source.conninfo=host=a"]
    assert "config.kafka.bootstrap_servers is missing" in helm.refuse(empty, *source)
    broker = ["--set", "config.kafka.bootstrap_servers=b"]
    assert "config.kafka.topic_prefix is missing" in helm.refuse(empty, *source, *broker)


def test_a_service_has_a_secret_and_a_digest_of_its_own(helm: Helm) -> None:
    options = [
        "existingSecret=all",
        "tables.existingSecret=of-tables",
        "image.digests.bridge=sha256:1",
    ]
    full = CHART / "ci/full-values.yaml"
    found = kinds_of(helm.render(full, *(word for o in options for word in ("--set", o))))
    for manifest in found["Deployment"]:
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        component = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        (secret,) = [each["secretRef"]["name"] for each in container["envFrom"]]
        assert secret == ("of-tables" if component == "tables" else "all")
        assert container["image"].endswith("@sha256:1") == (component == "bridge")


def test_two_replicas_have_a_disruption_budget_and_one_has_none(helm: Helm) -> None:
    minimal = CHART / "ci/minimal-values.yaml"
    kinds = [manifest["kind"] for manifest in documents(helm.render(minimal))]
    assert "PodDisruptionBudget" in kinds
    alone = documents(helm.render(minimal, "--set", "bridge.replicas=1"))
    assert "PodDisruptionBudget" not in [manifest["kind"] for manifest in alone]


def test_the_lease_is_the_one_object_that_the_failover_manager_may_write(helm: Helm) -> None:
    found = kinds_of(helm.render(CHART / "ci/full-values.yaml"))
    (lease,) = found["Lease"]
    assert "spec" not in lease
    (role,) = found["Role"]
    (rule,) = role["rules"]
    assert rule == {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": [lease["metadata"]["name"]],
        "verbs": ["get", "update"],
    }
    (binding,) = found["RoleBinding"]
    (subject,) = binding["subjects"]
    users = {
        deployment["metadata"]["name"]
        for deployment in found["Deployment"]
        if deployment["spec"]["template"]["spec"]["serviceAccountName"] == subject["name"]
    }
    assert users == {"r-slotbridge-failover"}
    assert watch_of(found)["lease"] == {"name": lease["metadata"]["name"]}


@pytest.mark.parametrize("option", ["failover.lease.enabled=false", "failover.replicas=1"])
def test_without_a_lease_no_pod_talks_to_the_api_server(helm: Helm, option: str) -> None:
    found = kinds_of(helm.render(CHART / "ci/full-values.yaml", "--set", option))
    assert not {"Lease", "Role", "RoleBinding"} & found.keys()
    assert len(found["ServiceAccount"]) == len(found["NetworkPolicy"]) == 1
    for deployment in found["Deployment"]:
        assert deployment["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert "lease" not in watch_of(found)


def test_an_existing_service_account_gets_the_role(helm: Helm) -> None:
    options = ("--set", "serviceAccount.create=false", "--set", "serviceAccount.name=ours")
    found = kinds_of(helm.render(CHART / "ci/full-values.yaml", *options))
    assert "ServiceAccount" not in found
    assert found["RoleBinding"][0]["subjects"][0]["name"] == "ours"


def watch_of(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """failover.watch of the configuration file."""
    (config,) = [each for each in found["Secret"] if "slotbridge.yaml" in each["stringData"]]
    settings: dict[str, Any] = yaml.safe_load(config["stringData"]["slotbridge.yaml"])
    watch: dict[str, Any] = settings["failover"]["watch"]
    return watch


BRIDGES: Final[dict[str, dict[str, Any]]] = {
    "config": {"source": {"tables": ["public.accounts"]}},
    "bridges": {
        "orders": {
            "source": {"slot": "orders", "publication": "orders", "tables": ["public.orders"]},
            "kafka": {"topic_prefix": "orders", "partitions": 12},
        }
    },
}


def test_several_bridges_come_from_one_file_each_with_a_file_of_its_own(
    helm: Helm, tmp_path: Path
) -> None:
    found = kinds_of(render_with(helm, tmp_path, BRIDGES))
    deployments = {each["metadata"]["name"]: each for each in found["Deployment"]}
    assert deployments.keys() >= {"r-slotbridge-bridge", "r-slotbridge-bridge-orders"}
    selectors = [each["spec"]["selector"]["matchLabels"] for each in found["Deployment"]]
    assert len({json.dumps(each, sort_keys=True) for each in selectors}) == len(selectors)
    budgets = [each["metadata"]["name"] for each in found["PodDisruptionBudget"]]
    assert {"r-slotbridge-bridge", "r-slotbridge-bridge-orders"} <= set(budgets)
    files = {
        each["metadata"]["name"]: yaml.safe_load(each["stringData"]["slotbridge.yaml"])
        for each in found["Secret"]
        if "slotbridge.yaml" in each["stringData"]
    }
    for name, deployment in deployments.items():
        if "bridge-orders" in name:
            volumes = deployment["spec"]["template"]["spec"]["volumes"]
            file = {"secretName": name, "defaultMode": 0o440}
            assert {"name": "config", "secret": file} in volumes
    orders, main = files["r-slotbridge-bridge-orders"], files["r-slotbridge"]
    assert orders["source"]["slot"] == "orders"
    assert orders["kafka"] == {**main["kafka"], "topic_prefix": "orders", "partitions": 12}
    assert orders["bridge"] == main["bridge"]
    assert "tables" not in orders and "failover" not in orders
    assert main["kafka"]["topic_prefix"] == "bank"


def test_each_of_several_bridges_has_alerts_of_its_own(helm: Helm, tmp_path: Path) -> None:
    (rule,) = kinds_of(render_with(helm, tmp_path, BRIDGES))["PrometheusRule"]
    late = {
        alert["labels"]["bridge"]: re.findall(r'pod=~"([^"]+)"', alert["expr"])[0]
        for alert in rule["spec"]["groups"][0]["rules"]
        if alert["alert"] == "SlotbridgeDeliveryLate"
    }
    pods = {"main": "r-slotbridge-bridge-7d9f-x2x", "orders": "r-slotbridge-bridge-orders-7d9f-x2x"}
    for name, pattern in late.items():
        assert [each for each in pods if re.fullmatch(pattern, pods[each])] == [name]
    assert late.keys() == pods.keys()


@pytest.mark.parametrize(
    ("differs", "told"),
    [
        ({"source": {"tables": []}}, "bridges.orders.source.tables is empty"),
        ({"source": {"slot": None}}, "bridges.orders.source.slot is missing"),
        ({"source": {"slot": "bank"}}, "source.slot is bank, as that of"),
        ({"source": {"publication": "slotbridge"}}, "source.publication is slotbridge, as that of"),
        ({"kafka": {"topic_prefix": "bank"}}, "kafka.topic_prefix is bank, as that of"),
        ({"source": {"tables": ["public.accounts"]}}, "it would be published twice"),
        ({"failover": {}}, "failover"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:40],
)
def test_bridges_that_share_a_slot_publication_prefix_or_table_are_refused(
    helm: Helm, tmp_path: Path, differs: dict[str, Any], told: str
) -> None:
    orders = json.loads(json.dumps(BRIDGES["bridges"]["orders"]))
    for section, keys in differs.items():
        merged = {**orders.get(section, {}), **keys}
        orders[section] = {key: value for key, value in merged.items() if value is not None}
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump({**BRIDGES, "bridges": {"orders": orders}}), encoding="utf-8")
    assert told in helm.refuse(CHART / "ci/full-values.yaml", "--values", str(wrong))


def render_with(helm: Helm, folder: Path, values: dict[str, Any]) -> str:
    """The full values with others over them."""
    path = folder / "more.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return helm.render(CHART / "ci/full-values.yaml", "--values", str(path))


def test_every_alert_asks_for_metrics_that_exist(rendered: dict[str, str]) -> None:
    known = {metric.name for found in all_metrics().values() for metric in found}
    (rule,) = [
        manifest
        for manifest in documents(rendered["full-values.yaml"])
        if manifest["kind"] == "PrometheusRule"
    ]
    for alert in rule["spec"]["groups"][0]["rules"]:
        names = re.findall(r"\b(slot(?:bridge|failover|tables)_\w+)", alert["expr"])
        assert names, alert
        assert set(names) <= known


def test_the_dashboards_are_config_maps_for_the_sidecar(rendered: dict[str, str]) -> None:
    found = {
        name: (manifest["metadata"], json.loads(content))
        for manifest in documents(rendered["full-values.yaml"])
        if manifest["kind"] == "ConfigMap"
        for name, content in manifest["data"].items()
        if name.endswith(".json")
    }
    assert found.keys() == {f"slotbridge-{name}.json" for name in DASHBOARDS}
    for metadata, dashboard in found.values():
        assert metadata["labels"]["grafana_dashboard"] == "1"
        assert metadata["annotations"] == {"grafana_folder": "Slotbridge"}
        assert dashboard["panels"]
    known = {metric.name for of_service in all_metrics().values() for metric in of_service}
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "count", "sum")}
    for name in DASHBOARDS:
        for panel, query in queries(name):
            asked = set(re.findall(r"\b(slot(?:bridge|failover|tables)_\w+)", query))
            assert asked and asked <= known, panel


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.name)
def test_the_manifests_are_as_they_were(rendered: dict[str, str], values: Path) -> None:
    golden = GOLDEN / values.name.replace("-values", "")
    found = yaml.safe_dump_all(documents(rendered[values.name]), width=1000)
    if os.environ.get("GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(found, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == found, ACCEPT
