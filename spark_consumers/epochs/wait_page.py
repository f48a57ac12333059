"""The answers of GET /v1/wait of `slottables run` (services.runtime.wait_page): how far tables are.

    200 {"lsn", "in", "reached", "timeline", "parked"}  the record of epochs has all before the lsn

The tables have all before an LSN once an epoch's commit LSN is there or beyond. While the source
commits nothing more, no epoch comes: then the bridge's record of progress tells that Kafka has all
up to the LSN, and the tables have it once all that was in the transaction topic then is read.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from schemas.errors import SlotbridgeError
from schemas.events import transaction_topic
from schemas.lsn import format_lsn
from schemas.settings import KafkaSettings
from schemas.wait import WaitQuery, lost
from services.runtime.wait_page import Answer, WaitPage
from spark_consumers.kafka.progress import ProgressTail
from spark_consumers.kafka.reader import TopicOffsets

_ASK_S: Final = 0.25
"""How often all requests together look at Kafka's state."""
_FRESH_S: Final = 2.0
"""How long an answer of Kafka holds."""
_TIMELINE_S: Final = 2.0
"""How long an answer waits for Kafka to tell the timeline, if nothing else is missing."""


class TablesState:
    """How far the tables are: written by the run, read by the threads of requests."""

    def __init__(self) -> None:
        self.commit_lsn: int | None = None
        """The commit LSN of the last epoch, None while that is not known yet."""
        self.offset = 0
        """The tables have all transactions before this offset of the transaction topic."""
        self.parked: Mapping[str, Mapping[str, str]] = {}
        """Source table that stays behind -> has, refused_at, reason, remedy."""


class KafkaState(NamedTuple):
    """The last progress record: Kafka has all before `end_lsn`.

    These transactions lie before the offset `written` of the transaction topic. `history`: each
    ancestor of `timeline` -> the LSN at which it was left.
    """

    end_lsn: int
    timeline: int
    history: Mapping[int, int]
    written: int


class KafkaLook:
    """Asks Kafka how far the bridge is, for all requests together, in a thread of its own."""

    def __init__(self, kafka: KafkaSettings, slot: str | None) -> None:
        """Connect nowhere yet. `slot`: the bridge's; None: the last record of any slot counts."""
        self._kafka = kafka
        self._slot = slot
        self._lock = threading.Lock()
        self._topics: TopicOffsets | None = None
        self._tail: ProgressTail | None = None
        self._asked, self._asking = float("-inf"), False
        self._last: KafkaState | None = None
        self.failure = ""
        """Why Kafka could not be asked the last time, "" if it could."""

    def state(self) -> KafkaState | None:
        """Return Kafka's state when it was last asked, and ask again; None where it is unknown.

        Return at once: a request is not to wait for Kafka beyond its own time-out. What an earlier
        request was told may be of a primary that a failover has replaced since.
        """
        with self._lock:
            known_s = time.monotonic() - self._asked
            if known_s > _FRESH_S:
                self._last, self.failure = None, ""
            due = not self._asking and known_s >= _ASK_S
            self._asking |= due
            last = self._last
        if due:
            thread = threading.Thread(target=self._refresh, name="wait page", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads: the next request asks
                with self._lock:
                    self._asking = False
        return last

    def _refresh(self) -> None:
        """Ask Kafka, and keep its answer or the failure for all who wait."""
        found, failure = None, "internal error"
        try:
            found, failure = self._ask()
        finally:
            with self._lock:
                self._last, self.failure = found, failure
                self._asked, self._asking = time.monotonic(), False

    def _ask(self) -> tuple[KafkaState | None, str]:
        """Return what Kafka has of the slot, or None and why it is not known."""
        topic = transaction_topic(self._kafka.topic_prefix)
        try:
            if self._topics is None:
                self._topics = TopicOffsets(self._kafka)
            if self._tail is None:
                self._tail = ProgressTail(self._kafka, self._topics, self._slot)
            record = self._tail.last()
            # Asked after the record was read: all that it tells of was written before.
            written = self._topics.written({topic: (0,)})[topic][0]
        except SlotbridgeError as error:
            if self._tail is not None:
                self._tail.close()
            self._tail = None
            return None, error.message
        server = record.server
        state = KafkaState(record.position.end_lsn, server.timeline, server.history, written)
        return state, ""


def wait_page(tables: TablesState, kafka: KafkaLook) -> WaitPage:
    """Return the page of a run."""
    return WaitPage(
        "tables",
        lambda query: _Look(tables, kafka, query).answer,
        lambda query: _late(query, tables, kafka),
    )


class _Look:
    """The condition of one request: tables or Kafka at the LSN that it names."""

    def __init__(self, tables: TablesState, kafka: KafkaLook, query: WaitQuery) -> None:
        self._tables = tables
        self._kafka = kafka
        self._query = query
        self._answered_by = time.monotonic() + min(query.timeout_s, _TIMELINE_S)
        self._target: int | None = None

    def answer(self) -> Answer | None:
        """Return the answer that the present state allows, None for none yet."""
        query, kafka = self._query, self._kafka.state()
        if kafka is not None:
            why = lost(query, kafka.timeline, kafka.history)
            if why:
                return 409, {"error": why}
            if self._target is None and kafka.end_lsn >= query.lsn:
                self._target = kafka.written
        known = query.timeline is None or (kafka is not None and kafka.timeline >= query.timeline)
        asked = kafka is not None or self._kafka.failure or time.monotonic() >= self._answered_by
        if known and asked and _have(self._tables, query.lsn, self._target):
            return 200, _page(query, self._tables, kafka)
        return None


def _late(query: WaitQuery, tables: TablesState, kafka: KafkaLook) -> str:
    lsn = tables.commit_lsn
    where = "their state is not known yet" if lsn is None else f"at {format_lsn(max(0, lsn))}"
    failure = f"; Kafka could not be asked: {kafka.failure}" if kafka.failure else ""
    return f"the tables do not have {format_lsn(query.lsn)} yet: {where}{failure}"


def _have(tables: TablesState, lsn: int, target: int | None) -> bool:
    """Tell whether the tables have all that was committed before `lsn`.

    `target`: the offset before which its transactions lie, None where that is not known.
    """
    if tables.commit_lsn is None:
        return False
    return tables.commit_lsn >= lsn or (target is not None and tables.offset >= target)


def _page(query: WaitQuery, tables: TablesState, kafka: KafkaState | None) -> dict[str, Any]:
    return {
        "lsn": format_lsn(query.lsn),
        "in": "tables",
        "reached": format_lsn(max(0, tables.commit_lsn or 0)),
        "timeline": None if kafka is None else kafka.timeline,
        "parked": {name: dict(parked) for name, parked in tables.parked.items()},
    }
