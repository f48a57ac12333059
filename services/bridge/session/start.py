"""Opens a session: all witnesses agree where Kafka is, and the slot streams from there.

    probe hosts -> own the origin -> compare visible records -> fence in Kafka -> end what hangs
    -> read progress -> compare witnesses -> note what is new of the server -> START_REPLICATION

The origin is owned first, so that a second bridge waits and fences nobody. Nothing is done in Kafka
before the server is shown to be the right one.
"""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import structlog

from schemas.errors import OperatorNeeded
from schemas.events import PreparedRecord, prepared_topic
from schemas.lsn import format_lsn
from schemas.progress import ProgressRecord
from schemas.registry import RegistrySettings
from schemas.snapshot import SnapshotSettings
from services.bridge import compiled, metrics
from services.bridge.events.envelope import Envelope
from services.bridge.events.formats.table_format import Formats, encoders_for
from services.bridge.events.relations import Relations, warn_of_unmatched
from services.bridge.events.shaping.tables import Shaping
from services.bridge.events.topic_owners import TopicOwners
from services.bridge.events.values.encoders import Encoders
from services.bridge.failpoints import reach
from services.bridge.hanging import settle_all
from services.bridge.progress.consistency import Witnesses
from services.bridge.progress.errors import Diverged
from services.bridge.progress.ledger import Ledger, Position, resume_at
from services.bridge.recovery.accept_divergence import accept
from services.bridge.recovery.placement import placement_of
from services.bridge.recovery.resume_record import Records
from services.bridge.recovery.staged_transactions import load_staged
from services.bridge.recovery.start_check import StartCheck
from services.bridge.session.liveness import Liveness
from services.bridge.session.session import Parts, Session
from services.bridge.session.settings import SessionSettings
from services.bridge.session.start_checks import check_settings, warn_of_compacted
from services.bridge.sink.claim_checks import ClaimChecks, open_claim_checks, storage_id_of
from services.bridge.sink.cloud_events import events_of
from services.bridge.sink.dead_letters import Refused
from services.bridge.sink.group_commit import GroupCommit
from services.bridge.sink.last_keys import last_key
from services.bridge.sink.table_names import noted_names
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.snapshot.progress import Owner
from services.bridge.snapshot.session_snapshot import open_snapshot
from services.bridge.snapshot.slot_creation import first_slot
from services.bridge.snapshot.snapshotter import Snapshotter
from services.bridge.source.database import Primary
from services.bridge.source.heartbeat import Heartbeat
from services.bridge.source.newer_primary import NewerPrimary
from services.bridge.source.publication_reader import warn_of_differences
from services.bridge.source.replication_connection import ReplicationConnection
from services.bridge.source.standby_status import StandbyStatus
from services.bridge.transactions.assembler import Assembler
from services.bridge.transactions.pipeline import Pipeline
from services.bridge.transactions.spool import Spool, SpoolFull, prepared_exceed_spool
from services.kafka.schema_registry import SchemaRegistry
from services.waiter import Waiter

logger = structlog.get_logger(__name__)


class _Agreed(NamedTuple):
    """The state that a session goes on from, on which all witnesses agree."""

    record: ProgressRecord
    seen: Witnesses
    records: Records
    heartbeat: Heartbeat


class _Encoding(NamedTuple):
    """The encoders of events, for changes and for rows of a snapshot alike."""

    shaping: Shaping
    encoders: Encoders
    relations: Relations
    envelope: Envelope


def open_session(
    settings: SessionSettings, refused: Refused, registry: RegistrySettings | None = None
) -> Session:
    """Connect, compare the witnesses and start streaming. Raise SlotbridgeError."""
    with contextlib.ExitStack() as resources:
        try:
            parts = _Opening(settings, resources).open(refused, registry)
        except BaseException:
            reach("closing")
            raise
        return Session(parts, resources.pop_all())


class _Opening:
    """The steps that open a session. `resources` closes whatever they open."""

    def __init__(self, settings: SessionSettings, resources: contextlib.ExitStack) -> None:
        self._settings = settings
        self._source, self._kafka, self._bridge = settings[:3]
        self._slot, self._prefix = self._source.slot, self._kafka.topic_prefix
        self._resources = resources
        self._shaping = Shaping(settings.shaping, self._prefix)
        self._waiter = Waiter()
        """Of what waits for Kafka or SQL: the server is answered, once it streams."""
        self._standstill = Waiter()
        """Of what the stream stands still for: Kafka transactions are ended and begun, too."""
        self._claim_checks: ClaimChecks | None = None
        compare = partial(warn_of_differences, source=self._source, shaping=settings.shaping)
        self._compare = partial(compare, prefix=self._prefix, logged=set())

    def open(self, refused: Refused, settings: RegistrySettings | None) -> Parts:
        """Perform all steps in their order; return the parts of the session."""
        registry = None if settings is None else SchemaRegistry(settings, self._waiter)
        if registry is not None:
            self._resources.callback(registry.close)
            registry.require()
        large, shaping = self._settings.claim_check, self._settings.shaping
        self._claim_checks = open_claim_checks(large, shaping, self._resources, self._standstill)
        primary = self._own_origin()
        topics = Topics(self._kafka, self._settings.shaping, self._waiter)
        topics.schema_text = registry.schema_text if registry is not None else None
        topics.prepare()
        topics.check_clocks(primary.clock_ms())
        reach("topics ready")
        connection = self._connect(primary)
        check = StartCheck(primary, connection, topics, self._slot, self._bridge)
        try:
            check.before_fencing()
            primary.establish()
            reach("shown")
            producer = self._fence(topics, refused)
            agreed = self._agree(check, topics, primary, connection, producer)
        except OperatorNeeded:
            check.log_tokens()
            raise
        check.log_tokens()
        return self._build(primary, topics, connection, producer, agreed, registry)

    def _own_origin(self) -> Primary:
        """Open the SQL session on the primary, which owns the origin while it lasts."""
        primary = Primary(
            self._source,
            self._waiter,
            sql_deadline_ms=self._bridge.sql_deadline_ms,
            idle_timeout_ms=self._bridge.origin_idle_timeout_ms,
        )
        self._resources.callback(primary.close)
        primary.prepare()
        reach("owned")
        return primary

    def _connect(self, primary: Primary) -> ReplicationConnection:
        connection = ReplicationConnection(
            primary.conninfo,
            self._slot,
            wal_sender_timeout_ms=self._bridge.wal_sender_timeout_ms,
            sql_deadline_ms=self._bridge.sql_deadline_ms,
        )
        self._resources.callback(connection.close)
        return connection

    def _fence(self, topics: Topics, refused: Refused) -> TransactionalProducer:
        """Make the producer; no other bridge of this slot can write to Kafka any more."""
        producer = TransactionalProducer(self._kafka, self._bridge, topics, self._slot, refused)
        self._resources.callback(producer.abandon)
        producer.begin_session()
        reach("fenced")
        return producer

    def _agree(
        self,
        check: StartCheck,
        topics: Topics,
        primary: Primary,
        connection: ReplicationConnection,
        producer: TransactionalProducer,
    ) -> _Agreed:
        """End hanging transactions; return the record to go on from, if all witnesses agree."""
        settle_all(topics, producer, primary, self._slot, check)
        record = topics.last_progress(self._slot)
        snapshot = self._snapshot_settings(record)
        producer.follow(record, check.accepted)
        storage_id = storage_id_of(self._claim_checks, record, check.accepted)
        try:
            seen = check.compare(record)
        except Diverged as error:
            points = check.switch_points
            record = accept(error, record, check.accepted, primary, points, producer, topics)
            seen = check.compare(record)
        reach("agreed")
        heartbeat = Heartbeat(
            self._slot,
            interval_ms=self._bridge.heartbeat_interval_ms,
            patience_ms=self._bridge.connect_deadline_ms,
        )
        heartbeat.compare = self._compare
        placement = placement_of(self._settings.shaping, self._bridge, self._kafka)
        publication = self._source.publication
        check_settings(self._shaping, primary, publication, topics, record, placement)
        records = Records(
            self._slot, heartbeat, seen, placement, storage_id, reads_rows=snapshot.reads_all
        )
        make_first = partial(
            first_slot,
            primary,
            connection,
            topics,
            self._source,
            snapshot,
            deadline_s=self._bridge.sql_deadline_ms / 1000,
        )
        record = records.resume(record, primary, producer, make_first)
        return _Agreed(record, seen, records, heartbeat)

    def _snapshot_settings(self, record: ProgressRecord | None) -> SnapshotSettings:
        """Return the snapshot's settings with the mode that is in effect."""
        given = self._settings.snapshot
        snapshot = given.in_effect(reads_rows=record is None or record.settings.reads_rows)
        if given.mode is None and not snapshot.reads_all:
            logger.info(
                "rows from before the slot are not sent: this topic prefix began without them",
                hint="snapshot.mode: initial sends them now, never says that none are wanted",
            )
        self._settings = self._settings._replace(snapshot=snapshot)
        return snapshot

    def _build(
        self,
        primary: Primary,
        topics: Topics,
        connection: ReplicationConnection,
        producer: TransactionalProducer,
        agreed: _Agreed,
        registry: SchemaRegistry | None,
    ) -> Parts:
        """Build what encodes, sends and commits; start the stream."""
        record, heartbeat, timeline = agreed.record, agreed.heartbeat, agreed.records.timeline
        start = resume_at(record, agreed.seen.slot)
        position = record.position
        ledger = Ledger(start, position.end_lsn, position.ahead_lsn)
        standby_status = StandbyStatus(
            connection,
            ledger,
            wal_sender_timeout_ms=self._bridge.wal_sender_timeout_ms,
            subject=f"slot {self._slot}",
        )
        self._table_names = noted_names(topics, self._shaping.naming, primary.server, make=True)
        group_commit = self._grouping()(
            producer,
            self._bridge,
            standby_status,
            heartbeat,
            agreed.records.at,
            ledger,
            record,
            subject=f"slot {self._slot}",
            events_of=events_of(self._kafka, registry.url if registry else "", timeline),
            claim_checks=self._claim_checks,
            table_names=self._table_names,
        )
        self._resources.callback(group_commit.close)
        newer_primary = NewerPrimary(self._source, primary.server)
        self._resources.callback(newer_primary.close)
        liveness = Liveness(primary, ledger, standby_status, heartbeat, group_commit, newer_primary)
        self._standstill.work = liveness.commit_and_tick
        encoding = self._encoding(primary, topics, registry, timeline)
        snapshot = None
        if self._settings.snapshot.mode != "never":
            owner = self._owner(agreed, start.end_lsn)
            snapshot = self._open_snapshot(primary, topics, owner, encoding, group_commit)
        spool = self._open_spool(heartbeat)
        bytes_max = self._bridge.transaction_bytes_max
        pipeline = Pipeline(
            spool,
            Assembler(encoding.envelope, start, bytes_max, position.counts, encoding.shaping),
            emit=group_commit.take if snapshot is None else snapshot.emit,
            waiter=Waiter(liveness.tick),
            prepared_topic=prepared_topic(self._prefix),
            slot=self._slot,
            staged=self._load_staged(topics, spool),
        )
        self._start(connection, primary, start, standby_status)
        self._announce(start, primary, timeline)
        return Parts(
            primary,
            connection,
            ledger,
            standby_status,
            heartbeat,
            group_commit,
            liveness,
            pipeline,
            snapshot,
            agreed.seen.switch_points,
        )

    def _owner(self, agreed: _Agreed, lsn: int) -> Owner:
        """Return whose snapshot is read, from a slot whose stream begins at `lsn`."""
        owner = Owner(self._slot, agreed.records.timeline, lsn, agreed.seen.switch_points)
        if self._settings.snapshot.mode != "always":
            return owner
        since_lsn = self._settings.rows_since_lsn
        return owner._replace(since_lsn=lsn if since_lsn is None else since_lsn)

    def _grouping(self) -> Callable[..., GroupCommit]:
        if self._settings.spans is None:
            return GroupCommit
        from services.bridge.sink.traced_commit import TracedGroupCommit  # only with tracing

        return partial(TracedGroupCommit, self._settings.spans, self._prefix)

    def _compare_publication(self, primary: Primary, topics: Topics) -> None:
        if not primary.ask("compare the publication with the settings", self._compare):
            logger.info("not judged: whether the publication is as the settings say")
        publication, servers = self._source.publication, self._kafka.bootstrap_servers
        warn_of_compacted(self._shaping.naming, primary, publication, topics, servers)

    def _encoding(
        self, primary: Primary, topics: Topics, registry: SchemaRegistry | None, timeline: int
    ) -> _Encoding:
        """Return what makes events of changes. Raise for tables that the settings do not fit."""
        shaping = self._shaping
        if self._settings.rows_since_lsn is None:  # the first session: a failover does not wait
            self._compare_publication(primary, topics)
        warn_of_unmatched(shaping, primary)
        encoders = encoders_for(self._kafka)(self._bridge, money_digits=primary.money_digits())
        apart = self._kafka.key_bytes == "connect"
        owners = TopicOwners(shaping.naming, topics.shapes(), apart=apart)
        owners.require_apart(primary.published() if apart and not topics.shapes() else ())
        relations = Relations(
            self._prefix,
            primary,
            topics.shapes(),
            shaping,
            encoders,
            Formats(
                self._kafka,
                shaping.naming,
                encoders,
                registry,
                last_key=partial(last_key, topics),
            ),
            owners=owners,
            deposit=None if self._claim_checks is None else self._claim_checks.deposit,
            table_names=self._table_names,
        )
        if self._table_names is not None:  # a session that refuses a table at once leaves its name
            self._table_names.write(0)
        envelope = Envelope(
            self._prefix,
            primary.server.database,
            timeline,
            relations.describe,
            tombstones=self._bridge.tombstones,
            transaction_metadata=self._bridge.transaction_metadata,
            encoders=encoders,
            flat=shaping.flat,
            outbox_messages=shaping.outbox_messages,
            dead_rows=self._bridge.on_refused == "dead_letter",
        )
        return _Encoding(shaping, encoders, relations, envelope)

    def _open_snapshot(
        self,
        primary: Primary,
        topics: Topics,
        owner: Owner,
        encoding: _Encoding,
        group_commit: GroupCommit,
    ) -> Snapshotter:
        """Open what reads existing rows and answers signals; it ends with the session."""
        snapshot = open_snapshot(
            self._settings.snapshot,
            self._source,
            self._kafka,
            self._bridge,
            encoding.shaping,
            primary=primary,
            topics=topics,
            owner=owner,
            relations=encoding.relations,
            encoders=encoding.encoders,
            take=group_commit.take,
            waiter=self._standstill,
            durable_lsn=group_commit.durable_lsn,
        )
        self._resources.callback(snapshot.close)
        return snapshot

    def _open_spool(self, heartbeat: Heartbeat) -> Spool:
        """Open the slot's spool, and let the heartbeat report how much it holds."""
        spool = Spool(
            self._bridge.spool_folder / f"slotbridge-{self._prefix}-{self._slot}.spool",
            memory_bytes_max=self._bridge.spool_memory_bytes_max,
            bytes_max=self._bridge.spool_bytes_max,
        )
        self._resources.callback(spool.close)
        heartbeat.held = spool.held
        return spool

    def _load_staged(self, topics: Topics, spool: Spool) -> list[PreparedRecord]:
        """Put transactions that are prepared and undecided from Kafka into the spool."""
        with topics.reader(prepared_topic(self._prefix)) as reader:
            try:
                staged = load_staged(reader, self._slot, spool)
            except SpoolFull as error:
                raise prepared_exceed_spool(error) from error
        if staged:
            gids = ", ".join(sorted(record.gid for record in staged)[:5])
            logger.info("prepared transactions await their decision", count=len(staged), gids=gids)
            reach("staging loaded")
        return staged

    def _start(
        self,
        connection: ReplicationConnection,
        primary: Primary,
        start: Position,
        standby_status: StandbyStatus,
    ) -> None:
        """Let the server stream; whatever waits answers it from here on."""
        connection.start(
            start.end_lsn,
            self._source.publication,
            streaming=self._settings.streaming,
            origin=self._source.origin,
            two_phase=self._source.two_phase,
        )
        primary.streams = True
        standby_status.heard(time.monotonic())  # silence counts from here
        self._waiter.work = standby_status.answer
        reach("resumed inside" if start.seq else "started")

    def _announce(self, start: Position, primary: Primary, timeline: int) -> None:
        """Say, in metrics and log, that changes flow from here."""
        metrics.TIMELINE.set(timeline)
        metrics.LIVE.connect()
        logger.info(
            "streaming",
            slot=self._slot,
            lsn=format_lsn(start.end_lsn),
            timeline=timeline,
            system_identifier=primary.server.system_identifier,
            compiled=compiled.engine is not None,
        )
