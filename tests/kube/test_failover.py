"""The primary dies, and `slotfailover failover` runs in a pod, as the runbook says."""

import time

from tests.kube.cluster import CONFIG, tell
from tests.kube.stage import Stage
from tests.providers.slots import await_ready


def test_a_failover_by_a_command_in_a_pod(stage: Stage) -> None:
    release, trio = stage.release, stage.trio
    tell(f"\nhelm install --wait: {release.helm('install', stage.values()):.1f} s")
    release.await_pods()
    pod = release.pods("failover")[0]["metadata"]["name"]
    with stage.ledger.load():
        stage.ledger.await_more(300)
        await_ready(trio.primary, trio.standby, stage.slot)
        trio.primary.kill()
        stage.outside.proxies[0].close()  # as of a machine without a server: it refuses
        began = time.monotonic()
        order = ("slotfailover", "failover", "--yes", "--config", CONFIG)
        code, said = release.execute(pod, *order)
        tell(f"slotfailover failover in a pod: {time.monotonic() - began:.1f} s\n{said}")
        assert code == 0, said
        assert "last contact with a" in said, said  # watch, in this pod, has noted how far it was
        stage.ledger.await_more(300)
    tell(stage.ledger.compare())
    release.await_pods()
    release.helm("uninstall")
