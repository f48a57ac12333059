"""Reads which tables' rows a bridge's snapshot has not brought to Kafka yet."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import SlotbridgeError
from schemas.events import snapshot_topic
from schemas.naming import schema_and_table, table_matches
from schemas.progress import ProgressRecord
from schemas.settings import KafkaSettings
from schemas.snapshot import READ_ALL, SnapshotProgress, SnapshotRequest, SnapshotSettings
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.small_topic_tail import READ_DEADLINE_S, SmallTopicTail


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The last progress of each table's snapshot, by source table; and what signals asked for."""

    progress: Mapping[str, SnapshotProgress]
    requests: Sequence[SnapshotRequest] = ()

    def unfinished(self, table: str, lsn: int) -> bool:
        """Tell whether rows of a table were still to come as of `lsn`; a table may not have begun.

        `waiting` of the last record counts the tables whose rows are still to be read.
        """
        found = self.progress.get(table)
        if found is not None:
            return not found.done or found.commit_lsn >= lsn
        last = max(self.progress.values(), key=lambda one: one.ts_ms, default=None)
        return last is not None and last.waiting > 0

    def unsent(
        self, table: str, oid: int, settings: SnapshotSettings, record: ProgressRecord
    ) -> str:
        """Return why Kafka may lack rows of the table from before the slot, "" if it has all.

        It has all once a snapshot has read the table of this `oid` to its end. `record`: the last
        progress record of the bridge.
        """
        schema, name = schema_and_table(table)
        found = self.progress.get(table)
        if found is not None and found.done and found.oid == oid and _lasts(found, record):
            if any(table_matches(pattern, schema, name) for pattern in settings.where):
                return "snapshot.where leaves out rows from before the slot"
            if any(r.where and table_matches(r.tables, schema, name) for r in self.requests):
                return "a signal asked the snapshot for some of the rows only"
            return ""
        if any(table_matches(pattern, schema, name) for pattern in settings.exclude):
            return "snapshot.exclude leaves out rows from before the slot"
        mode = settings.in_effect(reads_rows=record.settings.reads_rows).mode
        if mode is not None and not READ_ALL[mode]:
            return f"rows from before the slot were not sent (snapshot.mode {mode})"
        return "the bridge's snapshot has not sent its rows from before the slot"

    def filling(self, tables: Iterable[str], lsn: int) -> list[str]:
        """Return those of `tables` that lack rows of the snapshot at the commit LSN `lsn`, sorted.

        A table of which the snapshot has no row, as it is excluded or waits, counts only if the
        snapshot has read others and is not over.
        """
        return sorted(table for table in tables if self.unfinished(table, lsn + 1))


def _lasts(progress: SnapshotProgress, record: ProgressRecord) -> bool:
    """Tell whether the present timeline has all that the snapshot's rows were read from."""
    if progress.timeline == record.server.timeline:
        return True
    left = record.server.history.get(progress.timeline)
    return left is not None and progress.commit_lsn < left and progress.seen_lsn <= left


class SnapshotTail:
    """Follows the progress of a slot's snapshot."""

    def __init__(self, kafka: KafkaSettings, topics: TopicOffsets, slot: str) -> None:
        self._kafka = kafka
        self._topics = topics
        self._slot = slot
        self._begin()

    def _begin(self) -> None:
        self._tail = SmallTopicTail(
            self._kafka, self._topics, snapshot_topic(self._kafka.topic_prefix)
        )
        self._found: dict[str, SnapshotProgress] = {}
        self._requests: dict[str, SnapshotRequest] = {}

    def read(self, deadline_s: float = READ_DEADLINE_S) -> Snapshots:
        """Return the progress as the topic of snapshots tells it now; none without the topic.

        Raise SlotbridgeError where that can't be read within `deadline_s`.
        """
        try:
            records = self._tail.new(deadline_s)
        except SlotbridgeError:
            self._tail.close()
            self._begin()
            raise
        for record in records:
            key = json.loads(record.key or b"{}")
            if key.get("slot") != self._slot:
                continue
            if key.get("request") == "read":
                self._requests[key["tables"]] = self._tail.parsed(record, SnapshotRequest)
            elif set(key) == {"slot", "schema", "table"}:
                name = f"{key['schema']}.{key['table']}"
                self._found[name] = self._tail.parsed(record, SnapshotProgress)
        return Snapshots(dict(self._found), tuple(self._requests.values()))

    def close(self) -> None:
        """Close the connections to the broker."""
        self._tail.close()


def read_snapshots(kafka: KafkaSettings, topics: TopicOffsets, slot: str) -> Snapshots:
    """Return the progress of a slot's snapshot, as the topic of snapshots tells it now."""
    tail = SnapshotTail(kafka, topics, slot)
    try:
        return tail.read()
    finally:
        tail.close()
