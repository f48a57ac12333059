"""The summary of one table's events in an epoch, over the partitions of its topic. Pure."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field

from pyspark.sql import Row

from schemas.errors import BadInput, ExitCode, OperatorNeeded
from spark_consumers.events.shape import CommitPosition, Shape


@dataclass(slots=True)
class TopicSummary:
    """An epoch's events of one topic.

    `late`: had before; `refused`: (partition, offset) of the first record that is not an event,
    None where all are; `refused_head`: how its text begins. `counted_rows`: rows that the
    transactions count, duplicates too; `distinct_rows`: each once. `seen_lsn`: what commits before
    it may be in a snapshot's rows already, 0 without any.
    """

    topic: str
    events: int = 0
    rows: int = 0
    counted_rows: int = 0
    distinct_rows: int = 0
    late: int = 0
    keyless_rows: int = 0
    identified_rows: int = 0
    snapshot_rows: int = 0
    seen_lsn: int = 0
    lsn_max: int = 0
    ts_us_max: int = 0
    unavailable: bool = False
    refused: tuple[int, int] | None = None
    refused_head: str = ""
    refused_count: int = 0
    truncates: set[tuple[int, int, int]] = field(default_factory=set)
    tables: set[tuple[str, str]] = field(default_factory=set)
    next_offsets: dict[int, int] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take in the summary of one partition."""
        self.events += row.events
        self.rows += row.rows
        self.counted_rows += row.counted_rows
        self.late += row.late
        self.keyless_rows += row.keyless_rows
        self.identified_rows += row.identified_rows
        self.snapshot_rows += row.snapshot_rows
        self.seen_lsn = max(self.seen_lsn, row.seen_lsn or 0)
        self.lsn_max = max(self.lsn_max, row.lsn_max or 0)
        self.ts_us_max = max(self.ts_us_max, row.ts_us_max or 0)
        self.unavailable |= bool(row.unavailable)
        self.refused_count += row.refused
        if row.refused_offset is not None and self.refused is None:
            self.refused = (row.partition, row.refused_offset)
            self.refused_head = row.refused_head or ""
        self.truncates |= {(t.commit_lsn, t.seq, t.ts_us) for t in row.truncates}
        self.tables |= {(name.schema, name.table) for name in row.tables}
        if row.next_offset is not None:
            self.next_offsets[row.partition] = row.next_offset

    def counted(self, after_lsn: int) -> int:
        """Count the epoch's events as its transactions count them: each once, a truncate once.

        Records that can't be read are not counted.
        """
        return self.distinct_rows + sum(lsn > after_lsn for lsn, _, _ in self.truncates)

    @property
    def duplicates(self) -> int:
        """The number of rows that the epoch contains a second time."""
        return max(0, self.counted_rows - self.distinct_rows)

    @property
    def last_truncate(self) -> CommitPosition | None:
        """The last truncate's position."""
        last = max(self.truncates, default=None)
        return None if last is None else CommitPosition(*last[:2])

    def require_events(self) -> None:
        """Raise BadInput for a record that is not an event."""
        if self.refused is not None:
            partition, offset = self.refused
            number = registry_id(self.refused_head)
            raise BadInput(
                "the record is not an event of a table",
                operation="read events",
                subject=f"{self.topic}, partition {partition}, offset {offset}",
                hint="only the bridge may write to its topics; tables.on_bad_event: quarantine "
                "continues without the record"
                if number is None
                else f"the record begins with a schema registry's id ({number}): set "
                "kafka.value_format and registry.url as the bridge has them (avro or protobuf), "
                "and restart `slottables run`",
                exit_code=ExitCode.RECORD_REFUSED,
            )

    def require_fits(self, shape: Shape, *, keyed: bool) -> None:
        """Raise for events that don't belong to the table, or (`keyed`) can't be applied to it.

        Rows of a snapshot are inserts of a table without a key: the bridge sends each of them once,
        or refuses the table (docs/guides/snapshots.md).
        """
        wrong = self.tables - {(shape.schema, shape.table)}
        if wrong:
            raise OperatorNeeded(
                f"the topic has events of {'.'.join(map(str, min(wrong)))} besides {shape.name}",
                operation="read events",
                subject=self.topic,
                hint="rename one of the tables: their names are the same for Kafka",
            )
        if not keyed:
            return
        if shape.keyless and self.identified_rows > self.snapshot_rows:
            raise BadInput(
                f"{shape.name} has no key, and rows of it are updated or deleted",
                operation="read events",
                subject=self.topic,
                lsn=self.lsn_max,
                hint="keep it as a changelog: set tables.rules: "
                f"{{{shape.name}: {{kind: changelog}}}}, stop `slottables run`, drop the Iceberg "
                "table, and start `run`",
                exit_code=ExitCode.RECORD_REFUSED,
            )
        if not shape.keyless and self.keyless_rows:
            raise BadInput(
                f"{self.keyless_rows} events of {shape.name} have no Kafka key",
                operation="read events",
                subject=self.topic,
                lsn=self.lsn_max,
                hint="the table's key was added later: leave the table out (tables.tables), or "
                "begin a new topic prefix",
                exit_code=ExitCode.RECORD_REFUSED,
            )


def registry_id(head: str) -> int | None:
    """Return the id of the schema with which a record begins, in base64; None for another. Pure."""
    try:
        data = base64.b64decode(head, validate=True)
    except ValueError:
        return None
    return int.from_bytes(data[1:5], "big") if len(data) > 4 and data[0] == 0 else None


def summarize(rows: Iterable[Row], positions: Iterable[Row]) -> dict[str, TopicSummary]:
    """Return topic -> TopicSummary from the rows of `changes.summary` and `changes.positions`."""
    summaries: dict[str, TopicSummary] = {}
    for row in rows:
        summaries.setdefault(row.topic, TopicSummary(row.topic)).add(row)
    for row in positions:
        summaries[row.topic].distinct_rows = row.distinct_rows
    return summaries
