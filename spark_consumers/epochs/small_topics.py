"""The topics of a bridge that say how events are to be read, and which are missing.

    schema       the tables' shapes
    dead letters the events that Kafka has refused
    divergence   the transactions that a failover lost

`run` follows them from their beginning. The ids of those that were there are a property of the
table `_epochs`, so that a topic which was made again is refused after a restart, too, and by the
other commands that read one of them (`expect_noted_ids`).
"""

import json

import structlog
from pyspark.sql import SparkSession

from schemas.naming import Naming
from schemas.settings import KafkaSettings
from schemas.tables import TablesSettings
from spark_consumers.epochs.ledger import Ledger
from spark_consumers.kafka.divergence import Divergences
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.shapes import DeadLetters, ShapeLog
from spark_consumers.kafka.small_topic_tail import SmallTopicTail

log = structlog.get_logger()
TOPIC_IDS = "slotbridge.small_topic_ids"
"""Property of the table `_epochs`: {small topic: its id when the tables read it last}."""
_MADE_AGAIN_HINT = (
    "if the new topic lacks records, fill new tables under another tables.namespace; if it has "
    "all, and the other small topics are the former ones, accept all as they are: stop "
    f"`slottables run`, ALTER TABLE … _epochs UNSET TBLPROPERTIES ('{TOPIC_IDS}'), start `run`"
)


class SmallTopics:
    """The small topics of one runner."""

    def __init__(
        self, kafka: KafkaSettings, topics: TopicOffsets, settings: TablesSettings, naming: Naming
    ) -> None:
        def follows(name: str) -> bool:
            return settings.follows(name, naming)

        self.shapes = ShapeLog(kafka, topics, naming, follows, keeps_refused=True)
        self.dead = DeadLetters(kafka, topics, follows)
        self._divergences = Divergences(kafka, topics)
        self._noted: dict[str, str] = {}

    def close(self) -> None:
        """Close the connections to the broker."""
        for each in (self.shapes, self.dead, self._divergences):
            each.close()

    def expect_noted(self, ledger: Ledger, spark: SparkSession, *, before: bool) -> None:
        """Refuse topics with other ids than those that were noted; `before`: tables have epochs."""
        self._noted = _noted_ids(ledger, spark, before=before)
        for tail in self._tails():
            tail.expect(self._noted.get(tail.topic, ""), _MADE_AGAIN_HINT)

    def require_same(self) -> None:
        """Raise OperatorNeeded where a topic was deleted and made again; see SmallTopicTail."""
        for tail in self._tails():
            tail.require_same()

    def read(self) -> None:
        """Take in the shapes up to now; raise OperatorNeeded for a divergence."""
        self._divergences.require_none()
        self.shapes.read()

    def note(self, ledger: Ledger, spark: SparkSession) -> None:
        """Note the ids of the topics that were read, where they are new."""
        found = {tail.topic: tail.id for tail in self._tails() if tail.id}
        if self._noted != (self._noted | found):
            self._noted |= found
            ledger.note(spark, {TOPIC_IDS: json.dumps(self._noted)})

    def _tails(self) -> tuple[SmallTopicTail, ...]:
        return self.shapes.tail, self.dead.tail, self._divergences.tail


def expect_noted_ids(
    tail: SmallTopicTail, ledger: Ledger, spark: SparkSession, *, before: bool = True
) -> None:
    """Let a tail refuse a topic with another id than the one that `run` has noted.

    It then raises MadeAgainError when it is read. A topic whose id is not noted is taken as it is;
    with `before`, the tables have epochs, and the log says so.
    """
    noted = _noted_ids(ledger, spark, before=before)
    if tail.topic in noted:
        tail.expect(noted[tail.topic], _MADE_AGAIN_HINT)


def _noted_ids(ledger: Ledger, spark: SparkSession, *, before: bool) -> dict[str, str]:
    """Return the noted ids by topic; log that the topics are not judged if tables have epochs."""
    noted: dict[str, str] = json.loads(ledger.noted(spark).get(TOPIC_IDS, "{}"))
    if before and not noted:
        log.warning(
            "not judged: whether the small topics were deleted and created again since the "
            "last epoch, as their ids were not noted; the next epoch notes them",
        )
    return noted
