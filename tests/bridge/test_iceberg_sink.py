"""Iceberg's own Kafka Connect sink appends our flat rows to a table, which pyiceberg reads."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError

from services.testbed import jars
from tests.bridge.conftest import NewBridge
from tests.bridge.test_jdbc_sink import JSON, run
from tests.bridge.values.forms import DEBEZIUM
from tests.providers.connect_sink import ConnectSink
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually

ENVELOPE = dict.fromkeys(("key_format", "value_format"), "json_schema_envelope")
MODES = {**DEBEZIUM, "decimal_handling": "double", "time_precision": "connect"}


def iceberg_sink(folder: Path, kafka: Broker, topic: str) -> ConnectSink:
    """The sink of one topic into the table lake.t of a catalog in `folder`."""
    spark = find_spec("pyspark")
    assert spark is not None and spark.origin is not None
    sink = {
        "name": f"iceberg-{topic}",
        "connector.class": "org.apache.iceberg.connect.IcebergSinkConnector",
        "topics": topic,
        "iceberg.tables": "lake.t",
        "iceberg.tables.auto-create-enabled": "true",
        "iceberg.control.topic": f"{topic}-control",
        "iceberg.control.commit.interval-ms": "2000",
        "iceberg.catalog.catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        "iceberg.catalog.uri": f"jdbc:sqlite:{folder / 'catalog.db'}",
        "iceberg.catalog.warehouse": f"file://{folder / 'lake'}",
        "iceberg.catalog.io-impl": "org.apache.iceberg.hadoop.HadoopFileIO",
    }
    hadoop = Path(spark.origin).parent / "jars"
    class_path = [
        jars.class_path("connect-iceberg"),
        *map(str, sorted(hadoop.glob("hadoop-client-*.jar"))),
    ]
    return ConnectSink(folder, kafka.bootstrap_servers, JSON, sink, class_path)


def test_a_table_of_flat_rows(
    pair: Provider, fresh_database: str, kafka: Broker, new_bridge: NewBridge, tmp_path: Path
) -> None:
    source = pair.primary.conninfo(fresh_database)
    run(
        source,
        "CREATE TABLE t (id int PRIMARY KEY, v text, big bigint, part double precision, ok boolean,"
        " b bytea, tags text[])",
    )
    shaping = {"flat": {"fields": ["op"]}}
    bridge = new_bridge(source, formats=ENVELOPE, shaping=shaping, tombstones=False, **MODES)
    topic = f"{bridge.prefix}.public.t"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    (made,) = admin.create_topics([NewTopic(f"{topic}-control", 1, 1)]).values()
    made.result(30)
    sink = iceberg_sink(tmp_path, kafka, topic)
    try:
        bridge.start().streaming()
        run(
            source,
            "INSERT INTO t SELECT i, 'v' || i, 1::bigint << 40, i / 4.0, i % 2 = 0, '\\x00ff',"
            " ARRAY['a', NULL] FROM generate_series(1, 40) i",
            "UPDATE t SET v = NULL WHERE id % 10 = 0",
            "DELETE FROM t WHERE id = 7",
        )
        bridge.caught_up()
        sink.start()
        found: list[dict[str, Any]] = []

        def there() -> bool:
            assert sink.works, sink.said
            found[:] = _rows(tmp_path)
            return len(found) == 45

        eventually(there, what="45 rows in the table", timeout_s=150, interval_s=1)
        assert bridge.stop() == 0
    finally:
        sink.stop()
    last: dict[int, dict[str, Any]] = {}
    for row in sorted(found, key=lambda row: (row["__commit_lsn"], row["__seq"])):
        last[row["id"]] = row
    left = [row for row in last.values() if row["__op"] != "d"]
    with psycopg.connect(source) as connection:
        truth = connection.execute("SELECT * FROM t ORDER BY id").fetchall()
    names = ("id", "v", "big", "part", "ok", "b", "tags")
    assert sorted(tuple(row[name] for name in names) for row in left) == truth
    assert {row["__op"] for row in found} == {"c", "u", "d"}


def _rows(folder: Path) -> list[dict[str, Any]]:
    if not (folder / "catalog.db").exists():
        return []
    catalog = SqlCatalog("iceberg", uri=f"sqlite:///{folder / 'catalog.db'}")
    try:
        found: list[dict[str, Any]] = catalog.load_table("lake.t").scan().to_arrow().to_pylist()
    except NoSuchTableError:
        return []
    else:
        return found
    finally:
        catalog.close()
