"""Reads Kafka, committed records only: the stream of events, and the topic of table shapes."""

import re
from collections.abc import Collection, Iterable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from pydantic import ValidationError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from schemas.errors import BadInput, ExitCode, Retryable, SetupError
from schemas.events import SchemaEvent, dead_topic, schema_topic
from schemas.naming import Naming
from schemas.settings import KafkaSettings, TablesSettings
from spark_consumers.columns import Shape

_PROBE_TIMEOUT_S = 5.0
_DISCOVERY_INTERVAL_MS = 5_000
_FETCH_WAIT_MS = 10
_JAVA_NAMES = {
    "security.protocol": "security.protocol",
    "sasl.mechanism": "sasl.mechanism",
    "sasl.mechanisms": "sasl.mechanism",
    "ssl.endpoint.identification.algorithm": "ssl.endpoint.identification.algorithm",
}
_JAAS = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


def stream(
    spark: SparkSession, kafka: KafkaSettings, naming: Naming, tables: TablesSettings
) -> DataFrame:
    """The records of the tables' topics, the schema topic and the dead letters, from the first."""
    return (
        spark.readStream.format("kafka")
        .options(**reader_options(kafka))
        .option("subscribePattern", topic_pattern(kafka.topic_prefix, naming, tables.tables))
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", tables.offsets_per_trigger_max)
        .option("failOnDataLoss", "true")
        .load()
    )


def read_shapes(
    spark: SparkSession, kafka: KafkaSettings, naming: Naming, tables: Collection[str] = ()
) -> dict[str, Shape]:
    """topic -> the latest shape of its table, from the schema topic; empty when there is none.

    Of `tables` (`schema.table`; none: of every table that has a topic). Raises SetupError when two
    tables share a topic or rows have no identity, BadInput for a record that is no SchemaEvent.
    """
    topic = schema_topic(kafka.topic_prefix)
    records = (
        spark.read.format("kafka")
        .options(**reader_options(kafka))
        .option("subscribePattern", re.escape(topic))
        .option("startingOffsets", "earliest")
        .option("endingOffsets", "latest")
        .load()
        .where(F.col("value").isNotNull())
        .select("partition", "offset", F.col("value").cast("string").alias("value"))
        .collect()
    )
    latest: dict[tuple[str, str], SchemaEvent] = {}
    for record in sorted(records, key=lambda r: (r.partition, r.offset)):
        try:
            event = SchemaEvent.model_validate_json(record.value)
        except ValidationError as error:
            raise BadInput(
                "the record is no schema event of this version",
                operation="read table shapes",
                subject=f"{topic}, partition {record.partition}, offset {record.offset}",
                hint="run bridge and slottables of the same version",
                exit_code=ExitCode.RECORD_REFUSED,
            ) from error
        known = latest.get((event.schema_, event.table))
        if known is None or event.commit_lsn >= known.commit_lsn:
            latest[event.schema_, event.table] = event
    wanted = [
        event
        for (schema, table), event in latest.items()
        if naming.publishes(schema, table) and (not tables or f"{schema}.{table}" in tables)
    ]
    return _by_topic(naming, wanted)


def _by_topic(naming: Naming, events: Iterable[SchemaEvent]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for event in events:
        shape = Shape.from_event(event)
        topic = naming.table(shape.schema, shape.table).name
        if naming.key(shape.schema, shape.table):
            raise SetupError(
                f"{shape.name} has another key in Kafka (shaping.keys) than at its source",
                operation="read table shapes",
                subject=topic,
                hint="a table needs its primary key: list the tables to follow, without this one, "
                "in tables.tables",
            )
        if topic in shapes:
            raise SetupError(
                f"{shapes[topic].name} and {shape.name} share one topic",
                operation="read table shapes",
                subject=topic,
                hint="give each a topic of its own (shaping.routes), or list those to follow in "
                "tables.tables; characters that Kafka forbids become `_`",
            )
        shapes[topic] = shape
    return shapes


def topic_pattern(prefix: str, naming: Naming, tables: Iterable[str]) -> str:
    """A Java regular expression: the topics of `tables` (`schema.table`; none: of every table).

    The schema topic belongs to it, so that a change of shape wakes the stream; the dead letters do.
    """
    names = [naming.table(*table.split(".", 1)).name for table in tables]
    of_tables = "|".join(map(re.escape, names)) if names else naming.pattern()
    return "|".join((re.escape(schema_topic(prefix)), re.escape(dead_topic(prefix)), of_tables))


def reader_options(kafka: KafkaSettings) -> dict[str, str]:
    """Spark's options of a Kafka source; security settings are translated from librdkafka's."""
    options = {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "kafka.isolation.level": "read_committed",
        "kafka.metadata.max.age.ms": str(_DISCOVERY_INTERVAL_MS),
        "kafka.fetch.max.wait.ms": str(_FETCH_WAIT_MS),
    }
    given = {name: str(value) for name, value in kafka.options.items()}
    for name, java_name in _JAVA_NAMES.items():
        if name in given:
            options[f"kafka.{java_name}"] = given[name]
    if "ssl.ca.location" in given:
        options["kafka.ssl.truststore.type"] = "PEM"
        options["kafka.ssl.truststore.location"] = given["ssl.ca.location"]
    if "ssl.certificate.location" in given or "ssl.key.location" in given:
        raise SetupError(
            "a client certificate in kafka.options can't be handed on to Spark",
            operation="read Kafka's settings",
            hint="use SASL over SSL for slottables",
        )
    if "sasl.username" in given:
        options["kafka.sasl.jaas.config"] = _jaas(given)
    return options


def _jaas(given: dict[str, str]) -> str:
    mechanism = given.get("sasl.mechanism", given.get("sasl.mechanisms", "PLAIN"))
    if mechanism not in _JAAS:
        raise SetupError(
            f"the SASL mechanism {mechanism} can't be handed on to Spark",
            operation="read Kafka's settings",
            hint=f"use one of {', '.join(_JAAS)}",
        )
    user, password = (
        given.get(f"sasl.{part}", "").replace("\\", "\\\\").replace('"', '\\"')
        for part in ("username", "password")
    )
    return f'{_JAAS[mechanism]} required username="{user}" password="{password}";'


def require_broker(kafka: KafkaSettings) -> None:
    """Raise Retryable (KAFKA_UNREACHABLE) within seconds where Spark would wait for minutes."""
    try:
        own: dict[str, str | int | float | bool] = {
            "bootstrap.servers": kafka.bootstrap_servers,
            "log_level": 0,
        }
        AdminClient(own | kafka.options).list_topics(timeout=_PROBE_TIMEOUT_S)
    except KafkaException as error:
        raise Retryable(
            "Kafka does not answer",
            operation="connect to Kafka",
            subject=kafka.bootstrap_servers,
            hint="check kafka.bootstrap_servers and that the broker runs",
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        ) from error
