"""The hashes of an audit: PostgreSQL and Spark make the same of the same values."""

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from services.postgres.sessions import TABLES, open_session
from spark_consumers.audit.source_scan import SourceScan
from spark_consumers.verify import exported_rows, hashes, postgres
from spark_consumers.verify.exported_rows import source_rows
from spark_consumers.verify.forms import Layer
from tests.providers.interface import Provider

VALUES = """
    CREATE TABLE hashed AS SELECT
        i AS id, CASE WHEN i % 17 = 0 THEN NULL ELSE i % 5 = 0 END AS truth, i::int2 AS small,
        (random() - 0.5) * power(10::float8, i % 600 - 300) AS d,
        ((random() - 0.5) * power(10::float8, i % 70 - 35))::float4 AS r,
        (i % 1000)::float8 * 100 AS round, (i % 7)::numeric(38, 10) / 3 AS free,
        ((random() - 0.5) * power(10::numeric, i % 20))::numeric(38, 10) AS n,
        power(10::numeric, i % 20)::numeric(20) AS whole,
        DATE '0001-01-01' + i * 500 AS day,
        TIMESTAMP '1950-01-01' + i * interval '1.000001 d' AS at,
        TIMESTAMPTZ '1950-01-01' + i * interval '77777.000001 s' AS instant,
        TIME '00:00' + i * interval '1.000001 s' AS clock, i * interval '1.5 d' AS span,
        decode(md5(i::text), 'hex') AS b, repeat(chr(150 + i), i % 9) || '%{}:~' AS t,
        ('p' || i)::char(9) AS padded, md5(i::text)::uuid AS u, ARRAY[i, NULL] AS ints,
        ARRAY['a "' || i, NULL] AS words, jsonb_build_object('k', i) AS jb
    FROM generate_series(1, 3000) i;
    ALTER TABLE hashed ALTER free TYPE numeric, ALTER n TYPE numeric(38, 10);
    INSERT INTO hashed (id, d, r, t, day, at, instant, n) VALUES
        (-1, 'NaN', '-Infinity', '', 'infinity', '-infinity', 'infinity', 0),
        (-2, '-0', 0, '~', '0044-03-15 BC', '0044-03-15 BC', '0044-03-15 BC', -0.0000000001),
        (-3, 1.7976931348623157e308, 3.4e38, '1:a', NULL, NULL, NULL, NULL),
        (-4, 5e-324, 1e-45, NULL, NULL, NULL, NULL, NULL);
"""


def test_a_bucket_is_of_columns_whose_text_is_the_same_on_both_sides() -> None:
    array = [Layer("_float8", array=True), Layer("float8")]
    domain = [Layer("positive", domain=True), Layer("int4")]
    layers = [array, [Layer("int4")], domain, [Layer("vector")], [Layer("float8")]]
    assert hashes.buckets_of(1, layers, ()) == (64, (1, 4), True)
    assert hashes.buckets_of(1, layers, (0, 1)) == (64, (1,), True)
    assert hashes.buckets_of(1, layers, (0, 2)) == (64, (0, 2), False)
    assert hashes.buckets_of(100, [array], ()) == (128, (0,), False)


@pytest.mark.long
def test_both_engines_hash_alike(
    pair: Provider,
    fresh_database: str,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spark_consumers.verify.postgres.FILE_BYTES_MAX", 500_000)
    name = ("public", "hashed")
    with open_session(TABLES, pair.primary.conninfo(fresh_database)) as connection:
        connection.autocommit = False
        connection.execute("SET LOCAL search_path = public")
        connection.execute(VALUES.encode())
        columns = postgres.source_columns(connection, *name)
        kinds = postgres.column_layers(connection, name)
        layers = [kinds[column.name] for column in columns]
        told: list[int] = []
        scan = SourceScan(
            connection,
            name,
            row_filter="id <> 7",
            busy_percent=100,
            stop=threading.Event(),
            progress=lambda done, _pages: told.append(done),
        )
        source = scan.buckets(columns, layers, [0], 64)
        alone = {  # by column, so that a failure names it
            column.name: scan.buckets((columns[0], column), (layers[0], layer), [0], 64)
            for column, layer in zip(columns, layers, strict=True)
        }
        postgres.export(connection, name, columns, "id <> 7", tmp_path)
    with source_rows(spark, tmp_path, columns) as rows:
        texts = [hashes.table_text(f.name, f.dataType) for f in rows.schema.fields]

        def there(chosen: list[str]) -> dict[int, tuple[int, int]]:
            bucket = f"{hashes.table_bucket(texts[:1], 64)} AS b"
            found = rows.selectExpr(bucket, f"{hashes.table_hash(chosen)} AS h")
            counted = found.groupBy("b").agg(F.count("*").alias("n"), F.sum("h").alias("h"))
            return {row["b"]: (row["n"], int(row["h"])) for row in counted.collect()}

        unequal = [
            column.name
            for column, text in zip(columns, texts, strict=True)
            if alone[column.name] != there([texts[0], text])
        ]
        assert not unequal
        assert source == there(texts)
    assert sum(rows for rows, _ in source.values()) == 3003
    assert len(told) > 1 and scan.pages in told
    monkeypatch.setattr(exported_rows, "_sees_the_folder", lambda _: False)
    before = spark.sparkContext._jsc.getPersistentRDDs().size()
    with source_rows(spark, tmp_path, columns) as rows:
        assert len(list(tmp_path.iterdir())) > 2
        assert spark.sparkContext._jsc.getPersistentRDDs().size() > before + 2
        assert source == there(texts), "as the driver sends them to executors"
    assert spark.sparkContext._jsc.getPersistentRDDs().size() == before
