"""kubectl and helm on the node, and what pods need from outside of it."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from services.testbed.kafka import KafkaBroker
from services.testbed.ports import free_port
from services.testbed.processes import Processes
from tests.chart.helm import helm_program
from tests.providers.proxy import Proxy
from tests.providers.waiting import eventually
from tools.generate import CHART

NODE: Final = Path(__file__).parent / "node"
CONFIG: Final = "/etc/slotbridge/slotbridge.yaml"
"""Where a pod has its configuration file."""
_TELL_EVERY_S: Final = 15.0
Answer = TypeVar("Answer")


def run(command: list[str], *, timeout_s: float = 600, stdin: str | None = None) -> str:
    """Run a command and return its stdout; fail with what it said."""
    code, said = attempt(command, timeout_s=timeout_s, stdin=stdin)
    assert code == 0, f"{command}: {said[-4000:]}"
    return said


def attempt(
    command: list[str], *, timeout_s: float = 600, stdin: str | None = None
) -> tuple[int, str]:
    """Run a command; return its exit code and its stdout, with stderr where it failed."""
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    return done.returncode, done.stdout + (done.stderr if done.returncode else "")


def run_told(command: list[str], *, timeout_s: float) -> str:
    """Run a command whose stderr says how it goes, and goes to ours; return its stdout."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}"
    return done.stdout


def tell(line: str) -> None:
    """Print what was measured: `make test-kube` shows it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def awaited(
    ask: Callable[[], Answer], *, what: str, timeout_s: float = 60, interval_s: float = 0.2
) -> Answer:
    """As `eventually`, and tell every 15 s what is waited for."""
    began = told = time.monotonic()

    def asked() -> Answer:
        nonlocal told
        now = time.monotonic()
        if now - told > _TELL_EVERY_S:
            told = now
            tell(f"  waiting for {now - began:.0f} s until {what}")
        return ask()

    return eventually(asked, what=what, timeout_s=timeout_s, interval_s=interval_s)


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
    """A pair and a broker: `conninfo` is for the test, `for_pods` for a bridge in a pod."""

    conninfo: str
    """Whichever node takes writes."""
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

    @property
    def nodes(self) -> dict[str, str]:
        """failover.nodes for pods."""
        return {name: self.node_for_pods(number) for number, name in enumerate("ab")}

    def node_for_pods(self, number: int) -> str:
        """One of the nodes."""
        return f"host={self.host} port={self.ports[number]} dbname={self.dbname} user=postgres"


class Cluster:
    """The node."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = str(kubeconfig)
        self.folder = kubeconfig.parent
        cache = os.environ.get("KUBE_LOCAL_CACHE")
        folder = Path(cache) if cache else Path.home() / ".cache/kube-local"
        self._kubectl_program = str(folder / "bin/kubectl")
        self._helm_program = str(helm_program())

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return its stdout."""
        code, said = self.try_kubectl(*arguments, stdin=stdin)
        assert code == 0, f"kubectl {arguments}: {said[-4000:]}"
        return said

    def try_kubectl(self, *arguments: str, stdin: str | None = None) -> tuple[int, str]:
        """Run kubectl; return its exit code and what it said."""
        command = [self._kubectl_program, "--kubeconfig", self._kubeconfig, *arguments]
        return attempt(command, stdin=stdin)

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

    def restart(self) -> float:
        """Stop every part of the node, keep its data, and start it; return the seconds it took."""
        began = time.monotonic()
        run_told([str(NODE / "down.sh")], timeout_s=300)
        run_told([str(NODE / "up.sh")], timeout_s=1200)
        return time.monotonic() - began


class Release:
    """A release in a namespace of its own, in which Pod Security `restricted` is enforced."""

    def __init__(self, cluster: Cluster, namespace: str, name: str = "r") -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl in the namespace."""
        return self.cluster.kubectl("-n", self.namespace, *arguments, stdin=stdin)

    def helm(
        self, command: str, values: dict[str, Any] | None = None, *, wait: bool = True
    ) -> float:
        """Run helm's `command` on the release; return the seconds it took."""
        began = time.monotonic()
        options = ("--wait", "--timeout", "10m") if wait else ()
        self.cluster.helm(command, self.name, "-n", self.namespace, *options, values=values or {})
        return time.monotonic() - began

    def make_secret(self, name: str, **keys: str) -> None:
        """Make a Secret of these keys."""
        literals = [f"--from-literal={key}={value}" for key, value in keys.items()]
        self.kubectl("create", "secret", "generic", name, *literals)

    def pods(self, component: str) -> list[dict[str, Any]]:
        """The pods of a component that are not being deleted."""
        labels = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        items = json.loads(self.kubectl("get", "pods", "-l", labels, "-o", "json"))["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def answers(self, component: str, path: str, port: int = 9187) -> dict[str, int]:
        """pod -> the status that it answers `path` with."""
        return {
            pod["metadata"]["name"]: probe(pod["status"].get("podIP"), path, port)
            for pod in self.pods(component)
        }

    def streaming(self) -> list[str]:
        """Names of the bridge's pods whose /readyz answers 200."""
        return [name for name, code in self.answers("bridge", "/readyz").items() if code == 200]

    def await_streaming(self, *, timeout_s: float = 60) -> str:
        """Wait until one pod alone streams, and return its name.

        They are asked one after another: the first may lose its session to the second meanwhile.
        """

        def alone() -> str:
            names = self.streaming()
            return names[0] if len(names) == 1 else ""

        return awaited(alone, what=f"a bridge of {self.name} streams", timeout_s=timeout_s)

    def await_pods(self) -> None:
        """Wait until two bridges are available, and one of them streams."""
        awaited(
            lambda: list(self.answers("bridge", "/availablez").values()) == [200, 200],
            what=f"both bridges of {self.name} stream or stand by",
            timeout_s=120,
        )
        self.await_streaming()

    def delete_pod(self, name: str) -> None:
        """`kubectl delete pod --force`."""
        self.kubectl("delete", "pod", name, "--force", "--grace-period=0")

    def execute(self, pod: str, *command: str) -> tuple[int, str]:
        """Run a command in a pod; return its exit code and what it said."""
        return self.cluster.try_kubectl("-n", self.namespace, "exec", pod, "--", *command)

    def leaders(self) -> list[str]:
        """Names of the failover manager's pods that lead."""
        found = []
        for pod in self.pods("failover"):
            name = pod["metadata"]["name"]
            _code, log = self.cluster.try_kubectl("-n", self.namespace, "logs", name)
            told = [line for line in log.splitlines() if "this replica " in line]
            if told and "this replica leads" in told[-1]:
                found.append(name)
        return found

    @property
    def lease_holder(self) -> str:
        """The pod that the Lease names, as the API server has it; empty for none."""
        path = "jsonpath={.spec.holderIdentity}"
        holder = self.kubectl("get", "lease", f"{self.name}-slotbridge-failover", "-o", path)
        return holder.strip().rpartition("_")[0]


def read(address: str | None, path: str, port: int) -> str:
    """What a pod answers with; nothing where nothing answers."""
    if not address:
        return ""
    try:
        with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def probe(address: str | None, path: str, port: int = 9187) -> int:
    """The status that a pod answers with; 0 where nothing answers."""
    if not address:
        return 0
    try:
        with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
