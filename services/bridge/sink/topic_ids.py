"""Whether a topic is still the one that the slot has written: Kafka gives each topic an id.

A topic that was deleted and made again under its name has another id. Nothing else tells of it
where the partitions are still led by their first leaders (epoch 0) and others have written more
than was noted: the ends are beyond what is noted, and the leader has the noted epoch.

    start                   the ids that the record has noted | the ids that Kafka tells
    while the bridge runs   the same every RECHECK_S, without waiting for the answers;
                            of a topic whose id is not known yet: at once
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple

import structlog
from confluent_kafka import KafkaException, TopicCollection, Uuid
from confluent_kafka.admin import AdminClient

from services.bridge.sink.offsets import ASKED_AT_ONCE, in_parts
from services.kafka.records import REQUEST_TIMEOUT_S

logger = structlog.get_logger(__name__)

RECHECK_S: Final = 60.0
_LOOK_S: Final = 1.0
_PAUSE_S: Final = 0.5
_PATIENCE_S: Final = 1.0
STALE_S: Final = 20.0
"""How long a broker that was cut off may tell the id of a former topic: twice its session."""
_NO_ID: Final = str(Uuid(0, 0))
"""The id that a broker without topic ids reports (before Kafka 2.8)."""
Ids = Mapping[str, str]
"""Topic -> its id."""


class MadeAgain(NamedTuple):
    """A topic that has another id than the one that was noted."""

    topic: str
    noted: str
    id: str


def made_again(noted: Ids, present: Ids) -> list[MadeAgain]:
    """Return the topics of both that have another id by now. Pure."""
    return [
        MadeAgain(topic, noted[topic], id_)
        for topic, id_ in present.items()
        if noted.get(topic, id_) != id_
    ]


def ask(admin: AdminClient, topics: Iterable[str]) -> Mapping[str, "Future[Any]"]:
    """Ask for the descriptions of `topics`, up to ASKED_AT_ONCE; returns at once."""
    names = [*topics]
    if not names:
        return {}
    return admin.describe_topics(TopicCollection(names), request_timeout=REQUEST_TIMEOUT_S)


def answers(futures: Mapping[str, "Future[Any]"]) -> dict[str, str]:
    """Await what was asked; without the topics whose id Kafka does not tell."""
    present: dict[str, str] = {}
    for topic, description in futures.items():
        try:
            id_ = str(description.result(REQUEST_TIMEOUT_S + 5).topic_id)
        except (KafkaException, TimeoutError):
            continue
        if id_ != _NO_ID:
            present[topic] = id_
    return present


def compare_ids(
    admin: AdminClient, noted: Ids, topics: Sequence[str], *, brokers: int
) -> tuple[dict[str, str], list[MadeAgain]]:
    """Return the ids of `topics` by now, and those that were made again. For a start.

    Where Kafka has several `brokers`, another id is asked for again, for STALE_S: a broker that was
    cut off from the others tells the id of a topic that has been replaced since. What can't be
    judged is told.
    """
    present = read_ids(admin, topics)
    deadline = time.monotonic() + (STALE_S if brokers > 1 else 0.0)
    while (changed := made_again(noted, present)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        present |= read_ids(admin, [one.topic for one in changed])
    if unnoted := sorted({*topics} - noted.keys()):
        logger.info("not judged: the ids of topics were not noted", topics=unnoted)
    _log_silent({*topics} - present.keys())
    return present, changed


def read_ids(admin: AdminClient, topics: Sequence[str]) -> dict[str, str]:
    """Return the ids of `topics`, without those whose id Kafka does not tell."""
    present: dict[str, str] = {}
    for some in in_parts(topics):
        present |= answers(ask(admin, some))
    return present


def _log_silent(silent: Iterable[str]) -> None:
    if topics := sorted(silent):
        logger.warning("not judged: Kafka does not tell the ids of topics", topics=topics)


class IdWatch:
    """The ids of topics while the bridge runs, and for the next progress record. One session's."""

    def __init__(self, admin: AdminClient, brokers: Callable[[], int], first_ids: Ids) -> None:
        """Watch the ids of topics; `first_ids`: those that the start has found."""
        self._admin = admin
        self._brokers = brokers
        self.known = {**first_ids}
        self._next = dict.fromkeys(first_ids, time.monotonic() + RECHECK_S)
        """When a topic is asked about (time.monotonic); one that is not there: now."""
        self._changed: dict[str, float] = {}
        """Since when Kafka tells another id of a topic."""
        self._silent: set[str] = set()
        self._asked: Mapping[str, Future[Any]] = {}
        self._due = 0.0

    def look(self, topics: Callable[[], set[str]]) -> list[MadeAgain]:
        """Take the answers that are there and ask what is due; return the topics made again.

        `topics`: those with noted ends, called about once a second. Waits only for the ids of new
        ones, and not long: so the record that notes their ends first has their ids.
        """
        now = time.monotonic()
        if now < self._due or not all(one.done() for one in self._asked.values()):
            return []
        self._due = now + _LOOK_S
        changed = self._take(now)
        wanted = topics()
        self.known = {topic: id_ for topic, id_ in self.known.items() if topic in wanted}
        self._next = {topic: due for topic, due in self._next.items() if topic in wanted}
        due = [topic for topic in wanted if self._next.get(topic, 0.0) <= now]
        self._asked = ask(self._admin, due[:ASKED_AT_ONCE])
        if self._asked.keys() - self.known.keys():
            wait(self._asked.values(), _PATIENCE_S)
            if all(one.done() for one in self._asked.values()):
                changed += self._take(now)
                self._asked = {}
        return changed

    def hurry(self) -> None:
        """Let the next look take place at once, whatever the interval says."""
        self._due = 0.0

    def _take(self, now: float) -> list[MadeAgain]:
        """Take the brokers' answers; return the topics that were made again.

        With several brokers, one may answer with stale metadata: a new id counts after STALE_S.
        """
        present = answers(self._asked)
        changed = {one.topic: one for one in made_again(self.known, present)}
        silent = self._asked.keys() - present.keys()
        _log_silent(silent - self._silent)
        self._silent = (self._silent - present.keys()) | silent
        self._next |= dict.fromkeys(self._asked, now + RECHECK_S) | dict.fromkeys(changed, now)
        self.known = present | self.known
        since = {topic: self._changed.get(topic, now) for topic in changed}
        self._changed = {at: t for at, t in self._changed.items() if at not in present} | since
        patience_s = STALE_S if self._brokers() > 1 else 0.0
        return [one for one in changed.values() if now - since[one.topic] >= patience_s]
