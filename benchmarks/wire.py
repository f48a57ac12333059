"""A TCP relay in front of a PostgreSQL server that counts what a replication connection is sent.

server -> type:u8 length:u32 content            length counts itself, not the type
'd' (CopyData) content: 'w' start:u64 end:u64 time:i64 payload | 'k' end:u64 time:i64 reply:u8
"""

import contextlib
import multiprocessing
import socket
import struct
import threading
from ctypes import c_longlong
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any, NamedTuple, Protocol


class Counts(Protocol):
    """The fields of Traffic, one after another."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


_HEAD = struct.Struct("!cI")
_DATA_HEADER_BYTES = 25


class Traffic(NamedTuple):
    """What the server has sent: CopyData of changes, keepalives, their bytes on the wire.

    `payload_bytes` are pgoutput's messages alone, without the headers around them.
    """

    messages: int
    message_bytes: int
    payload_bytes: int
    keepalives: int
    keepalive_bytes: int


class Relay:
    """Relays one connection to 127.0.0.1:`port`, without TLS, in a process of its own.

    In a thread it would stand still while libpq connects, which holds the interpreter.
    """

    def __init__(self, port: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        context = multiprocessing.get_context("fork")
        self._counts: SynchronizedArray[Any] = context.Array(c_longlong, len(Traffic._fields))
        self._process = context.Process(
            target=_serve, args=(listener, port, self._counts), daemon=True
        )
        self._process.start()
        listener.close()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    @property
    def traffic(self) -> Traffic:
        """What has been counted so far."""
        return Traffic(*map(int, self._counts[:]))


def _serve(listener: socket.socket, port: int, counts: Counts) -> None:
    client, _ = listener.accept()
    server = socket.create_connection(("127.0.0.1", port))
    for each in (client, server):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_relay, args=(client, server, None), daemon=True).start()
    _relay(server, client, counts)


def _relay(
    source: socket.socket,
    target: socket.socket,
    counts: Counts | None,
) -> None:
    unread = bytearray()
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            if counts is not None:
                unread += data
                count_whole(unread, counts)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def count_whole(unread: bytearray, counts: Counts) -> None:
    """Count the whole messages at the start of `unread` and remove them."""
    pos = 0
    while len(unread) - pos >= _HEAD.size:
        kind, length = _HEAD.unpack_from(unread, pos)
        size = 1 + length
        if len(unread) - pos < size:
            break
        if kind == b"d" and unread[pos + _HEAD.size] == b"k"[0]:
            _add(counts, 0, 0, 0, 1, size)
        elif kind == b"d":
            _add(counts, 1, size, size - _HEAD.size - _DATA_HEADER_BYTES, 0, 0)
        pos += size
    del unread[:pos]


def _add(counts: Counts, *more: int) -> None:
    for index, number in enumerate(more):
        counts[index] += number
