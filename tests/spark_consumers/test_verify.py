"""From a real database through the real bridge into tables, and the comparison of both ends."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from schemas.errors import Retryable
from spark_consumers import verify
from spark_consumers.verify import TableComparison, verify_tables
from tests.bridge.running import Bridge
from tests.providers.interface import Broker, Provider
from tests.spark_consumers.conftest import NewPipeline, Pipeline

TABLES = """
    CREATE TYPE mood AS ENUM ('sad', 'happy');
    CREATE DOMAIN positive AS int CHECK (VALUE > 0);
    CREATE TABLE types (
        id int8 PRIMARY KEY, truth bool, small int2, middle int4, o oid, r float4, d float8,
        price numeric(12, 2), free numeric, m money, day date, at timestamp, at0 timestamp(0),
        instant timestamptz, clock time, zoned timetz, span interval, b bytea, t text,
        padded char(8), short varchar(5), j json, jb jsonb, u uuid, ints int[], words text[],
        kind mood, number positive, r4 int4range, net inet
    );
    CREATE DOMAIN stamps AS timestamptz(3)[];
    CREATE DOMAIN instant AS timestamptz;
    CREATE TABLE lists (
        id int PRIMARY KEY, ints int8[], words text[], prices numeric(8, 2)[], reals float8[],
        truths bool[], days date[], moments timestamp[], clocks time[], bytes bytea[],
        kinds mood[], numbers positive[], at instant, stamps stamps, boxes box[], spans interval[]
    );
    CREATE TABLE whole (id int PRIMARY KEY, note text, big text);
    ALTER TABLE whole REPLICA IDENTITY FULL;
    ALTER TABLE whole ALTER big SET STORAGE EXTERNAL;
    CREATE TABLE log (note text, n int);
    CREATE TABLE emptied (id int PRIMARY KEY, note text);
    CREATE SCHEMA "Odd one";
    CREATE TABLE "Odd one"."T-1" ("Key" int, key text, "a""b.c`d" text, PRIMARY KEY ("Key", key));
"""
ROWS = r"""
    INSERT INTO types VALUES
    (1, true, -32768, 2147483647, 4294967295, 0.1, 1e-300, -1234567890.12, 'NaN', 12.34,
     '0044-03-15 BC', '2026-01-31 12:00:00.000001', '2026-01-31 12:00:00.6',
     '2026-01-31 12:00:00.5+02', '23:59:59.999999', '10:20:30.5+02', '1 mon -2 days 03:00:01.5',
     '\x00ff80', E'a "b"\\\n\r\t,é💡\x01\x02', 'ab', 'äöü', '{"a":  1}', '{"a": [1, null]}',
     'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{1,NULL}', '{"x y",NULL,""}', 'sad', 7, '[1,5)',
     '10.0.0.1/8'),
    (3, false, 0, 0, 0, 'NaN', '-Infinity', 0, 1e50, 0, 'infinity', 'infinity', '-infinity',
     'infinity', '0:00', '0:00+14', '0', '', '', '', '', '[]', '[]',
     '00000000-0000-0000-0000-000000000000', '{}', '{}', 'happy', 1, 'empty', '::1'),
    (4, true, 1, 1, 1, 3.4e38, 1.7976931348623157e308, 0.01, -0.000, -1, '5874897-12-31',
     '294246-12-31 23:59:59.999999', '4713-01-01 00:00:00 BC', '12345-06-07 08:09:10.123456+00',
     '24:00', '12:00-15:59:59', '-1 year', '\x5c', '__debezium', '   ', ' ', 'null', '"x"',
     'ffffffff-ffff-ffff-ffff-ffffffffffff', '{{1,2},{3,4}}', '{NULL}', NULL, NULL, NULL, NULL);
    INSERT INTO lists VALUES
    (1, '{1,NULL,-9223372036854775808}', E'{"a \\"b\\"\\\\",NULL,"",é💡,"NULL"}', '{1.50,NULL}',
     '{0.1,NaN,-Infinity,1e-300,NULL,-0}', '{t,f,NULL}', '{2026-01-31,infinity,NULL}',
     '{2026-01-31 12:00:00.5,-infinity}', '{24:00,10:20:30.000001}', E'{"\\\\x00ff",NULL}',
     '{sad,NULL}', '{7}', '2026-01-31 12:00:00.5+02', '{2026-01-31 12:00:00.5+02,infinity}',
     '{(3,4),(1,2);(5,6),(3,4)}', '{1 mon -2 days}'),
    (2, '{}', '{{a,b},{c,"d e"}}', '{{{1},{2}},{{3},{4}}}', '{}', '{}', '{0044-03-15 BC}',
     '{0044-03-15 12:00:00 BC}', '{}', '{}', '{{happy}}', '{}', '0044-03-15 12:00:00+00 BC',
     '{12345-06-07 08:09:10.123+00,0001-12-31 00:00:00+00 BC}', '{}', '{}'),
    (3, '[0:1][5:6]={{1,2},{3,4}}', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
     NULL, NULL, NULL, NULL);
    INSERT INTO types (id) VALUES (2);
    INSERT INTO types (id, t) SELECT 5, string_agg(md5(i::text), '') FROM generate_series(1, 400) i;
    UPDATE types SET small = 5 WHERE id = 5;
    INSERT INTO whole SELECT i, 'a', repeat('x', 5000) FROM generate_series(1, 6) i;
    UPDATE whole SET note = 'b' WHERE id < 4;
    UPDATE whole SET id = 10 WHERE id = 1;
    DELETE FROM whole WHERE id = 2;
    INSERT INTO log SELECT 'same', 1 FROM generate_series(1, 5);
    INSERT INTO emptied SELECT i, 'x' FROM generate_series(1, 50) i;
    TRUNCATE emptied;
    INSERT INTO emptied VALUES (1, 'again'), (2, 'two'), (3, 'three');
    UPDATE emptied SET id = 20 WHERE id = 2;
    INSERT INTO "Odd one"."T-1" VALUES (1, 'k', 'v'), (1, 'l', NULL);
"""


@pytest.fixture
def bridged(
    pair: Provider,
    fresh_database: str,
    kafka: Broker,
    tmp_path: Path,
    topic_prefix: str,
    new_pipeline: NewPipeline,
) -> Iterator[tuple[Pipeline, str]]:
    """A pipeline whose topics a real bridge has filled, and the conninfo of its source."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(TABLES.encode())
        bridge = Bridge(tmp_path, conninfo, kafka, topic_prefix)
        try:
            bridge.start().streaming()
            connection.execute(ROWS.encode())
            bridge.caught_up()
            assert bridge.stop() == 0, bridge.output
        finally:
            bridge.end()
    yield new_pipeline(conninfo, publication=f"p_{topic_prefix}"), conninfo


def test_equal_tables_and_planted_differences(
    bridged: tuple[Pipeline, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, conninfo = bridged
    assert pipeline.apply()
    monkeypatch.setattr("spark_consumers.postgres.FILE_BYTES_MAX", 1000)
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
    with psycopg.connect(conninfo, autocommit=True) as connection:
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


def test_a_source_that_does_not_answer(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline("host=127.0.0.1 port=1 dbname=x connect_timeout=2")
    with pytest.raises(Retryable, match="the source does not answer"):
        verify.verify_tables(pipeline.spark, pipeline.settings)
