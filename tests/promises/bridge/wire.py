"""pgoutput messages as the server writes them: the decoder's opposite, for round trips.

Source: src/backend/replication/logical/proto.c.
"""

import struct

from schemas.shaping import ShapingSettings
from services.bridge.events.description import Described
from services.bridge.events.event import Stamp
from services.bridge.events.shaping.tables import Shaping, TableShaping
from services.bridge.pgoutput.decoder import POSTGRES_EPOCH_US
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


def encode(message: AnyMessage, streamed_xid: int | None = None) -> bytes:
    """The bytes of `message`; within a streamed block of `streamed_xid`."""
    data = _encode(message)
    if streamed_xid is None or data[:1] not in (b"R", b"Y", b"I", b"U", b"D", b"T", b"M"):
        return data
    return data[:1] + struct.pack("!I", streamed_xid) + data[1:]


def _encode(message: AnyMessage) -> bytes:
    match message:
        case Begin(commit_lsn, time, xid):
            return b"B" + struct.pack("!QqI", commit_lsn, time - POSTGRES_EPOCH_US, xid)
        case Commit(commit_lsn, end_lsn, time):
            return b"C" + struct.pack("!BQQq", 0, commit_lsn, end_lsn, time - POSTGRES_EPOCH_US)
        case Origin(lsn, name):
            return b"O" + struct.pack("!Q", lsn) + _cstring(name)
        case Type(oid, schema, name):
            return b"Y" + struct.pack("!I", oid) + _cstring(schema) + _cstring(name)
        case Relation():
            return _relation(message)
        case Insert(relation, new):
            return b"I" + struct.pack("!I", relation.oid) + b"N" + _row(new)
        case Update(relation, kind, old, new):
            before = b"" if old is None or kind is None else kind.encode() + _row(old)
            return b"U" + struct.pack("!I", relation.oid) + before + b"N" + _row(new)
        case Delete(relation, kind, old):
            return b"D" + struct.pack("!I", relation.oid) + kind.encode() + _row(old)
        case Truncate(relations, cascade, restart):
            flags = cascade | restart << 1
            oids = [relation.oid for relation in relations]
            return b"T" + struct.pack(f"!IB{len(oids)}I", len(oids), flags, *oids)
        case Message(transactional, lsn, prefix, content):
            head = struct.pack("!BQ", transactional, lsn) + _cstring(prefix)
            return b"M" + head + struct.pack("!I", len(content)) + content
        case _:
            return _encode_large(message)


def _encode_large(message: AnyMessage) -> bytes:
    """Messages of streamed and of prepared transactions."""
    match message:
        case StreamStart(xid, first):
            return b"S" + struct.pack("!IB", xid, first)
        case StreamStop():
            return b"E"
        case StreamCommit(xid, lsn, end, time):
            return b"c" + struct.pack("!IBQQq", xid, 0, lsn, end, time - POSTGRES_EPOCH_US)
        case StreamAbort(xid, subxid):
            return b"A" + struct.pack("!II", xid, subxid)
        case BeginPrepare():
            return b"b" + _prepared(*message)
        case Prepare():
            return b"P\0" + _prepared(*message)
        case StreamPrepare():
            return b"p\0" + _prepared(*message)
        case CommitPrepared():
            return b"K\0" + _prepared(*message)
        case RollbackPrepared(prepare_end, end, prepared, rolled_back, xid, gid):
            times = (prepared - POSTGRES_EPOCH_US, rolled_back - POSTGRES_EPOCH_US)
            return b"r\0" + struct.pack("!QQqqI", prepare_end, end, *times, xid) + _cstring(gid)
    raise AssertionError(message)


def _prepared(lsn: int, end: int, time: int, xid: int, gid: str) -> bytes:
    return struct.pack("!QQqI", lsn, end, time - POSTGRES_EPOCH_US, xid) + _cstring(gid)


def _cstring(text: str) -> bytes:
    return text.encode() + b"\0"


def _relation(relation: Relation) -> bytes:
    data = b"R" + struct.pack("!I", relation.oid) + _cstring(relation.schema)
    data += _cstring(relation.table) + relation.replica_identity.encode()
    data += struct.pack("!H", len(relation.columns))
    for column in relation.columns:
        data += bytes([column.key]) + _cstring(column.name)
        data += struct.pack("!Ii", column.type_oid, column.typmod)
    return data


def _row(row: Row) -> bytes:
    data = struct.pack("!H", len(row))
    for value in row:
        if value is None:
            data += b"n"
        elif value is UNCHANGED:
            data += b"u"
        else:
            assert isinstance(value, bytes)
            data += b"t" + struct.pack("!I", len(value)) + value
    return data


def plainly(relation: Relation, _stamp: Stamp, _seq: int) -> Described:
    """What an Envelope is told where settings, keys and schema events don't matter."""
    return Described(as_it_is(relation))


def as_it_is(relation: Relation) -> TableShaping:
    """Published whole, to the default topic of the prefix `bank`."""
    return Shaping(ShapingSettings(), "bank").plan(relation)
