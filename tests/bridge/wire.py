"""pgoutput messages as the server writes them: the decoder's opposite, for round trips.

Source: src/backend/replication/logical/proto.c.
"""

import struct

from services.bridge.decoder import (
    POSTGRES_EPOCH_US,
    UNCHANGED,
    AnyMessage,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Origin,
    Relation,
    Row,
    Truncate,
    Type,
    Update,
)


def encode(message: AnyMessage) -> bytes:
    """The bytes of `message`."""
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
