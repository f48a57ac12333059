"""A real Kafka cluster: three brokers, each also a controller, that replicate every topic.

Topics have three replicas and `min.insync.replicas` 2, as in production: with one broker lost all
goes on, with two lost nothing is accepted. `KafkaCluster.brokers` are started, stopped, killed,
paused, wiped one by one.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from schemas.errors import ExitCode, Retryable
from services.testbed.kafka import KafkaBroker, Quorum, new_cluster_id
from services.testbed.ports import free_port
from services.testbed.processes import Processes

BROKERS: Final = 3
SETTINGS: Final[dict[str, str | int]] = {
    "default.replication.factor": BROKERS,
    "min.insync.replicas": 2,
    "offsets.topic.replication.factor": BROKERS,
    "transaction.state.log.replication.factor": BROKERS,
    "transaction.state.log.min.isr": 2,
    "share.coordinator.state.topic.replication.factor": BROKERS,
    "share.coordinator.state.topic.min.isr": 2,
    # On a busy machine three of them take long to find each other.
    "initial.broker.registration.timeout.ms": 300_000,
    # A follower that is behind for longer is out of sync.
    "replica.lag.time.max.ms": 5000,
}
_ASK_TIMEOUT_S: Final = 15.0
_LOOK_S: Final = 0.1


class KafkaCluster:
    """Three brokers in folders of their own under `folder`. A context manager; inside, all run.

    `proxy_ports`: of a proxy to each broker's `proxied_port`; clients that come through one of
    them are sent to every broker through its own. `proxy_protocol`, `users`: see KafkaBroker.
    `environments`: of each broker's process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        processes: Processes,
        name: str = "kafka",
        settings: dict[str, str | int] | None = None,
        proxy_ports: Sequence[int] = (),
        proxy_protocol: str = "PLAINTEXT",
        users: Mapping[str, str] | None = None,
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        folder.mkdir(exist_ok=True)
        cluster_id = new_cluster_id()
        voters = {node_id: free_port() for node_id in range(1, BROKERS + 1)}
        ports = proxy_ports or (None,) * BROKERS
        added = environments or ({},) * BROKERS
        self.brokers = [
            KafkaBroker(
                folder / f"broker-{node_id}",
                processes=processes,
                name=f"{name}-{node_id}",
                settings={**SETTINGS, **(settings or {})},
                users=users,
                proxy_port=port,
                proxy_protocol=proxy_protocol,
                environment=environment,
                quorum=Quorum(cluster_id, node_id, voters),
            )
            for node_id, port, environment in zip(voters, ports, added, strict=True)
        ]

    def __enter__(self) -> "KafkaCluster":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def bootstrap_servers(self) -> str:
        """host:port of every broker, for clients."""
        return ",".join(broker.bootstrap_servers for broker in self.brokers)

    @property
    def running(self) -> bool:
        """Whether every broker's process runs."""
        return all(broker.running for broker in self.brokers)

    def start(self, *, timeout_s: float = 600.0) -> None:
        """Start the brokers that do not run, at once: alone, none would find a majority.

        Return when all replicas are in sync.
        """
        with ThreadPoolExecutor(BROKERS) as pool:
            starts = [
                pool.submit(broker.start, timeout_s=timeout_s)
                for broker in self.brokers
                if not broker.running
            ]
            for start in starts:
                start.result()
        self.await_in_sync(timeout_s=timeout_s)

    def stop(self) -> None:
        """Kill all brokers: the last ones can't stop in order, for want of a controller."""
        self.kill()

    def kill(self) -> None:
        """Kill all brokers with SIGKILL."""
        for broker in self.brokers:
            broker.kill()

    def pause(self) -> None:
        """Stop all brokers (SIGSTOP), until `resume`."""
        for broker in self.brokers:
            broker.pause()

    def resume(self) -> None:
        """Continue the brokers with SIGCONT, after `pause`."""
        for broker in self.brokers:
            broker.resume()

    def restart(self) -> None:
        """Kill all brokers and start them on the same data and ports."""
        self.kill()
        self.start()

    def roll(
        self, *, kill: bool = False, between: Callable[[KafkaBroker], None] = lambda _: None
    ) -> None:
        """Restart one broker after another, each once the one before is in sync again.

        `kill`: by SIGKILL instead of in order. `between` is called with each while it is down.
        """
        for broker in self.brokers:
            broker.kill() if kill else broker.stop()
            between(broker)
            broker.start()
            self.await_in_sync()

    def lose_disk(self, broker: KafkaBroker) -> None:
        """Kill `broker` and delete all that it has; started again, it joins with an empty disk."""
        broker.kill()
        shutil.rmtree(broker.folder / "data")

    def leader(self, topic: str, partition: int = 0) -> KafkaBroker | None:
        """Return the broker that leads the partition, None where no broker does."""
        found = self._admin().list_topics(topic, timeout=_ASK_TIMEOUT_S).topics[topic]
        leader: int = found.partitions[partition].leader
        return self.brokers[leader - 1] if leader > 0 else None

    def await_in_sync(self, *, timeout_s: float = 600.0) -> None:
        """Wait until every replica of every partition is in sync. Raise Retryable (DEADLINE)."""
        deadline = time.monotonic() + timeout_s
        behind = "no broker answers"
        admin = self._admin()
        while time.monotonic() < deadline:
            with contextlib.suppress(KafkaException):
                behind = _behind(admin)
                if not behind:
                    return
            time.sleep(_LOOK_S)
        raise Retryable(
            f"not all replicas are in sync after {timeout_s:.0f} s: {behind[:300]}",
            operation="await Kafka's replicas",
            hint="read the brokers' logs: " + ", ".join(str(one.log) for one in self.brokers),
            exit_code=ExitCode.DEADLINE,
        )

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})


def _behind(admin: AdminClient) -> str:
    """Name the partitions with a replica out of sync, or the missing brokers; "" if none."""
    metadata = admin.list_topics(timeout=_ASK_TIMEOUT_S)
    if len(metadata.brokers) < BROKERS:
        return f"brokers {sorted(metadata.brokers)} only"
    return ", ".join(
        f"{name}[{number}]"
        for name, topic in sorted(metadata.topics.items())
        for number, found in topic.partitions.items()
        if len(found.isrs) < len(found.replicas) or found.leader < 0
    )
