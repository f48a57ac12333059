"""`slotfailover watch` with real servers: somebody promotes, it does the rest."""

from pathlib import Path

from psycopg.conninfo import make_conninfo

from services.testbed.bed import Bed
from tests.promises.bridge.running import Bridge
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.drill import both
from tests.promises.failover.servers import (
    ask,
    await_equal,
    configuration,
    create_subscription,
    slotfailover,
    tell,
    write,
)
from tests.promises.failover.watch.watch_process import SETTINGS, TOKEN, Watching
from tests.providers.interface import Broker, Server, Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually

LEADS_TO = "SELECT subconninfo FROM pg_subscription WHERE subname = 's1'"


def test_watch_follows_a_promotion_pauses_and_hands_over_to_another_replica(
    local_trio: NewTrio, local_bed: Bed, kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    trio = local_trio()
    bridge = Bridge(tmp_path, both(trio), kafka, topic_prefix)
    prepare(trio, bridge)
    (tmp_path / "token").write_text(TOKEN + "\n")
    config = configuration(
        tmp_path,
        trio,
        as_roles=True,
        machines=machines(trio, local_bed),
        watch={**SETTINGS, "token_file": str(tmp_path / "token")},
    )
    first = Watching(config, "first")
    assert first.await_verdict("rest")["leading"]
    second = Watching(config, "second")
    try:
        second.await_verdict("rest")
        write(trio.primary, trio.dbname, 1)
        promote(trio.primary, trio.standby)
        write(trio.standby, trio.dbname, 101)
        await_equal(trio, trio.standby)
        await_kafka(bridge, trio, trio.standby)
        leader, other = await_one_repoint(first, second)
        assert "b was promoted: timeline 1 -> 2" in leader.events
        assert not other.status["leading"]
        assert ran(config) == [("watch", "done")]

        leader.kill()
        eventually(lambda: other.status["leading"], what="the other replica leads", timeout_s=60)
        rejoined = slotfailover("rejoin", "a", "--config", config, "--yes")
        assert rejoined.code == 0, rejoined.err
        other.order("pause", "a person is at work")
        promote(trio.standby, trio.primary)
        paused = other.await_verdict("paused")
        assert paused["decision"]["pending"]
        other.await_rounds(8)
        assert f"port={trio.standby.port}" in unquoted(ask(trio.subscriber, LEADS_TO, trio.dbname))
        third = Watching(config, "third")
        eventually(lambda: third.status["pause"]["paused"], what="a new replica knows the pause")
        third.end()
        other.order("resume")
        write(trio.primary, trio.dbname, 201)
        await_equal(trio, trio.primary)
        await_kafka(bridge, trio, trio.primary)
        eventually(lambda: ran(config)[-1] == ("watch", "done"), what="its run is ended")
        assert other.stop() == 0
        assert "Traceback" not in first.output + other.output
    finally:
        for replica in (first, second):
            replica.end()
        bridge.end()


def await_one_repoint(first: Watching, second: Watching) -> tuple[Watching, Watching]:
    """Which replica has repointed, and which has not: whoever gets the new primary's lock leads."""
    repoints = "slotfailover_repoints_total"
    eventually(lambda: first.metric(repoints) + second.metric(repoints) == 1, what="it is counted")
    return (first, second) if first.metric(repoints) else (second, first)


def prepare(trio: Trio, bridge: Bridge) -> None:
    """A table with a subscription s1 and the bridge, both ready on the standby."""
    for server in (trio.primary, trio.subscriber):
        tell(server, "CREATE TABLE t (id int PRIMARY KEY, note text)", dbname=trio.dbname)
    tell(trio.primary, "CREATE PUBLICATION p FOR ALL TABLES", dbname=trio.dbname)
    create_subscription(trio, "s1")
    bridge.start().streaming(trio.primary.conninfo(trio.dbname))
    for slot in ("s1", bridge.slot):
        await_ready(trio.primary, trio.standby, slot)


def promote(old: Server, new: Server) -> None:
    """As an external manager does it, once the old primary is dead and the new one has its WAL."""
    name = "synchronized_standby_slots"
    tell(new, f"ALTER SYSTEM SET {name} = ''", "ALTER SYSTEM SET synchronous_standby_names = ''")
    tell(new, "SELECT pg_reload_conf()")
    old.kill()
    tell(new, "SELECT pg_promote()")


def await_kafka(bridge: Bridge, trio: Trio, server: Server) -> None:
    """Kafka has what the server has, each row once."""
    conninfo = make_conninfo(server.conninfo(trio.dbname))
    bridge.caught_up(conninfo)
    bridge.assert_kafka_equals(conninfo, "t")
    ids = [event["after"]["id"] for event in bridge.events("t")]
    assert len(ids) == len(set(ids)) == ask(server, "SELECT count(*) FROM t", trio.dbname)


def ran(config: Path) -> list[tuple[str, str]]:
    """The commands in the journal, each with its outcome."""
    entries = slotfailover("history", "--config", config, "--json").json["entries"]
    return [(e["command"], e["outcome"]) for e in entries if e["step"] == "end"]


def unquoted(conninfo: str) -> str:
    return conninfo.replace("'", "")
