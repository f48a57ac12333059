"""Checks whether a progress record belongs to this server and to its history. Pure.

    what                      known to Kafka              asked of the server
    the database              server.system_identifier    IDENTIFY_SYSTEM
    its timeline              server.timeline, history    IDENTIFY_SYSTEM, TIMELINE_HISTORY
    it was not set back       position.end_lsn            where its WAL is flushed up to
                              witness.lsn, wal_lsn        where the origin or sequence is
                              position.xid, …             the WAL at commit_lsn
    what events are of        settings.publication,       pg_publication, the settings
                              its oid, source_origin
    its slot                  (there is a record)         pg_replication_slots

Each is a lower bound: it holds for any record that was ever committed, not only for the last one.
So it may be asked of a record that is merely visible, before anything is done
(docs/why/delivery.md, "The evidence at a start").
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from schemas.acceptance import Acceptance, Kind, Token
from schemas.errors import ExitCode, OperatorNeeded, Retryable
from schemas.events import DivergenceRecord
from schemas.lsn import format_lsn
from schemas.progress import ProgressPosition, ProgressRecord, ProgressWitness
from services.bridge.progress.errors import (
    COMPARE,
    RECOVER,
    Diverged,
    SelectionChanged,
    disagreement,
    publication_gone,
)
from services.bridge.progress.sequence_set_back import restoring, sequence_set_back
from services.bridge.progress.wal_commit import WalCommit
from services.postgres.server import Server
from services.postgres.slots import Slot

_WITNESSES = {"origin": "replication origin", "sequence": "witness sequence"}
_OTHER_WITNESS = {"origin": _WITNESSES["sequence"], "sequence": _WITNESSES["origin"]}


class Selection(NamedTuple):
    """The choice of changes that become events: a publication and `source.origin`.

    `oid` is that of pg_publication: another one of the same name is another publication. 0: there
    is none.
    """

    publication: str
    oid: int
    origin: str

    def __str__(self) -> str:
        return f"{self.publication}/{self.oid}/{self.origin}"


@dataclass(frozen=True, slots=True)
class Witnesses:
    """The server's evidence at a start.

    `switch_points`: each ancestor of the server's timeline -> the LSN at which it was left.
    `origin_lsn`: of the witness that is in use (`witness`), `former_lsn`: of the other kind, where
    it is known. `wal_lsn`: where the server's WAL is flushed up to. `commit`: what its WAL has at
    the record's `commit_lsn`, None: not known.
    """

    slot: Slot | None
    origin_lsn: int | None
    server: Server
    switch_points: Mapping[int, int]
    wal_lsn: int
    selection: Selection
    accepted: Acceptance = field(default_factory=Acceptance)
    commit: WalCommit | None = None
    witness: Literal["origin", "sequence"] = "origin"
    former_lsn: int | None = None

    @property
    def noted_lsn(self) -> int | None:
        """The furthest position that a witness of any kind notes; Kafka had all up to there."""
        known = [lsn for lsn in (self.origin_lsn, self.former_lsn) if lsn is not None]
        return max(known, default=None)

    @property
    def noted_by(self) -> str:
        """The witness of `noted_lsn`."""
        former = (self.former_lsn or 0) > (self.origin_lsn or 0)
        return _OTHER_WITNESS[self.witness] if former else _WITNESSES[self.witness]

    @property
    def agreed_lsn(self) -> int:
        """A position up to which server and Kafka have the same WAL, if the server was set back.

        The origin and the slot went back with it, and Kafka had all that they had been told of.
        """
        confirmed = self.slot.confirmed_flush_lsn if self.slot is not None else None
        return max(self.origin_lsn or 0, confirmed or 0)


def check_server(record: ProgressRecord, seen: Witnesses, slot: str) -> None:
    """Return normally if `record` may belong to this server.

    Raise OperatorNeeded (WITNESSES_DISAGREE, WRONG_DATABASE), Diverged, or Retryable for an older
    timeline: the new primary may just not have been reachable.
    """
    check_timeline(record, seen, slot)
    if seen.slot is None:
        raise disagreement(
            "the slot is gone, although Kafka has its progress record",
            slot,
            record.position.end_lsn,
            f"changes after this LSN may be lost: {RECOVER}. If there was a failover, the slot was "
            "not ready for it (slotfailover check)",
        )
    if seen.slot.invalidation_reason is not None:
        raise invalidated(seen.slot, slot)
    _check_branch(record, seen, slot)
    _check_position(record, seen, slot)
    _check_selection(record, seen, slot)


def check_timeline(record: ProgressRecord, seen: Witnesses, slot: str) -> None:
    """Raise if `record` is of another database, or of a newer or foreign timeline.

    All that a hidden record can be asked: where the server has not its events, they are aborted.
    """
    known, server = record.server, seen.server
    if known.system_identifier != server.system_identifier:
        raise OperatorNeeded(
            f"the database has system identifier {server.system_identifier}, Kafka's progress "
            f"record {known.system_identifier}",
            operation=COMPARE,
            subject=f"slot {slot}",
            hint="correct source.conninfo, or use another kafka.topic_prefix for this database; if "
            "this one replaces the former one, compare all tables with their topics",
            exit_code=ExitCode.WRONG_DATABASE,
            token=Token(Kind.OTHER_DATABASE, _owner(record, slot), seen.server.system_identifier),
        )
    if known.timeline > server.timeline:
        raise Retryable(
            f"the server is on timeline {server.timeline}, Kafka's progress record on "
            f"{known.timeline}: the server is an old primary",
            operation=COMPARE,
            subject=f"slot {slot}",
            lsn=reached(record),
            hint="stop or rejoin the old primary; name the new one in source.conninfo",
            exit_code=ExitCode.TIMELINE,
        )
    if not descends(record, seen):
        raise Diverged(
            slot,
            known.system_identifier,
            known.timeline,
            server.timeline,
            _fork(record, seen),
            reached(record),
            _another_timeline(record, seen),
        )


def _owner(record: ProgressRecord, slot: str) -> str:
    return f"{slot}@{record.server.system_identifier}"


def reached(record: ProgressRecord) -> int:
    """Return how far Kafka has the record's timeline, a part of a transaction included."""
    position = record.position
    return max(position.end_lsn, position.commit_lsn + 1 if position.seq else 0)


def descends(record: ProgressRecord, seen: Witnesses) -> bool:
    """Tell whether the record's timeline is the server's or an ancestor of it."""
    timeline = record.server.timeline
    if timeline != seen.server.timeline and timeline not in seen.switch_points:
        return False
    return record.server.history == {
        ancestor: lsn for ancestor, lsn in seen.switch_points.items() if ancestor < timeline
    }


def unjudged(record: ProgressRecord, seen: Witnesses) -> Iterator[str]:
    """Yield the checks that `check_server` could not make for lack of evidence."""
    if not _origin_is_binding(record, seen):
        yield f"the {_WITNESSES[seen.witness]}'s position"
    if record.position.commit_lsn and (seen.commit is None or not record.position.xid):
        yield "the last transaction's commit in the WAL"


def set_back(record: ProgressRecord, switch_lsn: int) -> ProgressRecord:
    """Return `record` cut back to `switch_lsn`, up to which Kafka and the server agree.

    A part of a transaction stays if that transaction committed before the switch. The origin went
    back as well; the slot may be where it was announced to be, and stays so.
    """
    position = record.position
    end_lsn, ahead_lsn = min(position.end_lsn, switch_lsn), min(position.ahead_lsn, switch_lsn)
    if position.seq and position.commit_lsn < switch_lsn:
        update = {"end_lsn": end_lsn, "ahead_lsn": ahead_lsn}
        position = position.model_copy(update=update)
    else:
        position = ProgressPosition(commit_lsn=0, end_lsn=end_lsn, seq=0, ahead_lsn=ahead_lsn)
    witness = ProgressWitness(kind=record.witness.kind)
    return record.model_copy(update={"position": position, "witness": witness})


def is_lost(
    timeline: int, commit_lsn: int, seen: Witnesses, accepted: Sequence[DivergenceRecord]
) -> bool:
    """Tell whether an event in Kafka never was, or no longer is, in the server's history.

    `timeline` 0: the event does not tell it. `accepted`: the divergences of the slot so far. A
    divergence between two timelines of the same number leaves open whose an event within it is:
    such an event is lost.
    """
    left = seen.switch_points.get(timeline)
    if timeline and timeline != seen.server.timeline and (left is None or commit_lsn >= left):
        return True
    return any(
        timeline in (0, one.lost_timeline) and one.switch_lsn <= commit_lsn < one.reached_lsn
        for one in accepted
    )


def invalidated(found: Slot, slot: str) -> OperatorNeeded:
    """Return the error of a slot that PostgreSQL has invalidated."""
    return disagreement(
        f"the slot is invalidated ({found.invalidation_reason})",
        slot,
        found.confirmed_flush_lsn,
        f"its WAL or catalog rows are gone: {RECOVER}; raise max_slot_wal_keep_size or "
        "idle_replication_slot_timeout",
    )


def _fork(record: ProgressRecord, seen: Witnesses) -> int:
    """Return where the histories of record and server part."""
    ours, theirs = sorted(record.server.history.items()), sorted(seen.switch_points.items())
    since = 0
    for at in range(max(len(ours), len(theirs))):
        one = ours[at] if at < len(ours) else (record.server.timeline, None)
        other = theirs[at] if at < len(theirs) else (seen.server.timeline, None)
        if one != other:
            ends = [lsn for _, lsn in (one, other) if lsn is not None]
            return min(ends) if one[0] == other[0] else since
        since = one[1] or since
    return since  # the same ancestors, and then timelines of different numbers


def _another_timeline(record: ProgressRecord, seen: Witnesses) -> str:
    where = f": they part at {format_lsn(_fork(record, seen))}"
    if record.server.timeline == seen.server.timeline:
        return f"is on another timeline of the same number{where}"
    return f"never was on it{where}"


def _check_branch(record: ProgressRecord, seen: Witnesses, slot: str) -> None:
    """Require that Kafka has nothing of the record's timeline beyond where the server left it."""
    left = seen.switch_points.get(record.server.timeline)
    if left is not None and reached(record) > left:
        known, timeline = record.server, seen.server.timeline
        raise Diverged(
            slot, known.system_identifier, known.timeline, timeline, left, reached(record)
        )


def _origin_is_binding(record: ProgressRecord, seen: Witnesses) -> bool:
    """Tell whether the server must have the witness's position that the record notes.

    A promoted standby must have it if it had the WAL of that move, which ends at `wal_lsn` or
    before.
    """
    if not record.witness.lsn or record.witness.kind != seen.witness:
        return False
    left = seen.switch_points.get(record.server.timeline)
    return left is None or record.witness.wal_lsn <= left


def _has_commit(record: ProgressRecord, seen: Witnesses) -> bool:
    """Tell whether the WAL has the commit that the record tells of, as far as both are known.

    A promoted standby has it on the record's timeline, from before the point where it left that.
    """
    found, position = seen.commit, record.position
    if found is None or not position.xid:
        return True
    return found.xid in (0, position.xid) and found.time_us == position.commit_time_us


def _has_move(record: ProgressRecord, seen: Witnesses) -> bool:
    """Tell whether the WAL is known to have the witness's move: up to the record's commit.

    The slot proves nothing: somebody may have made it anew on a server that was set back.
    """
    found, xid = seen.commit, record.position.xid
    if found is None or not xid or found.xid != xid:
        return False
    return _has_commit(record, seen) and found.end_lsn >= record.witness.wal_lsn


def _check_position(record: ProgressRecord, seen: Witnesses, slot: str) -> None:
    """Require that the server was not set back to an earlier state of the same timeline.

    `wal_lsn` is not compared with the server's WAL: flushed WAL may end inside a record, which a
    crash then removes. What was decoded is whole.
    """
    origin_lsn = seen.origin_lsn or 0
    known_lsn = reached(record)
    if record.server.timeline == seen.server.timeline and known_lsn > seen.wal_lsn:
        what = f"its WAL ends at {format_lsn(seen.wal_lsn)}, Kafka's record has its WAL up to"
        known = known_lsn
    elif _origin_is_binding(record, seen) and seen.origin_lsn is None:
        raise disagreement(
            f"the {_WITNESSES[seen.witness]} has no position, but by Kafka's record it was at "
            f"{format_lsn(record.witness.lsn)}: it was dropped, or the server was set back",
            slot,
            record.position.end_lsn,
            f"if the {seen.witness} alone was dropped: {restoring(record, slot)}; else {RECOVER}",
        )
    elif not _has_commit(record, seen):
        xid = record.position.xid
        what = f"its WAL lacks the commit of transaction {xid} that Kafka's record has at"
        known = record.position.commit_lsn
    elif not (_origin_is_binding(record, seen) and record.witness.lsn > origin_lsn):
        return
    elif seen.witness == "sequence":
        raise sequence_set_back(record, slot, origin_lsn, alone=_has_move(record, seen))
    else:
        name = _WITNESSES[seen.witness]
        what = f"its {name} is at {format_lsn(origin_lsn)}, by Kafka's record it was at"
        known = record.witness.lsn
    raise Diverged(
        slot,
        record.server.system_identifier,
        record.server.timeline,
        seen.server.timeline,
        seen.agreed_lsn or None,
        reached(record),
        f"was set back to an earlier state, as by a restored volume or snapshot ({what} "
        f"{format_lsn(known)}; they agree up to {format_lsn(seen.agreed_lsn)})",
    )


def _check_selection(record: ProgressRecord, seen: Witnesses, slot: str) -> None:
    """Require that the same publication and source.origin chose the events so far.

    Another choice passes only if an operator has accepted it, and never inside a transaction.
    """
    now = seen.selection
    if not now.oid:
        raise publication_gone(now.publication)
    noted = record.settings
    then = Selection(noted.publication, noted.publication_oid, noted.source_origin)
    if then == now:
        return
    if then.publication != now.publication:
        what = f"they are of publication {now.publication} now"
    elif then.oid != now.oid:
        what = "it was dropped and made again since"
    else:
        what = f"source.origin is {now.origin} now"
    message = (
        f"the events in Kafka are of publication {then.publication} (oid {then.oid}) with "
        f"source.origin {then.origin}; {what}"
    )
    if record.position.seq:
        raise disagreement(
            f"{message}; Kafka has only a part of the transaction at "
            f"{format_lsn(record.position.commit_lsn)}, and the rest would be numbered differently",
            slot,
            record.position.end_lsn,
            "start with the former publication and source.origin until Kafka has all of that "
            f"transaction; if the former publication is gone, {RECOVER}",
        )
    since = format_lsn(record.position.end_lsn)
    error = SelectionChanged(
        f"{message}: the server never sends changes that were committed while this publication "
        "did not include them",
        operation=COMPARE,
        subject=f"slot {slot}",
        lsn=record.position.end_lsn,
        hint=f"go back to publication {then.publication} and source.origin {then.origin}, or let "
        f"such changes since {since} never come to Kafka",
        token=Token(Kind.UNSENT_CHANGES, _owner(record, slot), f"{now}@{since}"),
    )
    if not seen.accepted.takes(error.token):
        raise error
