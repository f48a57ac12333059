"""The conversation with the walsender: answers in time, commits that wait, long silences.

Source: "Communication of logical replication" (PostgreSQL 15): empty transactions are skipped, and
where commits wait for the receiver a keepalive takes their place.
"""

import contextlib
import itertools
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning

import psutil
import psycopg
import pytest

from schemas.errors import Retryable
from schemas.lsn import parse_lsn
from schemas.settings import BridgeSettings, KafkaSettings
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.source.replication_connection import walsender_name
from services.testbed.kafka import KafkaBroker
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.providers.databases import Connection
from tests.providers.interface import Provider, Server, Trio
from tests.providers.progress_records import altered, progress_record
from tests.providers.standstill import Standstill
from tests.providers.steady_kafka import steady_kafka
from tests.providers.waiting import eventually, patient, patient_ms

SLOWED_MAX = 2.0
HEARTBEAT_S = patient(0.3)
HELD_UP_S = patient(0.03)
"""A commit of the bridge's own to Kafka, once a heartbeat, must not hold the others up: with it
none took over 20 ms; one that only the next feedback released took 150 ms to 1 s."""
PAIRS = 3
PAIRS_MAX = 40
"""Where other work keeps the processors busy, every hand-over between processes waits for them."""
STALL_S = patient(3.3)
SKIPPED = 60_000
SKIPPED_BYTES_MAX = 100
"""Each took 530 bytes while Kafka stood still."""
LONGEST_MS = 900_000
"""No broker of the tests allows a longer time-out of a transaction."""
RECORD = progress_record(
    slot="s", system_identifier="1", timeline=1, commit_lsn=10, end_lsn=20, seq=0, ts_ms=0
)


@pytest.fixture(scope="module")
def own_kafka(servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker to be stopped in the middle of its work."""
    with steady_kafka(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


def set_synchronous(connection: Connection, bridge: Bridge, *, on: bool) -> None:
    """Let commits wait for the bridge, or for nobody; returns when the server does so."""
    names = f'"slotbridge_{bridge.slot}"' if on else ""
    connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'".encode())
    connection.execute("SELECT pg_reload_conf()")
    query = "SELECT sync_state FROM pg_stat_replication WHERE application_name = %s"

    def done() -> bool:
        row = connection.execute(query, [f"slotbridge_{bridge.slot}"]).fetchone()
        return row is not None and row[0] == ("sync" if on else "async")

    eventually(done, what=f"the bridge is {'' if on else 'not '}a synchronous standby")


def latency_ms(server: Server, conninfo: str, transactions: int) -> float:
    """The mean of pgbench's transactions, one client."""
    done = server.run_tool("pgbench", ["-n", "-c", "1", "-t", str(transactions), conninfo])
    found = re.search(r"latency average = ([0-9.]+) ms", done.stdout)
    assert found, done.stdout
    return float(found[1])


def prepared(trio: Trio) -> str:
    conninfo = trio.primary.conninfo(trio.dbname)
    trio.primary.run_tool("pgbench", ["-i", "-q", "-I", "dtgp", conninfo])
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE published (id int PRIMARY KEY)")
    return conninfo


@pytest.mark.long
def test_commits_that_wait_for_the_bridge_are_released_at_once_when_filtered(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    trio = new_pair(synchronous=False)
    conninfo = prepared(trio)
    heartbeat_ms = round(HEARTBEAT_S * 1000)
    bridge = new_bridge(conninfo, tables=("public.published",), heartbeat_interval_ms=heartbeat_ms)
    bridge.start().streaming()
    alone: list[float] = []
    waiting: list[float] = []
    with psycopg.connect(conninfo, autocommit=True) as connection:
        while len(alone) < PAIRS or (len(alone) < PAIRS_MAX and _slowed(alone, waiting)):
            set_synchronous(connection, bridge, on=False)
            alone.append(latency_ms(trio.primary, conninfo, 300))
            set_synchronous(connection, bridge, on=True)
            eventually(lambda: _announced(bridge), what="the bridge knows that commits wait")
            waiting.append(latency_ms(trio.primary, conninfo, 300))
        assert any(not held_up(conninfo) for _ in range(PAIRS_MAX)), "one a heartbeat was held up"
        connection.execute("INSERT INTO published VALUES (1)")
        assert [event["after"]["id"] for event in bridge.events("published")] == [1]
        set_synchronous(connection, bridge, on=False)
        assert bridge.stop() == 0, bridge.output
    assert not _slowed(alone, waiting), (alone, waiting)
    assert bridge.progress()[-1].position.ahead_lsn == 0, (
        "a stopped bridge is never behind its slot"
    )


def held_up(conninfo: str) -> bool:
    """Whether one of the commits that wait was held up, other than those that do not are by now."""
    waiting_s = slowest_s(conninfo, 3 * HEARTBEAT_S)
    if waiting_s < HELD_UP_S:
        return False
    alone = psycopg.conninfo.make_conninfo(conninfo, options="-c synchronous_commit=local")
    return waiting_s > 1.5 * slowest_s(alone, 3 * HEARTBEAT_S)


def slowest_s(conninfo: str, for_s: float) -> float:
    """The longest commit of many, one after another."""
    slowest, until = 0.0, time.monotonic() + for_s
    with psycopg.connect(conninfo, autocommit=True) as connection:
        while (since := time.monotonic()) < until:
            connection.execute("UPDATE pgbench_branches SET bbalance = bbalance + 1")
            slowest = max(slowest, time.monotonic() - since)
    return slowest


def _slowed(alone: list[float], waiting: list[float]) -> bool:
    """Whether they take longer than the others, and not only for a hand-over or two."""
    taken_ms = statistics.median(waiting)
    return taken_ms > max(SLOWED_MAX * statistics.median(alone), HEARTBEAT_S * 100)


def _announced(bridge: Bridge) -> bool:
    last = bridge.progress()[-1]
    return last.position.ahead_lsn > last.position.end_lsn


def test_killed_while_the_slot_is_ahead_of_the_record(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    trio = new_pair(synchronous=False)
    conninfo = prepared(trio)
    bridge = new_bridge(conninfo, tables=("public.published",), heartbeat_interval_ms=3000)
    bridge.start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        set_synchronous(connection, bridge, on=True)
        eventually(lambda: _announced(bridge), what="the bridge knows that commits wait")
        connection.execute("INSERT INTO published VALUES (1)")

        def frozen_ahead() -> bool:
            connection.execute("UPDATE pgbench_branches SET bbalance = bbalance + 1")
            os.kill(bridge.pid, signal.SIGSTOP)  # or the next record comes before the kill
            if _confirmed(connection, bridge) > bridge.progress()[-1].position.end_lsn:
                return True
            os.kill(bridge.pid, signal.SIGCONT)
            return False

        eventually(frozen_ahead, what="the slot is ahead of the record")
        bridge.kill()
        record, confirmed = bridge.progress()[-1], _confirmed(connection, bridge)
        assert record.position.end_lsn < confirmed <= record.position.ahead_lsn
        ended = bridge.start(SLOTBRIDGE_FAILPOINT="after origin:1").exit_code()
        assert ended == -signal.SIGKILL  # and the origin is not past the record
        bridge.start().streaming()
        connection.execute("INSERT INTO published VALUES (2)")
        assert {event["after"]["id"] for event in bridge.events("published")} == {1, 2}
        set_synchronous(connection, bridge, on=False)
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "published")


def _confirmed(connection: Connection, bridge: Bridge) -> int:
    row = connection.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
        [bridge.slot],
    ).fetchone()
    assert row is not None
    return parse_lsn(row[0])


def walsender(connection: Connection, bridge: Bridge) -> int:
    """The pid of the process that streams to the bridge."""
    query = "SELECT pid FROM pg_stat_replication WHERE application_name = %s"
    name = f"slotbridge_{bridge.slot}"
    row = eventually(
        lambda: connection.execute(query, [name]).fetchone(), what="the bridge is connected"
    )
    assert row is not None
    return int(row[0])


STOOD_STILL_S = patient(0.17)
"""Whoever stands still for a quarter of a time-out may lose a session, whatever he does."""


def assert_session_outlasts(
    work: Callable[[], None], connection: Connection, bridge: Bridge
) -> None:
    """The bridge's session is the same after the work; done again where the machine stood still."""
    for _ in range(5):
        with Standstill() as machine:
            before = walsender(connection, bridge)
            work()
            lasts = walsender(connection, bridge) == before
        if lasts or machine.longest_s < STOOD_STILL_S:
            break
    assert lasts, bridge.output


@pytest.mark.long
@pytest.mark.parametrize("streaming", [False, True])
def test_a_long_filtered_transaction_outlasts_a_short_time_out(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, streaming: bool
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE published (id int PRIMARY KEY)")
        connection.execute("CREATE TABLE other (id int)")
        bridge = new_bridge(
            conninfo,
            tables=("public.published",),
            wal_sender_timeout_ms=patient_ms(700),
            streaming=streaming,
        )
        bridge.start().streaming()

        def work() -> None:
            connection.execute("INSERT INTO other SELECT generate_series(1, 500000)")
            bridge.caught_up()

        assert_session_outlasts(work, connection, bridge)
        assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_long_work_on_received_changes_is_not_taken_for_silence_of_the_server(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Commits of large transactions pile up behind the first, and take longer than the time-out."""
    conninfo = pair.primary.conninfo(fresh_database, options="-c logical_decoding_work_mem=64kB")
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(conninfo, autocommit=True))
        connection.execute("CREATE TABLE t (id int)")
        bridge = new_bridge(
            conninfo,
            wal_sender_timeout_ms=patient_ms(700),
            commit_interval_ms=patient_ms(1_700),
            commit_bytes_max=2**28,
            transaction_bytes_max=2**28,
        )
        bridge.start().streaming()
        writers = [stack.enter_context(psycopg.connect(conninfo)) for _ in range(6)]

        def work() -> None:
            for writer in writers:
                writer.execute("INSERT INTO t SELECT generate_series(1, 25000)")
            for writer in writers:
                writer.commit()
            bridge.caught_up()

        assert_session_outlasts(work, connection, bridge)
        assert bridge.stop() == 0, bridge.output


def test_while_kafka_stands_still_the_server_is_answered(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, own_kafka: KafkaBroker
) -> None:
    """Changes go on meanwhile, more than the producer's queue takes."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        bridge = new_bridge(conninfo, broker=own_kafka, wal_sender_timeout_ms=patient_ms(1_000))
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (0, '')")
        bridge.caught_up()
        numbers = itertools.count(1, 30_000)

        def work() -> None:
            own_kafka.pause()
            try:
                since = time.monotonic()
                for start in itertools.islice(numbers, 3):
                    connection.execute(
                        "INSERT INTO t SELECT g, repeat('x', 500)"
                        " FROM generate_series(%s::int, %s) g",
                        [start, start + 29_999],
                    )
                eventually(
                    lambda: time.monotonic() - since > STALL_S,
                    what="a long stall",
                    timeout_s=2 * STALL_S,
                )
            finally:
                own_kafka.resume()
            bridge.caught_up()

        assert_session_outlasts(work, connection, bridge)
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")


@pytest.mark.long
def test_a_commit_that_kafka_does_not_answer_can_be_cancelled(
    own_kafka: KafkaBroker, topic_prefix: str
) -> None:
    """The end of a session must not wait for the transaction's time-out; the record decides."""
    settings = KafkaSettings(
        bootstrap_servers=own_kafka.bootstrap_servers, topic_prefix=topic_prefix
    )
    topics = Topics(settings)
    topics.prepare()
    bridge = BridgeSettings(
        transaction_timeout_ms=LONGEST_MS, origin_idle_timeout_ms=LONGEST_MS + 1
    )
    producer = TransactionalProducer(settings, bridge, topics, "s")
    producer.begin_session()
    producer.commit(RECORD)
    own_kafka.pause()
    try:
        with ThreadPoolExecutor(1) as pool:
            commit = pool.submit(producer.commit, altered(RECORD, end_lsn=30))
            with pytest.raises(StillRunning):
                commit.result(2)
            producer.cancel()
            with pytest.raises(Retryable):
                commit.result(patient(40))  # at most 800 s
    finally:
        own_kafka.resume()
    following = TransactionalProducer(settings, BridgeSettings(), topics, "s")
    following.begin_session()
    found = topics.last_progress("s")
    assert found is not None and found.position.end_lsn in (20, 30)


@pytest.mark.long
@pytest.mark.parametrize("commits_wait", [False, True], ids=["", "commits wait"])
def test_while_kafka_stands_still_what_is_not_published_takes_no_memory(
    new_pair: NewPair, new_bridge: NewBridge, own_kafka: KafkaBroker, commits_wait: bool
) -> None:
    primary = new_pair(synchronous=False).primary
    conninfo = primary.conninfo("bank")
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute("CREATE TABLE t (id int); CREATE TABLE hidden (id int)")
        # The server sends transactions of a table that `shaping` leaves out, and where commits
        # wait, a keepalive for each of a table that is not in the publication.
        left_out = {"tables": ("public.t",)} if commits_wait else {}
        shaping = {} if commits_wait else {"exclude": ["public.hidden"]}
        bridge = new_bridge(conninfo, broker=own_kafka, shaping=shaping, **left_out)
        bridge.start().streaming()
        if commits_wait:
            name = walsender_name(bridge.slot)
            connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'".encode())
            connection.execute("SELECT pg_reload_conf()")
        connection.execute("INSERT INTO t VALUES (0)")
        bridge.caught_up()
        grown = None
        for _ in range(5):  # a session that asks Kafka at that moment is lost: not what is asked
            own_kafka.pause()
            try:
                grown = _grown_while_paused(connection, bridge)
            finally:
                own_kafka.resume()
            bridge.caught_up()
            if grown is not None:
                break
        assert bridge.stop() == 0, bridge.output
    assert grown is not None and grown < SKIPPED * SKIPPED_BYTES_MAX, grown


def _grown_while_paused(connection: Connection, bridge: Bridge) -> int | None:
    """Bytes that the bridge has grown by, once it has read it all; None if its session is lost."""
    lost = bridge.output.count("session lost")
    connection.execute("INSERT INTO t VALUES (1)")  # Kafka is to commit this
    before = resident_bytes(bridge)
    connection.execute(
        f"DO $$ BEGIN FOR n IN 1 .. {SKIPPED} LOOP"
        " INSERT INTO hidden VALUES (n); COMMIT; END LOOP; END $$".encode()
    )
    row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    assert row is not None
    end = parse_lsn(row[0]) - 2**13
    eventually(
        lambda: (
            bridge.output.count("session lost") > lost or walsender_sent(connection, bridge) >= end
        ),
        what="the bridge has read it all",
        timeout_s=120,
    )
    if bridge.output.count("session lost") > lost:
        return None
    return resident_bytes(bridge) - before


def resident_bytes(bridge: Bridge) -> int:
    return int(psutil.Process(bridge.pid).memory_info().rss)


def walsender_sent(connection: Connection, bridge: Bridge) -> int:
    query = "SELECT sent_lsn FROM pg_stat_replication WHERE application_name = %s"
    row = connection.execute(query, [walsender_name(bridge.slot)]).fetchone()
    return parse_lsn(row[0]) if row is not None else 0
