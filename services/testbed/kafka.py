"""A real Kafka broker: a KRaft node from locked jars, on a Java that the machine has or not.

It is a cluster by itself, or one node of a cluster.
"""

import secrets
import signal
import subprocess
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from schemas.errors import ExitCode, Retryable, SetupError
from services.testbed import cds_archive, procfs
from services.testbed.jars import class_path
from services.testbed.java import SHORT_LIVED, find_java_home
from services.testbed.ports import LOOPBACK, free_port, is_free, require_free
from services.testbed.processes import Processes

SETTINGS: dict[str, str | int] = {
    "num.partitions": 1,
    "auto.create.topics.enable": "false",
    "default.replication.factor": 1,
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 4,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 4,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "group.initial.rebalance.delay.ms": 0,
    # A broker killed and restarted is refused until its old session has ended.
    "broker.session.timeout.ms": 3000,
    "broker.heartbeat.interval.ms": 1000,
    # Nobody reads along: no record twice a second that only says so.
    "metadata.max.idle.interval.ms": 0,
    # The first entry of an index reads its file ahead: 10 MB of zeros for each new partition.
    "log.index.size.max.bytes": 262_144,
}
"""Settings of a broker without peers, and settings that make it quick."""
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0
_PROBE_TIMEOUT_S = 3.0
_JVM_OPTIONS = (
    *("-Xms256m", "-Xmx768m", "-XX:+UseSerialGC", "-Xshare:auto", "-XX:-UsePerfData"),
    *("-Djava.awt.headless=true", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"),
)


class Quorum(NamedTuple):
    """The controllers that a node belongs to: every node of `voters` (id -> controller port)."""

    cluster_id: str
    node_id: int
    voters: Mapping[int, int]


class KafkaBroker:
    """One broker that is also a controller. Data in `folder`; ports stay over restarts.

    `secured` are protocols (SSL, SASL_SSL) that it listens for besides PLAINTEXT, each on a port of
    its own, as `localhost`; `settings` say with which keys. `users` are name -> SCRAM-SHA-512
    password, made when the data folder is.
    """

    def __init__(
        self,
        folder: Path,
        *,
        processes: Processes,
        name: str = "kafka",
        java_home: Path | None = None,
        settings: dict[str, str | int] | None = None,
        secured: Sequence[str] = (),
        users: Mapping[str, str] | None = None,
        proxy_port: int | None = None,
        proxy_protocol: str = "PLAINTEXT",
        environment: Mapping[str, str] | None = None,
        short_lived: bool = True,
        quorum: Quorum | None = None,
    ) -> None:
        """Describe a broker, which is neither created nor started yet.

        `proxy_port`: of a proxy to `proxied_port`. The broker's clients are told to come through
        it, as `localhost` where `proxy_protocol` is SSL or SASL_SSL. `environment` is added to
        ours. `short_lived`: quick to start rather than quick after some minutes. `quorum`: of a
        cluster of several nodes; by default the node is alone.
        """
        self._short_lived = short_lived
        self._jvm_options = (*_JVM_OPTIONS, *(SHORT_LIVED if short_lived else ()))
        self.name = name
        self.folder = folder
        self.port = free_port()
        self.secured = {protocol: free_port() for protocol in secured}
        self._users = users or {}
        self.proxied_port = free_port() if proxy_port is not None else 0
        self._proxy_port = proxy_port
        self._proxy_protocol = proxy_protocol
        self._environment = environment or {}
        self._quorum = quorum or Quorum(new_cluster_id(), 1, {1: free_port()})
        self._settings = settings or {}
        self._processes = processes
        self._java_home = java_home
        self._class_path = ""
        self._broker: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap_servers(self) -> str:
        """Return host:port for clients."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def log(self) -> Path:
        """The broker's log file."""
        return self._processes.log_path(self.name)

    @property
    def running(self) -> bool:
        """True while the broker's process runs."""
        return self._broker is not None and self._broker.poll() is None

    @property
    def pid(self) -> int:
        """The broker's process id."""
        return self._started().pid

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the broker's process; raise RuntimeError where there is none."""
        if self._broker is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._broker

    def start(self, *, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Format the data folder the first time, start, and wait until the broker answers.

        Raise SetupError with the broker's own reason when it ends, and Retryable (DEADLINE) when
        it does not answer within `timeout_s` seconds.
        """
        assert not self.running, f"{self.name} runs already"
        require_free(self.port, server="Kafka")
        if not self._class_path:
            self._prepare()
        self._format_missing()
        self._broker = self._processes.spawn(
            self.name,
            [*self._java(), "kafka.Kafka", self._properties],
            env=self._environment,
            cwd=self.folder,
        )
        broker = self._broker
        answered = procfs.wait_until(
            lambda: broker.poll() is not None or self._answers(), timeout_s=timeout_s
        )
        if broker.poll() is not None:
            self._processes.forget(broker)
            raise _refusal(self.log)
        if not answered:
            self.kill()
            raise Retryable(
                f"no answer after {timeout_s:.0f} s",
                operation="start Kafka",
                hint=f"read {self.log}",
                exit_code=ExitCode.DEADLINE,
            )

    def stop(self) -> None:
        """Stop in order; SIGKILL after 30 s."""
        if self._broker is not None:
            self._processes.stop(self._broker, grace_s=_STOP_TIMEOUT_S)
            self._broker = None

    def kill(self) -> None:
        """Kill the broker (SIGKILL) and wait for its end."""
        if self._broker is not None:
            self._broker.kill()
            self._broker.wait(timeout=_STOP_TIMEOUT_S)
            self._processes.forget(self._broker)
            self._broker = None

    def pause(self) -> None:
        """Stop the broker (SIGSTOP): it holds connections but answers nothing, until `resume`."""
        self._started().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the broker with SIGCONT, after `pause`."""
        self._started().send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Stop (if it runs) and start on the same data and port."""
        self.stop()
        self.start()

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def _java(self) -> list[str | Path]:
        home = self._java_home or find_java_home()
        self._java_home = home
        unpacked = f"-Djava.io.tmpdir={self.folder}"  # a killed one leaves nothing elsewhere
        return [home / "bin" / "java", *self._jvm_options, unpacked, "-cp", self._class_path]

    def _prepare(self) -> None:
        """Find Kafka's jars and write the broker's configuration."""
        self._class_path = class_path("kafka")
        self.folder.mkdir(exist_ok=True)
        if self._short_lived:
            java = Path(self._java()[0])
            self._jvm_options += cds_archive.options(
                "kafka", java, self._jvm_options, self._class_path, self._run_once
            )
        settings = {
            **self._node_settings(),
            **self._proxied(),
            "log.dirs": str(self.folder / "data"),
            **self._settings,
        }
        text = "".join(f"{key}={value}\n" for key, value in settings.items())
        self._properties.write_text(text, encoding="utf-8")

    def _format_missing(self) -> None:
        """Format the data folder where there is none; a node of a cluster joins with it empty."""
        if not (self.folder / "data" / "meta.properties").exists():
            self._format(self._quorum.cluster_id)

    def _run_once(self, option: str) -> None:
        """Start and stop a broker besides, with an option for Java."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="once-") as scratch:
            once = KafkaBroker(
                Path(scratch),
                processes=self._processes,
                name=f"{self.name}-once",
                java_home=self._java_home,
                short_lived=False,
            )
            once._jvm_options = (*self._jvm_options, option)
            once.start()
            once.stop()

    def _node_settings(self) -> dict[str, str | int]:
        _, node_id, voters = self._quorum
        own = node_settings(self.port, voters[node_id], self.secured)
        every = ",".join(f"{node}@{LOOPBACK}:{port}" for node, port in voters.items())
        return {**own, "node.id": node_id, "controller.quorum.voters": every}

    def _proxied(self) -> dict[str, str | int]:
        """Return the settings of a second listener, which clients reach through a proxy."""
        if self._proxy_port is None:
            return {}
        own = self._node_settings()
        host = LOOPBACK if self._proxy_protocol == "PLAINTEXT" else "localhost"
        return {
            "listeners": f"{own['listeners']},PROXIED://{LOOPBACK}:{self.proxied_port}",
            "advertised.listeners": f"{own['advertised.listeners']},"
            f"PROXIED://{host}:{self._proxy_port}",
            "listener.security.protocol.map": f"{own['listener.security.protocol.map']},"
            f"PROXIED:{self._proxy_protocol}",
        }

    def _format(self, cluster_id: str) -> None:
        """Format the data folder, with SCRAM users. Raise where Kafka refuses."""
        arguments = ["format", "-t", cluster_id, "-c", str(self._properties)]
        for name, password in self._users.items():
            arguments += ["--add-scram", f"SCRAM-SHA-512=[name={name},password={password}]"]
        done = subprocess.run(
            [*self._java(), "kafka.tools.StorageTool", *arguments],
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            cwd=self.folder,
            check=False,
        )
        if done.returncode != 0:
            self.log.write_text(done.stdout + done.stderr, encoding="utf-8")
            raise _refusal(self.log)

    def _answers(self) -> bool:
        if is_free(self.port):
            return False
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        try:
            return bool(admin.list_topics(timeout=_PROBE_TIMEOUT_S).brokers)
        except KafkaException:
            return False


def new_cluster_id() -> str:
    """Return a random cluster id, which must not look like an option."""
    return "m" + urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")[1:]


def node_settings(
    port: int, controller_port: int, secured: Mapping[str, int] | None = None
) -> dict[str, str | int]:
    """Return SETTINGS and the addresses of a broker and controller on the loopback interface.

    `secured`: protocol -> port, for each listener besides PLAINTEXT.
    """
    others = list((secured or {}).items())
    plain = f"PLAINTEXT://{LOOPBACK}:{port}"
    controller = f"CONTROLLER://{LOOPBACK}:{controller_port}"
    listeners = [plain, *(f"{name}://{LOOPBACK}:{number}" for name, number in others), controller]
    advertised = [plain, *(f"{name}://localhost:{number}" for name, number in others)]
    protocols = ["PLAINTEXT:PLAINTEXT", *(f"{name}:{name}" for name, _ in others)]
    return {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@{LOOPBACK}:{controller_port}",
        "listeners": ",".join(listeners),
        "advertised.listeners": ",".join(advertised),
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": ",".join([*protocols, "CONTROLLER:PLAINTEXT"]),
        **SETTINGS,
    }


def _refusal(log: Path) -> SetupError:
    """Return the error behind the end of a broker, by the last line of its log that names one."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Exception" in line or "rror:" in line or "FATAL" in line]
    hint, code = f"read {log}", ExitCode.PROGRAM_MISSING
    if "No space left on device" in text:
        hint, code = "free disk space (a test bed needs about 1 GB)", ExitCode.DISK_FULL
    elif "Address already in use" in text:
        hint, code = "stop the program on that port, or start again", ExitCode.PORT_IN_USE
    reason = (errors or lines or ["it ended without a word"])[-1][:300]
    return SetupError(reason, operation="start Kafka", hint=hint, exit_code=code)
