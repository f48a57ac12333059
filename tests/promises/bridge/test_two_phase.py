"""Prepared transactions on live servers: published at COMMIT PREPARED, whatever happens between."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from schemas.errors import ExitCode, SetupError
from schemas.events import prepared_topic, transaction_topic
from services.bridge.source.server_requirements import check_server
from services.postgres.server import Server as FoundServer
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import committed
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_failover import both, promote
from tests.promises.bridge.test_large_transactions import SMALL, decoding
from tests.providers.databases import Connection
from tests.providers.interface import Provider, Server
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient


@contextmanager
def prepared(conninfo: str, gid: str) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A connection whose transaction is prepared at the end."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("BEGIN")
        yield connection
        connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())


def values(bridge: Bridge, table: str = "t") -> list[int]:
    """The ids of a table's events, in the order of their transactions."""
    if f"{bridge.prefix}.public.{table}" not in bridge.topics():
        return []
    events = sorted(
        bridge.events(table), key=lambda e: (e["source"]["commit_lsn"], e["source"]["seq"])
    )
    return [event["after"]["id"] for event in events]


def staged(bridge: Bridge) -> set[str]:
    """The gids that wait in Kafka."""
    waiting: dict[str, bool] = {}
    topic = prepared_topic(bridge.prefix)
    for _, key, value in committed(bridge.kafka.bootstrap_servers, topic):
        name = json.loads(key or b"")
        if name["part"] == 0:
            waiting[name["gid"]] = value is not None
    return {gid for gid, there in waiting.items() if there}


def boundaries(bridge: Bridge) -> list[tuple[str, int | None]]:
    """(status, event_count) of the transaction topic."""
    topic = transaction_topic(bridge.prefix)
    events = (
        json.loads(value or b"") for _, _, value in committed(bridge.kafka.bootstrap_servers, topic)
    )
    return [(event["status"], event["event_count"]) for event in events]


pytestmark = pytest.mark.since_18


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    return pair.primary.conninfo(fresh_database)


@pytest.fixture
def connection(conninfo: str) -> Iterator[Connection]:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        connection.execute("CREATE TABLE unpublished (id int)")
        yield connection


def test_published_when_committed_and_never_when_rolled_back(
    conninfo: str, connection: Connection, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, two_phase=True, tables=("public.t",)).start().streaming()
    with prepared(conninfo, "kept") as one:
        one.execute("INSERT INTO t VALUES (1, 'first')")
        one.execute("UPDATE t SET note = 'second' WHERE id = 1")
    with prepared(conninfo, "dropped") as two:
        two.execute("INSERT INTO t VALUES (2, 'never')")
    with prepared(conninfo, "empty") as three:
        three.execute("INSERT INTO unpublished VALUES (1)")
    connection.execute("INSERT INTO t VALUES (3, 'between')")
    bridge.caught_up()
    assert values(bridge) == [3]
    assert staged(bridge) == {"kept", "dropped", "empty"}
    connection.execute("ROLLBACK PREPARED 'dropped'")
    connection.execute("COMMIT PREPARED 'empty'")
    connection.execute("COMMIT PREPARED 'kept'")
    bridge.caught_up()
    assert values(bridge) == [3, 1, 1]
    assert not staged(bridge)
    assert boundaries(bridge) == [("BEGIN", None), ("END", 1), ("BEGIN", None), ("END", 2)]
    assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")


@pytest.mark.long
@pytest.mark.parametrize("options", ["", SMALL], ids=["whole", "streamed"])
def test_decided_after_a_crash_and_on_another_machine(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, options: str
) -> None:
    """Each restart has a spool of its own: all that it knows of the PREPARE is in Kafka."""
    conninfo = pair.primary.conninfo(fresh_database, options=options)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        bridge = new_bridge(conninfo, two_phase=True).start().streaming()
        with prepared(conninfo, "kept") as one:
            one.execute("INSERT INTO t SELECT g, 'n' FROM generate_series(1, 2000) g")
            one.execute("SAVEPOINT s")
            one.execute("INSERT INTO t SELECT g, 'n' FROM generate_series(5000, 7000) g")
            one.execute("ROLLBACK TO s")
            one.execute("DELETE FROM t WHERE id > 1500")
        with prepared(conninfo, "dropped") as two:
            two.execute("INSERT INTO t SELECT g, 'n' FROM generate_series(8000, 9000) g")
        bridge.caught_up()
        assert (decoding(connection, bridge, "stream")[0] > 0) == bool(options)
        bridge.kill()
        connection.execute("INSERT INTO t VALUES (10000, 'between')")
        other = new_bridge(conninfo, slot=bridge.slot, two_phase=True).start().streaming()
        other.caught_up()
        other.kill()
        connection.execute("ROLLBACK PREPARED 'dropped'")
        connection.execute("COMMIT PREPARED 'kept'")
        third = new_bridge(conninfo, slot=bridge.slot, two_phase=True).start().streaming()
        third.caught_up()
        assert third.stop() == 0, third.output
    assert not staged(third)
    third.assert_kafka_equals(conninfo, "t")
    assert set(third.identities("t").values()) == {1}


@pytest.mark.long
def test_killed_while_a_large_one_is_staged_and_while_it_is_published(
    conninfo: str, connection: Connection, new_bridge: NewBridge
) -> None:
    small = {"transaction_bytes_max": 2**17, "commit_bytes_max": 2**17}
    bridge = new_bridge(conninfo, two_phase=True, **small).start().streaming()
    with prepared(conninfo, "large") as one:
        one.execute(
            "INSERT INTO t SELECT g, md5(g::text) || md5((-g)::text)"
            " FROM generate_series(1, 60000) g"
        )
    topic = prepared_topic(bridge.prefix)
    eventually(
        lambda: any(True for _ in committed(bridge.kafka.bootstrap_servers, topic)),
        what="a part is staged",
    )
    bridge.kill()
    bridge.start().streaming().caught_up()
    connection.execute("COMMIT PREPARED 'large'")
    eventually(lambda: any(r.position.seq for r in bridge.progress()), what="a part is published")
    bridge.kill()
    bridge.start().streaming().caught_up()
    assert bridge.stop() == 0, bridge.output
    assert not staged(bridge)
    bridge.assert_kafka_equals(conninfo, "t")
    assert set(bridge.identities("t").values()) == {1}


def test_decided_by_the_promoted_standby(new_pair: NewPair, new_bridge: NewBridge) -> None:
    trio = new_pair()
    primary, standby = (s.conninfo(trio.dbname) for s in (trio.primary, trio.standby))
    with psycopg.connect(primary, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    bridge = new_bridge(both(trio), two_phase=True).start().streaming(primary)
    await_ready(trio.primary, trio.standby, bridge.slot)
    with prepared(primary, "kept") as one:
        one.execute("INSERT INTO t VALUES (1, 'prepared on the old primary')")
    with prepared(primary, "dropped") as two:
        two.execute("INSERT INTO t VALUES (2, 'never')")
    bridge.caught_up(primary)
    trio.primary.kill()
    promote(trio)
    bridge.streaming(standby)
    with psycopg.connect(standby, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (3, 'between')")
        connection.execute("COMMIT PREPARED 'kept'")
        connection.execute("ROLLBACK PREPARED 'dropped'")
    bridge.caught_up(standby)
    assert bridge.stop() == 0, bridge.output
    assert values(bridge) == [3, 1]
    assert not staged(bridge)


@pytest.mark.long
def test_a_slot_becomes_two_phase_while_a_transaction_is_prepared(
    conninfo: str, connection: Connection, new_bridge: NewBridge
) -> None:
    """The server sends at COMMIT PREPARED what it did not decode at PREPARE; then both at once."""
    bridge = new_bridge(conninfo).start().streaming()
    with prepared(conninfo, "before") as one:
        one.execute("INSERT INTO t VALUES (1, 'prepared before')")
    connection.execute("INSERT INTO t VALUES (2, 'n')")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    later = new_bridge(conninfo, slot=bridge.slot, two_phase=True).start().streaming()
    with prepared(conninfo, "after") as two:
        two.execute("INSERT INTO t VALUES (3, 'prepared after')")
    later.caught_up()
    connection.execute("COMMIT PREPARED 'before'")
    connection.execute("COMMIT PREPARED 'after'")
    later.caught_up()
    assert later.stop() == 0, later.output
    assert values(later) == [2, 1, 3]
    # From here on the slot decodes two-phase, whatever the setting says.
    without = new_bridge(conninfo, slot=bridge.slot).start().streaming()
    with prepared(conninfo, "again") as three:
        three.execute("INSERT INTO t VALUES (4, 'n')")
    without.caught_up()
    assert staged(without) == {"again"}
    connection.execute("COMMIT PREPARED 'again'")
    without.caught_up()
    assert without.stop() == 0, without.output
    assert "the slot decodes two-phase" in without.output
    assert values(without) == [2, 1, 3, 4]


def test_a_lost_staging_is_an_error_and_not_a_lost_transaction(
    conninfo: str, connection: Connection, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, two_phase=True).start().streaming()
    with prepared(conninfo, "lost") as one:
        one.execute("INSERT INTO t VALUES (1, 'n')")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    topic = prepared_topic(bridge.prefix)
    admin = AdminClient({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(patient(30))
    eventually(lambda: topic not in bridge.topics(), what="the topic is gone")
    connection.execute("COMMIT PREPARED 'lost'")
    bridge.start()
    assert bridge.exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    assert f"{topic} was deleted and made again" in bridge.output
    bridge.start(accept=bridge.token)
    assert bridge.exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    assert "'lost' was committed, but its changes are not in" in bridge.output


@pytest.mark.long
def test_a_transfer_between_two_banks(
    conninfo: str,
    connection: Connection,
    subscriber: Server,
    fresh_subscriber_database: str,
    new_bridge: NewBridge,
    topic_prefix: str,
) -> None:
    """The article's: one global transaction, two servers, a bridge each; both halves or none."""
    there = subscriber.conninfo(fresh_subscriber_database)
    with psycopg.connect(there, autocommit=True) as other:
        for bank in (connection, other):
            bank.execute("CREATE TABLE account (id int PRIMARY KEY, gid text, balance int)")
            bank.execute("INSERT INTO account VALUES (1, 'start', 1000)")
        debits = new_bridge(conninfo, two_phase=True).start().streaming()
        credits = new_bridge(there, two_phase=True, prefix=f"{topic_prefix}x").start().streaming()
        update = "UPDATE account SET balance = balance + %s, gid = %s WHERE id = 1"
        for number in range(12):
            gid = f"transfer {number}"
            with prepared(conninfo, gid) as here:
                here.execute(update, [-10, gid])
            with prepared(there, gid) as far:
                far.execute(update, [10, gid])
            if number == 4:
                debits.kill()
            verdict = "ROLLBACK" if number % 3 == 0 else "COMMIT"
            for bank in (connection, other):
                bank.execute(f"{verdict} PREPARED '{gid}'".encode())
            if number == 4:
                debits.start()
            if number == 8:
                credits.kill()
                credits.start()
        debits.streaming().caught_up()
        credits.streaming().caught_up()
    assert debits.stop() == credits.stop() == 0
    halves = [[e["after"] for e in bridge.events("account")] for bridge in (debits, credits)]
    committed_gids = [f"transfer {n}" for n in range(12) if n % 3 != 0]
    for sign, half in zip((-1, 1), halves, strict=True):
        assert [row["gid"] for row in half] == committed_gids
        assert [row["balance"] for row in half] == [1000 + sign * 10 * n for n in range(1, 9)]


def test_refused_before_18() -> None:
    server = FoundServer(
        system_identifier="1",
        timeline=1,
        version=170005,
        database="db",
        in_recovery=False,
        wal_level="logical",
        synchronized_standby_slots="standby",
        wal_sender_timeout_ms=60_000,
    )
    check_server(server)
    with pytest.raises(SetupError, match="two_phase_at") as refused:
        check_server(server, two_phase=True)
    assert refused.value.exit_code == ExitCode.SERVER_VERSION
