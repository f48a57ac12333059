"""Reads are batched where much arrives, and nothing waits in the socket longer than it may."""

import socket
import struct
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bridge.source import receive_batching
from services.bridge.source.receive_batching import (
    BATCH_BYTES,
    BATCH_S,
    BEHIND_BYTES,
    BEHIND_MESSAGES,
    BYTES_PER_S,
    RATE_S,
    Gathering,
    Pace,
)
from tests.promises.bridge.conftest import NewBridge
from tests.providers.interface import Provider


@given(st.lists(st.tuples(st.floats(0.0001, 0.01), st.integers(0, 2**18)), min_size=1))
def test_reads_are_batched_while_the_last_rate_is_high(reads: list[tuple[float, int]]) -> None:
    pace, now, since, size = Pace(0.0), 0.0, 0.0, 0
    for passed_s, more in reads:
        now, size, before = now + passed_s, size + more, pace.batches
        assert pace.read(more, now) is (pace.batches is not before)
        if now - since >= RATE_S:
            assert pace.batches is (size >= BYTES_PER_S * (now - since))
            since, size = now, 0
        else:
            assert pace.batches is before


def test_more_than_a_batch_says_that_there_is_more() -> None:
    pace = Pace(0.0)
    assert pace.behind(BEHIND_MESSAGES, 0)
    assert not pace.behind(BEHIND_MESSAGES - 1, 2**20)
    assert pace.read(2**20, RATE_S)
    assert not pace.behind(10 * BEHIND_MESSAGES, BATCH_BYTES)
    assert pace.behind(1, BEHIND_BYTES)


START_S = 1000.0
"""A time of our own: the machine's uptime decides how its clock's differences are rounded."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over TCP."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
    ):
        theirs, _ = server.accept()
        with theirs:
            for one, other in ((theirs, ours), (ours, theirs)):
                one.sendall(b"hello")
                assert other.recv(5)
            yield ours, theirs


def much(one: Gathering) -> None:
    """Reads at a high rate, for longer than a rate is measured."""
    one.read(2**20, START_S + 2 * RATE_S)


def low_water_mark(one: socket.socket) -> int:
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_so_rcvlowat_is_set_on_the_socket(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_batching, "RTT_US_MAX", 10**6)  # the machine may be busy
    ours, _ = ends
    with closing(Gathering(ours.fileno(), START_S)) as one:
        assert one.wait_max_s == float("inf")
        much(one)
        assert (low_water_mark(ours), one.wait_max_s) == (BATCH_BYTES, BATCH_S)
    assert low_water_mark(ours) == 1


def test_a_far_server_keeps_its_window(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_batching, "RTT_US_MAX", -1)
    ours, _ = ends
    before = ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    with closing(Gathering(ours.fileno(), START_S)) as one:
        much(one)
        assert (low_water_mark(ours), one.wait_max_s) == (1, float("inf"))
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before


def test_min_rtt_is_read_from_tcp_info(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = ends
    info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    smoothed_us = struct.unpack_from("68xI", info)[0]
    assert 0 < receive_batching._min_rtt_us(ours) <= smoothed_us < 60_000_000, "microseconds"


def test_a_socket_without_tcp_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(Gathering(ours.fileno(), START_S)) as one:
        much(one)
        assert one.wait_max_s == float("inf")


@pytest.mark.long
def test_few_rows_behind_many_come_at_once(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Less than a batch is left in the socket when the load ends."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, filler text)")
        bridge = new_bridge(conninfo).start().streaming()
        for some in range(5):
            since = 100_000 * some
            connection.execute(
                "INSERT INTO t SELECT n, repeat('x', 200) FROM generate_series(%s, %s) n",
                [since + 1, since + 50_000],
            )
            connection.execute("INSERT INTO t VALUES (%s, '')", [since + 100_000])
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")
