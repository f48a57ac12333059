"""Apache Iceberg's sink of Kafka Connect, which appends the rows of topics to Iceberg tables."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg.conninfo import conninfo_to_dict

from services.testbed import jars
from services.testbed.ports import LOOPBACK
from tests.providers.sink_worker import SinkWorker
from tests.providers.waiting import patient, patient_ms

if TYPE_CHECKING:
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.table import Table


class IcebergSink(SinkWorker):
    """One sink, whose tables are in a JDBC catalog in PostgreSQL and in files of its folder."""

    def __init__(
        self,
        folder: Path,
        conninfo: str,
        bootstrap_servers: str,
        topics: str,
        converter: Mapping[str, str],
        sink: Mapping[str, str],
    ) -> None:
        """`conninfo`: of the catalog; `topics`: a regular expression.

        `converter`: properties, its class under no name; `sink`: more properties of the sink.
        """
        catalog = conninfo_to_dict(conninfo)
        name = f"iceberg-{catalog['dbname']}"
        address = f"{LOOPBACK}:{catalog['port']}/{catalog['dbname']}"
        warehouse = f"file://{folder / 'lake'}"
        properties = {
            "name": name,
            "connector.class": "org.apache.iceberg.connect.IcebergSinkConnector",
            "tasks.max": "1",
            "topics.regex": topics,
            "iceberg.catalog": "lake",
            "iceberg.catalog.catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
            "iceberg.catalog.uri": f"jdbc:postgresql://{address}",
            "iceberg.catalog.jdbc.user": str(catalog["user"]),
            "iceberg.catalog.jdbc.password": str(catalog.get("password") or "none"),
            "iceberg.catalog.jdbc.schema-version": "V1",
            "iceberg.catalog.warehouse": warehouse,
            "iceberg.control.topic": f"control-{name}",
            "iceberg.control.commit.interval-ms": "1000",
            "iceberg.control.commit.timeout-ms": str(patient_ms(3_400)),
            # As short as a broker allows: after a kill, the next one waits for them.
            "iceberg.kafka.session.timeout.ms": str(patient_ms(2_000)),
            "iceberg.kafka.transaction.timeout.ms": str(patient_ms(1_700)),
            "iceberg.tables.auto-create-enabled": "true",
            "iceberg.tables.evolve-schema-enabled": "true",
            **sink,
        }
        import pyspark  # not at the top: other Pythons collect the tests without it

        of_spark = Path(pyspark.__file__).parent / "jars"
        hadoop = [*of_spark.glob("hadoop-client-*.jar"), *of_spark.glob("commons-logging-*.jar")]
        groups = [jars.class_path(group) for group in ("connect-iceberg", "connect-avro")]
        super().__init__(
            folder,
            bootstrap_servers,
            converter,
            properties,
            ":".join([*groups, *map(str, hadoop)]),
            consumer_session_timeout_ms=str(patient_ms(2_000)),
            consumer_heartbeat_interval_ms="1000",
        )
        admin = AdminClient({"bootstrap.servers": bootstrap_servers})
        control = NewTopic(properties["iceberg.control.topic"], num_partitions=1)
        admin.create_topics([control])[control.topic].result(patient(30))
        self._catalog = f"postgresql+psycopg://{catalog['user']}@{address}", warehouse

    def make_table(self, name: str, columns: Mapping[str, str]) -> None:
        """Make a table of `columns`, each with its type, so that the sink does not."""
        from pyiceberg.schema import Schema
        from pyiceberg.types import NestedField

        fields = enumerate(columns.items(), start=1)
        schema = Schema(*(NestedField(number, name, kind) for number, (name, kind) in fields))
        with self._opened() as catalog:
            catalog.create_namespace_if_not_exists("lake")
            catalog.create_table(f"lake.{name}", schema)

    def table(self, name: str) -> "Table":
        """Read a table's metadata."""
        with self._opened() as catalog:
            return catalog.load_table(f"lake.{name}")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Read all rows of a table, none if it is not made yet."""
        from pyiceberg.exceptions import NoSuchTableError

        with contextlib.suppress(NoSuchTableError):
            found: list[dict[str, Any]] = self.table(name).scan().to_arrow().to_pylist()
            return found
        return []

    @contextlib.contextmanager
    def _opened(self) -> Iterator["SqlCatalog"]:
        from pyiceberg.catalog.sql import SqlCatalog

        uri, warehouse = self._catalog
        with contextlib.closing(SqlCatalog("lake", uri=uri, warehouse=warehouse)) as catalog:
            yield catalog
