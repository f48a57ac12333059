"""The events that an epoch lacks though its transactions' ENDs count them, and if they may come."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.iceberg.table_note import MissingEventsError
from spark_consumers.kafka.reader import Offsets
from spark_consumers.kafka.transactions import Cut

_MISSING = -1


@dataclass(frozen=True, slots=True)
class Wanted:
    """The part of a topic to read.

    `table`: the source table. `events`: how many events the transactions' ENDs count. `after_lsn`:
    the commit LSN that the table has, where it differs from the group's. `counted_after`: `events`
    are those after this LSN; None: after the group's. `resumes`: the topic is read from where the
    table's last epoch ended; otherwise a table behind the group is read from the beginning.
    `needs_first`: the table has nothing yet, and the topic must have its first events. `unread`:
    earlier epochs have not read the topic, so that any of its transactions may be still to be seen.
    """

    table: str
    events: int
    after_lsn: int | None = None
    counted_after: int | None = None
    resumes: bool = False
    needs_first: bool = True
    unread: bool = False


def refuse(
    short: Mapping[str, int],
    wanted: Mapping[str, Wanted],
    cut: Cut,
    refused: Callable[[str, SlotbridgeError], None],
) -> None:
    """Give each table that lacks events to `refused`, with the error."""
    for topic, count in short.items():
        error = MissingEventsError(
            f"Kafka lacks {count} events of {wanted[topic].table} that its transaction "
            "topic counts",
            operation="read events",
            subject=topic,
            lsn=cut.commit_lsn,
            hint="a bridge that was killed publishes them at its next start. `slottables "
            f"rebuild --table {wanted[topic].table}` brings the table back without what "
            "Kafka has lost, and marks it as incomplete",
        )
        error.count = count
        refused(wanted[topic].table, error)


def short(
    wanted: Mapping[str, Wanted],
    summaries: Mapping[str, TopicSummary],
    after_lsn: int,
    settled: Collection[str],
) -> dict[str, int]:
    """Return topic -> number of missing events, for each topic that lacks some.

    A record that can't be read may be one of the counted events, or anybody's: it stands in for a
    counted one only where nothing else can come any more (topics in `settled`). Pure.
    """
    found = {}
    for topic, want in wanted.items():
        summary = summaries.get(topic, TopicSummary(topic))
        counted_after = after_lsn if want.counted_after is None else want.counted_after
        there = summary.counted(counted_after) + (summary.refused_count if topic in settled else 0)
        if there < want.events:
            found[topic] = want.events - there
    return found


def require_settled(
    short: Mapping[str, int],
    wanted: Mapping[str, Wanted],
    cut: Cut,
    settled: Collection[str],
) -> None:
    """Raise Retryable for a topic whose missing events an open transaction may bring. Pure."""
    for topic, count in short.items():
        if topic not in settled:
            raise Retryable(
                f"Kafka does not show {count or 'all'} events of {wanted[topic].table} yet: a "
                "transaction in the topic is neither committed nor aborted",
                operation="read events",
                subject=topic,
                lsn=cut.commit_lsn,
                hint="start the bridge, which ends its transactions that hang; then start "
                "slottables again",
                exit_code=ExitCode.KAFKA_UNREACHABLE,
            )


def lacking(read: Offsets, ends: Offsets) -> dict[str, int]:
    """Return the topics that end before what was read, each with its highest such offset. Pure."""
    found: dict[str, int] = {}
    for topic, offsets in read.items():
        for n, at in offsets.items():
            if at > ends.get(topic, {}).get(n, _MISSING):
                found[topic] = max(found.get(topic, 0), at)
    return found


def some_before(some: Offsets, others: Offsets) -> bool:
    """Tell whether one of some offsets is before its counterpart. Pure."""
    return any(
        at < others[topic][n] for topic, partitions in some.items() for n, at in partitions.items()
    )


def next_offsets(ends: Offsets, summaries: Mapping[str, TopicSummary]) -> Offsets:
    """Return where the events after an epoch's are, which was read up to `ends`. Pure."""
    return {
        topic: {
            number: (summaries[topic].next_offsets.get(number, end) if topic in summaries else end)
            for number, end in numbers.items()
        }
        for topic, numbers in ends.items()
    }
