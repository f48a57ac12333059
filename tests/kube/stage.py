"""Where a test of a release plays: the servers outside, the release, and what is expected."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.kube.cluster import Cluster, Outside, Release, awaited
from tests.kube.ledger import Ledger
from tests.providers.interface import Trio


@dataclass(frozen=True, slots=True)
class Stage:
    """One pair, one broker, one namespace with a release `r` and its Secret `slotbridge`."""

    cluster: Cluster
    outside: Outside
    trio: Trio
    release: Release
    ledger: Ledger

    @property
    def slot(self) -> str:
        """The bridge's slot."""
        return f"s_{self.release.namespace}"

    def values(self, **more: Any) -> dict[str, Any]:
        """The values of a release of ours; `more` are further top-level keys."""
        prefix = self.release.namespace
        return {
            "image": {"registry": "localhost", "tag": "test", "pullPolicy": "Never"},
            "existingSecret": "slotbridge",
            "config": {
                "source": {"slot": self.slot, "publication": f"p_{prefix}"},
                "kafka": {
                    "bootstrap_servers": self.outside.broker.for_pods,
                    "topic_prefix": prefix,
                },
                "bridge": {"heartbeat_interval_ms": 500},
                "snapshot": {"mode": "never"},
                "failover": {"nodes": self.outside.nodes},
            },
            "bridge": {
                "spool": {"size": "1Gi"},
                "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {}},
            },
            "failover": {
                "enabled": True,
                "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {}},
            },
            **more,
        }

    def kill_the_working_bridge(self) -> float:
        """Wait for a stand-by, kill the pod that streams; seconds until another streams."""
        self.release.await_pods()
        working = self.release.await_streaming()
        return self._killed(
            working, lambda: [name for name in self.release.streaming() if name != working]
        )

    def kill_the_leader(self) -> float:
        """Kill the failover manager's leading pod; return the seconds until another one leads."""
        (leader,) = self.await_leader()
        awaited(
            lambda: list(self.release.answers("failover", "/readyz", 9188).values()) == [200, 200],
            what="both failover managers look at the pair",
            timeout_s=120,
        )
        return self._killed(
            leader, lambda: [name for name in self.release.leaders() if name != leader]
        )

    def await_leader(self) -> list[str]:
        """Wait until a failover manager leads."""
        return awaited(self.release.leaders, what="a failover manager leads", interval_s=0.5)

    def _killed(self, pod: str, another: Callable[[], list[str]]) -> float:
        began = time.monotonic()
        self.release.delete_pod(pod)
        awaited(another, what=f"another pod does what {pod} did", interval_s=0.05)
        return time.monotonic() - began
