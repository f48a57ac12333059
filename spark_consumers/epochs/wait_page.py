"""GET /v1/wait of `slottables run`: read your writes in the tables (slotbridge.consumer.wait_for).

    200 {"lsn", "in", "reached", "timeline", "parked"}  the record of epochs has all before the lsn
    400 405 {"error"}                                   wrong query, which the error names; not GET
    409 {"error"}                                       `timeline` was left before the lsn: lost
    503 {"error"}                                       WAITERS_MAX requests wait already
    504 {"error"}                                       the tables do not have it in time

The tables have all before an LSN once an epoch's commit LSN is there or beyond. While the source
commits nothing more, no epoch comes: then the bridge's record of progress tells that Kafka has all
up to the LSN, and the tables have it once all that was in the transaction topic then is read.
"""

import json
import select
import threading
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from schemas.errors import SlotbridgeError
from schemas.events import transaction_topic
from schemas.lsn import format_lsn
from schemas.settings import KafkaSettings
from schemas.wait import TOO_MANY, WAITERS_MAX, WaitQuery, lost, parse_wait
from spark_consumers.kafka.progress import ProgressTail
from spark_consumers.kafka.reader import TopicOffsets

PATH: Final = "/v1/wait"
_LOOK_S: Final = 0.05
_ASK_S: Final = 0.25
"""How often a request looks at the tables' state, and all of them at Kafka's."""
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
    ancestor of `timeline` -> the LSN at which it was left; None: not known.
    """

    end_lsn: int
    timeline: int
    history: Mapping[int, int] | None
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
        found, failure = None, "internal error"
        try:
            found, failure = self._ask()
        finally:
            with self._lock:
                self._last, self.failure = found, failure
                self._asked, self._asking = time.monotonic(), False

    def _ask(self) -> tuple[KafkaState | None, str]:
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
        return KafkaState(record.end_lsn, record.timeline, record.history, written), ""


class TablesWait:
    """The page, as a WSGI application."""

    def __init__(self, tables: TablesState, kafka: KafkaLook) -> None:
        self._tables = tables
        self._kafka = kafka
        self._lock = threading.Lock()
        self.waiters = 0
        """How many requests wait now."""

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        """Answer once the tables have what was committed before the LSN, or why they do not."""
        code, document = self._answer(environ)
        start(f"{code} {HTTPStatus(code).phrase}", [("Content-Type", "application/json")])
        return [json.dumps(document).encode()]

    def _answer(self, environ: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if environ.get("REQUEST_METHOD", "GET") != "GET":
            return 405, {"error": "only GET is answered"}
        text = environ.get("QUERY_STRING", "")
        try:
            query = parse_wait(dict(urllib.parse.parse_qsl(text, keep_blank_values=True)), "tables")
        except ValueError as error:
            return 400, {"error": str(error)}
        with self._lock:
            if self.waiters >= WAITERS_MAX:
                return 503, {"error": TOO_MANY}
            self.waiters += 1
        try:
            return self._wait(query, environ.get("wsgi.input"))
        finally:
            with self._lock:
                self.waiters -= 1

    def _wait(self, query: WaitQuery, client: Any) -> tuple[int, dict[str, Any]]:
        deadline = time.monotonic() + query.timeout_s
        told_by = min(deadline, time.monotonic() + _TIMELINE_S)
        target: int | None = None
        while True:
            kafka, tables = self._kafka.state(), self._tables
            if kafka is not None:
                why = lost(query, kafka.timeline, kafka.history)
                if why:
                    return 409, {"error": why}
                if target is None and kafka.end_lsn >= query.lsn:
                    target = kafka.written
            known = query.timeline is None or (
                kafka is not None and kafka.timeline >= query.timeline
            )
            asked = kafka is not None or self._kafka.failure or time.monotonic() >= told_by
            if known and asked and _have(tables, query.lsn, target):
                return 200, _told(query, tables, kafka)
            if time.monotonic() >= deadline:
                return 504, {"error": self._late(query)}
            if _gone(client):
                return 504, {"error": "the client is gone"}
            time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))

    def _late(self, query: WaitQuery) -> str:
        lsn = self._tables.commit_lsn
        where = "their state is not known yet" if lsn is None else f"at {format_lsn(max(0, lsn))}"
        failure = (
            f"; Kafka could not be asked: {self._kafka.failure}" if self._kafka.failure else ""
        )
        return f"the tables do not have {format_lsn(query.lsn)} yet: {where}{failure}"


def _have(tables: TablesState, lsn: int, target: int | None) -> bool:
    """Tell whether the tables have all that was committed before `lsn`.

    `target`: the offset before which its transactions lie, None where that is not known.
    """
    if tables.commit_lsn is None:
        return False
    return tables.commit_lsn >= lsn or (target is not None and tables.offset >= target)


def _told(query: WaitQuery, tables: TablesState, kafka: KafkaState | None) -> dict[str, Any]:
    return {
        "lsn": format_lsn(query.lsn),
        "in": "tables",
        "reached": format_lsn(max(0, tables.commit_lsn or 0)),
        "timeline": None if kafka is None else kafka.timeline,
        "parked": {name: dict(told) for name, told in tables.parked.items()},
    }


def _gone(client: Any) -> bool:
    """Tell whether the client has closed its connection. `client`: the request's input."""
    try:
        if not select.select([client], [], [], 0)[0]:
            return False
        return not client.peek(1)
    except (AttributeError, OSError, TypeError, ValueError):
        return False
