"""Sockets with numbers that select() can't take."""

import contextlib
import fcntl
import os
import resource
import socket
import time
from collections.abc import Iterator

import psycopg
import pytest

from services.bridge.source.readiness import FD_SETSIZE, wait_readable, wait_writable
from services.bridge.source.replication_connection import Keepalive, ReplicationConnection
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient_ms


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """All numbers that select() can take are in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * FD_SETSIZE), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        last = 0
        while last < FD_SETSIZE:
            last = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, last)
        yield


@pytest.mark.parametrize("lowest", [0, FD_SETSIZE])
@pytest.mark.usefixtures("many_descriptors")
def test_waiting_ends_with_bytes_a_time_out_or_the_end_of_the_connection(lowest: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = fcntl.fcntl(ours, fcntl.F_DUPFD, lowest)
        with socket.socket(fileno=number):
            before = time.monotonic()
            wait_readable([number], 0.0)
            wait_readable([number], 0.02)
            assert time.monotonic() - before >= 0.02
            wait_writable(number, 60.0)
            theirs.sendall(b"x")
            wait_readable([number], 60.0)
            assert ours.recv(1) == b"x"
            theirs.close()
            wait_readable([number], 60.0)


@pytest.mark.long
@pytest.mark.usefixtures("many_descriptors")
def test_the_replication_socket_may_have_any_number(pair: Provider, fresh_database: str) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    slot = f"s_{fresh_database}"
    with psycopg.connect(conninfo, autocommit=True) as sql:
        sql.execute("CREATE PUBLICATION p FOR ALL TABLES")
        sql.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    connection = ReplicationConnection(
        conninfo, slot, wal_sender_timeout_ms=patient_ms(3_300), sql_deadline_ms=patient_ms(3_300)
    )
    with contextlib.closing(connection):
        connection.start(0, "p", streaming=True, origin="any", two_phase=False)
        connection.feedback(0, 0, ask=True)

        def answered() -> bool:
            connection.wait(1.0)
            return any(isinstance(one, Keepalive) for one in connection.read())

        eventually(answered, what="the server answers")
