"""A release on a real node, step by step: each test goes on where the one before it has ended.

Installed, tested, its pods killed, the node restarted, upgraded, rolled back, the pair switched
over. After each step Kafka is compared with the database, transaction by transaction.
"""

import time
from typing import Any, Final

import pytest
import yaml

from tests.kube.cluster import CONFIG, Release, awaited, probe, read, tell
from tests.kube.signals import api_server, kill, paused, pids_of
from tests.kube.stage import Stage
from tests.providers.databases import connect
from tests.providers.slots import await_ready
from tests.providers.waiting import patient

ROUNDS: Final = 5
TAKE_OVER_AIM_S: Final = 5.0
TAKE_OVER_MAX_S: Final = patient(10)
PRIVILEGED: Final = """
apiVersion: v1
kind: Pod
metadata: {name: privileged}
spec:
  containers:
    - name: c
      image: localhost/busybox:1
      command: [sleep, "60"]
      securityContext: {privileged: true}
"""


@pytest.fixture(scope="module")
def values(stage: Stage) -> dict[str, Any]:
    """What the release is installed with."""
    setup = {"enabled": True, "existingSecret": "superuser", "bridgeRole": f"b_{stage.slot}"}
    return stage.values(setup=setup)


def test_a_pod_that_pod_security_forbids_is_refused(stage: Stage) -> None:
    namespace = stage.release.namespace
    code, said = stage.cluster.try_kubectl("-n", namespace, "apply", "-f", "-", stdin=PRIVILEGED)
    assert code != 0
    assert 'violates PodSecurity "restricted' in said, said
    tell(f"refused: {' '.join(said.split())[:120]} …")


def test_helm_installs_it_and_helm_test_passes(stage: Stage, values: dict[str, Any]) -> None:
    release = stage.release
    release.make_secret("superuser", SETUP_CONNINFO=stage.outside.node_for_pods(0))
    tell(f"helm install --wait: {release.helm('install', values):.1f} s")
    with connect(stage.trio.primary, stage.trio.dbname) as connection:
        made = "SELECT count(*) FROM pg_roles WHERE rolname = %s"
        assert connection.execute(made, [f"b_{stage.slot}"]).fetchone() == (1,)
    release.await_pods()
    assert len(release.pods("bridge")) == 2
    tell(f"helm test: {release.helm('test', wait=False):.1f} s")


def test_rows_flow_to_kafka(stage: Stage) -> None:
    with stage.ledger.load():
        stage.ledger.await_more(300)
    tell(stage.ledger.compare())


def test_the_working_bridge_is_killed_under_load(stage: Stage) -> None:
    with stage.ledger.load():
        times = [stage.kill_the_working_bridge() for _ in range(ROUNDS)]
    took = ", ".join(f"{seconds:.2f}" for seconds in times)
    soon = sum(seconds < TAKE_OVER_AIM_S for seconds in times)
    tell(
        f"from kubectl delete pod --force until the other pod streams: {took} s; "
        f"{soon} of {ROUNDS} under {TAKE_OVER_AIM_S:.0f} s"
    )
    tell(stage.ledger.compare())
    assert max(times) < TAKE_OVER_MAX_S


def test_every_other_pod_is_killed_under_load(stage: Stage) -> None:
    release = stage.release
    with stage.ledger.load():
        release.await_pods()
        working = release.await_streaming()
        for name in release.answers("bridge", "/healthz"):
            if name != working:
                release.delete_pod(name)
        stage.ledger.await_more()
        release.await_pods()
        assert release.await_streaming() == working
        tell(f"another failover manager leads after {stage.kill_the_leader():.1f} s")
        (leader,) = stage.await_leader()
        for name in release.answers("failover", "/healthz", 9188):
            if name != leader:
                release.delete_pod(name)
        stage.ledger.await_more()
        assert stage.await_leader() == [leader]
    tell(stage.ledger.compare())


def test_the_node_restarts_under_load(stage: Stage) -> None:
    with stage.ledger.load():
        tell(f"node stopped and up again: {stage.cluster.restart():.1f} s")
        began = time.monotonic()
        stage.release.await_pods()
        tell(f"its bridges are back {time.monotonic() - began:.1f} s later")
        stage.ledger.await_more()
    tell(stage.ledger.compare())


def test_a_paused_bridge_is_taken_over_and_repeats_nothing_when_it_goes_on(stage: Stage) -> None:
    release = stage.release
    with stage.ledger.load():
        release.await_pods()
        working = release.await_streaming()
        began = time.monotonic()
        with paused(pids_of(release, working)):
            awaited(
                lambda: [name for name in release.streaming() if name != working],
                what=f"another pod streams while {working} is paused",
                timeout_s=200,
                interval_s=1,
            )
            tell(f"another pod streams {time.monotonic() - began:.0f} s after SIGSTOP")
            stage.ledger.await_more()
        stage.ledger.await_more()
        release.await_pods()
    tell(stage.ledger.compare())


def test_the_failover_managers_may_write_their_lease_and_nothing_else(stage: Stage) -> None:
    release = stage.release
    (leader,) = stage.await_leader()
    assert release.lease_holder == leader
    account = f"system:serviceaccount:{release.namespace}:r-slotbridge-failover"

    def may(verb: str, what: str) -> bool:
        order = ("-n", release.namespace, "auth", "can-i", verb, what, "--as", account)
        return stage.cluster.try_kubectl(*order)[1].strip().startswith("yes")

    lease = "leases.coordination.k8s.io"
    assert may("update", f"{lease}/r-slotbridge-failover")
    assert not may("update", f"{lease}/another")
    assert not may("create", lease)
    assert not may("list", lease)
    assert not may("get", "secrets")


def test_the_lease_of_a_pod_that_is_deleted_moves_at_once(stage: Stage) -> None:
    """SIGTERM: it gives the Lease up. Without one, `kill_the_leader` has waited for its end."""
    release = stage.release
    (leader,) = stage.await_leader()
    began = time.monotonic()
    release.kubectl("delete", "pod", leader, "--wait=false")
    (another,) = awaited(
        lambda: [name for name in release.leaders() if name != leader],
        what=f"another failover manager leads than {leader}",
    )
    tell(f"another failover manager leads {time.monotonic() - began:.1f} s after `delete pod`")
    assert release.lease_holder == another
    assert time.monotonic() - began < patient(4)


def test_a_paused_leader_of_the_failover_managers_is_taken_over(stage: Stage) -> None:
    release = stage.release
    (leader,) = stage.await_leader()
    began = time.monotonic()
    with paused(pids_of(release, leader)):
        awaited(
            lambda: release.lease_holder != leader,
            what=f"the Lease leaves {leader}, which is paused",
            interval_s=0.5,
        )
        tell(f"the Lease has moved {time.monotonic() - began:.0f} s after SIGSTOP")
        (another,) = awaited(
            lambda: [name for name in release.leaders() if name != leader],
            what=f"another failover manager leads while {leader} is paused",
            timeout_s=200,
            interval_s=1,
        )
        tell(f"another failover manager leads {time.monotonic() - began:.0f} s after SIGSTOP")
    awaited(
        lambda: release.leaders() == [another],
        what=f"{leader} knows that it does not lead",
        timeout_s=120,
        interval_s=1,
    )


def test_nobody_leads_while_the_api_server_stands_still(stage: Stage) -> None:
    """The leader's deadline passes; then it leads again, or the other one does."""
    release = stage.release
    (leader,) = stage.await_leader()
    addresses = [pod["status"]["podIP"] for pod in release.pods("failover")]

    def leading() -> list[str]:
        pages = {address: read(address, "/metrics", 9188) for address in addresses}
        return [address for address, page in pages.items() if "slotfailover_leader 1.0" in page]

    assert len(leading()) == 1
    with paused(api_server(stage.cluster)):
        began = time.monotonic()
        awaited(lambda: not leading(), what=f"{leader} stops leading", interval_s=0.2)
        stopped_s = time.monotonic() - began
        tell(f"nobody leads {stopped_s:.1f} s after the API server was paused")
    assert stopped_s < 15
    began = time.monotonic()
    awaited(lambda: len(leading()) == 1, what="a failover manager leads again", interval_s=0.5)
    tell(f"a failover manager leads {time.monotonic() - began:.1f} s after it went on")


def test_nothing_needs_the_api_server_while_it_stands_still(stage: Stage) -> None:
    """Rows flow, and a stand-by takes over, while no question to Kubernetes is answered."""
    release = stage.release
    release.await_pods()
    working = release.await_streaming()
    bridge = pids_of(release, working)
    addresses = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in release.pods("bridge")}
    (other,) = [address for name, address in addresses.items() if name != working]
    with stage.ledger.load(), paused(api_server(stage.cluster)):
        stage.ledger.await_more()
        began = time.monotonic()
        kill(bridge)
        awaited(
            lambda: probe(other, "/readyz") == 200, what="the stand-by streams", interval_s=0.05
        )
        tell(f"from SIGKILL until the other pod streams: {time.monotonic() - began:.2f} s")
        stage.ledger.await_more()
    release.await_pods()
    tell(stage.ledger.compare())


def test_an_upgrade_changes_the_configuration_and_a_rollback_takes_it_back(
    stage: Stage, values: dict[str, Any]
) -> None:
    release = stage.release
    changed = {**values, "config": {**values["config"]}}
    changed["config"]["bridge"] = {**values["config"]["bridge"], "commit_interval_ms": 51}
    with stage.ledger.load():
        tell(f"helm upgrade --wait: {release.helm('upgrade', changed):.1f} s")
        release.await_pods()
        assert _configuration(release)["bridge"]["commit_interval_ms"] == 51
        stage.ledger.await_more()
        tell(f"helm rollback --wait: {release.helm('rollback'):.1f} s")
        release.await_pods()
        assert "commit_interval_ms" not in _configuration(release)["bridge"]
        stage.ledger.await_more()
    tell(stage.ledger.compare())


def test_a_second_release_on_the_same_slot_stands_by(stage: Stage) -> None:
    second = Release(stage.cluster, stage.release.namespace, "second")
    second.helm("install", stage.values(failover={"enabled": False}), wait=False)
    with stage.ledger.load():
        awaited(
            lambda: list(second.answers("bridge", "/availablez").values()) == [200, 200],
            what="a second release on the same slot stands by",
            timeout_s=120,
        )
        assert second.streaming() == []
        assert len(stage.release.streaming()) == 1
    second.helm("uninstall")
    tell(stage.ledger.compare())


def test_the_pair_is_switched_over_by_a_command_in_a_pod(stage: Stage) -> None:
    release = stage.release
    pod = release.pods("failover")[0]["metadata"]["name"]
    with stage.ledger.load():
        await_ready(stage.trio.primary, stage.trio.standby, stage.slot)
        began = time.monotonic()
        order = ("switchover", "--to", "b", "--no-rejoin", "--yes", "--config", CONFIG)
        code, said = release.execute(pod, "slotfailover", *order)
        tell(f"slotfailover switchover in a pod: {time.monotonic() - began:.1f} s\n{said}")
        assert code == 1, said  # what is left to do is the old primary's rejoin, on its machine
        assert "TO DO     a: the node is fenced and still runs" in said
        with connect(stage.trio.standby) as connection:
            assert connection.execute("SELECT pg_is_in_recovery()").fetchone() == (False,)
        release.await_streaming()
        stage.ledger.await_more(300)
    tell(stage.ledger.compare())


def test_it_is_uninstalled(stage: Stage) -> None:
    tell(f"helm uninstall --wait: {stage.release.helm('uninstall'):.1f} s")
    awaited(lambda: not stage.release.pods("bridge"), what="no bridge is left", timeout_s=120)


def _configuration(release: Release) -> dict[str, Any]:
    """What the working pod has as its configuration file."""
    code, said = release.execute(release.await_streaming(), "cat", CONFIG)
    assert code == 0, said
    document: dict[str, Any] = yaml.safe_load(said)
    return document
