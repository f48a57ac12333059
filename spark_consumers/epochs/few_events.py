"""The events that an epoch brings one table, and their summary, without Spark. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from spark_consumers.apply.events import TRUNCATE, RowEvent, event_of
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.events.unsuited import Unsuited
from spark_consumers.kafka.few_records import Record


class Bounds(NamedTuple):
    """Which events of a topic are the epoch's: after `had`, up to `upto`; counted after `counted`.

    All are commit LSNs.
    """

    had: int
    upto: int
    counted: int


def own_events(
    records: Iterable[Record], topic: str, bounds: Bounds
) -> tuple[list[RowEvent], TopicSummary]:
    """Return the epoch's events of one topic, and their summary, as `changes.summary` tells it."""
    summary, own = TopicSummary(topic), []
    counted = set()
    for record in records:
        event = event_of(record)
        if event.commit_lsn > bounds.upto:
            before = summary.next_offsets.get(record.partition, record.offset)
            summary.next_offsets[record.partition] = min(before, record.offset)
            continue
        if event.commit_lsn <= bounds.had:
            summary.late += 1
            continue
        own.append(event)
        _add(summary, event)
        if event.op != TRUNCATE and event.commit_lsn > bounds.counted:
            summary.counted_rows += 1
            counted.add((event.commit_lsn, event.seq))
    summary.distinct_rows = len(counted)
    return own, summary


def _add(summary: TopicSummary, event: RowEvent) -> None:
    """Take one of the epoch's events into the summary."""
    summary.events += 1
    summary.lsn_max = max(summary.lsn_max, event.commit_lsn)
    summary.ts_us_max = max(summary.ts_us_max, event.ts_us or 0)
    summary.unavailable |= event.unchanged
    summary.tables.add((event.schema, event.table))
    summary.identified_rows += event.op in ("u", "d", "r")
    if event.op == TRUNCATE:
        if event.ts_us is None:
            raise Unsuited("a truncate without a time")
        summary.truncates.add((event.commit_lsn, event.seq, event.ts_us))
        return
    summary.rows += 1
    summary.keyless_rows += not event.keyed
    if event.op == "r":
        summary.snapshot_rows += 1
        summary.seen_lsn = max(summary.seen_lsn, event.lsn or 0)
