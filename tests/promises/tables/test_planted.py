"""Flips, losses and doubles, in records of Kafka and in Parquet files: the audit names each.

`run` can't notice any of them: the counts of the transactions agree with the records, and the
files have the paths and sizes that Iceberg knows.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from schemas.errors import ExitCode
from schemas.lsn import parse_lsn
from spark_consumers.audit.audit import Audit
from spark_consumers.audit.report import Difference, TableAudit, exit_code
from spark_consumers.epochs.audit_log import AuditLog
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable
from tests.promises.tables.test_audit import beside, load, told, writer
from tests.providers.interface import Provider

ITEMS = SourceTable("items", {"id": ("int4", -1), "note": ("text", -1)})
PLAIN = SourceTable("plain", {"note": ("text", -1), "n": ("int4", -1)}, key=())
TABLES = b"""
    CREATE TABLE items (id int PRIMARY KEY, note text);
    CREATE TABLE plain (note text, n int);
"""
ROWS = b"""
    INSERT INTO items SELECT i, md5(i::text) FROM generate_series(1, 1000) i;
    INSERT INTO plain SELECT md5(i::text), i FROM generate_series(1, 1000) i;
"""
LOAD = """
    UPDATE items SET note = md5(note) WHERE id = 500 + {step} % 400;
    DELETE FROM items WHERE id = 900 + {step};
    INSERT INTO items VALUES (3000 + {step}, 'new');
    INSERT INTO plain SELECT 'load', 3000 + {step} FROM generate_series(1, 2);
"""
"""It leaves the rows alone in which differences are planted."""
UNCOMPRESSED = {"properties": {"write.parquet.compression-codec": "uncompressed"}}


@pytest.fixture
def followed(
    pair: Provider,
    fresh_database: str,
    topic_prefix: str,
    new_bridge: NewBridge,
    new_pipeline: NewPipeline,
) -> tuple[Pipeline, str, Bridge]:
    """Two tables that a bridge streams, and that the Iceberg tables have; and the bridge."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(TABLES)
    bridge = new_bridge(conninfo, snapshot={"mode": "initial"})
    bridge.start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(ROWS)
    bridge.caught_up()
    pipeline = new_pipeline(
        conninfo,
        publication=f"p_{topic_prefix}",
        slot=bridge.slot,
        audit_busy_percent=50,
        audit_deadline_ms=600_000,
        maintenance_interval_ms=0,
        rules={"public.*": UNCOMPRESSED},
    )
    assert pipeline.stream(once=True)
    return pipeline, conninfo, bridge


def forge(pipeline: Pipeline, conninfo: str, publication: str) -> None:
    """Write records that tell of what PostgreSQL does not have, and let others never be written."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        publish = f"ALTER PUBLICATION {publication} SET (publish = '{{}}')"
        connection.execute(publish.format("update, delete, truncate").encode())
        connection.execute(b"INSERT INTO items VALUES (2000, 'its record is lost')")
        connection.execute(publish.format("insert, delete, truncate").encode())
        connection.execute(b"UPDATE items SET note = 'its record is lost' WHERE id = 1")
        connection.execute(publish.format("insert, update, delete, truncate").encode())
        row = connection.execute(b"SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row
        pipeline.publisher.commit_lsn = parse_lsn(row[0]) - 100
        with pipeline.publisher.transaction() as t:
            t.update(ITEMS, {"id": 2, "note": "flipped in its record"})
            t.delete(ITEMS, {"id": 3, "note": None})
            t.insert(PLAIN, {"note": "there twice", "n": 7})
            t.insert(PLAIN, {"note": "there twice", "n": 7})
        connection.execute(b"INSERT INTO plain VALUES ('there twice', 7)")


def rewrite(
    pipeline: Pipeline, table: str, where: str, change: Callable[[pa.Table], pa.Table]
) -> None:
    """Write the Parquet file that has a row anew: same path and size, other rows."""
    (row,) = pipeline.spark.sql(
        f"SELECT _file FROM {pipeline.identifier(table)} WHERE {where}"
    ).collect()
    path = Path(row[0].removeprefix("file:"))
    size, rows = path.stat().st_size, pq.read_table(path)
    pq.write_table(change(rows), path, compression="zstd", write_statistics=False)
    content = path.read_bytes()
    footer = 8 + int.from_bytes(content[-8:-4], "little")
    assert len(content) <= size
    room = bytes(size - len(content))
    path.write_bytes(content[:-footer] + room + content[-footer:])
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def flipped(rows: pa.Table) -> pa.Table:
    """Row 10 with another value."""
    notes = pc.if_else(pc.equal(rows["id"], 10), "flipped in its file", rows["note"])
    place = rows.schema.get_field_index("note")
    return rows.set_column(place, rows.schema.field(place), notes)


def without(rows: pa.Table) -> pa.Table:
    """All rows but number 11."""
    return rows.filter(pc.not_equal(rows["id"], 11))


def doubled(rows: pa.Table) -> pa.Table:
    """The rows, and number 12 once more."""
    return pa.concat_tables([rows, rows.filter(pc.equal(rows["id"], 12))])


def audit(pipeline: Pipeline) -> list[TableAudit]:
    """One round, beside `run`."""
    with beside(writer(pipeline)):
        return Audit(pipeline.spark, pipeline.settings, stop=threading.Event()).run()


@pytest.mark.long
def test_each_plant_is_named_within_a_round(
    followed: tuple[Pipeline, str, Bridge], topic_prefix: str
) -> None:
    pipeline, conninfo, bridge = followed
    with beside(load(conninfo, LOAD)):
        found = audit(pipeline)
    assert exit_code(found, named=False) == ExitCode.OK, told(found)
    bridge.caught_up()
    forge(pipeline, conninfo, f"p_{topic_prefix}")
    bridge.caught_up()
    found = audit(pipeline)
    of_records = {
        "public.items": (
            Difference("different", '{"id":1}', ("note",)),
            Difference("different", '{"id":2}', ("note",)),
            Difference("missing", '{"id":2000}'),
            Difference("missing", '{"id":3}'),
        ),
        "public.plain": (Difference("extra", '{"note":"there twice","n":7}'),),
    }
    assert {one.table: one.rows for one in found} == of_records, told(found)
    assert [one.extra for one in found] == [0, 2]
    for change, number in ((flipped, 10), (without, 11), (doubled, 12)):
        rewrite(pipeline, "items", f"id = {number}", change)
    rewrite(pipeline, "plain", "n = 20", lambda rows: rows.filter(pc.not_equal(rows["n"], 20)))
    found = audit(pipeline)
    assert {one.table: one.rows for one in found} == {
        "public.items": (
            Difference("different", '{"id":10}', ("note",)),
            Difference("different", '{"id":1}', ("note",)),
            Difference("different", '{"id":2}', ("note",)),
            Difference("extra", '{"id":12}'),
            Difference("missing", '{"id":11}'),
            Difference("missing", '{"id":2000}'),
            Difference("missing", '{"id":3}'),
        ),
        "public.plain": (
            Difference("extra", '{"note":"there twice","n":7}'),
            Difference("missing", '{"note":"98f13708210194c475687be6106a3b84","n":20}'),
        ),
    }, told(found)
    assert exit_code(found, named=False) == ExitCode.CHECK_FAILED
    failing_tables_are_not_judged(pipeline)


def failing_tables_are_not_judged(pipeline: Pipeline) -> None:
    """Spark fails where rows of one table are compared: the others are judged, and recorded."""
    log = AuditLog(pipeline.kafka.topic_prefix)
    before = log.findings(pipeline.spark)
    work = Audit(pipeline.spark, pipeline.settings, stop=threading.Event())

    def fails(*_: object) -> None:
        raise PySparkException("[FAILED_READ_FILE.FILE_NOT_EXIST] a file is not there")

    with pytest.MonkeyPatch.context() as patch, beside(writer(pipeline)):
        patch.setattr("spark_consumers.audit.table_rows.TableRows.of", fails)
        found = {one.table: one for one in work.run()}
    assert {one.verdict for one in found.values()} == {"not judged"}
    assert "FILE_NOT_EXIST" in found["public.items"].reason
    after = log.findings(pipeline.spark)
    assert after.keys() == before.keys() == found.keys()
    for name, one in after.items():
        assert one.reason and one.lsn > before[name].lsn
