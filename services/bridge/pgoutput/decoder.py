"""pgoutput's bytes to messages. Pure: no I/O, no clock; keeps the relation and type caches.

    B  final_lsn:u64 commit_time:i64 xid:u32
    C  flags:u8 commit_lsn:u64 end_lsn:u64 commit_time:i64
    O  origin_lsn:u64 name:cstr
    R  [xid:u32] oid:u32 schema:cstr table:cstr replica_identity:u8 n:u16
       { flags:u8 name:cstr type:u32 typmod:i32 }
    Y  [xid:u32] oid:u32 schema:cstr name:cstr
    I  [xid:u32] oid:u32 'N' tuple
    U  [xid:u32] oid:u32 [('K'|'O') tuple] 'N' tuple
    D  [xid:u32] oid:u32 ('K'|'O') tuple
    T  [xid:u32] n:u32 flags:u8 {oid:u32}
    M  [xid:u32] flags:u8 lsn:u64 prefix:cstr length:u32 content
    S  xid:u32 first:u8                     E
    c  xid:u32 flags:u8 commit_lsn:u64 end_lsn:u64 commit_time:i64
    A  xid:u32 subxid:u32 [abort_lsn:u64 abort_time:i64]
    b  prepare_lsn:u64 end_lsn:u64 prepare_time:i64 xid:u32 gid:cstr
    P  flags:u8 and as b                    p  flags:u8 and as b
    K  flags:u8 commit_lsn:u64 end_lsn:u64 commit_time:i64 xid:u32 gid:cstr
    r  flags:u8 prepare_end_lsn:u64 end_lsn:u64 prepare_time:i64 rollback_time:i64 xid:u32 gid:cstr
    tuple = n:u16 { 'n' | 'u' | 't' length:u32 bytes }

[xid] is there only between S and E: such changes are decoded by a Decoder made with `streamed`.
Integers are big-endian, times microseconds since 2000-01-01 UTC, cstr ends with a zero byte.
Source: PostgreSQL documentation 54.9 "Logical Replication Message Formats";
src/backend/replication/logical/proto.c.
"""

import itertools
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from services.bridge.pgoutput.errors import DecodeError as DecodeError
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    Message,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    RollbackPrepared,
    Row,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)

POSTGRES_EPOCH_US: Final = 946_684_800_000_000
"""2000-01-01 in microseconds since 1970-01-01."""

_BEGIN = struct.Struct("!QqI")
_COMMIT = struct.Struct("!BQQq")
_U64 = struct.Struct("!Q")
_U32 = struct.Struct("!I")
_U16 = struct.Struct("!H")
_TYPE_AND_MODIFIER = struct.Struct("!Ii")
_TRUNCATE = struct.Struct("!IB")
_MESSAGE = struct.Struct("!BQ")
_STREAM_START = struct.Struct("!IB")
_STREAM_ABORT = struct.Struct("!II")
_ABORT_WITH_POSITION_BYTES: Final = 25
_PREPARED = struct.Struct("!QQqI")
_ROLLBACK_PREPARED = struct.Struct("!QQqqI")
_NULL, _UNCHANGED, _TEXT = b"n"[0], b"u"[0], b"t"[0]
_NEW, _KEY, _OLD = b"N"[0], b"K"[0], b"O"[0]


class Decoder:
    """Decodes one connection's messages; a new connection needs a new Decoder.

    `relations` and `types` (by oid) hold what the server has described, and `descriptions` (by
    message kind and oid) these messages as they are outside of blocks.
    `writers` is for who encodes rows, by `row_kind`: emptied when the server describes something.
    The server describes relations anew within every streamed transaction: with `streamed`, a
    Decoder is for the blocks of one such transaction, whose messages carry their (sub)xid.
    """

    def __init__(self, *, streamed: bool = False) -> None:
        self._body = 5 if streamed else 1
        self.relations: dict[int, Relation] = {}
        self.types: dict[int, Type] = {}
        self.descriptions: dict[tuple[int, int], bytes] = {}
        self.writers: dict[bytes, Any] = {}
        self.arrival = itertools.count(1).__next__
        """Numbers a description that arrives now, here or in a streamed block."""
        self._arrived: dict[tuple[int, int], int] = {}
        self._parsers: dict[int, Callable[[bytes], AnyMessage]] = {
            b"B"[0]: _begin,
            b"C"[0]: _commit,
            b"O"[0]: _origin,
            b"R"[0]: self._relation,
            b"Y"[0]: self._type,
            b"I"[0]: self._insert,
            b"U"[0]: self._update,
            b"D"[0]: self._delete,
            b"T"[0]: self._truncate,
            b"M"[0]: self._message,
            b"S"[0]: _stream_start,
            b"E"[0]: _stream_stop,
            b"c"[0]: _stream_commit,
            b"A"[0]: _stream_abort,
            b"b"[0]: _begin_prepare,
            b"P"[0]: _prepare,
            b"p"[0]: _stream_prepare,
            b"K"[0]: _commit_prepared,
            b"r"[0]: _rollback_prepared,
        }

    def decode(self, data: bytes, lsn: int) -> AnyMessage:
        """Return the one message in `data`, which came at WAL position `lsn`.

        Raise DecodeError for truncated, unknown or surplus bytes, and nothing else; it names the
        offset, `lsn`, and the relation when the message has come so far.
        """
        try:
            return self._parsers[data[0]](data)
        except DecodeError as error:
            raise self._located(error, data, lsn) from None
        except KeyError:
            unknown = DecodeError(f"unknown message kind {data[:1]!r} at offset 0")
            raise self._located(unknown, data, lsn) from None
        except (IndexError, struct.error):
            cut = DecodeError(f"truncated at offset {len(data)}")
            raise self._located(cut, data, lsn) from None

    @property
    def row_at(self) -> int:
        """Where the values of the first row begin in an insert or update."""
        return self._body + 7

    def row_kind(self, data: bytes) -> bytes:
        """Return the bytes before a row's values, without xid: kind, relation, N K or O, count."""
        return data[:8] if self._body == 1 else data[:1] + data[5:12]

    def _located(self, error: DecodeError, data: bytes, lsn: int) -> DecodeError:
        """Add operation, LSN, hint and table to an error, and return it."""
        error.operation = "decode pgoutput"
        error.lsn = lsn
        error.hint = "report this with the server's version; the slot keeps the change"
        if data[:1] in (b"I", b"U", b"D") and not error.subject:
            relation = self.relations.get(int.from_bytes(data[self._body : self._body + 4]))
            if relation is not None:
                error.subject = f"{relation.schema}.{relation.table}"
        return error

    def _relation(self, data: bytes) -> Relation:
        """Decode a Relation message, and keep it for the changes that name its oid."""
        (oid,) = _U32.unpack_from(data, self._body)
        schema, pos = _cstring(data, self._body + 4)
        table, pos = _cstring(data, pos)
        identity = chr(data[pos])
        if identity not in "dnfi":
            raise DecodeError(
                f"unknown replica identity {identity!r} at offset {pos}",
                subject=f"{schema}.{table}",
            )
        (count,) = _U16.unpack_from(data, pos + 1)
        pos += 3
        columns = []
        for _ in range(count):
            flags = data[pos]
            name, pos = _cstring(data, pos + 1)
            type_oid, typmod = _TYPE_AND_MODIFIER.unpack_from(data, pos)
            pos += 8
            known = self.types.get(type_oid)
            type_name = f"{known.schema}.{known.name}" if known is not None else ""
            columns.append(RelationColumn(name, type_oid, typmod, bool(flags & 1), type_name))
        _finished(data, pos)
        relation = Relation(oid, schema or "pg_catalog", table, identity, tuple(columns))
        self.relations[oid] = relation
        self.writers.clear()
        self._describe(data, oid)
        return relation

    def _type(self, data: bytes) -> Type:
        (oid,) = _U32.unpack_from(data, self._body)
        schema, pos = _cstring(data, self._body + 4)
        name, pos = _cstring(data, pos)
        _finished(data, pos)
        self.writers.clear()
        self.types[oid] = result = Type(oid, schema or "pg_catalog", name)
        self._describe(data, oid)
        return result

    def _insert(self, data: bytes) -> Insert:
        relation = self._known(_U32.unpack_from(data, self._body)[0])
        new, pos = _tuple(data, _expect(data, self._body + 4, _NEW), relation)
        _finished(data, pos)
        return Insert(relation, new)

    def _update(self, data: bytes) -> Update:
        """Decode an Update: the old row or key, if it was sent, and the new row."""
        relation = self._known(_U32.unpack_from(data, self._body)[0])
        pos = self._body + 4
        kind = data[pos]
        old: Row | None = None
        if kind in (_KEY, _OLD):
            old, pos = _tuple(data, pos + 1, relation)
        new, pos = _tuple(data, _expect(data, pos, _NEW), relation)
        _finished(data, pos)
        return Update(relation, None if old is None else chr(kind), old, new)

    def _delete(self, data: bytes) -> Delete:
        relation = self._known(_U32.unpack_from(data, self._body)[0])
        pos = self._body + 4
        kind = data[pos]
        if kind not in (_KEY, _OLD):
            raise DecodeError(f"a delete's old row has kind {chr(kind)!r} at offset {pos}")
        old, pos = _tuple(data, pos + 1, relation)
        _finished(data, pos)
        return Delete(relation, chr(kind), old)

    def _truncate(self, data: bytes) -> Truncate:
        count, flags = _TRUNCATE.unpack_from(data, self._body)
        pos = self._body + _TRUNCATE.size
        _finished(data, pos + 4 * count)
        oids = struct.unpack_from(f"!{count}I", data, pos)
        return Truncate(tuple(map(self._known, oids)), bool(flags & 1), bool(flags & 2))

    def _message(self, data: bytes) -> Message:
        flags, lsn = _MESSAGE.unpack_from(data, self._body)
        prefix, pos = _cstring(data, self._body + _MESSAGE.size)
        (length,) = _U32.unpack_from(data, pos)
        pos += 4
        _finished(data, pos + length)
        return Message(bool(flags & 1), lsn, prefix, data[pos:])

    def learn(self, other: "Decoder", arrived: Mapping[tuple[int, int], int]) -> None:
        """Take over the descriptions that `other` got, unless this decoder has later ones.

        `arrived`: the arrival of each by kind and oid. The server takes these for told from now on.
        """
        self.writers.clear()
        for key, number in arrived.items():
            if key in other.descriptions and number > self._arrived.get(key, 0):
                self._arrived[key] = number
                self.descriptions[key] = other.descriptions[key]
                pair: Any = (self.relations, other.relations)
                mine, theirs = pair if key[0] == b"R"[0] else (self.types, other.types)
                mine[key[1]] = theirs[key[1]]

    def _describe(self, data: bytes, oid: int) -> None:
        plain = data if self._body == 1 else data[:1] + data[self._body :]
        self.descriptions[data[0], oid] = plain
        self._arrived[data[0], oid] = self.arrival()

    def _known(self, oid: int) -> Relation:
        relation = self.relations.get(oid)
        if relation is None:
            raise DecodeError(f"relation {oid} at offset {self._body} has not been described")
        return relation


def _begin(data: bytes) -> Begin:
    commit_lsn, time, xid = _BEGIN.unpack_from(data, 1)
    if len(data) != 21:
        _finished(data, 21)
    return Begin(commit_lsn, time + POSTGRES_EPOCH_US, xid)


def _commit(data: bytes) -> Commit:
    _flags, commit_lsn, end_lsn, time = _COMMIT.unpack_from(data, 1)
    if len(data) != 26 or end_lsn <= commit_lsn:
        _finished(data, 26)
        _ordered(commit_lsn, end_lsn, 10)
    return Commit(commit_lsn, end_lsn, time + POSTGRES_EPOCH_US)


def _origin(data: bytes) -> Origin:
    (lsn,) = _U64.unpack_from(data, 1)
    name, pos = _cstring(data, 9)
    _finished(data, pos)
    return Origin(lsn, name)


def _stream_start(data: bytes) -> StreamStart:
    xid, first = _STREAM_START.unpack_from(data, 1)
    _finished(data, 6)
    return StreamStart(xid, first == 1)


def _stream_stop(data: bytes) -> StreamStop:
    _finished(data, 1)
    return StreamStop()


def _stream_commit(data: bytes) -> StreamCommit:
    (xid,) = _U32.unpack_from(data, 1)
    _flags, commit_lsn, end_lsn, time = _COMMIT.unpack_from(data, 5)
    _finished(data, 30)
    _ordered(commit_lsn, end_lsn, 14)
    return StreamCommit(xid, commit_lsn, end_lsn, time + POSTGRES_EPOCH_US)


def _stream_abort(data: bytes) -> StreamAbort:
    xid, subxid = _STREAM_ABORT.unpack_from(data, 1)
    if len(data) != _ABORT_WITH_POSITION_BYTES:  # streaming = parallel adds LSN and time
        _finished(data, 9)
    return StreamAbort(xid, subxid)


def _begin_prepare(data: bytes) -> BeginPrepare:
    return BeginPrepare(*_prepared(data, 1))


def _prepare(data: bytes) -> Prepare:
    return Prepare(*_prepared(data, 2))


def _stream_prepare(data: bytes) -> StreamPrepare:
    return StreamPrepare(*_prepared(data, 2))


def _commit_prepared(data: bytes) -> CommitPrepared:
    return CommitPrepared(*_prepared(data, 2))


def _prepared(data: bytes, pos: int) -> tuple[int, int, int, int, str]:
    lsn, end_lsn, time, xid = _PREPARED.unpack_from(data, pos)
    gid, end = _cstring(data, pos + _PREPARED.size)
    _finished(data, end)
    _ordered(lsn, end_lsn, pos + 8)
    return lsn, end_lsn, time + POSTGRES_EPOCH_US, xid, gid


def _rollback_prepared(data: bytes) -> RollbackPrepared:
    prepare_end, end, prepared, rolled_back, xid = _ROLLBACK_PREPARED.unpack_from(data, 2)
    gid, pos = _cstring(data, 2 + _ROLLBACK_PREPARED.size)
    _finished(data, pos)
    _ordered(prepare_end, end, 10)
    return RollbackPrepared(
        prepare_end, end, prepared + POSTGRES_EPOCH_US, rolled_back + POSTGRES_EPOCH_US, xid, gid
    )


def _tuple(data: bytes, pos: int, relation: Relation) -> tuple[Row, int]:
    """Return a row's values and the position after it. Raise DecodeError out of bounds."""
    count = int.from_bytes(data[pos : pos + 2])
    if count != len(relation.columns):
        raise DecodeError(
            f"a row of {count} columns at offset {pos}, expected {len(relation.columns)}"
        )
    pos += 2
    row: Row = []
    for _ in range(count):
        kind = data[pos]
        if kind == _TEXT:
            start = pos + 5
            pos = start + int.from_bytes(data[pos + 1 : start])
            row.append(data[start:pos])
        elif kind == _NULL:
            row.append(None)
            pos += 1
        elif kind == _UNCHANGED:
            row.append(UNCHANGED)
            pos += 1
        else:
            raise DecodeError(f"unknown value kind {chr(kind)!r} at offset {pos}")
    if pos > len(data):
        raise DecodeError(f"truncated at offset {len(data)}")
    return row, pos


def _cstring(data: bytes, pos: int) -> tuple[str, int]:
    end = data.find(0, pos)
    if end < 0:
        raise DecodeError(f"truncated at offset {len(data)}")
    try:
        return data[pos:end].decode("utf-8"), end + 1
    except UnicodeDecodeError:
        raise DecodeError(f"no UTF-8 text at offset {pos}") from None


def _expect(data: bytes, pos: int, kind: int) -> int:
    if data[pos] != kind:
        raise DecodeError(f"expected {chr(kind)!r} at offset {pos}, found {chr(data[pos])!r}")
    return pos + 1


def _ordered(lsn: int, end_lsn: int, pos: int) -> None:
    if end_lsn <= lsn:
        raise DecodeError(f"a transaction's end, at offset {pos}, lies before its last record")


def _finished(data: bytes, pos: int) -> None:
    if pos != len(data):
        raise DecodeError(f"{len(data)} bytes where the message ends at offset {pos}")
