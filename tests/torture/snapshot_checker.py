"""What Kafka has of snapshots: each chunk whole, each key once in each snapshot of its table. Pure.

    duplicated    a key twice in a snapshot; a snapshot that begins anew though nobody asked
    torn          a chunk without its BEGIN, END, or progress; one whose parts disagree
    lost          progress without its rows, a chunk that is left out, a signal that asks nothing
    stale         a row that is older than a change of it before
    unfinished    a table whose rows are asked for, and not all read

Chunks of a table are numbered from 1; a read request behind the last one begins a snapshot anew. A
repair (`slotbridge recover`) completes it; signals of the time that it covers are not heard.
That the rows are right is seen by the tables that are made of all events (promises.bridge.oracle).
"""

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from schemas.naming import table_matches
from schemas.snapshot import SnapshotProgress, SnapshotRequest
from services.bridge.snapshot.requests import asked_of, is_progress, is_request
from tests.promises.bridge.reading import Record
from tests.torture.checker import Finding, KafkaTransactionOf, Repair, chunk_of, is_repair

_Position = tuple[int, int]
_Change = tuple[_Position, str | None]
"""Where it is, and who wrote the row; None: nobody, it is gone."""


class Told(NamedTuple):
    """What `<prefix>.snapshot` tells, in order."""

    progress: list[SnapshotProgress]
    requests: list[SnapshotRequest]


@dataclass
class _Chunk:
    """The events at one mark: BEGIN, rows of one table or several, END."""

    keys: dict[str, list[bytes | None]] = field(default_factory=lambda: defaultdict(list))
    statuses: list[str] = field(default_factory=list)
    counts: Mapping[str, int] = field(default_factory=dict)
    places: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))


def told_of(records: Iterable[Record]) -> Told:
    """Parse the records of `<prefix>.snapshot`."""
    told = Told([], [])
    for record in records:
        if record.value is None:
            continue
        if is_request(record.key):
            told.requests.append(SnapshotRequest.model_validate_json(record.value))
        elif is_progress(record.key):
            told.progress.append(SnapshotProgress.model_validate_json(record.value))
    return told


def check_snapshots(
    records: Iterable[Record],
    told: Told,
    signals: Collection[str],
    kafka_transaction_of: KafkaTransactionOf,
    repairs: Sequence[Repair] = (),
) -> list[Finding]:
    """Return every violation. `records`: as for `check`; `signals`: ids of the rows that ask."""
    chunks: dict[int, _Chunk] = defaultdict(_Chunk)
    versions = Versions()
    repaired = {one.commit_lsn for one in repairs}
    unheard: set[str] = set()
    for record in records:
        if record.value is None or "commit_lsn" in record.headers:
            continue  # a tombstone; a message of an outbox
        event = json.loads(record.value)
        lsn = chunk_of(event)
        versions.take(record, event)
        if is_repair(event) and event["source"]["table"] == "signals" and event["after"]:
            unheard.add(event["after"]["id"])
        if lsn and lsn not in repaired:
            _add(chunks[lsn], record, event)
    findings = [
        finding
        for lsn, chunk in chunks.items()
        for finding in _whole(lsn, chunk, kafka_transaction_of)
    ]
    findings += versions.stale()
    for table in sorted({one.table for one in told.progress}):
        own = [one for one in told.progress if one.table == table]
        asked = [
            one
            for one in told.requests
            if one.type == "read" and table_matches(one.tables, "public", table)
        ]
        findings += _snapshots(table, own, asked, chunks, repaired)
    known = Counter((one.commit_lsn, one.table) for one in told.progress)
    findings += [
        Finding("torn", f"chunk {lsn} has {known[lsn, table]} records of progress of {table}")
        for lsn, chunk in chunks.items()
        for table in chunk.keys
        if known[lsn, table] != 1
    ]
    heard = Counter((one.id, one.tables, one.type) for one in told.requests)
    names = {one.id for one in told.requests}
    findings += [
        Finding("duplicated", f"request {request} {n} times")
        for request, n in heard.items()
        if n > 1
    ]
    findings += [
        Finding("lost", f"signal {name} asks nothing")
        for name in signals
        if name not in names and name not in unheard
    ]
    return findings


class Versions:
    """What each key's row was, by the tid of who wrote it; and which rows were read.

    A row that is read at a position is what the changes before have made of it, or newer, as its
    database snapshot may see more. No tid writes a row again, and no key comes back.
    """

    def __init__(self) -> None:
        self._changes: dict[tuple[str, bytes], list[_Change]] = defaultdict(list)
        self._emptied: dict[str, list[_Position]] = defaultdict(list)
        self._read: list[tuple[str, bytes, _Position, str]] = []

    def take(self, record: Record, event: Mapping[str, Any]) -> None:
        """Note an event of a table."""
        source = event.get("source") or {}
        if "table" not in source or event["op"] == "m":
            return
        table, position = source["table"], (source["commit_lsn"], source["seq"])
        tid = str((event["after"] or {}).get("tid"))
        if event["op"] == "t":
            self._emptied[table].append(position)
        elif record.key is not None and event["op"] == "r":
            self._read.append((table, record.key, position, tid))
        elif record.key is not None:
            self._changes[table, record.key].append((position, tid if event["after"] else None))

    def stale(self) -> Iterable[Finding]:
        """Yield the rows that are older than what was published before them."""
        for table, key, position, tid in self._read:
            emptied: list[_Change] = [(at, None) for at in self._emptied.get(table, [])]
            changes = sorted([*self._changes.get((table, key), []), *emptied], key=itemgetter(0))
            since = bisect_left(changes, position, key=itemgetter(0))
            known = {found for _, found in changes[max(0, since - 1) :]}
            if since and tid not in known:
                what = f"{table} {key!r}: the row of {tid!r} at {position} is older than"
                yield Finding("stale", f"{what} {changes[since - 1]}")


def unfinished(told: Told, tables: Iterable[str]) -> list[str]:
    """Return those of `tables` whose rows are asked for and not all read."""
    last = {one.table: one for one in told.progress}
    left = []
    for table in tables:
        asked, found = asked_of("public", table, told.requests), last.get(table)
        since = asked.read.commit_lsn if asked.read is not None else 0
        if asked.read is not None and asked.read.type == "stop":
            continue
        if found is None or not found.done or found.commit_lsn < since:
            left.append(table)
    return left


def incomplete(told: Told, tables: Iterable[str]) -> list[str]:
    """Return those of `tables` of which not all rows were asked for at last."""
    asked = {table: asked_of("public", table, told.requests).read for table in tables}
    return [
        table
        for table, read in asked.items()
        if read is not None and (read.type == "stop" or read.where)
    ]


def _add(chunk: _Chunk, record: Record, event: Mapping[str, Any]) -> None:
    chunk.places[record.topic, record.partition].append(record.offset)
    if "status" in event:
        chunk.statuses.append(event["status"])
        if event["status"] == "END":
            chunk.counts = {
                c["data_collection"].removeprefix("public."): c["event_count"]
                for c in event["data_collections"]
            }
    else:
        chunk.keys[event["source"]["table"]].append(record.key)


def _whole(lsn: int, chunk: _Chunk, kafka_transaction_of: KafkaTransactionOf) -> list[Finding]:
    findings = []
    rows = {table: len(keys) for table, keys in chunk.keys.items()}
    if chunk.statuses != ["BEGIN", "END"] or chunk.counts != rows or not rows:
        what = f"chunk {lsn}: {chunk.statuses}, END says {chunk.counts}, found {rows}"
        findings.append(Finding("torn", what))
    for (topic, partition), offsets in chunk.places.items():
        if len({kafka_transaction_of(topic, partition, offset) for offset in offsets}) > 1:
            what = f"chunk {lsn}: in several Kafka transactions in {topic}[{partition}]"
            findings.append(Finding("torn", what))
    return findings


def _snapshots(
    table: str,
    progress: Sequence[SnapshotProgress],
    asked: Sequence[SnapshotRequest],
    chunks: Mapping[int, _Chunk],
    repaired: Collection[int],
) -> Iterable[Finding]:
    """Yield what is wrong with the snapshots of one table; `asked`: the requests to read it."""
    before: SnapshotProgress | None = None
    keys: Counter[bytes | None] = Counter()
    for one in progress:
        if one.commit_lsn in repaired:  # all of its rows are in Kafka by then
            before = one
            keys.clear()
            continue
        since = before.commit_lsn if before is not None else 0
        if any(since < request.commit_lsn < one.commit_lsn for request in asked):
            before = None
        if before is None:
            keys.clear()
        expected = before.chunks + 1 if before is not None else 1
        if one.chunks != expected:
            kind = "duplicated" if one.chunks < expected else "lost"
            yield Finding(kind, f"{table}: chunk {one.chunks} where {expected} is next")
            keys.clear()
        found = chunks[one.commit_lsn].keys.get(table, []) if one.commit_lsn in chunks else []
        rows = one.rows - (before.rows if before is not None else 0)
        if rows != len(found):
            what = (
                f"{table}: chunk {one.chunks} at {one.commit_lsn} of {rows} rows has {len(found)}"
            )
            yield Finding("lost" if rows > len(found) else "torn", what)
        keys.update(found)
        twice = [key for key in found if keys[key] > 1]
        if twice:
            what = f"{table}: {len(twice)} keys are read twice in one snapshot, as {twice[0]!r}"
            yield Finding("duplicated", what)
        before = one
