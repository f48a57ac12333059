"""Whether Kafka still has the ends of the partitions that the slot has written.

An unclean election, a disk that is lost with the only replica, a volume that was set back: the last
records of a partition are gone, and nothing else tells of it. So progress records note, about once
a second, where the acknowledged records of each partition end: at most the last second before a
crash is not judged. Where a partition has been led anew since, the leader is also
asked whether it has all of that (`leader_epochs`): at a start, and while the bridge runs. The ids
of topics are compared too (`topic_ids`): one that was made again has nothing of what was noted.

Most lost records can be published again by a repair. The names of tables that settings hide
(`table_names`) can not: their loss is an error of its own, which an operator decides.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

import structlog

from schemas.acceptance import Acceptance, Kind, Token, short_digest
from schemas.errors import OperatorNeeded
from schemas.events import table_names_topic
from schemas.lsn import format_lsn
from schemas.progress import ProgressKafka, ProgressRecord
from services.bridge.progress.errors import RECOVER, NamesLost
from services.bridge.sink.offsets import (
    Partition,
    PartitionEnd,
    answers,
    in_parts,
    name_of,
    some_answers,
)
from services.bridge.sink.topic_ids import IdWatch, MadeAgain, compare_ids
from services.bridge.sink.topics import Topics

logger = structlog.get_logger(__name__)

NOTED_EVERY_S: Final = 1.0
PARTITIONS_MAX: Final = 2000
"""Of those that were written last, besides that of `table_names`, which may be written to once: 40
kB a second, 200 kB where each is of another topic."""
_NAMED_MAX: Final = 5
_HINT: Final = (
    f"restore the topics, or {RECOVER}; or go on without the lost records, as where somebody has "
    "deleted the topic on purpose"
)
_AGAIN_S: Final = 60.0
_STALE_S: Final = 20.0
"""How long a broker that was cut off may take itself for the leader: twice a broker's session."""
_PAUSE_S: Final = 0.2
Noted = dict[str, list[tuple[int, int, int]]]


class Lost(NamedTuple):
    """A partition that ends before the noted offset, or was cut off before it and written on."""

    partition: Partition
    noted: int
    offset: int


class Gone(NamedTuple):
    """A topic that is not there, and where it was noted to end; None where no record tells.

    `empty`: it is there, and no record was ever written to it.
    """

    topic: str
    noted: int | None
    empty: bool = False


Loss = Lost | Gone | MadeAgain


class Kept(NamedTuple):
    """The noted ends and topic ids that a start has verified, for later progress records."""

    ends: dict[Partition, PartitionEnd]
    topic_ids: dict[str, str]
    renewed: bool
    """Whether what is noted holds no longer: a topic is gone, or what is lost is accepted."""
    grown: Mapping[str, tuple[int, int]] = {}
    """Topics with more partitions than noted, and both numbers."""


CutOff = Callable[[Mapping[Partition, PartitionEnd]], Mapping[Partition, bool]]
"""As `leader_epochs.cut_off`."""


class Tails:
    """The known ends of partitions, for the next progress record of one session."""

    def __init__(self, slot: str, prefix: str, cut_off: CutOff) -> None:
        """Know no ends yet; `prefix`: of the slot's topics."""
        self._slot = slot
        self._names = table_names_topic(prefix)
        self._cut_off = cut_off
        self._topics: Topics | None = None
        self._ends: dict[Partition, PartitionEnd] = {}
        self._ids: IdWatch | None = None
        self._due = 0.0
        self._again: dict[Partition, float] = {}
        """When to ask a leader again that has not told (time.monotonic)."""
        self.renewed = False
        """Whether the last record in Kafka notes ends that are known to hold no longer."""

    def start(self, topics: Topics, record: ProgressRecord | None, accepted: Acceptance) -> None:
        """Begin with the ends that `record` has noted, as `check_tails` judges them."""
        self._topics, kept = topics, Kept({}, {}, renewed=False)
        if record is not None:
            kept = check_tails(topics, record, self._cut_off, accepted)
        self._ends, self.renewed = kept.ends, kept.renewed
        if kept.grown:
            logger.warning(
                "topics have more partitions than before: rows may go to other ones, and their "
                "order is kept only within each (docs/guides/shaping.md, Placement)",
                topics=[f"{name}: {then}, now {now}" for name, (then, now) in kept.grown.items()],
            )
        self._ids = IdWatch(topics.admin, lambda: topics.brokers, kept.topic_ids)

    def judge(self, lost: Sequence[Loss]) -> None:
        """Raise OperatorNeeded where something is `lost`, NamesLost where names of tables are."""
        judge_lost(lost, self._slot, None, self._names, None)

    def learn(self, ends: Mapping[Partition, PartitionEnd]) -> None:
        """Note where each partition ends now; keep names and the last PARTITIONS_MAX learnt.

        Raise as `judge` does where acknowledged records are gone. Where a new leader does not tell
        whether it has them, the former end is kept, for a later look or the next start.
        """
        if self._topics is not None:
            ends = _asked_again(self._topics, self._ends, ends)
        shorter = lost_tails(self._ends, ends)
        self.judge(shorter)
        unjudged = self._judge_led_anew(led_anew(self._ends, ends, shorter), ends)
        for partition, end in ends.items():
            former = self._ends.pop(partition, end)
            self._ends[partition] = former if partition in unjudged else end
        surplus = len(self._ends) - ((self._names, 0) in self._ends) - PARTITIONS_MAX
        spare = (at for at in self._ends if at[0] != self._names)
        for partition in [*islice(spare, max(0, surplus))]:
            del self._ends[partition]
        if self._ids is not None:
            self.judge(self._ids.look(lambda: {topic for topic, _ in self._ends}))

    def _judge_led_anew(
        self, then: Mapping[Partition, PartitionEnd], ends: Mapping[Partition, PartitionEnd]
    ) -> Collection[Partition]:
        """Return the partitions whose new leader has not told, or is not asked again yet."""
        now = time.monotonic()
        asked = {at: end for at, end in then.items() if self._again.get(at, 0.0) <= now}
        cuts = self._cut_off(asked) if asked else {}
        self.judge(_cut(asked, ends, cuts))
        silent = asked.keys() - cuts.keys()
        self._again = {at: due for at, due in self._again.items() if at not in cuts}
        self._again |= dict.fromkeys(silent, time.monotonic() + _AGAIN_S)
        _log_silent(silent)
        return then.keys() - cuts.keys()

    def hurry(self) -> None:
        """Note the known ends in the next record, without waiting for the interval."""
        self._due = 0.0
        if self._ids is not None:
            self._ids.hurry()

    def note(self) -> Noted:
        """Return the ends for a new record, {} where they were noted a second ago."""
        now = time.monotonic()
        if now < self._due or not self._ends:
            return {}
        self._due = now + NOTED_EVERY_S
        return noted(self._ends)

    def note_all(self, producer: int) -> ProgressKafka:
        """Return the part `kafka` of a new record by this producer; its `ends` are from `note`."""
        ends, known = self.note(), self._ids.known if self._ids is not None else {}
        topics = self._topics
        return ProgressKafka.model_construct(  # not validated: up to PARTITIONS_MAX, each second
            producer=producer,
            ends=ends,
            topic_ids={at: known[at] for at in ends if at in known},
            partitions={} if topics is None else topics.counts(ends),
        )


def noted(ends: Mapping[Partition, PartitionEnd]) -> Noted:
    """Convert ends to the form of ProgressKafka. Pure."""
    found: Noted = {}
    for (topic, partition), end in ends.items():
        found.setdefault(topic, []).append((partition, end.offset, end.epoch))
    return found


def read_noted(noting: ProgressKafka) -> dict[Partition, PartitionEnd]:
    """Return the partitions' ends that are noted. Pure."""
    return {
        (topic, partition): PartitionEnd(offset, epoch)
        for topic, ends in noting.ends.items()
        for partition, offset, epoch in ends
    }


def grown(then: Mapping[str, int], now: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the topics with more partitions than noted, with both numbers. Pure."""
    return {
        topic: (then[topic], count)
        for topic, count in now.items()
        if count > then.get(topic, count)
    }


def lost_tails(
    then: Mapping[Partition, PartitionEnd], now: Mapping[Partition, PartitionEnd]
) -> list[Lost]:
    """Return the partitions of `then` that end earlier `now`. Pure."""
    return [
        Lost(partition, end.offset, now[partition].offset)
        for partition, end in then.items()
        if partition in now and now[partition].offset < end.offset
    ]


def led_anew(
    then: Mapping[Partition, PartitionEnd],
    now: Mapping[Partition, PartitionEnd],
    shorter: Sequence[Lost],
) -> dict[Partition, PartitionEnd]:
    """Return the ends of `then` whose leader is of another epoch `now`, without `shorter`. Pure."""
    known = {one.partition for one in shorter}
    return {
        partition: end
        for partition, end in then.items()
        if partition in now
        and partition not in known
        and 0 <= end.epoch != now[partition].epoch
        and end.offset
    }


def _cut(
    then: Mapping[Partition, PartitionEnd],
    now: Mapping[Partition, PartitionEnd],
    cuts: Mapping[Partition, bool],
) -> list[Lost]:
    return [Lost(at, end.offset, now[at].offset) for at, end in then.items() if cuts.get(at)]


def check_tails(
    topics: Topics, record: ProgressRecord, cut_off: CutOff, accepted: Acceptance
) -> Kept:
    """Compare the noted ends of partitions and ids of topics with the present ones.

    Raise OperatorNeeded where a partition ends earlier, or did once, or a topic was made again;
    NamesLost where the topic of tables' names is such a topic, or is gone.

    `record`: any that is visible, as an end is a lower bound for ever.
    """
    last = record if record.kafka.ends else topics.last_noting_ends(record.slot)
    if last is None:
        logger.info("not judged: no progress record tells where partitions ended")
        return Kept({}, {}, renewed=False)
    noting = last.kafka
    then = read_noted(noting)
    written = {topic for (topic, _), end in then.items() if end.offset}
    gone = sorted({topic for topic, _ in then if not topics.has(topic)})
    # Nothing else of it can be found again: what it had is the only trace of a former name.
    named = table_names_topic(topics.prefix)
    names_gone = [Gone(named, then[named, 0].offset)] if named in written.intersection(gone) else []
    if gone:
        logger.warning("not judged: topics that the slot has written are gone", topics=gone)
    there = [partition for partition in then if topics.has(partition[0])]
    names = sorted({topic for topic, _ in there})
    ids, others = compare_ids(topics.admin, noting.topic_ids, names, brokers=topics.brokers)
    made_again = {one.topic for one in others}
    same = {partition: then[partition] for partition in there if partition[0] not in made_again}
    now = _asked_again(topics, same, _asked(topics, there))
    lost = lost_tails(same, now)
    asked = led_anew(same, now, lost)
    cuts = cut_off(asked) if asked else {}
    lost += _cut(asked, now, cuts)
    silent = {at for at in there if at not in now or (at in asked and at not in cuts)}
    _log_silent(silent)
    found: list[Loss] = [*names_gone, *(one for one in others if one.topic in written), *lost]
    judge_lost(found, record.slot, record.position.end_lsn, named, accepted)
    kept = same | {partition: now[partition] for partition in there if partition not in silent}
    ids = {name: noting.topic_ids[name] for name in names if name in noting.topic_ids} | ids
    more = grown(noting.partitions, topics.counts(names))
    return Kept(kept, ids, renewed=bool(gone or others or lost), grown=more)


def check_names(topics: Topics, slot: str, accepted: Acceptance) -> None:
    """Raise NamesLost where settings hide something and Kafka has nothing in the topic of names.

    For a repair, where no progress record tells whether there was something: whoever makes missing
    topics makes that of the names, too.
    """
    if not topics.hides:
        return
    names = table_names_topic(topics.prefix)
    place, there = (names, 0), topics.has(names)
    if not there or not answers(topics.ask_ends([place], committed=False))[place].offset:
        judge_lost([Gone(names, None, empty=there)], slot, 0, names, accepted)


def _asked(topics: Topics, partitions: Sequence[Partition]) -> dict[Partition, PartitionEnd]:
    now: dict[Partition, PartitionEnd] = {}
    for some in in_parts(partitions):
        now |= some_answers(topics.ask_ends(some, committed=False))
    return now


def _asked_again(
    topics: Topics, then: Mapping[Partition, PartitionEnd], now: Mapping[Partition, PartitionEnd]
) -> Mapping[Partition, PartitionEnd]:
    """Return `now`, asked again where the end is an earlier one by a leader of an older epoch.

    A broker that was cut off from the others, or stood still, takes itself for the leader and tells
    the end that it knows, until it hears of the new leader. Where that stays so for _STALE_S, the
    topic was made again: epochs begin anew.
    """
    deadline = time.monotonic() + _STALE_S
    while (stale := _stale(then, now)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        topics.learn_leaders()
        now = {**now, **_asked(topics, stale)}
    return now


def _stale(
    then: Mapping[Partition, PartitionEnd], now: Mapping[Partition, PartitionEnd]
) -> list[Partition]:
    """Return the partitions that answer with an earlier end and leader epoch than were known."""
    return [
        at
        for at, end in now.items()
        if at in then and end.offset < then[at].offset and end.epoch < then[at].epoch
    ]


def _log_silent(silent: Collection[Partition]) -> None:
    if silent:
        names = sorted(map(name_of, silent))
        logger.warning("not judged: partitions whose leader does not answer", partitions=names)


def _topic_of(lost: Loss) -> str:
    return lost.partition[0] if isinstance(lost, Lost) else lost.topic


def _identified(lost: Loss) -> str:
    """Name what is lost, whatever was written there since."""
    return f"{name_of(lost.partition) if isinstance(lost, Lost) else lost.topic} {lost.noted}"


def _described(lost: Loss) -> str:
    """Return a sentence that says what Kafka lost."""
    if isinstance(lost, MadeAgain):
        return f"{lost.topic} was deleted and made again (id {lost.id}, not {lost.noted})"
    if isinstance(lost, Gone):
        if lost.noted is not None:
            return f"{lost.topic} is gone, which ended at {lost.noted}"
        seen = "empty" if lost.empty else "not there"
        return f"{lost.topic} is {seen}, and no progress record tells whether it was"
    if lost.offset < lost.noted:
        return f"{name_of(lost.partition)} ends at {lost.offset}, not {lost.noted}"
    return f"{name_of(lost.partition)} was cut off before {lost.noted}, and written on since"


def judge_lost(
    lost: Sequence[Loss], slot: str, lsn: int | None, names: str, accepted: Acceptance | None
) -> None:
    """Raise OperatorNeeded, NamesLost where `names` is among it; log what an operator accepts.

    `accepted`: None while the bridge runs, when nothing may be accepted.
    """
    if not lost:
        return
    lost = sorted(lost, key=lambda one: _topic_of(one) != names)
    every = [*map(_described, lost)]
    kind, refusal, hint = Kind.LOST_RECORDS, OperatorNeeded, _HINT
    if _topic_of(lost[0]) == names:
        kind, refusal, hint = Kind.LOST_NAMES, NamesLost, NamesLost.HINT
    bound = f"{format_lsn(lsn or 0)}-{short_digest(map(_identified, lost))}"
    token = Token(kind, slot, bound) if accepted is not None else None
    if accepted is not None and accepted.takes(token):
        logger.warning("going on without records that Kafka has lost", lost=every)
        return
    described, more = ", ".join(every[:_NAMED_MAX]), len(lost) - _NAMED_MAX
    raise refusal(
        f"Kafka lost committed records: {described}" + (f", and {more} more" if more > 0 else ""),
        operation="compare the ends of partitions",
        subject=f"slot {slot}",
        lsn=lsn,
        hint=hint,
        token=token,
    )
