"""The messages of pgoutput, one type for each message of protocol version 4. Pure.

LSNs are bytes into the WAL, times microseconds since 1970-01-01 UTC.
Source: PostgreSQL documentation 54.9 "Logical Replication Message Formats".
"""

from dataclasses import dataclass
from typing import Final, NamedTuple


class Unchanged:
    """The type of UNCHANGED, a TOASTed value that an UPDATE did not touch and the WAL lacks."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged()
Value = bytes | None | Unchanged
"""A column's text form, NULL, or UNCHANGED."""
Row = list[Value]


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column of a Relation message. `key`: part of the replica identity.

    `type_name`: `schema.name` as a Type message has it, empty for built-in types.
    """

    name: str
    type_oid: int
    typmod: int
    key: bool
    type_name: str = ""


@dataclass(frozen=True, slots=True)
class Relation:
    """A table's shape from here on. `replica_identity`: one of d, n, f, i."""

    oid: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


class Begin(NamedTuple):
    """A transaction's start. `commit_lsn`: where its commit record begins; time since 1970, µs."""

    commit_lsn: int
    commit_time_us: int
    xid: int


class Commit(NamedTuple):
    """A transaction's end. `end_lsn`: just after its commit record, the only resume point."""

    commit_lsn: int
    end_lsn: int
    commit_time_us: int


class Origin(NamedTuple):
    """The replication origin that the transaction was applied from."""

    origin_lsn: int
    name: str


class Type(NamedTuple):
    """A type that is not built in."""

    oid: int
    schema: str
    name: str


class Insert(NamedTuple):
    """An INSERT of one row."""

    relation: Relation
    new: Row


class Update(NamedTuple):
    """A changed row. `old`: the key columns (`old_kind` K), the whole row (O), or None."""

    relation: Relation
    old_kind: str | None
    old: Row | None
    new: Row

    @property
    def present_values(self) -> Row:
        """The new row, with the unchanged values that the old row tells."""
        old = self.old
        if old is None:
            return self.new
        whole = self.old_kind == "O"
        return [
            o if isinstance(n, Unchanged) and (whole or o is not None) else n
            for n, o in zip(self.new, old, strict=True)
        ]


class Delete(NamedTuple):
    """A removed row. `old` as in Update."""

    relation: Relation
    old_kind: str
    old: Row


class Truncate(NamedTuple):
    """Emptied tables, all in one statement."""

    relations: tuple[Relation, ...]
    cascade: bool
    restart_identity: bool


class Message(NamedTuple):
    """A logical message (pg_logical_emit_message)."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


class StreamStart(NamedTuple):
    """A block of changes of a transaction in progress begins; `first`: its first block."""

    xid: int
    first: bool


class Frame(NamedTuple):
    """One message of a streamed block: the (sub)transaction, its WAL position, pgoutput's bytes."""

    subxid: int
    lsn: int
    payload: bytes


class StreamStop(NamedTuple):
    """The block ends; blocks of other transactions may follow."""


class StreamCommit(NamedTuple):
    """A streamed transaction has committed; positions as in Commit."""

    xid: int
    commit_lsn: int
    end_lsn: int
    commit_time_us: int


class StreamAbort(NamedTuple):
    """A streamed transaction (`subxid` = `xid`) or one subtransaction of it was rolled back."""

    xid: int
    subxid: int


class BeginPrepare(NamedTuple):
    """A prepared transaction's start. `prepare_lsn`: where its PREPARE record begins."""

    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


class Prepare(NamedTuple):
    """A prepared transaction's end: all its changes have been sent."""

    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


class StreamPrepare(NamedTuple):
    """A streamed transaction was prepared; fields as in Prepare."""

    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


class CommitPrepared(NamedTuple):
    """COMMIT PREPARED; positions as in Commit."""

    commit_lsn: int
    end_lsn: int
    commit_time_us: int
    xid: int
    gid: str


class RollbackPrepared(NamedTuple):
    """ROLLBACK PREPARED. `prepare_end_lsn`: the end of the PREPARE that it undoes."""

    prepare_end_lsn: int
    end_lsn: int
    prepare_time_us: int
    rollback_time_us: int
    xid: int
    gid: str


Change = Insert | Update | Delete | Truncate
AnyMessage = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Change
    | Message
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | StreamPrepare
    | CommitPrepared
    | RollbackPrepared
)
STREAM_MESSAGES: Final = (StreamStart, StreamStop, StreamCommit, StreamAbort)
"""The messages that services.bridge.transactions.streams takes."""
PREPARED_MESSAGES: Final = (BeginPrepare, Prepare, StreamPrepare, CommitPrepared, RollbackPrepared)
"""The messages that services.bridge.transactions.prepared takes."""
