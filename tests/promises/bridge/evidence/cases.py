"""What a bridge must refuse, under load; after each, what an operator may do, and nothing is lost.

Each returns what happened in a few words, and the comparison at its end.
"""

from collections.abc import Callable
from dataclasses import replace

from schemas.errors import ExitCode
from schemas.events import HEARTBEAT_PREFIX
from services.testbed.postgres import PostgresServer
from tests.promises.bridge.evidence.ground import (
    DBNAME,
    Compared,
    Ground,
    Load,
    await_noted,
    compare,
    in_recovery,
    insert,
    promote,
    refusal,
    sessions_after,
    wal_lsn,
)
from tests.promises.bridge.running import Bridge
from tests.providers.databases import connect
from tests.providers.tokens import token_of
from tests.providers.waiting import eventually

Outcome = tuple[str, Compared]
Case = Callable[[Ground], Outcome]


def restore(ground: Ground) -> Outcome:
    """The volume is set back to a snapshot; in every other round the server then overtakes Kafka's
    record before the bridge sees it again."""
    overtaken = ground.rng.random() < 0.5
    server, bridge, load = running(ground)
    image = ground.image(server)
    before = wal_lsn(server)
    load.more(ground.rng.randint(20, 120))
    await_noted(bridge, before)
    if overtaken:
        bridge.kill()
    server.kill()
    ground.restore(server, image)
    server.start()
    if overtaken:
        reached = bridge.progress()[-1]
        far = max(reached.position.end_lsn, reached.witness.wal_lsn)
        with connect(server, DBNAME) as connection:
            while wal_lsn(server) <= far:
                insert(connection, 100)
        load.more(10)
        bridge.start()
    refusal(bridge, ExitCode.TIMELINE, "set back to an earlier state")
    how = "overtaken" if overtaken else "behind"
    return f"refused (32, set back, {how}); accepted", accepted(ground, bridge, server, load)


def soon_and_promoted(ground: Ground) -> Outcome:
    """As `soon`, and promoted since: the WAL of the record's timeline tells."""
    return soon(ground, promoted=True)


def soon(ground: Ground, *, promoted: bool = False) -> Outcome:
    """As `restore`, overtaken, without a move of the origin in between that a record could note:
    that the WAL has another commit where Kafka knows of one is all that tells."""
    server = ground.server()
    bridge = ground.bridge(server, heartbeat_interval_ms=60_000).start().streaming()
    load = ground.load(server)
    load.more(ground.rng.randint(5, 60))
    load.stop()
    bridge.caught_up()
    image = ground.image_of_idle(server)
    load = ground.load(server)
    load.more(ground.rng.randint(5, 60))
    load.stop()
    bridge.caught_up()
    bridge.kill()
    reached = bridge.progress()[-1]
    server.kill()
    ground.restore(server, image)
    server.start()
    far = max(reached.position.end_lsn, reached.witness.wal_lsn)
    with connect(server, DBNAME) as connection:
        while wal_lsn(server) <= far:
            insert(connection, 100)
    if promoted:
        server.kill()
        promote(server)
        eventually(lambda: not in_recovery(server), what="it is promoted")
    line = refusal(bridge.start(), ExitCode.TIMELINE, "set back to an earlier state")
    assert "lacks the commit of transaction" in line
    return "refused (32, set back soon); accepted", accepted(
        ground, bridge, server, ground.load(server)
    )


def crash(ground: Ground) -> Outcome:
    """The primary is killed and restarted, again and again: nothing is refused.

    Large WAL records, not flushed by their own commit, so that flushed WAL often ends inside one.
    """
    server, bridge, load = running(ground)
    crashes = ground.rng.randint(3, 5)
    for _ in range(crashes):
        with connect(server, DBNAME) as connection:
            connection.execute("SET synchronous_commit = off")
            for _ in range(ground.rng.randint(5, 20)):
                connection.execute(
                    "SELECT pg_logical_emit_message(false, %s, repeat('x', 1000000))",
                    [HEARTBEAT_PREFIX],
                )
            sessions_after(bridge, lambda: _crash(server))
        load.more(ground.rng.randint(5, 20))
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return "crashes of the primary: none refused", compare(server, bridge)


def _crash(server: PostgresServer) -> None:
    server.kill()
    server.start()


def promotion(ground: Ground) -> Outcome:
    """Two servers are promoted to timeline 2 from one primary, at different places."""
    first, bridge, load = running(ground)
    assert bridge.stop() == 0, bridge.output
    second = ground.copy(ground.image(first))
    load.more(ground.rng.randint(5, 60))
    load.stop()
    first.kill()
    promote(second)
    bridge = ground.bridge(second).start().streaming()
    load = ground.load(second)
    load.more(ground.rng.randint(20, 120))
    bridge.kill()
    load.stop()
    second.kill()
    promote(first)
    load = ground.load(first)
    load.more(ground.rng.randint(5, 60))
    bridge = ground.bridge(first).start()
    refusal(bridge, ExitCode.TIMELINE, "another timeline of the same number")
    return "refused (32, same number); accepted", accepted(ground, bridge, first, load)


def stale(ground: Ground) -> Outcome:
    """A bridge that sees only the old primary, started again and again, beside a healthy one; and
    one with a wrong database."""
    old, bridge, load = running(ground)
    assert bridge.stop() == 0, bridge.output
    new = ground.copy(ground.image(old))
    load.stop()
    promote(new)
    healthy = ground.bridge(new).start().streaming()
    load = ground.load(new)
    load.more(20)
    other = ground.server()
    on_old = ground.bridge(old, connect_deadline_ms=ground.rng.randint(500, 3000)).start()
    on_other = ground.bridge(other).start()
    load.more(ground.rng.randint(5, 60))
    refusal(on_other, ExitCode.WRONG_DATABASE, "the database has system identifier")
    refusal(on_old, ExitCode.TIMELINE, "old primary")
    assert healthy.running and healthy.sessions == 1, healthy.output
    load.stop()
    healthy.caught_up()
    assert healthy.stop() == 0, healthy.output
    return "refused (31, 32), the healthy one undisturbed", compare(new, healthy)


def publication(ground: Ground) -> Outcome:
    """The publication is another one, or another of the same name."""
    how = ground.rng.choice([_switched, _made_again, _made_again_while_it_runs])
    return how(ground)


def _switched(ground: Ground) -> Outcome:
    server, bridge, load = running(ground)
    assert bridge.stop() == 0, bridge.output
    load.more(ground.rng.randint(5, 60))
    with connect(server, DBNAME) as connection:
        connection.execute("CREATE PUBLICATION other FOR ALL TABLES")
    load.more(5)
    other = ground.bridge(server, publication="other").start()
    refusal(other, ExitCode.WITNESSES_DISAGREE, "they are of publication other now")
    bridge.start().streaming()
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return "refused (30, switched); back to the former one", compare(server, bridge)


def _made_again(ground: Ground) -> Outcome:
    """What was committed while there was none is not sent: that is what is accepted."""
    server, bridge, load = running(ground)
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    with connect(server, DBNAME) as connection:
        insert(connection, 3)
        connection.execute(f"DROP PUBLICATION {bridge.publication}".encode())
        insert(connection, 3)
        connection.execute(f"CREATE PUBLICATION {bridge.publication} FOR ALL TABLES".encode())
    _accept_publication(ground, server, bridge)
    seen = compare(server, bridge)
    return "refused (30, made again); accepted without 3 rows", replace(seen, lost=seen.lost - 3)


def _made_again_while_it_runs(ground: Ground) -> Outcome:
    """At once, so that nothing was committed without it."""
    server, bridge, load = running(ground)
    load.stop()
    bridge.caught_up()
    with connect(server, DBNAME) as connection, connection.transaction():
        connection.execute(f"DROP PUBLICATION {bridge.publication}".encode())
        connection.execute(f"CREATE PUBLICATION {bridge.publication} FOR ALL TABLES".encode())
    refusal(bridge, ExitCode.SERVER_SETTING, "dropped and made again")
    _accept_publication(ground, server, bridge)
    return "refused (25, then 30, made again while it runs); accepted", compare(server, bridge)


def _accept_publication(ground: Ground, server: PostgresServer, bridge: Bridge) -> None:
    line = refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, "dropped and made again")
    sessions_after(bridge, lambda: bridge.start(accept=token_of(line)))
    load = ground.load(server)
    load.more(10)
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    sessions_after(bridge, bridge.start)
    assert bridge.stop() == 0, bridge.output


def running(ground: Ground) -> tuple[PostgresServer, Bridge, Load]:
    """A server, a bridge that streams from it, and a load that has begun."""
    server = ground.server()
    bridge = ground.bridge(server).start().streaming()
    load = ground.load(server)
    load.more(ground.rng.randint(5, 60))
    return server, bridge, load


def accepted(ground: Ground, bridge: Bridge, server: PostgresServer, load: Load) -> Compared:
    """What is there after one start with the token of the refusal, then without it."""
    sessions_after(bridge, lambda: bridge.start(accept=bridge.token))
    load.more(10)
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    sessions_after(bridge, bridge.start)
    assert bridge.stop() == 0, bridge.output
    return compare(server, bridge)
