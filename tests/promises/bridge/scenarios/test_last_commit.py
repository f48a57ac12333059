"""The commit that a progress record tells of is what the server's WAL has there, of every kind."""

import contextlib

import pytest

from schemas.progress import ProgressRecord
from services.bridge.progress.wal_commit import (
    NO_COMMIT,
    PAGE_BYTES,
    RECORD_BYTES,
    WalCommit,
    bytes_of_commit,
    commit_at,
    page_of,
)
from services.bridge.source.replication_connection import ReplicationConnection
from tests.promises.bridge.scenarios.conftest import Scene
from tests.providers.progress_records import altered
from tests.providers.waiting import eventually, patient_ms

SAVEPOINTS = (
    "DO $$ BEGIN FOR i IN 1..200 LOOP BEGIN INSERT INTO t VALUES (1000 + i); {}; END LOOP; END $$"
)


@pytest.mark.long
def test_a_commit_of_any_kind_is_found_in_the_wal(scene: Scene) -> None:
    scene.run(
        "CREATE TABLE t (id int PRIMARY KEY)", "SELECT pg_replication_origin_create('elsewhere')"
    )
    scene.start()
    many = SAVEPOINTS.format("EXCEPTION WHEN division_by_zero THEN NULL; END")
    for kind in (
        ["INSERT INTO t VALUES (1)"],
        ["INSERT INTO t SELECT generate_series(10, 900)"],
        [many],
        ["CREATE TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (1)"],
        ["INSERT INTO t VALUES (2)", "DROP TABLE u"],
    ):
        before = len(scene.bridge.progress())
        scene.together(*kind)
        eventually(lambda: len(scene.bridge.progress()) > before, what="it is published")  # noqa: B023
        scene.bridge.caught_up()
    records = published_from_elsewhere(scene)
    xids = {record.position.xid for record in records}
    assert len(xids) > 6, "also the moves of the bridge's origin"
    assert any(record.position.commit_time_us < 10**15 for record in records), "the origin's time"
    for record in records:
        found = in_wal(scene, record)
        assert found is not None and found == same(record, found), record
        assert record.position.commit_lsn < found.end_lsn <= record.position.end_lsn
    assert "commit in the WAL" not in scene.bridge.output
    scene.run("SELECT pg_switch_wal()", "CHECKPOINT")  # as archive_timeout does where little comes
    last = records[-1]
    found = in_wal(scene, last)
    assert found is not None and found == same(last, found), "zeros follow it"
    elsewhere = altered(last, commit_lsn=last.position.commit_lsn + 3 * PAGE_BYTES)
    assert in_wal(scene, elsewhere) == NO_COMMIT, "zeros are not a commit"


def published_from_elsewhere(scene: Scene) -> list[ProgressRecord]:
    """Commit with an origin and its time, until a record is of that; return all records."""
    scene.run("SELECT pg_replication_origin_session_setup('elsewhere')")
    records: list[ProgressRecord] = []
    for number in range(3, 103):  # a heartbeat that is published with it may be the last commit
        scene.together(
            "SELECT pg_replication_origin_xact_setup('0/4711', '2001-02-03 04:05:06+00')",
            f"INSERT INTO t VALUES ({number})",
        )
        scene.bridge.caught_up()
        records = [record for record in scene.bridge.progress() if record.position.xid]
        if any(record.position.commit_time_us < 10**15 for record in records):
            break
    return records


@pytest.mark.long
def test_a_commit_of_many_subtransactions_is_judged_too(scene: Scene) -> None:
    scene.configure(heartbeat_interval_ms=60_000)
    scene.run("CREATE TABLE t (id int PRIMARY KEY)")
    scene.start()
    many = SAVEPOINTS.format("EXCEPTION WHEN division_by_zero THEN NULL; END")
    for _ in range(5):  # a heartbeat that is published with it may be the last commit instead
        scene.together("TRUNCATE t", many.replace("1..200", "1..20000"))
        scene.bridge.caught_up()
        known = [record for record in scene.bridge.progress() if record.position.xid]
        record = max(known, key=between)
        if between(record) > RECORD_BYTES:
            break
    assert scene.bridge.stop() == 0, scene.bridge.output
    assert between(record) > RECORD_BYTES
    found = in_wal(scene, record)
    assert found is not None and found == same(record, found)


def between(record: ProgressRecord) -> int:
    """Bytes of WAL from the commit to the record's end."""
    return record.position.end_lsn - record.position.commit_lsn


def same(record: ProgressRecord, found: WalCommit) -> WalCommit:
    """What the record tells; it does not tell where the commit ends."""
    return WalCommit(record.position.xid, record.position.commit_time_us, found.end_lsn)


def in_wal(scene: Scene, record: ProgressRecord) -> WalCommit | None:
    wal = read(scene, record, RECORD_BYTES)
    if bytes_of_commit(wal, record.position.commit_lsn) > len(wal):
        wal = read(scene, record, bytes_of_commit(wal, record.position.commit_lsn))
    return commit_at(wal, record.position.commit_lsn)


def read(scene: Scene, record: ProgressRecord, count: int) -> bytes:
    connection = ReplicationConnection(
        *(scene.bridge.conninfo, scene.bridge.slot),
        wal_sender_timeout_ms=patient_ms(3_300),
        sql_deadline_ms=patient_ms(3_300),
        name="test",
    )
    row = scene.connection.execute("SELECT pg_current_wal_flush_lsn() - '0/0'").fetchone()
    assert row is not None
    stop = min(int(row[0]), record.position.commit_lsn + count)
    with contextlib.closing(connection) as own:
        return own.read_wal(page_of(record.position.commit_lsn), stop, record.server.timeline)
