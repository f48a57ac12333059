"""From a real database through the real bridge into tables, and the comparison of both ends."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from schemas.errors import Retryable
from schemas.large_values import reference_of
from spark_consumers.blame import blame
from spark_consumers.restore.restoration import restore
from spark_consumers.verify.comparison import TableComparison, verify_tables
from tests.conftest import database
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.tables import ROWS, TABLES
from tests.providers.interface import Broker, Provider

# A timetz comes back in UTC, and arrays begin at 1: JSON does not show the latter.
VALUES = (
    *(
        f"SELECT (to_jsonb(_row) - '{{zoned}}'::text[])::text FROM {name} _row ORDER BY 1".encode()
        for name in ("types", "lists", "whole", "log", "emptied", '"Odd one"."T-1"')
    ),
    b"SELECT (zoned AT TIME ZONE 'UTC')::text FROM types ORDER BY id",
    b"SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'p' ORDER BY 1",
)
TYPES = b"""
    SELECT attrelid::regclass::text, attname, format_type(atttypid, atttypmod)
    FROM pg_attribute JOIN pg_class c ON c.oid = attrelid
    JOIN pg_namespace n ON n.oid = relnamespace
    WHERE relkind = 'r' AND attnum > 0 AND nspname NOT IN ('pg_catalog', 'information_schema')
    AND attname <> ALL ('{kind,number,zoned}') ORDER BY attrelid::regclass::text, attnum
"""


@pytest.fixture
def bridged(
    pair: Provider,
    fresh_database: str,
    topic_prefix: str,
    new_bridge: NewBridge,
    new_pipeline: NewPipeline,
) -> Iterator[tuple[Pipeline, str]]:
    """A pipeline whose topics a real bridge has filled, and the conninfo of its source."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(TABLES.encode())
        bridge = new_bridge(conninfo)
        bridge.start().streaming()
        connection.execute(ROWS.encode())
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    yield new_pipeline(conninfo, publication=f"p_{topic_prefix}", slot=bridge.slot), conninfo


def restored_as_at_the_source(pipeline: Pipeline, conninfo: str, into: str) -> None:
    """Restore all tables twice: into nothing, and into empty tables made as the source's were."""

    def told(connection: psycopg.Connection, query: bytes) -> list[tuple[object, ...]]:
        connection.execute("SET TimeZone = 'UTC'")
        return connection.execute(query).fetchall()

    lsn = pipeline.runner.record.commit_lsn
    unknown = ["kinds", "numbers", "at", "stamps"]
    with psycopg.connect(into, autocommit=True) as target, psycopg.connect(conninfo) as source:
        found = restore(pipeline.spark, pipeline.settings, lsn, into)
        assert [(t.table, t.as_text) for t in found.tables] == [
            *(("Odd one.T-1", []), ("public.emptied", []), ("public.lists", unknown)),
            *(("public.log", []), ("public.types", ["kind"]), ("public.whole", [])),
        ]
        for query in (*VALUES, TYPES):
            without = query.replace(b"zoned}", ",".join(("zoned", *unknown)).encode() + b"}")
            assert told(target, without) == told(source, without)
        target.execute('DROP SCHEMA public, "Odd one" CASCADE; CREATE SCHEMA public')
        target.execute(TABLES.encode())
        assert not any(
            t.as_text for t in restore(pipeline.spark, pipeline.settings, lsn, into).tables
        )
        for query in VALUES:
            assert told(target, query) == told(source, query)


def test_equal_tables_and_planted_differences(
    bridged: tuple[Pipeline, str],
    pair: Provider,
    monkeypatch: pytest.MonkeyPatch,
    new_pipeline: NewPipeline,
) -> None:
    pipeline, conninfo = bridged
    assert pipeline.stream()
    monkeypatch.setattr("spark_consumers.verify.postgres.FILE_BYTES_MAX", 1000)
    found = verify_tables(pipeline.spark, pipeline.settings)
    counts = {comparison.table: comparison.table_rows for comparison in found if comparison.equal}
    assert counts == {
        "Odd one.T-1": 2,
        "public.emptied": 3,
        "public.lists": 3,
        "public.log": 5,
        "public.types": 5,
        "public.whole": 5,
    }, [comparison.line() for comparison in found]
    shaping = {
        "filters": {"public.log": "true"},
        "computed": {"public.emptied": {"note": "'-'", "other": "1"}},
    }
    publication = pipeline.settings.source.publication if pipeline.settings.source else ""
    slot = pipeline.settings.source.slot if pipeline.settings.source else ""
    shaped = new_pipeline(conninfo, publication=publication, slot=slot, shaping=shaping)
    foreign = new_pipeline(conninfo, publication=publication, slot="of_nobody")
    (unknown,) = verify_tables(pipeline.spark, foreign.settings, tables=["public.log"])
    assert not unknown.equal and not unknown.missing and not unknown.not_judged
    assert "not a progress record of the slot" in unknown.source_not_judged
    judged = verify_tables(pipeline.spark, shaped.settings, tables=["public.log", "public.emptied"])
    assert [comparison.equal for comparison in judged] == [True, False]
    assert judged[1].line().startswith("public.log: not judged: shaping.filters")
    with database(pair.primary) as scratch:
        restored_as_at_the_source(pipeline, conninfo, pair.primary.conninfo(scratch))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        last = connection.execute("SELECT xmin::text::int8 FROM whole WHERE id = 3").fetchone()
        told = blame(pipeline.spark, pipeline.settings, "public.whole", ["3"])
        assert [version.operation for version in told] == ["insert", "update"]
        assert (told[-1].xid,) == last
        assert told[-1].changed == ("note",)
        connection.execute("INSERT INTO log VALUES ('same', 1)")
        connection.execute("DELETE FROM emptied WHERE id = 20")
        connection.execute("INSERT INTO emptied VALUES (9, 'new'), (10, 'new')")
        connection.execute("UPDATE emptied SET note = 'secret' WHERE id = 1")
        connection.execute("UPDATE types SET at = at + interval '1 us' WHERE id = 1")
        connection.execute('ALTER TABLE "Odd one"."T-1" ADD COLUMN more int')
        connection.execute("CREATE TABLE fresh (id int PRIMARY KEY)")
        connection.execute("INSERT INTO fresh VALUES (1)")
    found = verify_tables(pipeline.spark, pipeline.settings, examples_max=5)
    by_name = {comparison.table: comparison for comparison in found}
    assert [comparison.table for comparison in found if comparison.equal] == [
        "public.lists",
        "public.whole",
    ]
    assert differences(by_name["public.log"]) == (6, 5, 1, 0, 0)
    assert differences(by_name["public.emptied"]) == (4, 3, 2, 1, 1)
    assert differences(by_name["public.types"]) == (5, 5, 0, 0, 1)
    assert differences(by_name["public.fresh"]) == (1, 0, 1, 0, 0)
    assert by_name["Odd one.T-1"].columns == ("column more is not in the table",)
    assert set(by_name["public.emptied"].examples) == {
        'missing {"id":9}',
        'missing {"id":10}',
        'extra {"id":20}',
        'different {"id":1}',
    }
    one = verify_tables(pipeline.spark, pipeline.settings, tables=["public.log"])
    assert [comparison.table for comparison in one] == ["public.log"]
    assert not one[0].examples


def differences(found: TableComparison) -> tuple[int, ...]:
    return (found.source_rows, found.table_rows, found.missing, found.extra, found.different)


@pytest.mark.long
def test_a_source_that_does_not_answer(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline("host=127.0.0.1 port=1 dbname=x connect_timeout=2")
    with pytest.raises(Retryable, match="the source does not answer"):
        verify_tables(pipeline.spark, pipeline.settings)


@pytest.mark.long
def test_columns_with_large_values_hold_references_and_are_not_judged(
    pair: Provider,
    fresh_database: str,
    kafka: Broker,
    tmp_path: Path,
    topic_prefix: str,
    new_pipeline: NewPipeline,
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    shaping = {"large_values": {"*.*": {"*": {"claim_check_bytes": 100}}}}
    folder = tmp_path / "objects"
    folder.mkdir()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE doc (id text PRIMARY KEY, body text, photo bytea, n int)")
        bridge = Bridge(
            *(tmp_path, conninfo, kafka, topic_prefix),
            shaping=shaping,
            claim_check={"uri": folder.as_uri()},
        )
        bridge.start().streaming()
        connection.execute(
            "INSERT INTO doc VALUES ('a', repeat('x', 200), decode(repeat('00', 200), 'hex'), 1)"
        )
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        pipeline = new_pipeline(
            conninfo, publication=f"p_{topic_prefix}", slot=bridge.slot, shaping=shaping
        )
        assert pipeline.stream()
        ((_, body, photo, _),) = [tuple(row) for row in pipeline.rows("doc")]
        references = [
            reference_of(value, prefix=folder.as_uri()) for value in (body.encode(), bytes(photo))
        ]
        names = [reference.sha256 for reference in references if reference]
        assert [(folder / name).read_bytes() for name in names] == [b"x" * 200, b"\0" * 200]
        (found,) = verify_tables(pipeline.spark, pipeline.settings)
        assert found.equal and found.columns_not_judged == ("body", "photo")
        assert "equal, not judged (shaping.large_values): body, photo" in found.line()
        connection.execute("UPDATE doc SET n = 2")
        (found,) = verify_tables(pipeline.spark, pipeline.settings)
        assert not found.equal, "the other columns are compared"
