"""`slotfailover switchover` on real servers."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from services.testbed.bed import Bed
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.servers import (
    ask,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    write,
)
from tests.providers.interface import Server
from tests.providers.waiting import patient

UNUSED = """
    SELECT coalesce(string_agg(slot_name, ', '), '') FROM pg_replication_slots
     WHERE slot_type = 'physical' AND NOT active
"""


@contextlib.contextmanager
def writing_past_the_fence(server: Server) -> Iterator[None]:
    """A client that asks for READ WRITE itself, until the end of the block."""
    ended = threading.Event()

    def write_on() -> None:
        while not ended.wait(0.01):
            with (
                contextlib.suppress(psycopg.Error),
                psycopg.connect(server.conninfo(), autocommit=True) as session,
            ):
                while not ended.wait(0.01):
                    session.execute("BEGIN READ WRITE; SELECT pg_current_xact_id(); COMMIT")

    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(patient(60))


def test_switchover_there_and_back_again(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    write(trio.primary, trio.dbname, 1)
    config = configuration(
        tmp_path, trio, as_roles=True, machines=machines(trio, local_bed), synchronous_standbys=1
    )
    shown = slotfailover("switchover", "--config", config, "--dry-run", "--to", "b")
    assert shown.code == 0
    for new, name, first in (
        (trio.standby, "b", 101),
        (trio.primary, "a", 201),
    ):
        ran = slotfailover("switchover", "--config", config, "--yes", "--to", name)
        assert ran.code == 0, ran.err
        again = slotfailover("switchover", "--config", config, "--yes", "--to", name, "--json")
        assert (again.code, again.json["steps"]) == (0, []), again.err
        write(new, trio.dbname, first)
        await_equal(trio, new)
        ready = slotfailover("check", "--config", config)
        assert ready.code == 0, ready.out
        for server in (trio.primary, trio.standby):
            assert ask(server, UNUSED) == "", (new, ready.out)
    assert ask(trio.standby, "SELECT pg_is_in_recovery()")


@pytest.mark.long
def test_nodes_by_unix_socket_and_by_ipv6(local_trio: NewTrio, tmp_path: Path) -> None:
    trio = local_trio(
        settings={"unix_socket_directories": "/tmp", "listen_addresses": "127.0.0.1,::1"}
    )
    subscribe(trio, "s1")
    nodes = {"a": trio.primary.conninfo(host="/tmp"), "b": trio.standby.conninfo(host="::1")}
    advertised = {"a": f"host=127.0.0.1 port={trio.primary.port}"}
    config = configuration(tmp_path, trio, nodes=nodes, advertised=advertised)
    ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b", "--no-rejoin")
    assert ran.code == 1, ran.err
    assert "TO DO     a: the node is fenced and still runs" in ran.out
    moved = ask(trio.subscriber, "SELECT subconninfo FROM pg_subscription", trio.dbname)
    assert "host='::1'" in moved
    write(trio.standby, trio.dbname, 1)
    await_equal(trio, trio.standby)


@pytest.mark.long
def test_late_sequence_numbers_are_reported_once(local_trio: NewTrio, tmp_path: Path) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    with writing_past_the_fence(trio.primary):
        order = ("switchover", "--config", config, "--yes", "--to", "b", "--no-rejoin", "--json")
        ran = slotfailover(*order)
    assert ran.code == 1, ran.err
    late = [note for note in ran.json["notes"] if "transaction numbers after the final LSN" in note]
    assert len(late) == 1, ran.json["notes"]
    assert int(late[0].split()[3]) > 1, late
