"""Whole source transactions from Kafka: the topics, partition by partition, put together."""

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from confluent_kafka import Message

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SlotbridgeError
from schemas.events import (
    SETTLING_KEY_PREFIX,
    dead_topic,
    divergence_topic,
    legal_topic,
    progress_topic,
    transaction_topic,
)
from slotbridge.consumer.assembly import Assembly, Change, End, Refused, Transaction
from slotbridge.consumer.partitions import Options, Partitions, removed
from slotbridge.consumer.position import OPERATION, Partition, Position, lsn_of
from slotbridge.consumer.records import (
    RecordPlace,
    divergence,
    foreign,
    parse_document,
    row_event,
    whole_number,
)

_POLL_S: Final = 0.2
_HELD_MAX: Final = 20_000
"""Records of one partition beyond the next transaction, before it is held back."""
_STALLED_S: Final = 10.0
"""After this time without progress no partition of a table that lacks events is held back."""
_PROGRESS_TAIL: Final = 4_000
_LOOK_S: Final = 1.0
_LOOK_IDLE_S: Final = 5.0
_LOOK_SOON_S: Final = 0.1
"""How often new partitions are looked for: where events are missing, else, and at first."""


class Transactions:
    """Yields transactions in commit order, each whole; a context manager. For one thread."""

    def __init__(
        self,
        bootstrap_servers: str,
        prefix: str,
        *,
        position: Position | None = None,
        until: str | int | None = None,
        tables: Collection[str] | None = None,
        topics: Mapping[str, str] | None = None,
        options: Options | None = None,
        patience_s: float = 120.0,
    ) -> None:
        """Read the topics of `prefix`, on from `position`; None: from their beginning.

        until: an LSN; the last transaction is that which commits there or before. tables: the
        `schema.table` to read; None: all. Transactions without their events come too, with none.
        topics: `schema.table` -> its topic, where `shaping.routes` gives it another than
        `prefix.schema.table`. options: of librdkafka, such as for security. patience_s: how long
        nothing may come of what Kafka must have.
        """
        self._prefix = prefix
        self._tables = None if tables is None else frozenset(tables)
        self._routes = dict(topics or {})
        self._patience_s = patience_s
        self._ends_at: Partition = (transaction_topic(prefix), 0)
        self._dead = dead_topic(prefix)
        self._divergence_at: Partition = (divergence_topic(prefix), 0)
        self._progress_at: Partition = (progress_topic(prefix), 0)
        self._begun = position or Position()
        self._until = None if until is None else lsn_of(until)
        self._written: int | None = None
        """The end of the transaction topic when Kafka had all up to `until`."""
        self.done = False
        """Whether all transactions up to `until` were given."""
        self._assembly = Assembly(self._begun, self._ends_at)
        self._looked = 0.0
        self._unplaced = False
        """Whether Kafka could not tell where a partition begins."""
        self._progress, self._waited_s = 0, 0.0
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._partitions = Partitions(bootstrap_servers, options or {}, self._passed)

    def __enter__(self) -> "Transactions":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Transaction]:
        """Yield transactions until `stop` is called, or `until` is reached. Raise as `read`."""
        while not (self._closing.is_set() or self.done):
            found = self.read(_POLL_S)
            if found is not None:
                yield found

    @property
    def position(self) -> Position:
        """The position after the last transaction that was given.

        Its offsets move on also while nothing comes: store it at times where a topic's retention
        is shorter than a pause of the source. Raise as `read` after an error.
        """
        self._require_whole()
        return self._assembly.position()

    def stop(self) -> None:
        """End the iteration and `read` soon, from any thread."""
        self._closing.set()

    def close(self) -> None:
        """Disconnect. What was not stored comes again to the next reader."""
        self._closing.set()
        self._partitions.close()

    def read(self, timeout_s: float) -> Transaction | None:
        """Return the next transaction, None where none is whole within `timeout_s`.

        Raise Retryable where Kafka does not answer, or brings nothing for `patience_s` of what it
        must have; OperatorNeeded where Kafka has removed what was not read, or has transactions
        that the database lost; BadInput for a record that is not the bridge's or not in JSON.
        After an error, this reader raises it again: begin another one at the stored position.
        """
        self._require_whole()
        now = time.monotonic()
        deadline = now + timeout_s
        try:
            while not self._closing.is_set():
                found = self._give()
                if found is not None or self.done:
                    return found
                self._look(now)
                for message in self._partitions.records(min(_POLL_S, max(0.0, deadline - now))):
                    self._take(message)
                before, now = now, time.monotonic()
                # What is missing may be among what has come already.
                self._be_patient(0.0 if self._partitions.backlog else now - before)
                self._hold_back()
                if now >= deadline:
                    return self._give()
        except BaseException as error:  # records that came with it are lost to this reader
            self._failure = error
            raise
        return None

    def _require_whole(self) -> None:
        """Raise again what has ended an earlier `read`: this reader may lack records since."""
        if isinstance(self._failure, SlotbridgeError):
            raise self._failure
        if self._failure is not None:
            raise OperatorNeeded(
                f"an earlier read of this reader was ended by {type(self._failure).__name__}",
                operation=OPERATION,
                subject=f"prefix {self._prefix}",
                hint="begin another reader at the stored position",
            ) from self._failure

    def _give(self) -> Transaction | None:
        """Return the next transaction if it is whole, and not after `until`."""
        if self._until is not None:
            first = self._assembly.first
            if first is not None:
                self.done = first.commit_lsn > self._until
            elif self._written is not None:
                self.done = self._assembly.read_to(self._ends_at) >= self._written
            self.done |= self._assembly.commit_lsn >= self._until
            if self.done:
                return None
        return self._assembly.give()

    def _be_patient(self, waited_s: float) -> None:
        """Count the time without progress while something is missing. Raise once it is too long."""
        if self._assembly.progress != self._progress or not self._assembly.waits:
            self._progress, self._waited_s = self._assembly.progress, 0.0
            return
        self._waited_s += waited_s
        if self._waited_s > self._patience_s:
            endless = self._assembly.endless
            bounds = None if endless is None else self._partitions.bounds(self._ends_at)
            if bounds is None or self._assembly.read_to(self._ends_at) < bounds[1]:
                raise self._missing()
            raise self._assembly.no_end(endless or 0)

    def _look(self, now: float) -> None:
        """Begin to read partitions that are new: at first, and where something is missing."""
        known = {topic for topic, _ in self._partitions.assigned}
        lacking = self._lacking_topics()
        pause_s = _LOOK_S if lacking else _LOOK_IDLE_S
        if self._unplaced or not known or not lacking <= known:
            pause_s = _LOOK_SOON_S
        if now - self._looked < pause_s:
            return
        self._looked = now
        wanted = known | lacking | {self._ends_at[0], self._dead, self._divergence_at[0]}
        wanted |= {topic for topic, _ in self._begun.offsets}
        if self._until is not None:
            wanted.add(self._progress_at[0])
        starts: dict[Partition, int] = {}
        self._unplaced = False
        for topic in sorted(wanted):
            found = self._partitions.find(topic)
            for one in (one for one in found if one not in self._partitions.assigned):
                start = self._start(one)
                if start is None:
                    self._unplaced = True
                else:
                    starts[one] = start
            if topic == self._divergence_at[0] and not found:
                self._assembly.passed(self._divergence_at, -1)  # all of it will be new
        self._partitions.add(starts)

    def _start(self, partition: Partition) -> int | None:
        """Return where reading a partition begins: where it was left, or at its first record.

        None where Kafka can't tell now.
        """
        bounds = self._partitions.bounds(partition)
        if bounds is None:
            return None
        low, high = bounds
        if partition == self._progress_at:
            return max(low, high - _PROGRESS_TAIL)
        known = self._begun.offsets.get(partition)
        if known is None:
            return low
        if low > known:
            raise removed(partition[0])
        return known

    def _passed(self, partition: Partition, offset: int) -> None:
        """Note that a partition was read beyond `offset`; positions leave out that of progress."""
        if partition != self._progress_at:
            self._assembly.passed(partition, offset)

    def _hold_back(self) -> None:
        """Pause partitions that are far ahead of the next transaction."""
        far = {one for one in self._partitions.assigned if self._assembly.ahead(one, _HELD_MAX)}
        if self._waited_s > _STALLED_S:
            needed = {*self._lacking_topics(), self._dead}
            far = {one for one in far if one[0] not in needed}
        self._partitions.hold_back(far)

    def _take(self, message: Message) -> None:
        """Take a record as its topic says. Raise BadInput for one that is not the bridge's."""
        partition = (message.topic() or "", message.partition() or 0)
        at = RecordPlace(partition, message.offset() or 0)
        value, key = message.value(), message.key()
        if value is None or (key or b"")[: len(SETTLING_KEY_PREFIX)] == SETTLING_KEY_PREFIX:
            self._passed(partition, at.offset)
            return
        document = parse_document(value, at)
        try:
            if partition == self._ends_at:
                self._take_end(document, at)
            elif partition[0] == self._dead:
                self._take_dead(document, at)
            elif partition == self._divergence_at:
                self._take_divergence(document, at)
            elif partition == self._progress_at:
                self._take_progress(document)
            else:
                self._take_event(document, key, at)
        except (AttributeError, KeyError, TypeError) as error:
            raise foreign(at) from error

    def _take_end(self, document: Mapping[str, Any], at: RecordPlace) -> None:
        """Take an END with its counts of the chosen tables; pass one from before the position."""
        # Debezium's, from before an adoption, have no commit_lsn: their events neither.
        if document["status"] != "END" or "commit_lsn" not in document:
            self._assembly.passed(at.partition, at.offset)
            return
        lsn, begun = whole_number(document["commit_lsn"]), self._ends_at in self._begun.offsets
        if not begun and not self._assembly.any_end and lsn <= self._begun.commit_lsn:
            self._assembly.passed(at.partition, at.offset)
            return
        counts = {
            one["data_collection"]: whole_number(one["event_count"])
            for one in document["data_collections"]
            if self._chosen(one["data_collection"])
        }
        self._assembly.take_end(
            End(document["id"], lsn, whole_number(document["ts_ms"]), counts, at.offset)
        )

    def _take_dead(self, document: Mapping[str, Any], at: RecordPlace) -> None:
        """Take a dead letter in place of the event that Kafka refused."""
        refused = Refused(document["table"], whole_number(document["seq"]))
        # A logical message, which belongs to no table, may be outside of any transaction.
        if document["value"] is None or not refused.table or not self._chosen(refused.table):
            self._assembly.passed(at.partition, at.offset)
        else:
            commit_lsn = whole_number(document["commit_lsn"])
            self._assembly.take(at.partition, at.offset, commit_lsn, refused)

    def _take_event(
        self, document: Mapping[str, Any], key: bytes | str | None, at: RecordPlace
    ) -> None:
        """Take a row's event if its table is chosen."""
        event = row_event(document, at)
        if not self._chosen(event.table):
            self._assembly.passed(at.partition, at.offset, event.commit_lsn)
            return
        parsed = None if key is None else parse_document(key, at, "key")
        change = Change(event.table, event.seq, parsed, document)
        self._assembly.take(at.partition, at.offset, event.commit_lsn, change)

    def _take_divergence(self, document: Mapping[str, Any], at: RecordPlace) -> None:
        """Refuse transactions that never happened, if this reader gives them or has given them."""
        found = divergence(document, at)
        self._assembly.passed(at.partition, at.offset)
        known = at.partition in self._begun.offsets
        if known or self._begun.commit_lsn < found.reached_lsn:
            raise OperatorNeeded(
                f"Kafka has {found.count} transactions of timeline {found.lost_timeline} that the "
                "database lost at a failover: a copy made of these topics would contain them",
                operation=OPERATION,
                subject=str(at),
                lsn=found.switch_lsn,
                hint="begin anew, after what was lost: Position.after(LSN) of a copy that you "
                "have otherwise (docs/guides/consumers.md, Where a reader begins)",
            )

    def _take_progress(self, document: Mapping[str, Any]) -> None:
        """Note the end of the transaction topic once Kafka has all that commits up to `until`."""
        if (
            self._until is not None
            and whole_number(document["end_lsn"]) > self._until
            and self._written is None
        ):
            bounds = self._partitions.bounds(self._ends_at)
            self._written = None if bounds is None else bounds[1]

    def _lacking_topics(self) -> set[str]:
        return {self._topic(table) for table in self._assembly.lacking()}

    def _chosen(self, table: str) -> bool:
        return self._tables is None or table in self._tables

    def _topic(self, table: str) -> str:
        return self._routes.get(table) or legal_topic(f"{self._prefix}.{table}")

    def _missing(self) -> Retryable:
        """Return the error of a transaction that did not become whole in time."""
        end = self._assembly.first
        lacking = ", ".join(self._assembly.lacking())
        what = f"all events of {lacking}" if lacking else "the END of a transaction"
        return Retryable(
            f"Kafka did not deliver {what}, and nothing of that for {self._patience_s:.0f} s",
            operation=OPERATION,
            subject=f"prefix {self._prefix}",
            lsn=end.commit_lsn if end is not None else None,
            hint="name the topics of routed tables by `topics`, and the tables that have topics by "
            "`tables`: an outbox has none; else retention or compaction has removed the events",
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )
