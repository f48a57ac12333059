"""The chart on a real node: installed, tested, killed, upgraded, rolled back, and compared."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from services.demo.copies import database_rows, kafka_tables
from tests.kube.cluster import Cluster, Outside, probe, tell
from tests.providers.interface import Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually

pytestmark = pytest.mark.timeout(3600)
ROUNDS = 5
TAKE_OVER_MAX_S = 15.0


@pytest.fixture
def namespace(cluster: Cluster, topic_prefix: str) -> Iterator[str]:
    """A namespace in which Pod Security `restricted` is enforced."""
    cluster.kubectl("create", "namespace", topic_prefix)
    label = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", topic_prefix, label)
    yield topic_prefix
    cluster.kubectl("delete", "namespace", topic_prefix, "--wait=false")


def values(outside: Outside, prefix: str, **more: Any) -> dict[str, Any]:
    return {
        "image": {"registry": "localhost", "tag": "test", "pullPolicy": "Never"},
        "existingSecret": "slotbridge",
        "config": {
            "source": {"slot": f"s_{prefix}", "publication": f"p_{prefix}"},
            "kafka": {"bootstrap_servers": outside.broker.for_pods, "topic_prefix": prefix},
            "bridge": {"heartbeat_interval_ms": 500},
        },
        "bridge": {
            "spool": {"size": "1Gi"},
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {}},
        },
        **more,
    }


def make_secret(cluster: Cluster, namespace: str, name: str, **keys: str) -> None:
    literals = [f"--from-literal={key}={value}" for key, value in keys.items()]
    cluster.kubectl("-n", namespace, "create", "secret", "generic", name, *literals)


@contextlib.contextmanager
def load(conninfo: str) -> Iterator[None]:
    """Insert and update, a transaction at a time, while the block runs."""
    done = threading.Event()

    def work() -> None:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            while not done.wait(0.005):
                connection.execute("INSERT INTO t (body) VALUES (repeat('x', 100))")
                connection.execute("UPDATE t SET body = 'y' WHERE id = (SELECT max(id) FROM t)")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def assert_equal(outside: Outside, prefix: str, conninfo: str = "") -> int:
    """Wait until Kafka has all rows of the table; none is missing, none is there twice."""
    truth = database_rows(conninfo or outside.conninfo, ("t",))["t"]
    brokers = outside.broker.bootstrap_servers

    def same() -> bool:
        return kafka_tables(brokers, prefix, ("t",))["t"].rows == truth

    eventually(same, what="Kafka has what the database has", timeout_s=90, interval_s=1)
    assert kafka_tables(brokers, prefix, ("t",))["t"].repeated == 0
    return sum(truth.values())


def test_a_release_survives_its_pods_and_its_upgrades(
    cluster: Cluster, outside: Outside, namespace: str
) -> None:
    prefix = namespace
    with psycopg.connect(outside.conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id bigserial PRIMARY KEY, body text)")
    make_secret(cluster, namespace, "slotbridge", SLOTBRIDGE_SOURCE__CONNINFO=outside.for_pods)
    make_secret(cluster, namespace, "superuser", SETUP_CONNINFO=outside.node_for_pods(0))
    nodes = {name: outside.node_for_pods(number) for number, name in enumerate("ab")}
    chosen = values(
        outside,
        prefix,
        setup={"enabled": True, "existingSecret": "superuser", "bridgeRole": f"bridge_{prefix}"},
        failover={"enabled": True},
    )
    chosen["config"]["failover"] = {"nodes": nodes}
    wait = ("-n", namespace, "--wait", "--timeout", "5m")
    began = time.monotonic()
    cluster.helm("install", "r", *wait, values=chosen)
    tell(f"\ninstalled after {time.monotonic() - began:.1f} s")
    with psycopg.connect(outside.conninfo) as connection:
        made = "SELECT count(*) FROM pg_roles WHERE rolname = %s"
        assert connection.execute(made, [f"bridge_{prefix}"]).fetchone() == (1,)
    cluster.await_streaming(namespace, "r")
    pods = cluster.pods(namespace, "r", "bridge")
    assert len(pods) == 2
    assert [probe(pod["status"]["podIP"], "/availablez") for pod in pods] == [200, 200]
    tell(cluster.helm("test", "r", "-n", namespace, "--timeout", "3m", values={}))

    with load(outside.conninfo):
        times = [kill_the_working_pod(cluster, namespace) for _ in range(ROUNDS)]
        tell(f"take-over after kubectl delete pod --force: {[round(t, 1) for t in times]} s")
        chosen["config"]["bridge"]["commit_interval_ms"] = 50
        cluster.helm("upgrade", "r", *wait, values=chosen)
        cluster.await_streaming(namespace, "r")
        cluster.helm("rollback", "r", *wait, values={})
        cluster.await_streaming(namespace, "r")
    tell(f"equal: {assert_equal(outside, prefix)} rows")
    assert max(times) < TAKE_OVER_MAX_S

    cluster.helm("install", "second", "-n", namespace, values=values(outside, prefix))
    eventually(
        lambda: (
            [
                probe(pod["status"].get("podIP"), "/availablez")
                for pod in cluster.pods(namespace, "second", "bridge")
            ]
            == [200, 200]
        ),
        what="a second release on the same slot stands by",
        timeout_s=120,
    )
    assert cluster.streaming(namespace, "second") == []
    assert len(cluster.streaming(namespace, "r")) == 1
    for release in ("second", "r"):
        cluster.helm("uninstall", release, "-n", namespace, "--wait", values={})


def kill_the_working_pod(cluster: Cluster, namespace: str) -> float:
    """Wait for a stand-by, kill the pod that streams; return the seconds until another streams."""
    working = cluster.await_streaming(namespace, "r")

    def others() -> list[str]:
        return [
            pod["metadata"]["name"]
            for pod in cluster.pods(namespace, "r", "bridge")
            if probe(pod["status"].get("podIP"), "/availablez") == 200
            and pod["metadata"]["name"] != working
        ]

    eventually(others, what="a pod stands by", timeout_s=120)
    began = time.monotonic()
    cluster.kubectl("-n", namespace, "delete", "pod", working, "--force", "--grace-period=0")
    eventually(
        lambda: [name for name in cluster.streaming(namespace, "r") if name != working],
        what="another pod streams",
        timeout_s=60,
    )
    return time.monotonic() - began


def test_a_pod_that_cannot_work_says_why(
    cluster: Cluster, outside: Outside, namespace: str
) -> None:
    make_secret(cluster, namespace, "slotbridge", SLOTBRIDGE_SOURCE__CONNINFO=outside.for_pods)
    chosen = values(outside, namespace)
    chosen["config"]["kafka"]["bootstrap_servers"] = f"{outside.host}:1"
    chosen["config"]["bridge"]["connect_deadline_ms"] = 3000
    cluster.helm("install", "r", "-n", namespace, values=chosen)

    def message() -> str:
        for pod in cluster.pods(namespace, "r", "bridge"):
            for status in pod["status"].get("containerStatuses", ()):
                for state in (status["state"], status["lastState"]):
                    text = state.get("terminated", {}).get("message", "")
                    if "error: " in text:
                        return str(text)
        return ""

    told = eventually(message, what="a termination message", timeout_s=180)
    assert "check kafka.bootstrap_servers" in told, told
    chosen["existingSecret"] = "missing"
    cluster.helm("upgrade", "r", "-n", namespace, values=chosen)

    def events() -> str:
        found = json.loads(cluster.kubectl("-n", namespace, "get", "events", "-o", "json"))
        return " ".join(str(event["message"]) for event in found["items"])

    eventually(
        lambda: 'secret "missing" not found' in events(), what="the Secret is named", timeout_s=120
    )
    cluster.helm("uninstall", "r", "-n", namespace, values={})


def test_a_failover_by_the_runbook_in_a_pod(
    cluster: Cluster, own_outside: tuple[Outside, Trio], namespace: str
) -> None:
    outside, trio = own_outside
    with psycopg.connect(outside.conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id bigserial PRIMARY KEY, body text)")
    make_secret(cluster, namespace, "slotbridge", SLOTBRIDGE_SOURCE__CONNINFO=outside.for_pods)
    chosen = values(outside, namespace, failover={"enabled": True})
    nodes = {name: outside.node_for_pods(number) for number, name in enumerate("ab")}
    chosen["config"]["failover"] = {"nodes": nodes}
    cluster.helm("install", "r", "-n", namespace, "--wait", "--timeout", "5m", values=chosen)
    working = cluster.await_streaming(namespace, "r")
    change_the_leader(cluster, namespace)
    with load(outside.conninfo):
        await_ready(trio.primary, trio.standby, f"s_{namespace}")
    trio.primary.kill()
    outside.proxies[
        0
    ].close()  # what connects is refused from now on, as by a machine without server
    began = time.monotonic()
    command = ["slotfailover", "failover", "--yes", "--config", "/etc/slotbridge/slotbridge.yaml"]
    pod = cluster.pods(namespace, "r", "failover")[0]["metadata"]["name"]
    tell(cluster.kubectl("-n", namespace, "exec", pod, "--", *command))
    tell(f"failover in a pod: {time.monotonic() - began:.1f} s")
    promoted = trio.standby.conninfo(trio.dbname)
    with load(promoted):
        eventually(
            lambda: database_rows(promoted, ("t",))["t"].total() > 500,
            what="500 rows",
            timeout_s=60,
        )
    tell(f"equal after the failover: {assert_equal(outside, namespace, promoted)} rows")
    assert cluster.await_streaming(namespace, "r") == working
    cluster.helm("uninstall", "r", "-n", namespace, values={})


def change_the_leader(cluster: Cluster, namespace: str) -> None:
    """Kill the leading pod of the failover manager, and wait until the other one leads."""

    def leaders() -> list[str]:
        names = [pod["metadata"]["name"] for pod in cluster.pods(namespace, "r", "failover")]
        logs = {name: cluster.kubectl("-n", namespace, "logs", name) for name in names}
        return [name for name, log in logs.items() if "this replica leads" in log]

    (first,) = eventually(leaders, what="a failover manager leads", timeout_s=60)
    cluster.kubectl("-n", namespace, "delete", "pod", first, "--force", "--grace-period=0")
    began = time.monotonic()
    (second,) = eventually(leaders, what="another failover manager leads", timeout_s=60)
    assert second != first
    tell(f"another failover manager leads after {time.monotonic() - began:.1f} s")
