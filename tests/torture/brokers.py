"""Kafka in a run: one broker, or three that replicate every topic; and the faults of brokers.

Every fault ends with all brokers up, every replica in sync, and no client cut off or delayed.
"""

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from schemas.errors import SlotbridgeError
from services.testbed.kafka import KafkaBroker
from tests.promises.bridge.faults.markers import forget_markers
from tests.providers.kafka_cluster import KafkaCluster
from tests.providers.proxy import Proxy
from tests.providers.waiting import eventually
from tests.torture.checker import KafkaTransactionOf
from tests.torture.faults import Fault
from tests.torture.kafka_log import KafkaTransaction, PartitionLog, read_partitions

Answer = TypeVar("Answer")
_ASK_S: Final = 10.0
_ASK_AGAIN_S: Final = 0.5
_IN_SYNC_S: Final = 300.0
"""Of the rig, not of the bridge: the machine may be busy."""
_STARTS_MAX: Final = 3
_FAR_AWAY_S: Final = 0.08
"""Each way: 160 ms for a round trip, as between continents."""
_ALL_SHARE: Final = 0.2
"""How often a fault of a broker strikes all of them at once."""
_LED: Final = ("{}.progress", "{}.transaction", "{}.public.ledger", "__transaction_state")
"""A leader that dies leads a partition of one of these; the last one's are the coordinators."""


class Brokers:
    """`kafka` is a bed's broker or a cluster; `proxies` are before its brokers, in their order.

    `options` are of clients that come through them.
    """

    def __init__(
        self,
        kafka: KafkaBroker | KafkaCluster,
        proxies: Sequence[Proxy] = (),
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.kafka = kafka
        self.options = dict(options or {})
        self._cluster = kafka if isinstance(kafka, KafkaCluster) else None
        self._each = [kafka] if isinstance(kafka, KafkaBroker) else kafka.brokers
        self._proxies = proxies
        self._faults: dict[str, Callable[[Fault, str], None]] = {
            "broker killed": self._killed,
            "broker paused": self._paused,
            "broker cut off": self._cut_off,
            "leader killed": self._leader_killed,
            "brokers rolled": self._rolled,
            "disk lost": self._disk_lost,
        }

    @property
    def count(self) -> int:
        """How many brokers there are."""
        return len(self._each)

    @property
    def bootstrap_servers(self) -> str:
        """host:port of each, straight."""
        return self.kafka.bootstrap_servers

    @property
    def proxied_servers(self) -> str:
        """host:port of each through its proxy; straight where there are no proxies."""
        host = "localhost" if self.options else "127.0.0.1"  # whom the certificate names
        ports = (f"{host}:{proxy.port}" for proxy in self._proxies)
        return ",".join(ports) or self.bootstrap_servers

    def recover(self) -> None:
        """Whatever was done to them by a run that failed is undone."""
        for proxy in self._proxies:
            proxy.heal()
        for broker in self._each:
            if broker.running:
                broker.resume()
        self._start()

    def perform(self, fault: Fault, prefix: str) -> bool:
        """Do it and undo it; whether it is a fault of brokers. `prefix` is of the run's topics."""
        done = self._faults.get(fault.name)
        if done is None:
            return False
        self._in_sync()
        done(fault, prefix)
        return True

    @contextlib.contextmanager
    def far_away(self) -> Iterator[None]:
        """Inside, each answer takes a while."""
        for proxy in self._proxies:
            proxy.delay(_FAR_AWAY_S)
        yield
        for proxy in self._proxies:
            proxy.heal()

    @contextlib.contextmanager
    def without_a_leader(self, fault: Fault, prefix: str) -> Iterator[None]:
        """Inside, the leader of some partition is dead, or the one broker that there is."""
        self._in_sync()
        leader = self._leader(fault, prefix)
        leader.kill()
        try:
            yield
        finally:
            self._start()

    def copy_partition(self, topic: str, partition: int, name: str) -> None:
        """Keep its files as they are now, of every broker: all die for it, and come again."""
        with self._all_dead():
            for folder in self._folders(topic, partition):
                copy = _beside(folder, name)
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(folder, copy)

    def swap_partition(self, topic: str, partition: int, old: str, kept: str) -> None:
        """The partition is as `copy_partition` has kept it as `old`; what it was is kept, too."""
        with self._all_dead():
            for folder in self._folders(topic, partition):
                folder.rename(_beside(folder, kept))
                _beside(folder, old).rename(folder)

    def write_up_to(self, topic: str, partition: int, end: int) -> None:
        """Another producer writes what means nothing, until the partition ends there or later."""
        place = TopicPartition(topic, partition)
        options = {"bootstrap.servers": self.bootstrap_servers, "log_level": 0}
        consumer = Consumer({**options, "group.id": "rig", "isolation.level": "read_uncommitted"})
        try:
            there = int(insist(lambda: consumer.get_watermark_offsets(place, _ASK_S))[1])
        finally:
            consumer.close()
        producer = Producer({**options, "acks": "all"})
        for _ in range(end - there):
            producer.produce(topic, b"{}", b"of another", partition)
        assert producer.flush(_IN_SYNC_S) == 0

    def forget_markers(
        self, prefix: str, since_ms: int, wanted: Callable[[str], bool], seen: Mapping[str, int]
    ) -> int:
        """All die before they have written the markers of the last transaction; how many."""
        with self._all_dead():
            forgotten = [forget_markers(b, prefix, since_ms, wanted, seen) for b in self._each]
        return sum(map(len, forgotten))

    @contextlib.contextmanager
    def _all_dead(self) -> Iterator[None]:
        self._in_sync()
        self.kafka.kill()
        try:
            yield
        finally:
            self._start()

    def _folders(self, topic: str, partition: int) -> Iterator[Path]:
        for broker in self._each:
            yield broker.folder / "data" / f"{topic}-{partition}"

    def kafka_transactions(self, topics: set[str]) -> KafkaTransactionOf:
        """Ask the log of each partition's leader, not the gaps between offsets."""
        self._in_sync()
        logs: dict[tuple[str, int], PartitionLog] = {}
        leaders = self._leaders(topics)
        for number, broker in enumerate(self._each, 1):
            found = read_partitions(broker.folder / "data", topics)
            logs |= {at: log for at, log in found.items() if leaders.get(at, number) == number}

        def kafka_transaction_of(topic: str, partition: int, offset: int) -> KafkaTransaction:
            return logs[topic, partition].transaction_at(offset)

        return kafka_transaction_of

    @contextlib.contextmanager
    def end_of(self, topic: str) -> Iterator[Callable[[], int]]:
        """Inside, what is given tells where a topic's first partition ends, committed or not."""
        options = {"group.id": "rig", "isolation.level": "read_uncommitted", "log_level": 0}
        consumer = Consumer({"bootstrap.servers": self.bootstrap_servers, **options})
        place = TopicPartition(topic, 0)
        try:
            yield lambda: int(insist(lambda: consumer.get_watermark_offsets(place, _ASK_S))[1])
        finally:
            consumer.close()

    def forget(self, is_ours: Callable[[str], bool]) -> None:
        """Delete topics of a run that is over: the next one shall not wait for their replicas."""
        admin = self._admin()
        known = insist(lambda: admin.list_topics(timeout=_ASK_S)).topics
        ours = [name for name in known if is_ours(name)]
        for future in admin.delete_topics(ours, request_timeout=_ASK_S).values() if ours else ():
            with contextlib.suppress(KafkaException, TimeoutError):
                future.result(2 * _ASK_S)

    def _killed(self, fault: Fault, _prefix: str) -> None:
        for broker in self._chosen(fault):
            broker.kill()
        time.sleep(fault.seconds / 2)
        self._start()

    def _paused(self, fault: Fault, _prefix: str) -> None:
        chosen = self._chosen(fault)
        for broker in chosen:
            broker.pause()
        time.sleep(2 * fault.seconds)
        for broker in chosen:
            broker.resume()
        self._in_sync()

    def _cut_off(self, fault: Fault, _prefix: str) -> None:
        everywhere = _moments(fault).random() < _ALL_SHARE
        chosen = self._proxies if everywhere else self._proxies[_moments(fault).randrange(3) :][:1]
        for proxy in chosen or self._proxies[:1]:
            proxy.cut()
        time.sleep(1 + 2 * fault.seconds)
        for proxy in self._proxies:
            proxy.heal()

    def _leader_killed(self, fault: Fault, prefix: str) -> None:
        with self.without_a_leader(fault, prefix):
            time.sleep(2 * fault.seconds)

    def _rolled(self, fault: Fault, _prefix: str) -> None:
        """In order, or by SIGKILL, one after another."""
        kill = _moments(fault).random() < 0.5
        for broker in self._each:
            broker.kill() if kill else broker.stop()
            time.sleep(fault.seconds / 4)
            self._start()

    def _disk_lost(self, fault: Fault, prefix: str) -> None:
        """Of a leader. It stays away until it is known to be: a new disk takes its time."""
        assert self._cluster is not None
        leader = self._leader(fault, prefix)
        number = self._each.index(leader) + 1
        self._cluster.lose_disk(leader)
        admin = self._admin()

        def known() -> bool:
            with contextlib.suppress(KafkaException):
                return number in admin.list_topics(timeout=_ASK_S).brokers
            return True

        eventually(lambda: not known(), what=f"broker {number} is known to be gone", timeout_s=120)
        time.sleep(fault.seconds / 2)
        self._start()

    def _chosen(self, fault: Fault) -> Sequence[KafkaBroker]:
        moments = _moments(fault)
        return self._each if moments.random() < _ALL_SHARE else [moments.choice(self._each)]

    def _leader(self, fault: Fault, prefix: str) -> KafkaBroker:
        """That of a partition, drawn; where it has none for the moment, any broker."""
        moments = _moments(fault)
        topic = moments.choice(_LED).format(prefix)
        any_broker = moments.choice(self._each)
        partitions = [number for name, number in self._leaders({topic}) if name == topic]
        if self._cluster is None or not partitions:
            return any_broker
        return self._cluster.leader(topic, moments.choice(partitions)) or any_broker

    def _leaders(self, topics: set[str]) -> dict[tuple[str, int], int]:
        known = insist(lambda: self._admin().list_topics(timeout=_ASK_S)).topics
        return {
            (name, number): partition.leader
            for name in topics & known.keys()
            for number, partition in known[name].partitions.items()
        }

    def _start(self) -> None:
        """Those that do not run. One that gives up, as the others are late, is started again."""
        for attempt in range(1, _STARTS_MAX + 1):
            try:
                if not self.kafka.running:
                    self.kafka.start(timeout_s=_IN_SYNC_S)
            except SlotbridgeError:
                if attempt == _STARTS_MAX:
                    raise
            else:
                break
        self._in_sync()

    def _in_sync(self) -> None:
        if self._cluster is not None:
            self._cluster.await_in_sync(timeout_s=_IN_SYNC_S)

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})


def insist(ask: Callable[[], Answer], *, timeout_s: float = 120.0) -> Answer:
    """What Kafka answers; asked again where it has no answer, as right after a start."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ask()
        except KafkaException:
            if time.monotonic() > deadline:
                raise
        time.sleep(_ASK_AGAIN_S)


def _beside(folder: Path, name: str) -> Path:
    """Outside of what the broker takes for its partitions."""
    return folder.parents[1] / f"{folder.name}-{name}"


def _moments(fault: Fault) -> random.Random:
    """The same choices for the same fault."""
    return random.Random(f"{fault}")
