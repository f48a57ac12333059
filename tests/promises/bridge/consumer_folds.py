"""A table as its consumers fold it: by offset, or by (commit_lsn, seq)."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.promises.bridge.reading import Record, read_committed
from tests.promises.bridge.running import Bridge

Rows = dict[str, dict[str, Any]]
"""Key -> row."""


class Folded(NamedTuple):
    """Both folds, and how often each key was read by a snapshot."""

    by_offset: Rows
    by_position: Rows
    reads: Counter[str]


def fold(bridge: Bridge, table: str) -> Folded:
    """Fold the committed records of a table's topic. Raises AssertionError for a repeated event."""
    records = read_committed(bridge.kafka.bootstrap_servers, [f"{bridge.prefix}.public.{table}"])
    return fold_records(records)


def fold_records(records: Sequence[Record]) -> Folded:
    """Fold the committed records of one topic. Raises AssertionError for a repeated event."""
    events = [(record, json.loads(record.value)) for record in records if record.value is not None]
    seen = Counter(position(event) for _, event in events)
    assert max(seen.values(), default=1) == 1, "an event came twice"
    in_order = sorted(events, key=lambda found: position(found[1]))
    reads = Counter(key_of(record) for record, event in events if event["op"] == "r")
    return Folded(apply(events), apply(in_order), reads)


def position(event: dict[str, Any]) -> tuple[int, int]:
    """(commit_lsn, seq)."""
    return event["source"]["commit_lsn"], event["source"]["seq"]


def key_of(record: Record) -> str:
    """The record's key as text."""
    assert record.key is not None
    return record.key.decode()


def apply(events: list[tuple[Record, dict[str, Any]]]) -> Rows:
    """The rows that these events make, one after the other, with the last value of each key."""
    rows: Rows = {}
    for record, event in events:
        if event["op"] == "d":
            rows.pop(key_of(record), None)
        else:
            rows[key_of(record)] = event["after"]
    return rows
