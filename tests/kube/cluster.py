"""kubectl and helm on the node, and what pods need from outside of it."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.testbed.kafka import KafkaBroker
from services.testbed.ports import free_port
from services.testbed.processes import Processes
from tests.chart.generate import CHART
from tests.chart.helm import helm_program
from tests.providers.proxy import Proxy
from tests.providers.waiting import eventually

NODE: Final = Path(__file__).parent / "node"


def run(command: list[str], *, timeout_s: float = 600, stdin: str | None = None) -> str:
    """Run a command and return its stdout; fail with what it said."""
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def tell(line: str) -> None:
    """Print what was measured: `make test-kube` shows it."""
    sys.stdout.write(f"{line}\n")


class NodeBroker(KafkaBroker):
    """A broker with one more listener, on the address by which pods reach this machine."""

    def __init__(self, host: str, folder: Path, processes: Processes) -> None:
        super().__init__(folder, processes=processes, name="kafka-of-pods")
        self._host = host
        self._host_port = free_port()

    @property
    def for_pods(self) -> str:
        """host:port for clients in pods."""
        return f"{self._host}:{self._host_port}"

    def _proxied(self) -> dict[str, str | int]:
        own = self._node_settings()
        listener = f"PODS://{self.for_pods}"
        return {
            "listeners": f"{own['listeners']},{listener}",
            "advertised.listeners": f"{own['advertised.listeners']},{listener}",
            "listener.security.protocol.map": f"{own['listener.security.protocol.map']},"
            "PODS:PLAINTEXT",
        }


@dataclass(frozen=True, slots=True)
class Outside:
    """A database and a broker: `conninfo` is for the test, `for_pods` for a bridge in a pod."""

    conninfo: str
    dbname: str
    broker: NodeBroker
    host: str
    proxies: list[Proxy]

    @property
    def ports(self) -> list[int]:
        """The ports by which pods reach the two nodes."""
        return [proxy.port for proxy in self.proxies]

    @property
    def for_pods(self) -> str:
        """Both nodes, as pods reach them."""
        hosts = ",".join([self.host] * len(self.ports))
        ports = ",".join(map(str, self.ports))
        return f"host={hosts} port={ports} dbname={self.dbname} user=postgres"

    def node_for_pods(self, number: int) -> str:
        """One of the nodes."""
        return f"host={self.host} port={self.ports[number]} dbname={self.dbname} user=postgres"


class Cluster:
    """The node."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = str(kubeconfig)
        cache = os.environ.get("KUBE_LOCAL_CACHE")
        folder = Path(cache) if cache else Path.home() / ".cache/kube-local"
        self._kubectl_program = str(folder / "bin/kubectl")
        self._helm_program = str(helm_program())

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return its stdout."""
        command = [self._kubectl_program, "--kubeconfig", self._kubeconfig, *arguments]
        return run(command, stdin=stdin)

    def helm(self, command: str, release: str, *arguments: str, values: dict[str, Any]) -> str:
        """`helm install` and its like, with the chart of this checkout."""
        return run(
            [
                *(self._helm_program, "--kubeconfig", self._kubeconfig, command, release),
                *((str(CHART), "--values", "-") if command in ("install", "upgrade") else ()),
                *arguments,
            ],
            stdin=json.dumps(values),
        )

    def pods(self, namespace: str, release: str, component: str) -> list[dict[str, Any]]:
        """The pods of a component that are not being deleted."""
        labels = f"app.kubernetes.io/instance={release},app.kubernetes.io/component={component}"
        found = self.kubectl("-n", namespace, "get", "pods", "-l", labels, "-o", "json")
        items: list[dict[str, Any]] = json.loads(found)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def streaming(self, namespace: str, release: str) -> list[str]:
        """Names of the bridge's pods whose /readyz answers 200."""
        return [
            pod["metadata"]["name"]
            for pod in self.pods(namespace, release, "bridge")
            if probe(pod["status"].get("podIP"), "/readyz") == 200
        ]

    def await_streaming(self, namespace: str, release: str, *, timeout_s: float = 60) -> str:
        """Wait until one pod streams, and return its name."""
        (name,) = eventually(
            lambda: self.streaming(namespace, release),
            what=f"a bridge of {release} streams",
            timeout_s=timeout_s,
        )
        return name


def probe(address: str | None, path: str) -> int:
    """The status that a bridge answers with; 0 where nothing answers."""
    if not address:
        return 0
    try:
        with urllib.request.urlopen(f"http://{address}:9187{path}", timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
