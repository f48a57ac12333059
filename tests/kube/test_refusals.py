"""Pods that can't work say why."""

import json

from tests.kube.cluster import awaited, tell
from tests.kube.stage import Stage


def test_a_pod_that_cannot_work_says_why(stage: Stage) -> None:
    release = stage.release
    chosen = stage.values(failover={"enabled": False})
    chosen["config"]["kafka"]["bootstrap_servers"] = f"{stage.outside.host}:1"
    chosen["config"]["bridge"]["connect_deadline_ms"] = 3000
    release.helm("install", chosen, wait=False)

    def message() -> str:
        for pod in release.pods("bridge"):
            for status in pod["status"].get("containerStatuses", ()):
                for state in (status["state"], status["lastState"]):
                    text = state.get("terminated", {}).get("message", "")
                    if "error: " in text:
                        return str(text)
        return ""

    told = awaited(message, what="a pod has a termination message", timeout_s=180)
    assert "check kafka.bootstrap_servers" in told, told
    tell(f"\nthe pod's last words: {told[told.index('error: ') :][:300]}")
    chosen["existingSecret"] = "missing"
    release.helm("upgrade", chosen, wait=False)

    def events() -> str:
        found = json.loads(release.kubectl("get", "events", "-o", "json"))
        return " ".join(str(event["message"]) for event in found["items"])

    awaited(
        lambda: 'secret "missing" not found' in events(),
        what="the missing Secret is named",
        timeout_s=120,
    )
    release.helm("uninstall")
