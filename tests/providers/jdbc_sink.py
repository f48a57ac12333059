"""Debezium's JDBC sink, which writes topics into another PostgreSQL."""

from collections.abc import Mapping
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from services.testbed import jars
from services.testbed.ports import LOOPBACK
from tests.providers.sink_worker import SinkWorker


class JdbcSink(SinkWorker):
    """One sink: the tables that `source.table` names, each row by its key."""

    def __init__(
        self,
        folder: Path,
        conninfo: str,
        bootstrap_servers: str,
        topics: str,
        converter: Mapping[str, str],
        *,
        parameters: str = "",
        **options: str,
    ) -> None:
        """`topics`: a regular expression; `converter`: properties, its class under no name.

        `parameters`: of the URL; `options`: of the sink, with `_` for each dot.
        """
        target = conninfo_to_dict(conninfo)
        sink = {
            "name": f"sink-{target['dbname']}",
            "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
            "tasks.max": "1",
            "topics.regex": topics,
            "connection.url": f"jdbc:postgresql://{LOOPBACK}:{target['port']}/{target['dbname']}"
            + parameters,
            "connection.username": str(target["user"]),
            "connection.password": str(target.get("password") or "none"),
            "collection.name.format": "${source.table}",
            "insert.mode": "upsert",
            "delete.enabled": "true",
            "primary.key.mode": "record_key",
            "schema.evolution": "basic",
            **{key.replace("_", "."): value for key, value in options.items()},
        }
        super().__init__(
            *(folder, bootstrap_servers, converter, sink),
            f"{jars.class_path('connect-jdbc')}:{jars.class_path('connect-avro')}",
            # The default reads a header's JSON as a map without a schema: the sink refuses that.
            header_converter="org.apache.kafka.connect.converters.ByteArrayConverter",
        )
