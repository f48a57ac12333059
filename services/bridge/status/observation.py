"""The state that `slotbridge status` reads: hosts, their slots, Kafka's record, prepared ones.

Reads only, and nothing is owned or fenced: it can run beside the bridge at any time.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import psycopg

from schemas.errors import SlotbridgeError
from schemas.events import PreparedRecord, prepared_topic, progress_topic
from schemas.progress import ProgressRecord
from schemas.settings import KafkaSettings, SourceSettings
from schemas.shaping import ShapingSettings
from services.bridge.recovery.staged_transactions import load_staged
from services.bridge.sink.offsets import name_of
from services.bridge.sink.topics import Topics
from services.bridge.source.hosts import host_name, single_hosts
from services.bridge.source.publication_drift import (
    LACKING,
    PublicationDifference,
    publication_differences,
)
from services.bridge.source.publication_reader import read_publication, without_waiting
from services.bridge.source.replication_connection import walsender_name
from services.bridge.source.server_errors import connect_error
from services.bridge.source.witness import Kind, witness_of
from services.postgres import slots
from services.postgres.server import Connection, read_received, read_server, written_lsn
from services.postgres.sessions import STATUS, open_session
from services.postgres.slots import Slot

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class HostStatus:
    """One host of source.conninfo; LSNs in bytes. `problem`: why it could not be asked."""

    host: str
    problem: str | None = None
    role: str = ""
    timeline: int = 0
    system_identifier: str = ""
    slot: Slot | None = None
    origin_lsn: int | None = None
    witness: str = "origin"
    """What `origin_lsn` is of: source.witness."""
    wal_lsn: int | None = None
    prepared_gids: tuple[str, ...] = ()
    withheld_by: tuple[str, ...] = ()
    """Standbys that the server awaits before it sends the bridge a commit, with their state."""
    read_only: bool = False
    """Whether its sessions can't write by default, as on a primary that slotfailover has fenced."""
    drift: tuple[PublicationDifference, ...] = ()
    """How the publication differs from the settings, on a primary."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A staged transaction. `in_database`: None where no primary could be asked."""

    gid: str
    xid: int
    changes: int
    age_s: float
    in_database: bool | None


@dataclass(frozen=True, slots=True)
class Status:
    """`kafka_problem`: why Kafka could not be asked for `progress` and `waiting`."""

    slot: str
    hosts: tuple[HostStatus, ...]
    progress: ProgressRecord | None
    waiting: tuple[Waiting, ...]
    kafka_problem: str | None
    leaderless: tuple[str, ...] = ()
    """The partitions of the slot that no broker leads, as `topic[number]`."""
    prefix: str = ""

    @property
    def primary(self) -> HostStatus | None:
        """The reachable primary on the newest timeline."""
        found = [host for host in self.hosts if host.role == "primary"]
        return max(found, key=lambda host: host.timeline, default=None)

    @property
    def lag_bytes(self) -> int | None:
        """WAL that Kafka does not have yet."""
        primary = self.primary
        if primary is None or primary.wal_lsn is None or self.progress is None:
            return None
        return max(0, primary.wal_lsn - self.progress.position.end_lsn)

    @property
    def streaming(self) -> bool:
        """Whether a bridge is connected to the slot of the primary."""
        primary = self.primary
        slot = primary.slot if primary is not None else None
        return slot is not None and slot.active_pid is not None

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why not all changes flow, or why nobody can tell; empty where they do."""
        primary = self.primary
        if primary is None:
            found = ["not judged whether a bridge streams: no primary answers"]
        elif primary.slot is None:
            found = ["the primary does not have the slot"]
        elif primary.slot.invalidation_reason is not None:
            found = [f"the slot is invalidated ({primary.slot.invalidation_reason})"]
        elif primary.slot.active_pid is None:
            found = ["no bridge streams"]
        else:
            found = [
                f"no commits are sent before this standby has them: {standby}"
                for standby in primary.withheld_by
            ]
        if primary is not None:
            found += [one.evidence for one in primary.drift if one.name in LACKING]
        found += [
            f"{host.host} is a primary, too, on timeline {host.timeline}, and takes writes that "
            "this bridge does not read: slotfailover check tells what to do"
            for host in self.hosts
            if host.role == "primary" and host is not primary and not host.read_only
        ]
        if self.kafka_problem is not None:
            found.append("not judged what Kafka has: it does not answer")
        elif self.progress is None and self.streaming:  # the first record comes before the stream
            found.append(
                "a bridge streams from the slot, but not into these topics: Kafka has no progress "
                f"record of it under the prefix {self.prefix}; correct kafka.topic_prefix or "
                "kafka.bootstrap_servers"
            )
        return (*found, *(f"no broker leads {partition}" for partition in self.leaderless))

    def as_json(self) -> dict[str, Any]:
        """Return the whole status, for `--json`."""
        return {
            "slot": self.slot,
            "streaming": self.streaming,
            "obstacles": list(self.obstacles),
            "lag_bytes": self.lag_bytes,
            "progress": self.progress.model_dump() if self.progress is not None else None,
            "kafka_problem": self.kafka_problem,
            "leaderless": list(self.leaderless),
            "prepared": [asdict(waiting) for waiting in self.waiting],
            "hosts": [
                asdict(host) | {"ready": host.slot.ready if host.slot is not None else False}
                for host in self.hosts
            ],
        }


def read_status(source: SourceSettings, kafka: KafkaSettings, shaping: ShapingSettings) -> Status:
    """Ask every host and Kafka. What does not answer is part of the result, not an error."""
    topics = Topics(kafka, shaping)
    given = (source, shaping, topics.prefix)
    hosts = tuple(_host(conninfo, *given) for conninfo in single_hosts(source))
    missing, kafka_problem = _or_problem(lambda: _leaderless(topics))
    found: tuple[ProgressRecord | None, list[PreparedRecord]] | None = None
    if kafka_problem is None:
        found, kafka_problem = _or_problem(lambda: _from_kafka(topics, source.slot))
    progress, staged = found or (None, [])
    seen = Status(
        source.slot, hosts, progress, (), kafka_problem, missing or (), prefix=topics.prefix
    )
    primary = seen.primary
    waiting = tuple(_waiting(record, primary) for record in staged)
    return replace(seen, waiting=waiting)


def _leaderless(topics: Topics) -> tuple[str, ...]:
    topics.refresh()
    return tuple(map(name_of, sorted(topics.leaderless.intersection(topics.written()))))


def _from_kafka(topics: Topics, slot: str) -> tuple[ProgressRecord | None, list[PreparedRecord]]:
    """Read the progress record and the prepared transactions; none of both before the first run."""
    if not topics.there(progress_topic(topics.prefix)):
        return None, []
    progress = topics.last_progress(slot)
    staging = prepared_topic(topics.prefix)
    if not topics.there(staging):
        return progress, []
    with topics.reader(staging) as reader:
        return progress, load_staged(reader, slot)


def _waiting(record: PreparedRecord, primary: HostStatus | None) -> Waiting:
    return Waiting(
        record.gid,
        record.xid,
        record.changes,
        round(time.time() - record.prepare_ts_ms / 1000, 1),
        None if primary is None else record.gid in primary.prepared_gids,
    )


def _host(
    conninfo: str, source: SourceSettings, shaping: ShapingSettings, prefix: str
) -> HostStatus:
    """Return a server's state, with the publication's drift if it is the primary."""
    name = host_name(conninfo)
    try:
        with open_session(STATUS, conninfo) as connection:
            found = _read(connection, name, source.slot, source.witness)
            if found.role == "standby":
                return found
            seen = without_waiting(connection, partial(read_publication, source=source))
            drift = publication_differences(source, shaping, prefix, seen) if seen else ()
            return replace(found, drift=tuple(drift))
    except psycopg.Error as error:
        return HostStatus(name, problem=connect_error(error, name).message)


def _read(connection: Connection, name: str, slot: str, kind: Kind) -> HostStatus:
    """Return a server's role, timeline, slot, witness and positions."""
    server = read_server(connection)
    witness = witness_of(kind, slot)
    read_only = connection.execute("SHOW default_transaction_read_only").fetchone()
    gids = connection.execute(
        "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    ).fetchall()
    return HostStatus(
        host=name,
        role="standby" if server.in_recovery else "primary",
        timeline=server.timeline,
        system_identifier=server.system_identifier,
        slot=slots.read_slot(connection, slot),
        origin_lsn=witness.position(connection),
        witness=kind,
        wal_lsn=read_received(connection) if server.in_recovery else written_lsn(connection),
        prepared_gids=tuple(row[0] for row in gids),
        withheld_by=slots.withheld_by(connection, walsender_name(slot)),
        read_only=read_only is not None and read_only[0] == "on",
    )


def _or_problem(ask: Callable[[], Found]) -> tuple[Found | None, str | None]:
    try:
        return ask(), None
    except SlotbridgeError as error:
        return None, str(error)
