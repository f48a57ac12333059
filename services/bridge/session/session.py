"""One connection that streams: read, decode, send, commit, confirm.

`session_start.open_session` makes it.

    stream  read -> decode -> assemble -> send -> (commit -> status update) -> (move the origin)
    close   abandon the open Kafka transaction, drop all connections

Whatever fails ends the session; the next one starts from the last committed progress record, as
after a crash.
"""

import contextlib
import itertools
import time
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

import structlog

from schemas.lsn import format_lsn
from services.bridge import metrics
from services.bridge.compiled import Messages
from services.bridge.events.errors import DescriptionOutdated
from services.bridge.failpoints import reach
from services.bridge.progress.ledger import Ledger, Position
from services.bridge.session.liveness import Liveness
from services.bridge.sink.group_commit import GroupCommit
from services.bridge.snapshot.snapshotter import Snapshotter
from services.bridge.source.database import Primary
from services.bridge.source.heartbeat import Heartbeat
from services.bridge.source.replication_connection import Keepalive, ReplicationConnection
from services.bridge.source.standby_status import StandbyStatus
from services.bridge.transactions.pipeline import Pipeline
from services.postgres.server import Server

logger = structlog.get_logger(__name__)

WAIT_MAX_S: Final = 0.2
_JUDGED_ANEW: Final = itertools.count(1)
"""The numbers of this process's sessions that ended because a partition is to be described anew."""


class Ending(Protocol):
    """A stop request, which a session polls to end cleanly."""

    def is_set(self) -> bool: ...


class Parts(NamedTuple):
    """The parts of a session. `snapshot`: None if no rows of tables are to be read.

    `history`: each ancestor of the server's timeline -> the LSN at which the server left it.
    """

    primary: Primary
    connection: ReplicationConnection
    ledger: Ledger
    standby_status: StandbyStatus
    heartbeat: Heartbeat
    group_commit: GroupCommit
    liveness: Liveness
    pipeline: Pipeline
    snapshot: Snapshotter | None
    history: Mapping[int, int]


class Session:
    """Streams from a slot that is open; ended by `close`; never reused.

    `resources` closes the parts.
    """

    def __init__(self, parts: Parts, resources: contextlib.ExitStack) -> None:
        self._parts = parts
        self._resources = resources
        self._turned = time.monotonic()
        self._skips_messages = False

    @property
    def beat(self) -> float:
        """When the loop last turned (time.monotonic), for the liveness probe."""
        return max(self._turned, self._parts.standby_status.beat)

    @property
    def server(self) -> Server:
        """The primary that it is connected to."""
        return self._parts.primary.server

    @property
    def obstacle(self) -> str:
        """Why the server sends no commits, or may send none unnoticed; "" while it does."""
        return self._parts.heartbeat.obstacle

    @property
    def over(self) -> bool:
        """Whether the session is complete: only a snapshot was requested, and it is done."""
        return self._parts.snapshot is not None and self._parts.snapshot.over

    @property
    def history(self) -> Mapping[int, int]:
        """Each ancestor of the server's timeline -> the LSN at which the server left it."""
        return self._parts.history

    @property
    def durable(self) -> Position:
        """The position up to which Kafka has all events."""
        return self._parts.ledger.durable

    def stream(self, stop: Ending) -> None:
        """Stream until `stop` is set, then finish the open Kafka transaction and confirm.

        Raise SettingsError where only a snapshot was requested, and it could not read all tables.
        """
        connection, standby_status = self._parts.connection, self._parts.standby_status
        heartbeat, group_commit = self._parts.heartbeat, self._parts.group_commit
        standby_status.end_with(stop.is_set)
        while not (stop.is_set() or self.over):
            now = self._turned = time.monotonic()
            due = min(standby_status.due, heartbeat.due, group_commit.next_due())
            connection.wait(min(WAIT_MAX_S, due - now), group_commit.wakes)
            now_us = time.time_ns() // 1000
            spoken = False
            for received in connection.read():
                spoken = True
                if isinstance(received, Keepalive):
                    self._keepalive(received)
                else:
                    self._take(received, now_us)
            if spoken:  # now, not before: nobody listened while that was worked on
                standby_status.heard(time.monotonic())
            self._perform_due(time.monotonic(), behind=connection.behind)
        self._finish()
        if self.over and self._parts.snapshot is not None:
            self._parts.snapshot.require_all_read()

    def close(self) -> BaseException | None:
        """Close all connections; the next session receives again what Kafka has not committed.

        Return what a commit that was in progress failed with: that Kafka has fenced us may be
        known only now.
        """
        reach("closing")
        metrics.LIVE.disconnect()
        self._resources.close()
        return self._parts.group_commit.failure

    def _take(self, messages: Messages, now_us: int) -> None:
        """Take messages. Raise what ends the session.

        Where the server is to describe a partition anew, it is asked from the change on whose
        partition is unclear: Kafka gets what came before.
        """
        try:
            self._parts.pipeline.take_all(messages, now_us)
        except DescriptionOutdated as error:
            self._parts.group_commit.finish()
            logger.warning(
                "a new session is needed: the change may be of a partition that is another by now",
                partition=str(error.leaf),
                sessions=next(_JUDGED_ANEW),
                hint="where changes from before its ALTER TABLE remain, each change of it that an "
                "update elsewhere follows costs a session (docs/guides/shaping.md, Partitions)",
            )
            raise

    def _keepalive(self, item: Keepalive) -> None:
        self._parts.ledger.receive(item.wal_end)
        self._parts.pipeline.advance(item.wal_end)
        if item.reply:
            self._parts.standby_status.due = 0.0
            self._parts.group_commit.hurry()

    def _perform_due(self, now: float, *, behind: bool) -> None:
        """Do the work that is not the stream's: commit, read snapshot rows, report, warn."""
        self._parts.group_commit.perform(now, behind=behind)
        if self._parts.snapshot is not None:
            self._parts.snapshot.perform(now)
        self._parts.liveness.report_position()
        if (prefix := self._parts.pipeline.skipped) and not self._skips_messages:
            self._skips_messages = True
            logger.warning(
                "logical messages are skipped, as no setting names their prefix",
                prefix=prefix,
                hint="shaping.outbox, shaping.annotations name prefixes (docs/guides/shaping.md)",
            )

    def _finish(self) -> None:
        """Stop cleanly: commit what is whole, confirm it, and leave the origin where Kafka is.

        Raise TransactionHangs where consumers do not see it: no bridge is there to end that later.
        """
        heartbeat, group_commit = self._parts.heartbeat, self._parts.group_commit
        reach("stopping")
        heartbeat.commits_wait = False
        group_commit.finish()
        if self._parts.snapshot is not None:
            self._parts.snapshot.narration.log_durable()
        heartbeat.perform(self._parts.primary, self._parts.ledger)
        heartbeat.commits_wait = False
        group_commit.note()
        group_commit.require_visible()
        logger.info("stopped", lsn=format_lsn(self.durable.end_lsn))
