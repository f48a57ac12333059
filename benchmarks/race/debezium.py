"""Debezium as a contender: at-least-once, and in Kafka Connect's exactly-once mode (KIP-618).

Exactly-once is a matter of distributed workers alone: the connector is handed to a worker's REST
interface; offsets, configuration and status are topics of the worker's own. Batches are as large as
helps Debezium most here; its producer compresses as Slotbridge's does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.race.contenders import JSON, PUBLICATION, SlotCopy
from benchmarks.race.formats import RacedFormat
from tests.providers.debezium import Connector, Debezium, DistributedDebezium

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


class DebeziumContender:
    """Kafka Connect in standalone mode."""

    name = "debezium"
    to_kafka = True

    def __init__(
        self, producer: Mapping[str, str | int] | None = None, form: RacedFormat = JSON
    ) -> None:
        self._connect: Debezium | None = None
        self._jars = form.jars
        self._settings = {**PRODUCER, **(producer or {}), **form.of_worker()}
        if len(self._jars) > 1:  # Apicurio's converters do not name themselves as plugins
            self._settings["plugin.discovery"] = "hybrid_warn"

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
            settings=self._settings,
            jars=self._jars,
        )


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
        return DistributedDebezium(
            Path(slot_copy.bed.folder / slot_copy.slot),
            [connector],
            bootstrap_servers=slot_copy.bed.kafka.bootstrap_servers,
            processes=slot_copy.bed.processes,
            name=f"{self.name}-{slot_copy.slot}",
            heap=HEAP,
            settings=self._settings,
            jars=self._jars,
        )
