"""Debezium as a contender: at-least-once, and in Kafka Connect's exactly-once mode (KIP-618).

Exactly-once is a matter of distributed workers alone: the connector is handed to a worker's REST
interface; offsets, configuration and status are topics of the worker's own. Batches are as large as
helps Debezium most here; its producer compresses as Slotbridge's does.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.race.contenders import PUBLICATION, SlotCopy
from services.testbed.debezium import Connector, Debezium
from services.testbed.jars import class_path
from services.testbed.java import find_java_home
from services.testbed.ports import LOOPBACK, free_port
from services.testbed.procfs import wait_until

BATCH: Final[Mapping[str, str | int]] = {
    "max.batch.size": 8192,
    "max.queue.size": 32_768,
    "provide.transaction.metadata": "true",
}
PRODUCER: Final[Mapping[str, str | int]] = {
    "producer.compression.type": "lz4",
    "producer.linger.ms": 10,
    "producer.batch.size": 262_144,
    "producer.buffer.memory": 67_108_864,
}
HEAP: Final = "1g"
_REST_TIMEOUT_S: Final = 90.0


class DebeziumContender:
    """Kafka Connect in standalone mode."""

    name = "debezium"
    to_kafka = True

    def __init__(self, producer: Mapping[str, str | int] | None = None) -> None:
        self._connect: Debezium | None = None
        self._producer = {**PRODUCER, **(producer or {})}

    def launch(self, slot_copy: SlotCopy) -> None:
        """Start the worker with its connector."""
        connect = self._connect = self._make(slot_copy)
        connect.launch()

    @property
    def pid(self) -> int:
        """Connect's process id."""
        assert self._connect is not None
        return self._connect.pid

    def stop(self) -> None:
        """In order; killed when it takes too long."""
        if self._connect is not None:
            self._connect.stop()

    def complaint(self) -> str:
        """The end of its log."""
        assert self._connect is not None
        return self._connect.log.read_text(encoding="utf-8", errors="replace")[-1500:]

    def _make(self, slot_copy: SlotCopy) -> Debezium:
        connector = Connector(
            slot_copy.slot,
            slot_copy.conninfo,
            slot_copy.slot,
            PUBLICATION,
            slot_copy.prefix,
            options=BATCH,
        )
        return Debezium(
            slot_copy.bed.folder / slot_copy.slot,
            [connector],
            bootstrap_servers=slot_copy.bed.kafka.bootstrap_servers,
            processes=slot_copy.bed.processes,
            name=f"{self.name}-{slot_copy.slot}",
            heap=HEAP,
            settings=self._producer,
        )


class _Distributed(Debezium):
    """A worker group of one, with exactly.once.source.support."""

    def launch(self) -> None:
        """Start the worker, wait for its REST interface, hand over the connectors."""
        home = self._java_home or find_java_home()
        self.folder.mkdir(exist_ok=True)
        port = free_port()
        group = self.folder.name
        properties = self._worker_properties() | {
            "listeners": f"http://{LOOPBACK}:{port}",
            "group.id": group,
            "exactly.once.source.support": "enabled",
        }
        del properties["offset.storage.file.filename"]  # it would be taken for a topic's setting
        for kind in ("offset", "config", "status"):
            properties[f"{kind}.storage.topic"] = f"{group}-connect-{kind}"
            properties[f"{kind}.storage.replication.factor"] = 1
        worker = self._write("worker", properties)
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        self._worker = self._processes.spawn(
            self.name,
            [
                home / "bin" / "java",
                *self._jvm_options,
                "-cp",
                class_path("debezium"),
                main,
                worker,
            ],
            cwd=self.folder,
        )
        for connector in self.connectors:
            self._hand_over(f"http://{LOOPBACK}:{port}/connectors", connector)

    def _hand_over(self, url: str, connector: Connector) -> None:
        config = {key: str(value) for key, value in connector.properties().items()}
        body = json.dumps({"name": connector.name, "config": config}).encode()
        request = urllib.request.Request(
            url, data=body, headers={"Content-Type": "application/json"}, method="POST"
        )

        def handed_over() -> bool:
            if not self.running:
                log = self.log.read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"Connect ended:\n{log[-3000:]}")
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return bool(answer.status == 201)
            except urllib.error.HTTPError as error:
                if error.code in (404, 409, 500, 503):  # the worker still joins its group
                    return False
                raise RuntimeError(error.read().decode(errors="replace")) from error
            except OSError:
                return False

        if not wait_until(handed_over, timeout_s=_REST_TIMEOUT_S):
            raise RuntimeError(f"Connect took no connector: {self._reason()}")


class ExactlyOnceDebezium(DebeziumContender):
    """A Kafka transaction for each batch; offsets in it."""

    name = "debezium-eos"

    def _make(self, slot_copy: SlotCopy) -> Debezium:
        options = {**BATCH, "exactly.once.support": "required", "transaction.boundary": "poll"}
        connector = Connector(
            slot_copy.slot,
            slot_copy.conninfo,
            slot_copy.slot,
            PUBLICATION,
            slot_copy.prefix,
            options=options,
        )
        return _Distributed(
            Path(slot_copy.bed.folder / slot_copy.slot),
            [connector],
            bootstrap_servers=slot_copy.bed.kafka.bootstrap_servers,
            processes=slot_copy.bed.processes,
            name=f"{self.name}-{slot_copy.slot}",
            heap=HEAP,
            settings=self._producer,
        )
