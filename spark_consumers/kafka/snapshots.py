"""Reads which tables' rows a bridge's snapshot has not brought to Kafka yet."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.events import snapshot_topic
from schemas.settings import KafkaSettings
from schemas.snapshot import SnapshotProgress
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.small_topic_tail import SmallTopicTail


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The last progress of each table's snapshot, by source table."""

    progress: Mapping[str, SnapshotProgress]

    def unfinished(self, table: str, lsn: int) -> bool:
        """Tell whether rows of a table were still to come as of `lsn`; a table may not have begun.

        `waiting` of the last record counts the tables whose rows are still to be read.
        """
        found = self.progress.get(table)
        if found is not None:
            return not found.done or found.commit_lsn >= lsn
        last = max(self.progress.values(), key=lambda one: one.ts_ms, default=None)
        return last is not None and last.waiting > 0


def read_snapshots(kafka: KafkaSettings, topics: TopicOffsets, slot: str) -> Snapshots:
    """Return the progress of a slot's snapshot, as the topic of snapshots tells it now."""
    tail = SmallTopicTail(kafka, topics, snapshot_topic(kafka.topic_prefix))
    found: dict[str, SnapshotProgress] = {}
    try:
        for record in tail.new():
            key = json.loads(record.key or b"{}")
            if set(key) == {"slot", "schema", "table"} and key["slot"] == slot:
                name = f"{key['schema']}.{key['table']}"
                found[name] = tail.parsed(record, SnapshotProgress)
    finally:
        tail.close()
    return Snapshots(found)
