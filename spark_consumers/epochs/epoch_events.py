"""An epoch's events: of a small epoch in this process, and for Spark where it is asked for them."""

from collections.abc import Callable, Mapping, Sequence

from pyspark import StorageLevel
from pyspark.sql import DataFrame

from spark_consumers.apply.events import RowEvent
from spark_consumers.epochs.few_events import Bounds, own_events
from spark_consumers.epochs.topic_summary import TopicSummary, summarize
from spark_consumers.events import changes
from spark_consumers.events.unsuited import Unsuited
from spark_consumers.kafka.few_records import RecordReader
from spark_consumers.kafka.reader import Offsets


class EpochEvents:
    """The events of an epoch's topics."""

    def __init__(self, make: Callable[[], DataFrame]) -> None:
        """`make` reads them by Spark."""
        self._make = make
        self._frame: DataFrame | None = None
        self._own: dict[str, Sequence[RowEvent]] = {}
        self._summaries: dict[str, TopicSummary] = {}
        self.why = "another format than json"
        """Why this process has not read them, empty if it has."""

    def read(
        self,
        reader: RecordReader | None,
        starts: Offsets,
        ends: Offsets,
        bounds: Mapping[str, Bounds],
    ) -> "EpochEvents":
        """Read them into this process, if they are few and plain; return them.

        `reader`: None where they are in another format.
        """
        if reader is None:
            return self
        self.why = ""
        try:
            for topic, records in reader.read(starts, ends).items():
                own, summary = own_events(records, topic, bounds[topic])
                self._own[topic] = own
                if records:
                    self._summaries[topic] = summary
        except Unsuited as unsuited:
            self._own, self._summaries, self.why = {}, {}, str(unsuited)
        return self

    def own(self, topic: str) -> Sequence[RowEvent]:
        """Return the events of a topic that this process has; call it only if there is no `why`."""
        return self._own.get(topic, ())

    @property
    def frame(self) -> DataFrame:
        """The events as `changes.events` has them, kept by Spark."""
        if self._frame is None:
            self._frame = self._make().persist(StorageLevel.MEMORY_AND_DISK)
        return self._frame

    def summaries(self) -> dict[str, TopicSummary]:
        """Return what each topic brings."""
        if not self.why:
            return dict(self._summaries)
        frame = self.frame
        return summarize(changes.summary(frame).collect(), changes.positions(frame).collect())

    def unpersist(self) -> None:
        """Let Spark forget them."""
        if self._frame is not None:
            self._frame.unpersist()
