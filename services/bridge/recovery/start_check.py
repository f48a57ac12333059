"""All witnesses of what Kafka has, read at a start and compared (`ledger`, `consistency`)."""

import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import structlog

from schemas.errors import OperatorNeeded, Retryable, SlotbridgeError
from schemas.events import DivergenceRecord, divergence_topic, schema_topic, transaction_topic
from schemas.progress import ProgressRecord
from schemas.settings import BridgeSettings
from services.bridge.progress.consistency import (
    Witnesses,
    check_server,
    check_timeline,
    is_lost,
    unjudged,
)
from services.bridge.progress.errors import START_OVER, Diverged, NamesLost, disagreement
from services.bridge.progress.ledger import check_beginning, check_witnesses
from services.bridge.progress.wal_commit import (
    RECORD_BYTES,
    RECORD_BYTES_MIN,
    WalCommit,
    bytes_of_commit,
    commit_at,
    page_of,
)
from services.bridge.recovery.divergence import transactions_beyond, with_transactions
from services.bridge.recovery.visible_record import read_visible
from services.bridge.sink.leader_epochs import cut_off
from services.bridge.sink.partition_ends import Kept, check_names, check_tails
from services.bridge.sink.topics import Topics
from services.bridge.source.database import Primary
from services.bridge.source.replication_connection import ReplicationConnection
from services.kafka.records import READ_DEADLINE_S, parse_record

logger = structlog.get_logger(__name__)

_WRITTEN_WITH_EVENTS: Final = (transaction_topic, schema_topic)


class StartCheck:
    """Compares all witnesses for one session, as often as the start needs it.

    First `before_fencing`, which changes nothing anywhere; then, once no other bridge can write,
    `may_decide` for what hangs in Kafka, and `compare` for the last record.
    """

    def __init__(
        self,
        primary: Primary,
        connection: ReplicationConnection,
        topics: Topics,
        slot: str,
        bridge: BridgeSettings,
    ) -> None:
        self._primary = primary
        self._connection = connection
        self._topics = topics
        self._slot = slot
        self._bridge = bridge
        self._commits: dict[tuple[int, int], WalCommit | None] = {}
        self.accepted = bridge.acceptance

    @property
    def switch_points(self) -> dict[int, int]:
        """Each ancestor of the server's timeline -> the LSN at which it was left."""
        return self._connection.switch_points(self._primary.server.timeline)

    def before_fencing(self) -> None:
        """Check that the visible records may be of this server.

        A divergence that an operator has accepted passes here; `compare` raises it again.
        """
        visible = read_visible(self._topics, self._slot)
        records = [*([visible.record] if visible.record else []), *visible.hidden]
        if visible.others:
            raise self._several_slots(visible.others)
        seen = self.witnesses(visible.record)
        if visible.record is not None:
            self._may_be(check_server, visible.record, seen)
        elif not visible.hidden:
            self._check_beginning(seen)
        for hidden in visible.hidden:
            self._may_be(check_timeline, hidden, seen)
        self._require_no_repair(records)
        if visible.record is not None:  # before markers of ours lengthen what has lost its end
            self._check_tails(visible.record)

    def log_tokens(self) -> None:
        """Log what an operator has accepted, and the tokens that no refusal has asked for."""
        for token in sorted(map(str, self.accepted.used)):
            logger.warning("accepted by an operator", token=token, slot=self._slot)
        for token in self.accepted.unused:
            logger.warning(
                "not used: no refusal of this start asks for this token",
                token=token,
                slot=self._slot,
                hint="take it out of bridge.accept",
            )

    def _check_tails(self, record: ProgressRecord) -> Kept:
        look = partial(cut_off, self._topics.settings)
        return check_tails(self._topics, record, look, self.accepted)

    def require_names(self, record: ProgressRecord | None) -> None:
        """Raise NamesLost where Kafka has lost names of tables that settings hide; nothing else."""
        try:
            if record is None or not self._check_tails(record).ends:
                check_names(self._topics, self._slot, self.accepted)
        except NamesLost:
            raise
        except OperatorNeeded as error:
            logger.info("other records are lost", reason=error.message)

    def may_decide(self, record: ProgressRecord | None) -> None:
        """Raise where this server may not decide what hangs in Kafka after or with `record`."""
        if record is not None:
            self._may_be(check_timeline, record, self.witnesses())

    def _may_be(
        self,
        check: Callable[[ProgressRecord, Witnesses, str], None],
        record: ProgressRecord,
        seen: Witnesses,
    ) -> None:
        """Raise what `check` raises, but for a divergence that an operator has accepted."""
        try:
            check(record, seen, self._slot)
        except Diverged as error:
            if not self.accepted.takes(error.token):
                raise self._named(error, visible=True) from error

    def lost(self) -> Callable[[int, int], bool]:
        """Return a function of (timeline or 0, commit_lsn): whether the server lacks that event."""
        seen, topic = self.witnesses(), divergence_topic(self._topics.prefix)
        accepted: list[DivergenceRecord] = []
        if self._topics.there(topic):
            with self._topics.reader(topic) as reader:
                low, deadline = reader.bounds()[0], time.monotonic() + READ_DEADLINE_S
                accepted = [
                    parse_record(DivergenceRecord, topic, offset, value)
                    for offset, key, value in reader.between(low, reader.stable_end(), deadline)
                    if value is not None and key == self._slot.encode()
                ]
        return lambda timeline, commit_lsn: is_lost(timeline, commit_lsn, seen, accepted)

    def compare(self, record: ProgressRecord | None) -> Witnesses:
        """Return the witnesses if all of them agree with `record`, the last one.

        Raise what check_witnesses raises; a divergence names the transactions that are beyond.
        """
        seen = self.witnesses(record)
        if record is None:
            self._check_beginning(seen)
            return seen
        self._require_no_repair([record])
        try:
            check_witnesses(record, seen, self._slot)
        except Diverged as error:
            raise self._named(error) from error
        for what in unjudged(record, seen):
            logger.info("not judged: the progress record lacks it", what=what, slot=self._slot)
        return seen

    def witnesses(self, record: ProgressRecord | None = None) -> Witnesses:
        """Ask the server for its witnesses, also for the commit in its WAL that `record` notes."""
        system_identifier, timeline = self._connection.identify()
        server = self._primary.server
        if (system_identifier, timeline) != (server.system_identifier, server.timeline):
            raise Retryable("the server changed while connecting", operation="connect")
        wal_lsn = self._primary.wal_lsn()
        return Witnesses(
            slot=self._primary.slot(),
            origin_lsn=self._primary.origin_lsn(),
            former_lsn=self._primary.former_lsn(),
            witness=self._primary.kind_of_witness,
            server=server,
            switch_points=self.switch_points,
            wal_lsn=wal_lsn,
            selection=self._primary.selection(),
            accepted=self.accepted,
            commit=self._commit(record, wal_lsn) if record is not None else None,
        )

    def _commit(self, record: ProgressRecord, wal_lsn: int) -> WalCommit | None:
        """Return the WAL's commit at the record's `commit_lsn`, None if that is unknown."""
        lsn, timeline = record.position.commit_lsn, record.server.timeline
        own = timeline == self._primary.server.timeline
        end = wal_lsn if own else self.switch_points.get(timeline, 0)
        if not record.position.xid or lsn + RECORD_BYTES_MIN > end:
            return None
        if (timeline, lsn) not in self._commits:
            try:
                wal = self._read_wal(page_of(lsn), min(end, lsn + RECORD_BYTES), timeline)
                size = bytes_of_commit(wal, lsn)
                if size > len(wal):
                    wal = self._read_wal(page_of(lsn), min(end, page_of(lsn) + size), timeline)
            except SlotbridgeError as error:
                logger.info("not judged: the last commit in the server's WAL", reason=str(error))
                return None
            self._commits[timeline, lsn] = commit_at(wal, lsn)
        return self._commits[timeline, lsn]

    def _read_wal(self, start: int, stop: int, timeline: int) -> bytes:
        """Read WAL by a connection of its own. Raise Retryable where another server answers."""
        server = self._primary.server
        own = ReplicationConnection(
            self._primary.conninfo,
            self._slot,
            wal_sender_timeout_ms=self._bridge.wal_sender_timeout_ms,
            sql_deadline_ms=self._bridge.sql_deadline_ms,
            name="slotbridge: read WAL",
        )
        with contextlib.closing(own):
            if own.identify() != (server.system_identifier, server.timeline):
                raise Retryable("the server changed while connecting", operation="connect")
            return own.read_wal(start, stop, timeline)

    def _check_beginning(self, seen: Witnesses) -> None:
        """Require that nothing was published under this prefix and that the origin never moved."""
        check_beginning(seen, self._slot)
        for topic_of in _WRITTEN_WITH_EVENTS:
            topic = topic_of(self._topics.prefix)
            with self._topics.reader(topic) as reader:
                end = reader.bounds()[1]
            if end:
                raise disagreement(
                    f"{topic} has records, but Kafka has no progress record of this slot: the "
                    "progress topic is lost, or another slot has used this prefix",
                    self._slot,
                    None,
                    "use another kafka.topic_prefix, or delete all topics of this one first",
                )

    def _require_no_repair(self, records: Iterable[ProgressRecord]) -> None:
        """Raise where a repair has begun: the slot may be new, and tells nothing of Kafka then."""
        if any(record.repairing for record in records):
            raise disagreement(
                "`slotbridge recover` was interrupted: the slot may begin after changes that Kafka "
                "lacks",
                self._slot,
                None,
                "run `slotbridge recover` again",
            )

    def _several_slots(self, others: tuple[str, ...]) -> Exception:
        return disagreement(
            f"the topics of prefix {self._topics.prefix} belong to slot {', '.join(others)}",
            self._slot,
            None,
            "one prefix is for one slot: choose another kafka.topic_prefix for this slot. If the "
            f"other slot is gone for good, its prefix can't be used again either: {START_OVER}",
        )

    def _named(self, error: Diverged, *, visible: bool = False) -> Diverged:
        """Return `error` with the transactions beyond; `visible`: without waiting for open ones."""
        if error.switch_lsn is None:
            return error
        with self._topics.reader(transaction_topic(self._topics.prefix)) as reader:
            until = reader.stable_end() if visible else None
            beyond = transactions_beyond(reader, error.switch_lsn, until=until)
        return with_transactions(error, beyond)
