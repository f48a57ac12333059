"""What the catalog shows of a transaction that is being decoded."""

import json
import threading

import psycopg
import pytest

from services.bridge.source.visibility import await_visible, seen_in
from services.waiter import Waiter
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient, patient_ms

EPOCH = 2**32


@pytest.mark.parametrize(
    ("snapshot", "xid", "seen"),
    [
        ("100:105:101,103", 99, True),
        ("100:105:101,103", 100, True),
        ("100:105:101,103", 101, False),
        ("100:105:101,103", 104, True),
        ("100:105:101,103", 105, False),
        ("100:105:101,103", 200, False),
        ("105:105:", 104, True),
        (f"{EPOCH + 3}:{EPOCH + 5}:{EPOCH + 3}", 3, False),
        (f"{EPOCH + 3}:{EPOCH + 5}:{EPOCH + 3}", 4, True),
        (f"{EPOCH - 2}:{EPOCH + 5}:{EPOCH - 2}", 2**32 - 2, False),
        (f"{EPOCH - 2}:{EPOCH + 5}:{EPOCH - 2}", 2**32 - 1, True),
    ],
)
def test_a_commit_is_seen_in_a_snapshot(snapshot: str, xid: int, seen: bool) -> None:
    assert seen_in(snapshot, xid) is seen


@pytest.mark.long
def test_a_prepared_transaction_is_waited_for(pair: Provider, fresh_database: str) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with (
        psycopg.connect(conninfo, autocommit=True) as writing,
        psycopg.connect(conninfo, autocommit=True) as asking,
    ):
        for statement in ("BEGIN", "CREATE TABLE t ()"):
            writing.execute(statement)
        row = writing.execute("SELECT pg_current_xact_id()::text").fetchone()
        assert row is not None
        xid = int(row[0]) % EPOCH
        writing.execute(f"PREPARE TRANSACTION 'seen {fresh_database}'")
        waits: list[int] = []
        assert not await_visible(asking, xid, Waiter(lambda: waits.append(1)), deadline_s=0)

        def decide() -> None:
            if not waits:
                writing.execute(f"COMMIT PREPARED 'seen {fresh_database}'")
            waits.append(1)

        assert await_visible(asking, xid, Waiter(decide), deadline_s=patient(20))
        assert waits


@pytest.mark.long
def test_decoded_before_its_commit_is_seen(new_pair: NewPair, new_bridge: NewBridge) -> None:
    """The commit waits for a standby that has it but does not apply it: the bridge is first."""
    trio = new_pair()
    conninfo = trio.primary.conninfo(trio.dbname)
    bridge = new_bridge(conninfo, sql_deadline_ms=patient_ms(80_000)).start().streaming()
    with (
        psycopg.connect(conninfo, autocommit=True) as writing,
        psycopg.connect(conninfo, autocommit=True) as watching,
        psycopg.connect(trio.standby.conninfo(trio.dbname), autocommit=True) as standby,
    ):
        writing.execute("SET synchronous_commit = remote_apply")
        standby.execute("SELECT pg_wal_replay_pause()")

        def write() -> None:
            with writing.transaction():
                writing.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
                writing.execute("CREATE TABLE t (id int PRIMARY KEY, moods mood[])")
                writing.execute("ALTER TABLE t REPLICA IDENTITY FULL")
                writing.execute("INSERT INTO t VALUES (1, '{sad,NULL}')")

        thread = threading.Thread(target=write)
        thread.start()
        try:
            eventually(
                lambda: watching.execute(
                    "SELECT pid FROM pg_stat_activity WHERE application_name = 'slotbridge'"
                    " AND query LIKE '%pg_current_snapshot%'"
                ).fetchone(),
                what="the bridge has the transaction and waits for the catalog",
                timeout_s=120,
            )
            assert thread.is_alive()
        finally:
            standby.execute("SELECT pg_wal_replay_resume()")
            thread.join()
        bridge.caught_up()
    (event,) = bridge.events("t")
    assert event["after"] == {"id": 1, "moods": ["sad", None]}
    ((key, _value),) = bridge.records("public.t")
    assert json.loads(key or b"null") == {"id": 1}
