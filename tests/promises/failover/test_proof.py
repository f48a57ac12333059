"""A promotion needs proof that the old primary is gone or fenced by us, on real servers."""

import os
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from services.failover.model.statements import fenced
from services.failover.observe.client_sessions import read_fence
from services.testbed.bed import Bed
from services.testbed.ports import free_port
from tests.conftest import NewPair
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.frozen_server import frozen
from tests.promises.failover.servers import (
    Ran,
    accepting,
    ask,
    await_equal,
    configuration,
    slotfailover,
    slotfailover_process,
    subscribe,
    tell,
    word_of,
    write,
)
from tests.providers.databases import connect
from tests.providers.interface import Trio
from tests.providers.proxy import Proxy
from tests.providers.tokens import token_of
from tests.providers.waiting import eventually, patient, patient_ms


def assert_untouched(trio: Trio) -> None:
    """The standby is one and streams, and the subscription is enabled."""
    assert ask(trio.standby, "SELECT pg_is_in_recovery()")
    streams = "SELECT EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming')"
    eventually(lambda: ask(trio.standby, streams), what="the standby streams")
    assert "slotfailover" not in ask(trio.standby, "SHOW primary_conninfo")
    assert ask(trio.subscriber, "SELECT bool_and(subenabled) FROM pg_subscription", trio.dbname)


@pytest.mark.parametrize("wholly", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_frozen_primary_is_not_replaced(
    local_trio: NewTrio, tmp_path: Path, wholly: bool
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, connect_timeout_s=round(patient(1.3)))
    with connect(trio.primary, trio.dbname) as session:
        with frozen(trio.primary, wholly=wholly):  # type: ignore[arg-type]
            for options in ([], word_of(trio.standby, "a")):
                ran = slotfailover("failover", "--config", config, "--yes", *options)
                assert ran.code == 35, ran.err
                assert "its socket accepts connections" in ran.err
            if not wholly:  # its sessions work, and so does what feeds the standby
                session.execute("INSERT INTO t VALUES (1, 'while it did not answer')")
        session.execute("INSERT INTO t VALUES (2, 'afterwards')")
    assert_untouched(trio)
    await_equal(trio, trio.primary)


def test_a_primary_that_only_we_can_not_reach_is_not_replaced(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """Refused by a proxy without a server, by one that resets, and not reached at all."""
    trio = new_pair()
    subscribe(trio, "s1")
    resetting = Proxy(trio.primary.port)
    resetting.cut()
    try:
        for node, says in (
            (f"host=127.0.0.1 port={free_port()}", "b receives from a"),
            (f"host=127.0.0.1 port={resetting.port}", "may be "),
            ("host=nowhere.invalid", "may be cut off from here"),
        ):
            config = configuration(
                tmp_path,
                trio,
                nodes={"a": f"{node} user=postgres", "b": trio.standby.conninfo()},
                advertised={"a": f"host=127.0.0.1 port={trio.primary.port}"},
            )
            ran = slotfailover("failover", "--config", config, "--yes")
            assert (ran.code, says in ran.err) == (35, True), ran.err
            write(trio.primary, trio.dbname, 1 + 100 * int(ask(trio.primary, _COUNT, trio.dbname)))
    finally:
        resetting.close()
    told = slotfailover("failover", "--config", config, "--yes", *word_of(trio.standby, "a"))
    assert (told.code, "b has just connected anew" in told.err) == (35, True), told.err
    assert_untouched(trio)
    await_equal(trio, trio.primary)


_COUNT = "SELECT count(*) FROM t"


def test_an_unreachable_primary_needs_the_operators_word_or_a_fence(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    write(trio.primary, trio.dbname, 1)

    def settings(fence: str) -> Path:
        return configuration(
            tmp_path,
            trio,
            nodes={"a": "host=nowhere.invalid user=postgres", "b": trio.standby.conninfo()},
            advertised={"a": f"host=127.0.0.1 port={trio.primary.port}"},
            machines={"a": {"fence": fence}} if fence else {},
        )

    fails = f"{shlex.quote(sys.executable)} -c 'raise SystemExit(3)'"
    unfenced = settings("")
    trio.primary.kill()
    refused = slotfailover("failover", "--config", unfenced, "--yes")
    word = accepting(refused)
    assert (refused.code, word) == (35, word_of(trio.standby, "a")), refused.err
    plan = slotfailover("failover", "--config", unfenced, "--dry-run", *word)
    assert (plan.code, "counts as off: an operator says so" in plan.out) == (0, True), plan.err
    another = slotfailover("failover", "--config", unfenced, "--dry-run", "--accept", f"{word[1]}1")
    assert (another.code, "not used" in another.err) == (35, True), another.err
    failed = slotfailover("failover", "--config", settings(fails), "--yes", "--fence")
    assert (failed.code, "ended with 3" in failed.err) == (25, True), failed.err
    assert "run slotfailover failover without --fence" in failed.err
    assert ask(trio.standby, "SELECT pg_is_in_recovery()")
    works = f"touch {shlex.quote(str(tmp_path / 'shot'))}"
    ran = slotfailover("failover", "--config", settings(works), "--yes", "--fence")
    assert ran.code == 0, ran.err
    assert (tmp_path / "shot").exists()
    write(trio.standby, trio.dbname, 101)
    await_equal(trio, trio.standby)


@pytest.mark.long
def test_fence_runs_the_command_also_where_nothing_seems_to_listen(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    shot = tmp_path / "shot"
    given = {"a": {"fence": f"touch {shlex.quote(str(shot))}"}}
    config = configuration(tmp_path, trio, machines=given)
    trio.primary.kill()
    assert slotfailover("failover", "--config", config, "--yes", "--fence").code == 0
    assert shot.exists()


@pytest.mark.long
def test_a_standby_copied_from_a_fenced_primary_can_be_written_once_promoted(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    tell(trio.standby, *fenced("timeline 1 by somebody@elsewhere since 2026-01-01T00:00:00Z"))
    mark = "SELECT current_setting('slotfailover.fenced', true) LIKE 'timeline 1 %'"
    eventually(lambda: ask(trio.standby, mark), what="the standby has read it")
    trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes")
    assert ran.code == 0, ran.err
    assert "take away the fence" in ran.err
    write(trio.standby, trio.dbname, 1)
    await_equal(trio, trio.standby)


def test_somebody_elses_read_only_setting_is_not_a_fence(new_pair: NewPair, tmp_path: Path) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    for policy in (
        "ALTER ROLE postgres SET default_transaction_read_only = on",
        "ALTER SYSTEM SET default_transaction_read_only = on",
    ):
        tell(trio.primary, policy, "SELECT pg_reload_conf()")
        ran = slotfailover("failover", "--config", config, "--yes")
        assert (ran.code, "a is alive and writable" in ran.err) == (35, True), ran.err
    with connect(trio.primary, trio.dbname) as client:
        client.execute("SET default_transaction_read_only = off")
        client.execute("INSERT INTO t VALUES (1, 'by an application')")
    assert_untouched(trio)
    # A real failover is possible all the same, and the policy stays.
    trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes")
    assert ran.code == 0, ran.err


@pytest.mark.long
def test_a_role_that_is_read_only_by_itself_makes_no_fence_of_a_mark(new_pair: NewPair) -> None:
    """What an un-fencing by hand leaves, or one that was killed half-way."""
    trio = new_pair()
    tell(
        trio.primary,
        "CREATE ROLE reporting",
        "ALTER ROLE reporting SET default_transaction_read_only = on",
        "ALTER SYSTEM SET slotfailover.fenced = 'timeline 1 by x@y since then'",
        "SELECT pg_reload_conf()",
    )

    def mark() -> str:
        with connect(trio.primary) as connection:
            return read_fence(connection)[0]

    loaded = "SELECT current_setting('slotfailover.fenced', true) LIKE 'timeline%'"
    eventually(lambda: ask(trio.primary, loaded), what="the settings are read")
    assert mark() == ""
    tell(
        trio.primary,
        "SET default_transaction_read_only = off",
        "ALTER SYSTEM SET default_transaction_read_only = on",
        "SELECT pg_reload_conf()",
    )
    eventually(lambda: mark().startswith("timeline 1 "), what="the fence counts")


@pytest.mark.long
def test_fencing_a_primary_that_answers_drains_it_or_names_what_is_lost(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    write(trio.primary, trio.dbname, 1)
    await_equal(trio, trio.primary)
    tell(
        trio.primary,
        "ALTER SYSTEM SET synchronous_standby_names = ''",
        "ALTER SYSTEM SET synchronized_standby_slots = ''",
        "SELECT pg_reload_conf()",
    )
    led = ask(trio.standby, "SHOW primary_conninfo")
    tell(trio.standby, "ALTER SYSTEM SET primary_conninfo = 'port=1'", "SELECT pg_reload_conf()")
    silent = "SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)"
    eventually(lambda: ask(trio.standby, silent), what="the standby receives nothing")
    tell(trio.subscriber, "ALTER SUBSCRIPTION s1 DISABLE", dbname=trio.dbname)
    write(trio.primary, trio.dbname, 1001, 1000)
    refused = slotfailover("failover", "--config", config, "--yes", "--fence")
    assert refused.code == 34, refused.err
    lacking = _bytes(refused)
    assert lacking > 1000
    write(trio.primary, trio.dbname, 5001)  # it takes writes: nothing was changed
    # Where it streams, nothing is lost, and nothing has to be accepted.
    quoted = led.replace("'", "''")
    tell(trio.standby, f"ALTER SYSTEM SET primary_conninfo = '{quoted}'", "SELECT pg_reload_conf()")
    tell(trio.subscriber, "ALTER SUBSCRIPTION s1 ENABLE", dbname=trio.dbname)
    await_equal(trio, trio.primary)
    assert_untouched(trio)
    ran = slotfailover("failover", "--config", config, "--yes", "--fence")
    assert ran.code == 1, ran.err
    assert "the node is fenced and still runs" in ran.out
    assert ask(trio.standby, "SELECT count(*) FROM t", trio.dbname) == 1020


def test_a_loss_is_accepted_in_bytes(new_pair: NewPair, tmp_path: Path) -> None:
    trio = new_pair()
    tell(trio.primary, "CREATE TABLE t (id int PRIMARY KEY, note text)", dbname=trio.dbname)
    tell(
        trio.primary,
        "ALTER SYSTEM SET synchronous_standby_names = ''",
        "ALTER SYSTEM SET synchronized_standby_slots = ''",
        "SELECT pg_reload_conf()",
    )
    config = configuration(tmp_path, trio)
    tell(trio.standby, "ALTER SYSTEM SET primary_conninfo = 'port=1'", "SELECT pg_reload_conf()")
    silent = "SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)"
    eventually(lambda: ask(trio.standby, silent), what="the standby receives nothing")
    write(trio.primary, trio.dbname, 1, 1000)
    command = ("failover", "--config", config, "--yes", "--fence")
    refused = slotfailover(*command)
    lacking, token = _bytes(refused), token_of(refused.err).rpartition("+")[0]
    too_few = slotfailover(*command, "--accept", f"{token}+{lacking - 1}")
    assert (too_few.code, "not used" in too_few.err) == (34, True), too_few.err
    ran = slotfailover(*command, "--accept", f"{token}+{lacking + 2**24}")
    assert ran.code == 1, ran.err
    assert "loss accepted: " in ran.out
    assert "bytes of WAL of a" in ran.out


@pytest.mark.long
def test_bytes_are_named_also_where_the_standby_seems_to_stream(
    local_trio: NewTrio, tmp_path: Path
) -> None:
    """Its receiver stands still, and the primary has not noticed yet."""
    trio = local_trio()
    tell(trio.primary, "CREATE TABLE t (id int PRIMARY KEY, note text)", dbname=trio.dbname)
    names = "ALTER SYSTEM SET synchronous_standby_names = ''"
    tell(trio.primary, names, "SELECT pg_reload_conf()")
    config = configuration(tmp_path, trio, step_deadline_ms=patient_ms(2_700))
    receiver = psutil.Process(ask(trio.standby, "SELECT pid FROM pg_stat_wal_receiver"))
    receiver.suspend()
    try:
        write(trio.primary, trio.dbname, 1, 1000)
        ran = slotfailover("failover", "--config", config, "--yes", "--fence")
        assert (ran.code, _bytes(ran) > 1000) == (34, True), ran.err
        assert "it was taken back" in ran.err
        write(trio.primary, trio.dbname, 1001, 1)
    finally:
        receiver.resume()


def test_a_fence_command_that_returns_0_ends_a_frozen_primary(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    write(trio.primary, trio.dbname, 1)
    await_equal(trio, trio.primary)
    data = trio.primary.data  # type: ignore[attr-defined]
    kill = (
        "import os, psutil, pathlib;"
        f"p = psutil.Process(int(pathlib.Path('{data}', 'postmaster.pid').read_text().split()[0]));"
        "[q.kill() for q in (p, *p.children())]"
    )
    given = machines(trio, local_bed)
    given["a"]["fence"] = f"{shlex.quote(sys.executable)} -c {shlex.quote(kill)}"
    given["a"]["os_user"] = ""
    config = configuration(tmp_path, trio, machines=given, connect_timeout_s=round(patient(1.3)))
    with frozen(trio.primary, wholly=True):  # type: ignore[arg-type]
        ran = slotfailover("failover", "--config", config, "--yes", "--fence")
    eventually(lambda: not trio.primary.running, what="a child of ours is reaped")
    assert ran.code == 0, ran.err
    write(trio.standby, trio.dbname, 101)
    await_equal(trio, trio.standby)


@pytest.mark.long
def test_a_server_whose_process_we_do_not_see_is_not_off(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    """As a user who is in the group of its data folder, then as its owner in another container.

    Root alone can be these; an ordinary user sees the process, which pg_ctl stops.
    """
    trio = local_trio()
    subscribe(trio, "s1")
    write(trio.primary, trio.dbname, 1)
    given = machines(trio, local_bed)
    root = os.geteuid() == 0
    data = Path(given["a"]["data_folder"])

    def fail_over(before: str = "", **changes: str) -> Ran:
        config = configuration(
            tmp_path,
            trio,
            nodes={"a": "host=nowhere.invalid user=postgres", "b": trio.standby.conninfo()},
            advertised={"a": f"host=127.0.0.1 port={trio.primary.port}"},
            machines={"a": {**given["a"], **changes}},
        )
        words = ("failover", "--config", str(config), "--yes", "--fence")
        return slotfailover_process(*words, before=before)

    data.chmod(0o755)
    for path in (data.parent, data / "postmaster.pid", data / "PG_VERSION"):
        path.chmod(path.stat().st_mode | 0o055)
    apart = f"import ctypes, os; {_NEW_PIDS}; os.fork() and os._exit(os.wait()[1] >> 8);"
    for ran in (fail_over(os_user="nobody"), fail_over(apart)) if root else ():
        assert ran.code == 25, ran.out + ran.err
        assert "run slotfailover failover without --fence" in ran.err
        assert ask(trio.standby, "SELECT pg_is_in_recovery()")
    write(trio.primary, trio.dbname, 101)
    if root:
        trio.primary.kill()
    ran = fail_over()
    assert ran.code == 0, ran.err
    eventually(lambda: not trio.primary.running, what="a child of ours is reaped")
    write(trio.standby, trio.dbname, 201)
    await_equal(trio, trio.standby)


_NEW_PIDS = "ctypes.CDLL(None).unshare(0x20000000)"
"""CLONE_NEWPID: for the processes that are made from then on."""


def _bytes(ran: Ran) -> int:
    """How much would be lost, as a refusal says."""
    assert "bytes of WAL that a has" in ran.err, ran.err
    return int(token_of(ran.err).rpartition("+")[2])
