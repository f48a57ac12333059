"""Reads `<prefix>.transaction`: which transactions there are, in commit order, and their counts.

This is where epochs are cut: always just after an END, so always between two transactions.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import Consumer, TopicPartition

from schemas.errors import BadInput, ExitCode, OperatorNeeded, SetupError
from schemas.events import transaction_topic
from schemas.settings import KafkaSettings
from spark_consumers.kafka.following import Record, consumer, taken
from spark_consumers.kafka.reader import Topics

_MANY = 20_000
_POLL_S = 0.02
_READ_S = 1.0
_KEPT_MAX = 50_000


@dataclass(slots=True)
class Cut:
    """The transactions after the last epoch, up to and with the one of `commit_lsn`.

    `offset` is the first in the topic after them; `read_ms` Kafka's time stamp of the last END,
    `ts_ms` its commit time; `counts` their events by followed table.
    """

    commit_lsn: int
    offset: int
    read_ms: int = 0
    ts_ms: int = 0
    transactions: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class TransactionLog:
    """Gives the transactions of a prefix once, in commit order."""

    def __init__(
        self,
        kafka: KafkaSettings,
        topics: Topics,
        follows: Callable[[str], bool],
        offset: int | None,
        after_lsn: int,
    ) -> None:
        """Begin at `offset` (None: at the first), leaving out what is not after `after_lsn`."""
        self._topic = transaction_topic(kafka.topic_prefix)
        self._kafka = kafka
        self._topics = topics
        self._follows = follows
        self._offset = offset
        self._after_lsn = after_lsn
        self._consumer: Consumer | None = None
        self._ends: list[tuple[int, int, int, int, Counter[str]]] = []
        self._names: dict[str, bool] = {}

    def close(self) -> None:
        """Close the connections to the broker."""
        if self._consumer is not None:
            self._consumer.close()

    def read(self) -> bool:
        """Take in what has come up to the end that the topic has now; whether a transaction is
        there. What comes while it reads is left to the next call: transactions that come steadily
        must not keep an epoch from beginning. A backlog is read for up to _READ_S seconds."""
        if self._consumer is None and not self._open():
            return False
        assert self._consumer is not None
        deadline = time.monotonic() + _READ_S
        ended = False
        while not ended and len(self._ends) < _KEPT_MAX and time.monotonic() < deadline:
            messages = self._consumer.consume(_MANY, timeout=_POLL_S)
            ended = not messages
            for message in messages:
                record = taken(message, self._topic)
                if isinstance(record, Record):
                    self._take(record)
                elif record is not None:
                    ended = True  # the end of the partition
        return bool(self._ends)

    def cut(self, events_max: int, before_lsn: int | None = None) -> Cut | None:
        """Up to `events_max` events of followed tables, at least one transaction; None without any.

        It ends with a transaction that has such events, so that `upto` finds the same cut again.
        `before_lsn`: end before the transaction that commits there, unless it is the first.
        """
        found: Cut | None = None
        events = 0
        for offset, lsn, read_ms, ts_ms, counts in self._ends:
            if not counts:
                continue
            events += counts.total()
            past = before_lsn is not None and lsn >= before_lsn
            if found is not None and (events > events_max or past):
                break
            found = found or Cut(lsn, offset)
            self._add(found, offset, lsn, read_ms, ts_ms, counts)
        return found

    def upto(self, commit_lsn: int, deadline_s: float) -> Cut:
        """Exactly the transactions up to `commit_lsn`; raises OperatorNeeded without them."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            self.read()
            if any(end[1] >= commit_lsn for end in self._ends):
                break
        found = Cut(commit_lsn, 0)
        for offset, lsn, read_ms, ts_ms, counts in self._ends:
            if lsn <= commit_lsn:
                self._add(found, offset, lsn, read_ms, ts_ms, counts)
        if not found.transactions or found.commit_lsn != commit_lsn:
            raise OperatorNeeded(
                "Kafka lacks transactions that a table has already taken",
                operation="go on with an epoch",
                subject=self._topic,
                lsn=commit_lsn,
                hint="the topics were made anew or their retention was too short: "
                "rebuild the tables",
            )
        return found

    def waiting(self) -> tuple[int, int]:
        """Of the transactions that wait: the first one's commit time (ms since 1970), and the last
        one's commit LSN; zeros when none waits."""
        own = [end for end in self._ends if end[4]]
        return (own[0][3], own[-1][1]) if own else (0, 0)

    def done(self, cut: Cut) -> None:
        """Forget the transactions up to `cut`."""
        self._ends = [end for end in self._ends if end[1] > cut.commit_lsn]
        self._after_lsn = max(self._after_lsn, cut.commit_lsn)

    @staticmethod
    def _add(
        cut: Cut, offset: int, lsn: int, read_ms: int, ts_ms: int, counts: Counter[str]
    ) -> None:
        cut.commit_lsn, cut.offset = lsn, offset + 1
        cut.read_ms, cut.ts_ms = max(cut.read_ms, read_ms), max(cut.ts_ms, ts_ms)
        cut.transactions += 1
        cut.counts.update(counts)

    def _open(self) -> bool:
        self._topics.refresh()
        partitions = self._topics.partitions(self._topic)
        if not partitions:
            return False
        if partitions != (0,):
            raise SetupError(
                f"the topic has {len(partitions)} partitions, so its order is lost",
                operation="read transactions",
                subject=self._topic,
                hint="delete the topic and let the bridge create it",
            )
        offset = self._offset
        if offset is None:
            offset = self._topics.first({self._topic: (0,)})[self._topic][0]
        self._consumer = consumer(self._kafka)
        self._consumer.assign([TopicPartition(self._topic, 0, offset)])
        return True

    def _take(self, record: Record) -> None:
        if record.value is None:  # what ends a transaction that hangs means nothing
            return
        try:
            event = json.loads(record.value)
            if event["status"] == "BEGIN":
                return
            lsn, ts_ms = int(event["commit_lsn"]), int(event["ts_ms"])
            collections = [
                (str(c["data_collection"]), int(c["event_count"]))
                for c in event["data_collections"] or ()
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(
                "the record is not the END of a transaction",
                operation="read transactions",
                subject=f"{self._topic}, partition 0, offset {record.offset}",
                hint="only the bridge may write to its topics",
                exit_code=ExitCode.RECORD_REFUSED,
            ) from error
        last_lsn = self._ends[-1][1] if self._ends else self._after_lsn
        if lsn <= last_lsn:  # what the tables have, or a transaction that was written twice
            return
        counts = Counter({name: n for name, n in collections if self._followed(name)})
        if not counts and self._ends and not self._ends[-1][4]:
            self._ends.pop()  # of many that bring nothing, the last says it all
        self._ends.append((record.offset, lsn, record.ts_ms, ts_ms, counts))

    def _followed(self, name: str) -> bool:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = self._follows(name)
        return known
