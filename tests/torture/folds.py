"""Compares two folds of each topic: by offset, and by (commit_lsn, seq). Pure.

Consumers may do either. That the fold by offset is the table is judged by promises.bridge.oracle.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from tests.promises.bridge.reading import Record
from tests.torture.checker import Finding

_Position = tuple[int, int]
_Rows = dict[tuple[str, bytes | None], Any]
"""(table, key) -> row: tables may share a topic."""


def check_folds(records: Iterable[Record]) -> Iterator[Finding]:
    """Yield a finding for each partition whose two folds differ; `records`: by offset."""
    found: dict[tuple[str, int], list[tuple[_Position, bytes | None, Any]]] = defaultdict(list)
    for record in records:
        if record.value is None or "commit_lsn" in record.headers:
            continue  # a tombstone; a message of an outbox
        event = json.loads(record.value)
        source = event.get("source") or {}
        if "table" in source and event.get("op") in ("c", "r", "u", "d", "t"):
            change = (source["commit_lsn"], source["seq"]), record.key, event
            found[record.topic, record.partition].append(change)
    for (topic, partition), changes in found.items():
        by_offset = _fold(changes)
        by_position = _fold(sorted(changes, key=itemgetter(0)))
        if by_offset != by_position:
            keys = by_offset.keys() | by_position.keys()
            other = [key for key in keys if by_offset.get(key) != by_position.get(key)]
            what = f"{topic}[{partition}]: {len(other)} keys differ by offset and by position"
            yield Finding("wrong", f"{what}, as {sorted(map(str, other))[0]}")


def _fold(changes: Iterable[tuple[_Position, bytes | None, Any]]) -> _Rows:
    rows: _Rows = {}
    for _, key, event in changes:
        table = event["source"]["table"]
        if event["op"] == "t":
            rows = {one: row for one, row in rows.items() if one[0] != table}
        elif event["op"] == "d":
            rows.pop((table, key), None)
        else:
            rows[table, key] = event["after"]
    return rows
