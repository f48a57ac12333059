"""The quarantine of events that can't be read or do not fit their table.

    _quarantine   topic, partition, offset, commit_lsn, seq, op, reason, key, value, epoch

The row of a table that such an event would have changed stays as it was. `value` is the whole
record, so that the table needs the protection that the source has.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from schemas.errors import BadInput, ExitCode, SlotbridgeError
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.events import changes
from spark_consumers.events.shape import Shape
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.layout import FEW_METADATA_FILES
from spark_consumers.sql import literal

log = structlog.get_logger()
NAME = "_quarantine"
PLACES_MAX = 1000
"""The most bad events of one epoch; more of them mean a systematic error."""
_COLUMNS = ("topic", "partition", "offset", "commit_lsn", "seq", "op", "reason", "key", "value")
_PROPERTIES = FEW_METADATA_FILES | {"write.metadata.compression-codec": "gzip"}
_SAME = ("topic", "partition", "offset", "commit_lsn", "key", "value")
"""An event with these is in the quarantine already."""
_SQL = (
    "topic string, partition int, offset bigint, commit_lsn bigint, seq bigint, op string,"
    " reason string, key string, value string, epoch bigint"
)
Bad = dict[str, list[tuple[int, int]]]
"""topic -> (partition, offset) of each bad event."""


class Quarantine:
    """The table of bad events of one namespace."""

    def __init__(self, spark: SparkSession, namespace: str) -> None:
        self._spark = spark
        self._identifier = catalog.identifier(namespace, NAME)

    def put_aside(
        self,
        epoch: int | None,
        events: DataFrame,
        summaries: Iterable[tuple[TopicSummary, Sequence[Shape]]],
        refuse: Callable[[str, SlotbridgeError], None],
    ) -> Bad:
        """Write the bad events of an epoch down, each once, and say where they are.

        `epoch` None: of a rebuild. An event is known by its place and its content: an epoch that is
        made again may be larger, and a topic that was made again has other events at the places.
        Where more than PLACES_MAX are bad, `refuse` is called with the topic that has most of them;
        if it returns, the topic is left out.
        """
        given = list(summaries)
        found = [_unfit(events, summary, shapes) for summary, shapes in given if summary.rows]
        found += [_unread(events, summary) for summary, _ in given if summary.refused is not None]
        if not found:
            return {}
        bad = reduce(DataFrame.unionByName, found).persist()
        try:
            places = bad.select("topic", "partition", "offset").limit(PLACES_MAX + 1).collect()
            if len(places) > PLACES_MAX:
                ((topic, _),) = Counter(place.topic for place in places).most_common(1)
                error = BadInput(
                    f"more than {PLACES_MAX} events of one epoch do not fit their tables",
                    operation="put events aside",
                    subject=topic,
                    hint="compare the shapes in the schema topic with the events",
                    exit_code=ExitCode.RECORD_REFUSED,
                )
                refuse(topic, error)
                left = [(summary, shapes) for summary, shapes in given if summary.topic != topic]
                return self.put_aside(epoch, events, left, refuse)
            if places:
                self._write(epoch, bad, {place.offset for place in places})
        finally:
            bad.unpersist()
        where: Bad = {}
        for place in places:
            where.setdefault(place.topic, []).append((place.partition, place.offset))
        return where

    def _write(self, epoch: int | None, bad: DataFrame, offsets: Collection[int]) -> None:
        """Append the events that the quarantine's table does not have yet; make the table first."""
        if not self._spark.catalog.tableExists(self._identifier):
            self._spark.sql(f"CREATE TABLE {self._identifier} ({_SQL}) USING iceberg")
        table = catalog.load(self._spark, self._identifier)
        if not _PROPERTIES.items() <= catalog.properties(table).items():
            catalog.set_properties(table, _PROPERTIES)
        # The bounds spare most of the values, which are whole records.
        near = f"offset BETWEEN {min(offsets)} AND {max(offsets)}"
        there = self._spark.table(self._identifier).where(near).select(*_SAME)
        new = bad.join(there, [bad[n].eqNullSafe(there[n]) for n in _SAME], "left_anti")
        if not new.isEmpty():
            new.withColumn("epoch", F.lit(epoch).cast("bigint")).writeTo(self._identifier).append()
        log.warning("events were put into the quarantine", table=self._identifier, epoch=epoch)


def without(events: DataFrame, places: Sequence[tuple[int, int]]) -> DataFrame:
    """Leave out the events at the given places (partition, offset) of one topic."""
    partitions = sorted({partition for partition, _ in places})
    for partition in partitions:
        offsets = ", ".join(str(offset) for number, offset in places if number == partition)
        events = events.where(f"NOT (partition = {partition} AND offset IN ({offsets}))")
    return events


def _unfit(events: DataFrame, summary: TopicSummary, shapes: Sequence[Shape]) -> DataFrame:
    own = changes.own_events(events, summary.topic)
    found = [changes.problems(e, s) for e, s in changes.by_shape(own, shapes)]
    return reduce(DataFrame.unionByName, found).select(*_COLUMNS)


def _unread(events: DataFrame, summary: TopicSummary) -> DataFrame:
    """Return the records that are not events, as far as the epoch goes in each partition."""
    beyond = "".join(
        f" OR partition = {partition} AND offset >= {offset}"
        for partition, offset in sorted(summary.next_offsets.items())
    )
    unread = events.where(
        f"topic = {literal(summary.topic)} AND NOT {changes.IS_EVENT} AND NOT (false{beyond})"
    )
    return unread.withColumn("reason", F.lit("no event of a table")).select(*_COLUMNS)
