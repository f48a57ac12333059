"""Servers of which all but one witness say that they are the right one.

What Kafka knows last is a logical message outside of transactions: no commit in the WAL tells, and
no record notes where the origin has been since.
"""

from typing import Any, Final

from schemas.errors import ExitCode
from services.testbed.postgres import PostgresServer
from tests.promises.bridge.evidence.cases import Outcome, accepted
from tests.promises.bridge.evidence.ground import (
    DBNAME,
    Ground,
    compare,
    insert,
    promote,
    refusal,
    wal_lsn,
)
from tests.promises.bridge.running import Bridge
from tests.providers.databases import connect

_SELDOM: Final[dict[str, Any]] = {"heartbeat_interval_ms": 60_000}


def same_number(ground: Ground) -> Outcome:
    """As `cases.promotion`: the history of the timeline alone tells that it is another one."""
    first = ground.server()
    bridge = ground.bridge(first, **_SELDOM).start().streaming()
    _written(ground, first)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    second = ground.copy(ground.image(first))
    _written(ground, first)
    first.kill()
    promote(second)
    bridge = ground.bridge(second, **_SELDOM).start().streaming()
    _written(ground, second)
    reached = _ends_with_a_message(second, bridge)
    second.kill()
    promote(first)
    _overtake(first, reached)
    bridge = ground.bridge(first).start()
    refusal(bridge, ExitCode.TIMELINE, "another timeline of the same number")
    how = "refused (32, same number, its history alone); accepted"
    return how, accepted(ground, bridge, first, ground.load(first))


def foreign(ground: Ground) -> Outcome:
    """Another database with a slot, an origin and a publication of the same names, whose positions
    suit Kafka's record: its identifier alone tells."""
    ours, theirs = ground.server(), ground.server()
    bridge = ground.bridge(ours, **_SELDOM).start().streaming()
    _written(ground, theirs)
    names = {"slot": bridge.slot, "publication": bridge.publication}
    other = ground.bridge(theirs, prefix=f"{ground.prefix}x", **names, **_SELDOM)
    other.start().streaming()
    _written(ground, theirs)
    other.caught_up()
    assert other.stop() == 0, other.output
    _overtake(ours, wal_lsn(theirs))
    reached = _ends_with_a_message(ours, bridge)
    _overtake(theirs, reached)
    load = ground.load(theirs)
    refusal(
        ground.bridge(theirs, **names).start(),
        ExitCode.WRONG_DATABASE,
        "the database has system identifier",
    )
    load.stop()
    bridge.start().streaming()
    _written(ground, ours)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return "refused (31, its identifier alone); the right one goes on", compare(ours, bridge)


def _written(ground: Ground, server: PostgresServer) -> None:
    """Under a load for a while, which has ended then."""
    load = ground.load(server)
    load.more(ground.rng.randint(5, 60))
    load.stop()


def _ends_with_a_message(server: PostgresServer, bridge: Bridge) -> int:
    """Kill the bridge once a message is the last that Kafka has; how far the record is."""
    with connect(server, DBNAME) as connection:
        connection.execute("SELECT pg_logical_emit_message(false, 'slotbridge.failover', 'word')")
    bridge.caught_up()
    bridge.kill()
    record = bridge.progress()[-1]
    assert not record.position.xid and not record.position.seq, record
    return max(record.position.end_lsn, record.witness.wal_lsn)


def _overtake(server: PostgresServer, lsn: int) -> None:
    with connect(server, DBNAME) as connection:
        while wal_lsn(server) <= lsn:
            insert(connection, 100)
