"""Through a recording: each message with the decoder that it meets, and the tables it makes."""

from collections.abc import Iterator
from typing import NamedTuple

from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    Message,
    Prepare,
    Relation,
    RollbackPrepared,
    Row,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Update,
)
from tests.promises.bridge.recordings.record import Recorded

_WITH_XID = b"RYIUDTM"


class Step(NamedTuple):
    """`decoder` as after the message; `xid` and `subxid` are of the streamed block it is in."""

    recorded: Recorded
    decoder: Decoder
    streamed: bool
    xid: int
    subxid: int
    message: AnyMessage


def walk(messages: list[Recorded]) -> Iterator[Step]:
    """Decode one after another, a streamed transaction by a decoder of its own."""
    plain = Decoder()
    blocks: dict[int, Decoder] = {}
    xid = 0
    for item in messages:
        streamed = xid != 0 and item.data[:1] != b"E"
        decoder = blocks.setdefault(xid, Decoder(streamed=True)) if streamed else plain
        message = decoder.decode(item.data, item.lsn)
        has_xid = streamed and item.data[0] in _WITH_XID
        subxid = int.from_bytes(item.data[1:5]) if has_xid else xid
        yield Step(item, decoder, streamed, xid, subxid, message)
        if isinstance(message, StreamStart):
            xid = message.xid
        elif isinstance(message, StreamStop):
            xid = 0


Change = Insert | Update | Delete | Truncate


class Replica:
    """The tables that a reader of one slot has: changes count from their transaction's commit."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}
        self._open: list[Change] = []
        self._blocks: dict[int, list[tuple[int, Change]]] = {}
        self._prepared: dict[str, list[Change]] = {}

    def take(self, step: Step) -> None:
        """Apply one message."""
        match step.message:
            case Insert() | Update() | Delete() | Truncate() as change if step.streamed:
                self._blocks.setdefault(step.xid, []).append((step.subxid, change))
            case Insert() | Update() | Delete() | Truncate() as change:
                self._open.append(change)
            case StreamAbort(xid, subxid):
                block = self._blocks.pop(xid, [])
                self._blocks[xid] = [c for c in block if subxid not in (xid, c[0])]
            case Commit():
                self._apply(self._open)
                self._open = []
            case StreamCommit(xid):
                self._apply([change for _, change in self._blocks.pop(xid, [])])
            case Prepare() as prepare:
                self._prepared[prepare.gid], self._open = self._open, []
            case StreamPrepare() as prepare:
                block = self._blocks.pop(prepare.xid, [])
                self._prepared[prepare.gid] = [change for _, change in block]
            case CommitPrepared() as end:
                self._apply(self._prepared.pop(end.gid))
            case RollbackPrepared() as undone:
                del self._prepared[undone.gid]

    def contents(self) -> dict[str, list[list[str | None]]]:
        """As tests.promises.bridge.recordings.scenario.contents tells them."""
        texts = {
            table: [[None if v is None else bytes(v).decode() for v in row] for row in rows]  # type: ignore[arg-type]
            for table, rows in self.rows.items()
        }
        return {table: sorted(rows, key=_order) for table, rows in texts.items()}

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case Insert(relation, new):
                    self._table(relation).append(new)
                case Update(relation, _, old, new):
                    rows = self._table(relation)
                    at = _find(rows, relation, old or new)
                    rows[at] = [
                        was if value is UNCHANGED else value
                        for was, value in zip(rows[at], new, strict=True)
                    ]
                case Delete(relation, _, old):
                    rows = self._table(relation)
                    del rows[_find(rows, relation, old)]
                case Truncate(relations):
                    for relation in relations:
                        self._table(relation).clear()

    def _table(self, relation: Relation) -> list[Row]:
        rows = self.rows.setdefault(relation.table, [])
        for row in rows:
            row += [None] * (len(relation.columns) - len(row))
        return rows


def _find(rows: list[Row], relation: Relation, wanted: Row) -> int:
    keys = [index for index, column in enumerate(relation.columns) if column.key]
    (found,) = (i for i, row in enumerate(rows) if all(row[k] == wanted[k] for k in keys))
    return found


def _order(row: list[str | None]) -> tuple[bool, str, str]:
    return (row[0] is None, row[0] or "", row[1] or "")


def transcript(messages: list[Recorded]) -> list[str]:
    """Kinds and shapes, without what differs from one recording to the next: LSNs, xids, oids, and
    empty blocks. An (auto)vacuum of the catalogs meanwhile makes these, as it invalidates caches.
    """
    lines: list[str] = []
    for step in walk(messages):
        line = _line(step)
        if line == "StreamStop" and lines[-1] == "StreamStart":
            lines.pop()
        else:
            lines.append(line)
    return lines


def _line(step: Step) -> str:
    kind = f"{'  ' if step.streamed else ''}{type(step.message).__name__}"
    match step.message:
        case Relation() as relation:
            columns = [(c.name, c.typmod, c.key) for c in relation.columns]
            return f"{kind} {relation.table} {relation.replica_identity} {columns}"
        case Insert(relation, new):
            return f"{kind} {relation.table} {new}"
        case Update(relation, old_kind, old, new):
            return f"{kind} {relation.table} {old_kind} {old} {new}"
        case Delete(relation, old_kind, old):
            return f"{kind} {relation.table} {old_kind} {old}"
        case Truncate(relations, cascade, restart):
            return f"{kind} {sorted(r.table for r in relations)} {cascade} {restart}"
        case Message(transactional, _, prefix, content):
            return f"{kind} {transactional} {prefix} {content!r}"
        case BeginPrepare() | Prepare() | StreamPrepare() | CommitPrepared() as prepared:
            return f"{kind} {prepared.gid}"
        case RollbackPrepared() as prepared:
            return f"{kind} {prepared.gid}"
    return kind
