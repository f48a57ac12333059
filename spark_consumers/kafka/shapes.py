"""The tables' shapes from the schema topic, and dead letters, each with its position."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from schemas.errors import OperatorNeeded, SetupError
from schemas.events import DeadLetter, dead_topic, schema_topic
from schemas.naming import Naming
from schemas.schema_events import SchemaEvent
from schemas.settings import KafkaSettings
from spark_consumers.events.shape import START, CommitPosition, Shape
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.small_topic_tail import CommittedRecord, SmallTopicTail


class ShapeLog:
    """Every shape that a followed table has had, as far as the topic still has it."""

    def __init__(
        self,
        kafka: KafkaSettings,
        topics: TopicOffsets,
        naming: Naming,
        follows: Callable[[str], bool],
        *,
        keeps_refused: bool = False,
    ) -> None:
        """Read shapes; `keeps_refused`: `require` raises for a refused table, and not `read`."""
        self._keeps_refused = keeps_refused
        self._refused: dict[str, SetupError] = {}
        self.tail = SmallTopicTail(kafka, topics, schema_topic(kafka.topic_prefix))
        self._naming = naming
        self._follows = follows
        self._shapes: dict[str, list[Shape]] = {}
        self._topics: dict[str, str] = {}
        self._names: dict[int, dict[str, CommitPosition]] = {}

    @property
    def topic(self) -> str:
        """The name of the schema topic."""
        return self.tail.topic

    def close(self) -> None:
        """Close the connections to the broker."""
        self.tail.close()

    def read(self) -> None:
        """Take in what has been written up to now.

        Raise SetupError when two tables share a topic or rows have no identity, BadInput for a
        record that is not a SchemaEvent.
        """
        for record in self.tail.new():
            event = self.tail.parsed(record, SchemaEvent)
            name = f"{event.schema_}.{event.table}"
            since = CommitPosition(event.commit_lsn, event.seq)
            names = self._names.setdefault(event.oid, {})
            names[name] = max(since, names.get(name, since))
            if self._follows(name):
                try:
                    self._take(name, event)
                except SetupError as error:
                    if not self._keeps_refused:
                        raise
                    self._refused.setdefault(name, error)

    def known_at(self, commit_lsn: int) -> set[str]:
        """Return the tables that had events at or before a commit LSN."""
        return {n for n, s in self._shapes.items() if s[0].since.commit_lsn <= commit_lsn}

    def first_change(self, after_lsn: int) -> int | None:
        """Return the first commit LSN after `after_lsn` where a known table changed its shape."""
        changes = [
            shape.since.commit_lsn
            for shapes in self._shapes.values()
            for shape in shapes[1:]
            if shape.since.commit_lsn > after_lsn
        ]
        return min(changes, default=None)

    def upto(self, name: str, commit_lsn: int) -> Sequence[Shape]:
        """Return the table's shapes up to a commit LSN; the first holds from the beginning."""
        return [s for s in self._shapes.get(name, ()) if s.since.commit_lsn <= commit_lsn]

    def taken_over(
        self, name: str, columns: Shape | None, has_lsn: int, upto_lsn: int
    ) -> tuple[int, str] | None:
        """Return where a name went to a table with other rows, and which table that is; else None.

        `columns`, `has_lsn`: the shape and the commit LSN of the name's Iceberg table. The last
        such change up to `upto_lsn` counts.
        """
        return last_take_over(self.upto(name, upto_lsn), self._names, columns, has_lsn)

    def require(self, name: str, commit_lsn: int) -> list[Shape]:
        """Return the table's shapes up to a commit LSN.

        Raise OperatorNeeded where there is none, SetupError where the table can't be followed.
        """
        if name in self._refused:
            raise self._refused[name]
        shapes = list(self.upto(name, commit_lsn))
        if not shapes:
            raise OperatorNeeded(
                f"{self.topic} has no schema event of the table",
                operation="read table shapes",
                subject=name,
                lsn=commit_lsn,
                hint="topic_prefix must be the bridge's own; the schema topic must be kept",
            )
        return shapes

    def _take(self, name: str, event: SchemaEvent) -> None:
        """Keep a table's shape in order; before the first one, claim the table's topic."""
        shape = Shape.from_event(event)
        known = self._shapes.setdefault(name, [])
        if not known:
            self._claim_topic(shape)
            if event.before is not None:  # the topic is compacted: what was before is told here
                known.append(Shape.before(event))
        if all(shape.since != other.since for other in known):
            known.append(shape)
            known.sort(key=lambda s: s.since)

    def _claim_topic(self, shape: Shape) -> None:
        """Raise SetupError where a table's events are not alone in their topic, or lack its key."""
        topic = self._naming.table(shape.schema, shape.table).name
        if self._naming.key(shape.schema, shape.table):
            raise SetupError(
                f"{shape.name} has another key in Kafka (shaping.keys) than at its source",
                operation="read table shapes",
                subject=topic,
                hint="a table needs its primary key: list the tables to follow, without this one, "
                "in tables.tables",
            )
        if self._naming.flat(shape.schema, shape.table):
            raise SetupError(
                f"{shape.name} has flat rows in Kafka (shaping.flat)",
                operation="read table shapes",
                subject=topic,
                hint="a table needs the events' envelopes: leave it out of shaping.flat.tables, or "
                "list the tables to follow, without this one, in tables.tables",
            )
        other = self._topics.setdefault(topic, shape.name)
        if other != shape.name:
            raise SetupError(
                f"{other} and {shape.name} share one topic",
                operation="read table shapes",
                subject=topic,
                hint="give each a topic of its own (shaping.routes), or list those to follow in "
                "tables.tables; characters that Kafka forbids become `_`",
            )


def last_take_over(
    shapes: Sequence[Shape],
    names: Mapping[int, Mapping[str, CommitPosition]],
    columns: Shape | None,
    has_lsn: int,
) -> tuple[int, str] | None:
    """Return where a name last went to a table with other rows, and which that is; else None.

    Rows of the table from before, also those that change no more, were published under its former
    name; or under this one, before another table had it, whose rows have replaced them. `shapes`:
    of the name; `names`: oid -> name -> its last shape. Rows up to `has_lsn` are judged already.
    `columns` may be ahead of the rows, after a kill or by a rebuild. Pure.
    """
    known: dict[int, CommitPosition] = {}
    if columns is not None and columns.since.commit_lsn <= has_lsn:
        has_lsn, known = columns.since.commit_lsn, {columns.oid: columns.since}
    change = None
    for before, shape in pairwise([*shapes[:1], *shapes]):
        last = known.get(shape.oid, START)
        if shape.since <= last:
            continue
        others = names.get(shape.oid, {}) if shape.oid else {}
        former = [other for other, at in others.items() if last < at < shape.since]
        if former:
            which = f"that was {former[0]} before: its rows were published under that name"
            change = shape.since.commit_lsn, which
        elif shape.oid not in known:
            change = None  # a new table: the name has all its rows
        elif before.another_table(shape):
            which = "that had the name before another one, whose rows have replaced its own"
            change = shape.since.commit_lsn, which
        known[shape.oid] = shape.since
    return change if change and change[0] > has_lsn else None


class Lacking(NamedTuple):
    """An event that Kafka has refused, so that the table lacks it."""

    table: str
    position: CommitPosition
    reason: str


class DeadLetters:
    """Which events of followed tables Kafka has refused."""

    def __init__(
        self, kafka: KafkaSettings, topics: TopicOffsets, follows: Callable[[str], bool]
    ) -> None:
        self.tail = SmallTopicTail(kafka, topics, dead_topic(kafka.topic_prefix))
        self._follows = follows
        self._letters: list[Lacking] = []
        self._named: set[str] = set()

    @property
    def topic(self) -> str:
        """The topic of dead letters."""
        return self.tail.topic

    def close(self) -> None:
        """Close the connections to the broker."""
        self.tail.close()

    def between(self, after_lsn: int, upto_lsn: int) -> list[Lacking]:
        """Return the dead letters of transactions after `after_lsn`, up to and with `upto_lsn`."""
        self._letters += self._read(self.tail.new())
        self._letters = [x for x in self._letters if x.position.commit_lsn > after_lsn]
        return [x for x in self._letters if x.position.commit_lsn <= upto_lsn]

    def may_lack(self, table: str) -> bool:
        """Tell whether Kafka may ever have refused an event of a table.

        The answer is true also where it can't be known any more, because the topic of dead letters
        has lost its beginning. Call this after `between`.
        """
        return table in self._named or self.tail.lost_beginning

    def _read(self, records: Iterable[CommittedRecord]) -> Iterable[Lacking]:
        for record in records:
            letter = self.tail.parsed(record, DeadLetter)
            if letter.table and self._follows(letter.table):
                self._named.add(letter.table)
                yield Lacking(
                    letter.table, CommitPosition(letter.commit_lsn, letter.seq), letter.reason
                )
