"""Reads and writes the offset of a connector where Kafka Connect keeps it: a topic or a file."""

import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

from schemas.errors import OperatorNeeded, SettingsError
from schemas.settings import KafkaSettings
from services.adoption.connector import Connector
from services.adoption.last_records import OPERATION
from services.adoption.offsets import (
    Offset,
    is_key,
    offset_key,
    offset_of,
    read_map,
    write_map,
)
from services.kafka.delivery import ANY_PARTITION, deliver
from services.kafka.records import READ_DEADLINE_S, TopicReader


class Found(NamedTuple):
    """An offset: its key as Connect wrote it, and its parsed value."""

    key: bytes
    offset: Offset | None


class ConnectOffsets:
    """Where one connector's offset is."""

    def __init__(self, kafka: KafkaSettings, connector: Connector) -> None:
        self._kafka = kafka
        self._connector = connector
        self._file = Path(connector.offsets_file) if connector.offsets_file else None
        if bool(connector.offsets_topic) == (self._file is not None):
            raise SettingsError(
                "the options do not say where Kafka Connect keeps the connector's offset",
                operation=OPERATION,
                subject=f"connector {connector.name}",
                hint="give the worker's properties by --worker (offset.storage.topic or "
                "offset.storage.file.filename)",
            )

    @property
    def where(self) -> str:
        """The topic or the file."""
        return self._connector.offsets_topic or str(self._file)

    def read(self) -> Found:
        """Return the last offset. Raise SlotbridgeError where it can't be read."""
        found = self._in_file(self._file) if self._file is not None else self._in_topic()
        connector = self._connector
        key, value = found or (offset_key(connector.name, connector.prefix), None)
        if value is None:
            return Found(key, None)
        try:
            return Found(key, offset_of(value))
        except (ValueError, TypeError) as error:
            raise self._unreadable(error) from error

    def write(self, key: bytes, value: bytes) -> None:
        """Replace the offset. No worker may run with it. Raise SlotbridgeError."""
        if self._file is None:
            topic = self._connector.offsets_topic
            deliver(
                self._kafka,
                topic,
                {key: value},
                operation=OPERATION,
                hint="run `slotbridge release` again",
                partition=ANY_PARTITION,
            )
            return
        offsets = {one: had for one, had in self._map(self._file).items() if not self._is_ours(one)}
        temporary = self._file.with_suffix(".slotbridge")
        try:
            with temporary.open("wb") as file:
                file.write(write_map({**offsets, key: value}))
                file.flush()
                os.fsync(file.fileno())
            if self._file.exists():  # it stays the worker's
                was = self._file.stat()
                os.chown(temporary, was.st_uid, was.st_gid)
                temporary.chmod(stat.S_IMODE(was.st_mode))
            temporary.replace(self._file)
        except OSError as error:
            raise self._unreadable(error) from error

    def _is_ours(self, key: bytes | str | None) -> bool:
        return is_key(key, self._connector.name, self._connector.prefix)

    def _map(self, file: Path) -> dict[bytes, bytes | None]:
        try:
            data = file.read_bytes() if file.exists() else b""
            return read_map(data) if data else {}
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def _in_file(self, file: Path) -> tuple[bytes, bytes | None] | None:
        offsets = self._map(file)
        return next(((one, had) for one, had in offsets.items() if self._is_ours(one)), None)

    def _in_topic(self) -> tuple[bytes, bytes | None] | None:
        """Return the connector's last record in the topic, None without. Raise OperatorNeeded."""
        topic, found = self._connector.offsets_topic, None
        with TopicReader(self._kafka, topic) as reader:
            partitions = reader.partitions()
        if not partitions:
            raise self._unreadable(LookupError("there is no such topic"))
        for partition in partitions:
            with TopicReader(self._kafka, topic, partition) as reader:
                low, end = reader.bounds()
                deadline = time.monotonic() + READ_DEADLINE_S
                for _, key, value in reader.between(low, end, deadline):
                    if self._is_ours(key):
                        found = (key.encode() if isinstance(key, str) else key or b"", value)
        return found

    def _unreadable(self, error: Exception) -> OperatorNeeded:
        return OperatorNeeded(
            f"the offset of connector {self._connector.name} can't be read: {error}",
            operation=OPERATION,
            subject=self.where,
            hint="check --worker, and who may read it",
        )
