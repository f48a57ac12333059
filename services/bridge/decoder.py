"""pgoutput's bytes to messages. Pure: no I/O, no clock; keeps the relation and type caches.

    B  final_lsn:u64 commit_time:i64 xid:u32
    C  flags:u8 commit_lsn:u64 end_lsn:u64 commit_time:i64
    O  origin_lsn:u64 name:cstr
    R  oid:u32 schema:cstr table:cstr replica_identity:u8 n:u16
       { flags:u8 name:cstr type:u32 typmod:i32 }
    Y  oid:u32 schema:cstr name:cstr
    I  oid:u32 'N' tuple
    U  oid:u32 [('K'|'O') tuple] 'N' tuple
    D  oid:u32 ('K'|'O') tuple
    T  n:u32 flags:u8 {oid:u32}
    M  flags:u8 lsn:u64 prefix:cstr length:u32 content
    tuple = n:u16 { 'n' | 'u' | 't' length:u32 bytes }

Integers are big-endian, times microseconds since 2000-01-01 UTC, cstr ends with a zero byte.
Source: PostgreSQL documentation 54.9 "Logical Replication Message Formats";
src/backend/replication/logical/proto.c.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from schemas.errors import BadInput, ExitCode

POSTGRES_EPOCH_US: Final = 946_684_800_000_000
"""2000-01-01 in microseconds since 1970-01-01."""


class Unchanged:
    """The type of UNCHANGED, a TOASTed value that an UPDATE did not touch and the WAL lacks."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged()
Value = bytes | None | Unchanged
"""A column's text form, NULL, or UNCHANGED."""
Row = list[Value]


class DecodeError(BadInput):
    """Bytes that are no pgoutput message, or one that does not fit what came before."""

    exit_code = ExitCode.UNDECODABLE


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column of a Relation message. `key`: part of the replica identity."""

    name: str
    type_oid: int
    typmod: int
    key: bool


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
    """A new row."""

    relation: Relation
    new: Row


class Update(NamedTuple):
    """A changed row. `old`: the key columns (`old_kind` K), the whole row (O), or None."""

    relation: Relation
    old_kind: str | None
    old: Row | None
    new: Row


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


AnyMessage = (
    Begin | Commit | Origin | Relation | Type | Insert | Update | Delete | Truncate | Message
)

_BEGIN = struct.Struct("!QqI")
_COMMIT = struct.Struct("!BQQq")
_U64 = struct.Struct("!Q")
_U32 = struct.Struct("!I")
_U16 = struct.Struct("!H")
_TYPE_AND_MODIFIER = struct.Struct("!Ii")
_TRUNCATE = struct.Struct("!IB")
_MESSAGE = struct.Struct("!BQ")
_NULL, _UNCHANGED, _TEXT = b"n"[0], b"u"[0], b"t"[0]
_NEW, _KEY, _OLD = b"N"[0], b"K"[0], b"O"[0]


class Decoder:
    """Decodes one connection's messages; a new connection needs a new Decoder.

    `relations` (oid -> Relation) and `types` (oid -> Type) hold what the server has described.
    """

    def __init__(self) -> None:
        self.relations: dict[int, Relation] = {}
        self.types: dict[int, Type] = {}
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
            b"M"[0]: _message,
        }

    def decode(self, data: bytes, lsn: int) -> AnyMessage:
        """Return the one message in `data`, which came at WAL position `lsn`.

        Raises DecodeError for truncated, unknown or surplus bytes, and nothing else.
        """
        try:
            return self._parsers[data[0]](data)
        except DecodeError as error:
            error.lsn = lsn
            error.operation = "decode pgoutput"
            raise
        except KeyError as error:
            raise _refused(data, f"unknown message kind {data[:1]!r}", lsn) from error
        except (IndexError, struct.error, ValueError) as error:
            raise _refused(data, f"truncated or malformed ({error})", lsn) from error

    def _relation(self, data: bytes) -> Relation:
        (oid,) = _U32.unpack_from(data, 1)
        schema, pos = _cstring(data, 5)
        table, pos = _cstring(data, pos)
        identity = chr(data[pos])
        if identity not in "dnfi":
            raise DecodeError(f"unknown replica identity {identity!r}", subject=f"{schema}.{table}")
        (count,) = _U16.unpack_from(data, pos + 1)
        pos += 3
        columns = []
        for _ in range(count):
            flags = data[pos]
            name, pos = _cstring(data, pos + 1)
            type_oid, typmod = _TYPE_AND_MODIFIER.unpack_from(data, pos)
            pos += 8
            columns.append(RelationColumn(name, type_oid, typmod, bool(flags & 1)))
        _finished(data, pos)
        relation = Relation(oid, schema or "pg_catalog", table, identity, tuple(columns))
        self.relations[oid] = relation
        return relation

    def _type(self, data: bytes) -> Type:
        (oid,) = _U32.unpack_from(data, 1)
        schema, pos = _cstring(data, 5)
        name, pos = _cstring(data, pos)
        _finished(data, pos)
        self.types[oid] = result = Type(oid, schema or "pg_catalog", name)
        return result

    def _insert(self, data: bytes) -> Insert:
        relation = self._known(_U32.unpack_from(data, 1)[0])
        new, pos = _tuple(data, _expect(data, 5, _NEW), relation)
        _finished(data, pos)
        return Insert(relation, new)

    def _update(self, data: bytes) -> Update:
        relation = self._known(_U32.unpack_from(data, 1)[0])
        kind = data[5]
        old: Row | None = None
        pos = 5
        if kind in (_KEY, _OLD):
            old, pos = _tuple(data, 6, relation)
        new, pos = _tuple(data, _expect(data, pos, _NEW), relation)
        _finished(data, pos)
        return Update(relation, None if old is None else chr(kind), old, new)

    def _delete(self, data: bytes) -> Delete:
        relation = self._known(_U32.unpack_from(data, 1)[0])
        kind = data[5]
        if kind not in (_KEY, _OLD):
            raise DecodeError(f"a delete's old row has kind {chr(kind)!r}")
        old, pos = _tuple(data, 6, relation)
        _finished(data, pos)
        return Delete(relation, chr(kind), old)

    def _truncate(self, data: bytes) -> Truncate:
        count, flags = _TRUNCATE.unpack_from(data, 1)
        if len(data) != 6 + 4 * count:
            raise DecodeError(f"a truncate of {count} relations has {len(data)} bytes")
        oids = struct.unpack_from(f"!{count}I", data, 6)
        return Truncate(tuple(map(self._known, oids)), bool(flags & 1), bool(flags & 2))

    def _known(self, oid: int) -> Relation:
        relation = self.relations.get(oid)
        if relation is None:
            raise DecodeError(f"relation {oid} has not been described")
        return relation


def _begin(data: bytes) -> Begin:
    commit_lsn, time, xid = _BEGIN.unpack_from(data, 1)
    _finished(data, 21)
    return Begin(commit_lsn, time + POSTGRES_EPOCH_US, xid)


def _commit(data: bytes) -> Commit:
    _flags, commit_lsn, end_lsn, time = _COMMIT.unpack_from(data, 1)
    _finished(data, 26)
    if end_lsn <= commit_lsn:
        raise DecodeError("a commit ends before it begins")
    return Commit(commit_lsn, end_lsn, time + POSTGRES_EPOCH_US)


def _origin(data: bytes) -> Origin:
    (lsn,) = _U64.unpack_from(data, 1)
    name, pos = _cstring(data, 9)
    _finished(data, pos)
    return Origin(lsn, name)


def _message(data: bytes) -> Message:
    flags, lsn = _MESSAGE.unpack_from(data, 1)
    prefix, pos = _cstring(data, 10)
    (length,) = _U32.unpack_from(data, pos)
    pos += 4
    _finished(data, pos + length)
    return Message(bool(flags & 1), lsn, prefix, data[pos:])


def _tuple(data: bytes, pos: int, relation: Relation) -> tuple[Row, int]:
    """The values of a row and the position after it. Bounds are checked by index and at the end."""
    count = int.from_bytes(data[pos : pos + 2])
    if count != len(relation.columns):
        raise DecodeError(
            f"a row of {count} columns, expected {len(relation.columns)}",
            subject=f"{relation.schema}.{relation.table}",
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
            raise DecodeError(
                f"unknown value kind {chr(kind)!r} at offset {pos}",
                subject=f"{relation.schema}.{relation.table}",
            )
    if pos > len(data):
        raise DecodeError(
            f"truncated at offset {len(data)}", subject=f"{relation.schema}.{relation.table}"
        )
    return row, pos


def _cstring(data: bytes, pos: int) -> tuple[str, int]:
    end = data.index(0, pos)
    return data[pos:end].decode("utf-8"), end + 1


def _expect(data: bytes, pos: int, kind: int) -> int:
    if data[pos] != kind:
        raise DecodeError(f"expected {chr(kind)!r} at offset {pos}, found {chr(data[pos])!r}")
    return pos + 1


def _finished(data: bytes, pos: int) -> None:
    if pos != len(data):
        raise DecodeError(f"{len(data)} bytes where the message ends at offset {pos}")


def _refused(data: bytes, reason: str, lsn: int) -> DecodeError:
    return DecodeError(
        f"{reason} in a message of {len(data)} bytes",
        operation="decode pgoutput",
        lsn=lsn,
        hint="report this with the server's version; the slot keeps the change",
    )
