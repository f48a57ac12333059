"""Whether `slottables verify` compares with the server whose events Kafka has; without Spark."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import sql

from schemas.errors import ExitCode, SlotbridgeError
from schemas.events import progress_topic
from schemas.lsn import parse_lsn
from schemas.settings import KafkaSettings, SourceSettings
from services.testbed.pair import hasten_slot_sync
from spark_consumers.audit.source_snapshot import source_snapshot
from spark_consumers.verify import postgres
from spark_consumers.verify.comparison import TableComparison, verified, verify_lines
from spark_consumers.verify.source_identity import (
    SourceIdentity,
    not_judged,
    source_not_judged,
    walsender_of,
)
from tests.conftest import NewPair
from tests.providers.databases import await_copy, connect
from tests.providers.interface import Broker, Provider, Server
from tests.providers.progress_records import altered, progress_record
from tests.providers.roles import make_roles
from tests.providers.waiting import eventually, patient, patient_ms

RECORD = progress_record(
    slot="s",
    system_identifier="7",
    timeline=3,
    commit_lsn=900,
    end_lsn=900,
    seq=0,
    ts_ms=0,
    publication_oid=55,
    history={1: 500, 2: 700},
)
SAME = SourceIdentity(
    "7",
    standby=False,
    timeline=3,
    history={1: 500, 2: 700},
    publication_oid=55,
    slot="s",
    slot_database="bank",
    database="bank",
)


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        (SAME, ""),
        (SAME._replace(standby=True), ""),
        (SAME._replace(system_identifier="8"), "another system identifier"),
        (SAME._replace(timeline=2), "timeline 2, and Kafka's events are of timeline 3"),
        (SAME._replace(timeline=4), "timeline 4, and Kafka's events are of timeline 3"),
        (SAME._replace(standby=True, timeline=2), "receives timeline 2"),
        (SAME._replace(standby=True, timeline=None), "pg_read_all_stats"),
        (SAME._replace(publication_oid=None), "lacks the publication"),
        (SAME._replace(publication_oid=56), "lacks the publication"),
        (SAME._replace(history={1: 500, 2: 701}), "another timeline of the same number 3"),
        (SAME._replace(history={1: 500}), "another timeline of the same number 3"),
        (SAME._replace(history=None), "sql/roles.sql"),
        (SAME._replace(slot_database="copy"), "slot s is of the database copy"),
        (SAME._replace(slot_database=None), "has not the slot s"),
        (SAME._replace(standby=True, slot_database=None), "sync_replication_slots"),
    ],
)
def test_a_source_that_is_not_the_one_of_the_events_is_not_judged(
    identity: SourceIdentity, expected: str
) -> None:
    found = not_judged(RECORD, identity)
    assert expected in found and bool(found) is bool(expected)


def test_the_first_timeline_needs_no_history() -> None:
    record = altered(RECORD, timeline=1, history={})
    assert not_judged(record, SAME._replace(timeline=1, history={})) == ""


def test_rows_that_are_equal_to_those_of_an_unknown_source_are_not_equal() -> None:
    one = TableComparison("public.t", "t", 3, 3, 0, 0, 0)
    assert one.equal and verified([one]) == 0
    unknown = TableComparison("public.t", "t", 3, 3, 0, 0, 0, source_not_judged="why")
    assert not unknown.equal and verified([unknown]) == 1
    assert list(verify_lines([unknown], as_json=False)) == [
        "the source is not judged: why",
        "public.t: equal, the source is not judged (3 rows at the source, 3 in the table)",
    ]
    (text,) = verify_lines([unknown], as_json=True)
    told = json.loads(text)
    assert (told["equal"], told["source_not_judged"]) == (False, "why")
    assert told["tables"][0]["equal"] is False


class Told:
    """A prefix of Kafka where progress records are told, and how servers are judged by them."""

    def __init__(self, kafka: Broker, prefix: str, slot: str) -> None:
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        self._settings = KafkaSettings(
            bootstrap_servers=kafka.bootstrap_servers, topic_prefix=prefix
        )
        self.topic = progress_topic(prefix)
        self.record = RECORD.model_copy(update={"slot": slot})

    def tell(self, **values: Any) -> None:
        """Write a record that differs from `record` by `values`."""
        told = altered(self.record, **values)
        self._producer.produce(self.topic, told.model_dump_json(), told.slot)
        assert self._producer.flush(patient(30)) == 0

    def judged(self, conninfo: str, slot: str = "") -> str:
        """Judge the server as `verify` does; "" if it is the right one."""
        source = self._source(conninfo, slot)
        with postgres.snapshot(source) as connection:
            found = source_not_judged(connection, source, self._settings)
            assert connection.execute("SELECT 1").fetchone() == (1,)
        return found

    def audited(self, conninfo: str, **values: Any) -> SlotbridgeError | None:
        """Return how an audit's snapshot of the server is refused, None if it is not."""
        record = altered(self.record, **values)
        try:
            with source_snapshot(
                self._source(conninfo), record, deadline_ms=patient_ms(20_000)
            ) as taken:
                assert taken.timeline == record.server.timeline and taken.lsn
        except SlotbridgeError as error:
            return error
        return None

    def _source(self, conninfo: str, slot: str = "") -> SourceSettings:
        settings = {
            "conninfo": conninfo,
            "publication": "own",
            "slot": slot or self.record.slot,
        }
        return SourceSettings.model_validate(settings)


@pytest.fixture
def told(kafka: Broker, topic_prefix: str) -> Told:
    return Told(kafka, topic_prefix, f"s_{topic_prefix}")


def make_source(server: Server, dbname: str, told: Told) -> None:
    """Make publication and slot as a bridge has them, and the record that names the server."""
    with connect(server, dbname) as connection:
        connection.execute("CREATE PUBLICATION own FOR ALL TABLES")
        connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', failover => true)",
            [told.record.slot],
        )
        row = connection.execute(
            "SELECT system_identifier::text, (SELECT oid::int8 FROM pg_publication),"
            " ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int"
            " FROM pg_control_system()"
        ).fetchone()
    assert row is not None
    named = {"system_identifier": row[0], "publication_oid": row[1], "timeline": row[2]}
    told.record = altered(told.record, **named, history={})


def make_topic(kafka: Broker, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(patient(30))


@contextmanager
def template_copy(pair: Provider, dbname: str) -> Iterator[str]:
    """A copy of a database, on the standby, too."""
    name, original = f"copy_{dbname}", sql.Identifier(dbname)
    copy = sql.Identifier(name)
    with connect(pair.primary) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(copy, original))
        try:
            await_copy(pair.standby, name)
            yield name
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(copy))


@pytest.mark.long
def test_real_servers_are_judged(
    pair: Provider, fresh_database: str, kafka: Broker, told: Told
) -> None:
    primary, standby = (s.conninfo(fresh_database) for s in (pair.primary, pair.standby))
    make_source(pair.primary, fresh_database, told)
    assert "not a progress record of the slot" in told.judged(primary)
    make_topic(kafka, told.topic)
    told.tell()
    told.tell(slot="foreign", system_identifier="1")
    assert told.judged(primary) == ""
    assert told.audited(primary) is None
    assert "another system identifier" in told.judged(primary, "foreign")
    assert "not a progress record of the slot" in told.judged(primary, "of_nobody")

    def standby_judged() -> bool:
        hasten_slot_sync(pair.primary.conninfo(), pair.standby.conninfo())
        return told.judged(standby) == ""

    eventually(standby_judged, what="the standby has publication and slot", timeout_s=60)
    role = sql.Identifier(f"blind_{fresh_database}")
    with connect(pair.primary) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        try:
            blind = psycopg.conninfo.make_conninfo(standby, user=role._obj[0])
            eventually(
                lambda: "pg_read_all_stats" in told.judged(blind), what="the standby has the role"
            )
        finally:
            connection.execute(sql.SQL("DROP ROLE {}").format(role))
    told.tell(timeline=told.record.server.timeline + 1, history={1: 1})
    for conninfo in (primary, standby):
        assert f"timeline {told.record.server.timeline}" in told.judged(conninfo)


@pytest.mark.long
def test_a_copy_of_the_database_on_the_same_server_is_not_judged(
    pair: Provider, fresh_database: str, kafka: Broker, told: Told
) -> None:
    make_source(pair.primary, fresh_database, told)
    make_topic(kafka, told.topic)
    told.tell()
    standby = pair.standby.conninfo(fresh_database)

    def standby_judged() -> bool:
        hasten_slot_sync(pair.primary.conninfo(), pair.standby.conninfo())
        return told.judged(standby) == ""

    eventually(standby_judged, what="the standby has publication and slot", timeout_s=60)
    with template_copy(pair, fresh_database) as copy:
        for server in (pair.primary, pair.standby):
            found = told.judged(server.conninfo(copy))
            assert f"is of the database {fresh_database}, not {copy}" in found
        refused = told.audited(pair.primary.conninfo(copy))
        assert refused is not None and refused.exit_code == ExitCode.WRONG_DATABASE
        assert f"is of the database {fresh_database}, not {copy}" in refused.message
        assert told.judged(pair.primary.conninfo(fresh_database)) == ""


@pytest.mark.long
def test_a_server_that_was_promoted_to_the_same_number_is_not_judged(
    new_pair: NewPair, kafka: Broker, told: Told
) -> None:
    trio = new_pair(synchronous=False)
    server, dbname = trio.standby, trio.dbname
    with connect(server) as connection:
        connection.execute("SELECT pg_promote()")
    make_source(server, dbname, told)
    roles = make_roles(server, dbname, publication="own")
    with connect(server, dbname) as connection:
        connection.execute("CREATE ROLE blind LOGIN; CREATE ROLE streams LOGIN REPLICATION")
        query = "SELECT slotfailover.timeline_history(%s)"
        row = connection.execute(query, [told.record.server.timeline]).fetchone()
    assert row is not None and told.record.server.timeline == 2
    left_lsn = parse_lsn(row[0].split("\t")[1])
    told.record = altered(told.record, history={1: left_lsn})
    make_topic(kafka, told.topic)
    told.tell()
    may = [server.conninfo(dbname, user=u) for u in (roles.tables, "streams")]
    for conninfo in (server.conninfo(dbname), *may):
        assert told.judged(conninfo) == ""
    assert "sql/roles.sql" in told.judged(server.conninfo(dbname, user="blind"))
    assert told.audited(may[1]) is None
    rival = {"history": {1: left_lsn + 8}}
    told.tell(**rival)
    for conninfo in (server.conninfo(dbname), *may):
        assert "another timeline of the same number 2" in told.judged(conninfo)
    refused = told.audited(may[1], **rival)
    assert refused is not None and refused.exit_code == ExitCode.TIMELINE
    unknown = told.audited(may[1], history=None)
    assert unknown is not None and unknown.exit_code == ExitCode.NOT_JUDGED


def patience_s(connection: psycopg.Connection) -> tuple[int, float]:
    """Return after how many seconds Linux ends a connection without its network: idle, and not."""
    with socket.socket(fileno=os.dup(connection.fileno())) as its:
        assert its.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count, unsent_ms = (
            its.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
    return idle + interval * count, unsent_ms / 1000


@pytest.mark.long
def test_a_wait_for_the_source_does_not_outlast_its_network(
    pair: Provider, fresh_database: str
) -> None:
    """By Linux's defaults a session that waits for an answer notices it after two hours."""
    conninfo = pair.primary.conninfo(fresh_database)
    settings = SourceSettings.model_validate({"conninfo": conninfo})
    with postgres.snapshot(settings) as connection:
        assert patience_s(connection) == (25, 20)
        with walsender_of(connection, settings) as walsender:
            assert patience_s(walsender) == (25, 20)
    own = SourceSettings.model_validate({"conninfo": f"{conninfo} keepalives_idle=77"})
    with postgres.snapshot(own) as connection:
        assert patience_s(connection) == (92, 20)
