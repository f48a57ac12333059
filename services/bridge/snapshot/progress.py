"""The progress of a snapshot: rows published of each table, and the next table. Pure.

SnapshotProgress in Kafka    the table as it is now             its rows are
none                         published, not excluded            read from the beginning
of this oid and timeline     the same key                       read on, or done
of another oid               another table of that name         read from the beginning
of another key               the same                           read from the beginning
from before a request        the same                           read from the beginning
beyond where Kafka is, or    the same                           read from the beginning: what they
where a timeline was left                                       were read from is lost
any of these but the first   one without a key                  not read: they would be there twice
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from schemas.errors import SettingsError
from schemas.events import snapshot_topic
from schemas.naming import table_matches
from schemas.snapshot import (
    ReadFrom,
    SignalPosition,
    SlotBeginning,
    SnapshotKey,
    SnapshotProgress,
    SnapshotRequest,
    SnapshotSettings,
)
from services.bridge.events.event import Event
from services.bridge.events.shaping.tables import Shaping
from services.bridge.snapshot.places import Beginning, Place, RowsBefore, beginning_of
from services.bridge.snapshot.requests import asked_of
from services.bridge.snapshot.tables import SettingsCondition, TableShape

Snapshot = Literal["true", "first", "last"]


class Owner(NamedTuple):
    """Whose progress it is: the slot, and the timeline that rows are read from.

    `end_lsn`: Kafka has all transactions before, none after. `history`: each ancestor of the
    timeline -> where it was left; None: not known. `since_lsn`: progress from before that counts
    for nothing.
    """

    slot: str
    timeline: int
    end_lsn: int
    history: Mapping[int, int] | None
    since_lsn: int = 0


class Known(NamedTuple):
    """The state of a snapshot in Kafka: progress of tables, requests, beginnings of slots.

    `positions`: how far signal topics are taken.
    """

    progress: list[SnapshotProgress]
    requests: list[SnapshotRequest]
    beginnings: list[SlotBeginning]
    positions: list[SignalPosition]


class Apart(NamedTuple):
    """The state of tables without a key.

    The slot's beginning, where they lie now, by oid, and what the publication leaves out.
    """

    beginning: Beginning
    places: Mapping[int, Place]
    unpublished: Sequence[str] = ()


class ChunkPosition(NamedTuple):
    """A chunk in the stream: its commit LSN and last seq, and the LSN that bounds what it shows."""

    commit_lsn: int
    seq: int
    seen_lsn: int


@dataclass(slots=True)
class TableProgress:
    """A table and how far its rows are read. `last`: the key of the last one, in text form.

    `where`: a condition for its rows, "" for none; `asked`: that of a request. `paused`: a request
    says to wait. `before`: of a table without a key, which rows are read.
    """

    shape: TableShape
    last: list[str] | None = None
    rows: int = 0
    bytes: int = 0
    rows_estimate: int = -1
    began_ms: int = 0
    chunks: int = 0
    done: bool = False
    where: str = ""
    asked: bool = False
    paused: bool = False
    before: RowsBefore | None = None


@dataclass(slots=True)
class SnapshotPlan:
    """The tables that a snapshot reads, in order; `refused`: those that it can't read, and why.

    `unfit`: the hint of each refused table that the settings or the server do not fit as it is now;
    `unjudged`: those that a start does not judge, so that the settings may never have fitted.
    """

    tables: dict[str, TableProgress] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    unjudged: set[str] = field(default_factory=set)
    undone: list[str] = field(default_factory=list)
    """Tables whose rows may show what a failover has undone: they are read anew."""
    begun: bool = False
    """Whether Kafka has a row of this snapshot, or the session is about to send one."""

    def refusals(self, *, unfit: bool) -> str:
        """Return the tables that can't be read, each with its reason: those of `unfit`, or not."""
        names = [name for name in self.refused if (name in self.unfit) is unfit]
        return "; ".join(f"{name} {self.refused[name]}" for name in names)

    @property
    def next(self) -> TableProgress | None:
        """The table whose rows are read next, None when all are done or paused."""
        return next(
            (table for table in self.tables.values() if not (table.done or table.paused)), None
        )

    @property
    def waiting(self) -> int:
        """How many tables have rows left to read, also those that are paused."""
        return len(self.tables) - self.done

    @property
    def done(self) -> int:
        """How many tables are done."""
        return sum(table.done for table in self.tables.values())

    def refuse(self, name: str, reason: str, hint: str = "see the reason") -> None:
        """Refuse a table whose rows can't be read now; the start that finds it so goes on."""
        del self.tables[name]
        self.refused[name] = reason
        self.unfit[name] = hint

    def deny(self, oids: Set[int], *, keyless: bool) -> None:
        """Refuse tables that the role may not read and that are not done.

        `keyless`: only those without a key; another role reads the others, on a standby.
        """
        for name, table in list(self.tables.items()):
            denied = table.shape.relation.oid in oids and not (keyless and table.shape.key)
            if denied and not table.done:
                del self.tables[name]
                self.refused[name] = (
                    "may not be read whole: the bridge's role lacks SELECT on the table or USAGE "
                    "of its schema or its key's types', or policies hide rows from it"
                )

    def kind(self, table: TableProgress, index: int, count: int, *, ends: bool) -> Snapshot:
        """Return `source.snapshot` of row `index` of `count` in the table's next chunk.

        `ends`: the table has no rows after them.
        """
        if index == 0 and not self.begun:
            return "first"
        others = any(not other.done for other in self.tables.values() if other is not table)
        return "last" if ends and index == count - 1 and not others else "true"


def plan(
    shapes: Iterable[TableShape],
    found: Iterable[SnapshotProgress],
    settings: SnapshotSettings,
    shaping: Shaping,
    owner: Owner,
    asked: Iterable[SnapshotRequest] = (),
    apart: Apart | None = None,
) -> SnapshotPlan:
    """Plan the tables to read: `shapes` are those of the publication, `found` what Kafka has.

    `asked`: the requests that Kafka has. One whose insert a failover has undone asks for nothing.
    `apart`: None where the beginning of the slot is not known.
    """
    asked = [one for each in asked if (one := request_of(each, owner)) is not None]
    known = {(one.schema_, one.table): one for one in found if one.slot == owner.slot}
    result = SnapshotPlan()
    for shape in sorted(shapes, key=partial(rank, settings)):
        schema, table = shape.relation.schema, shape.relation.table
        excluded = any(table_matches(pattern, schema, table) for pattern in settings.exclude)
        request, paused = asked_of(schema, table, asked)
        wanted = settings.reads_all and not excluded
        if request is not None:
            wanted = request.type == "read"
        if not wanted or not shaping.naming.publishes(schema, table):
            continue
        before = known.get((schema, table))
        if apart and not (shape.key and (request or before)) and covered(shape, apart, settings):
            continue
        reason = unreadable(shape, shaping) if shape.key else ""
        if not shape.key and not (before and before.done and counts(before, shape, owner)):
            reason = apart_refusal(shape, settings, apart) or unrepeatable(before, shape, owner)
        if reason:
            result.refused[shape.name] = reason
            continue
        progress = TableProgress(shape, paused=paused, where=condition(settings, schema, table))
        if not shape.key and apart is not None:
            progress.before = apart.beginning.rows(shape)
        elif (
            shape.key  # without one, rows that were changed since would come twice
            and before is not None
            and request is not None
            and before.commit_lsn < request.commit_lsn
        ):
            before = None
        if request is not None and request.where:
            progress.where, progress.asked = request.where, True
        if before is not None and counts(before, shape, owner):
            progress.last, progress.rows = before.last, before.rows
            progress.chunks, progress.done = before.chunks, before.done
            progress.bytes, progress.began_ms = before.bytes, before.began_ms
        elif before is not None and shows_undone(before, owner):
            result.undone.append(shape.name)
        result.tables[shape.name] = progress
    return result


def goes_on(found: SnapshotPlan, last: SnapshotProgress | None) -> bool:
    """Tell whether Kafka has rows of the snapshot that `found` plans; `last`: its last progress.

    A snapshot has ended where no table waited: what is read later is another one.
    """
    if last is None or last.waiting == 0:
        return False
    return any(table.rows for table in found.tables.values())


def rank(settings: SnapshotSettings, shape: TableShape) -> tuple[int, str]:
    """Return the sort key of a table: its place in `order`, then its name."""
    schema, table = shape.relation.schema, shape.relation.table
    matches = [table_matches(pattern, schema, table) for pattern in settings.order]
    return (matches.index(True) if True in matches else len(matches)), shape.name


def condition(settings: SnapshotSettings, schema: str, table: str) -> str:
    """Return the condition that the settings have for a table's rows, "" for none."""
    for pattern, text in settings.where.items():
        if table_matches(pattern, schema, table):
            return SettingsCondition(text)
    return ""


def request_of(request: SnapshotRequest, owner: Owner) -> SnapshotRequest | None:
    """Return the request as the present timeline has it; None where that lacks its insert.

    A record of a signal topic asks also where the place at which it was taken is lost: then it asks
    from where that timeline was left.
    """
    if request.slot != owner.slot:
        return None
    if has(owner, request.timeline, request.commit_lsn):
        return request
    left = (owner.history or {}).get(request.timeline)
    if left is None or not request.topic:
        return None
    return request.model_copy(update={"timeline": owner.timeline, "commit_lsn": left})


def has(owner: Owner, timeline: int, lsn: int) -> bool:
    """Tell whether the present timeline contains `lsn` of `timeline`."""
    if timeline == owner.timeline:
        return True
    left = (owner.history or {}).get(timeline)
    return left is not None and lsn < left


def beginning_for(owner: Owner, records: Iterable[SlotBeginning]) -> Beginning | None:
    """Return where the owner's slot begins, None where that is not known."""
    own = [one for one in records if one.slot == owner.slot and has(owner, one.timeline, one.lsn)]
    return beginning_of(own[-1]) if own else None


def counts(before: SnapshotProgress, shape: TableShape, owner: Owner) -> bool:
    """Tell whether rows that `before` counts are those of the table as it is now."""
    if before.oid != shape.relation.oid or not owner.since_lsn <= before.commit_lsn < owner.end_lsn:
        return False
    if before.timeline != owner.timeline:
        left = (owner.history or {}).get(before.timeline)
        if left is None or before.commit_lsn >= left or before.seen_lsn > left:
            return False
    return before.done or before.key == shape.read_by_names


def shows_undone(before: SnapshotProgress, owner: Owner) -> bool:
    """Tell whether rows that are in Kafka may show commits that the present timeline never had."""
    left = (owner.history or {}).get(before.timeline)
    return left is not None and before.commit_lsn < left < before.seen_lsn


def covered(shape: TableShape, apart: Apart, settings: SnapshotSettings) -> bool:
    """Tell whether all rows of a table come as changes."""
    place = apart.places.get(shape.relation.oid)
    return settings.reads_without_key and apart.beginning.covers(shape, place)


def unreadable(shape: TableShape, shaping: Shaping) -> str:
    """Why a table can't be read by its key; "" where it can.

    Values of the key are in the topic of the progress, where a mask must not be undone.
    """
    try:
        published = shaping.plan(shape.keyed(()))
    except SettingsError:  # `refuse_unfit` judges that
        return ""
    names = {column.name for column in published.relation.columns}
    hidden = [one.name for one in shape.key if one.name not in names or one.name in published.masks]
    return f"is read by {hidden[0]}, which shaping leaves out or masks" if hidden else ""


def apart_refusal(shape: TableShape, settings: SnapshotSettings, apart: Apart | None) -> str:
    """Why the rows of a table without a key can't be told from its changes; "" where they can."""
    if not settings.reads_without_key:
        return "has no primary key"
    if apart is None:
        return "has no key, and the slot was not made by a bridge with snapshot.without_key: read"
    left_out = sorted({"insert", "update"}.intersection(apart.unpublished))
    if left_out:
        return f"has no key, and the publication leaves out {left_out[0]}s"
    return apart.beginning.refusal(shape, apart.places.get(shape.relation.oid))


def unrepeatable(before: SnapshotProgress | None, shape: TableShape, owner: Owner) -> str:
    """Why a table without a key can't be read on: nobody could tell its rows from those before."""
    if before is None or shape.key or counts(before, shape, owner):
        return ""
    return "has no key, and a failover may have undone what its rows in Kafka were read from"


def progress_of(
    owner: Owner,
    table: TableProgress,
    chunk: ChunkPosition,
    ts_ms: int,
    waiting: int,
    read_from: ReadFrom = "primary",
    refused: Mapping[str, str] | None = None,
) -> SnapshotProgress:
    """Make the progress of `table` after `chunk`; `waiting`: how many tables have rows left."""
    relation = table.shape.relation
    return SnapshotProgress(
        slot=owner.slot,
        schema=relation.schema,
        table=relation.table,
        oid=relation.oid,
        key=table.shape.read_by_names,
        last=None if table.done else table.last,
        rows=table.rows,
        chunks=table.chunks,
        done=table.done,
        timeline=owner.timeline,
        commit_lsn=chunk.commit_lsn,
        seq=chunk.seq,
        seen_lsn=chunk.seen_lsn,
        bytes=table.bytes,
        rows_estimate=max(table.rows_estimate, table.rows) if table.rows_estimate >= 0 else -1,
        began_ms=table.began_ms,
        waiting=waiting,
        refused=dict(refused or {}),
        read_from=read_from,
        ts_ms=ts_ms,
    )


def progress_event(prefix: str, progress: SnapshotProgress) -> Event:
    """Make the record of `progress`, for the Kafka transaction with its rows."""
    key = SnapshotKey(slot=progress.slot, schema=progress.schema_, table=progress.table)
    value = progress.model_dump_json(by_alias=True).encode()
    return Event(snapshot_topic(prefix), key.model_dump_json(by_alias=True).encode(), value)
