"""Tables from topics in each format: a real database, bridge, Kafka, schema registry and Spark."""

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from schemas.errors import BadInput, ExitCode, Retryable, SetupError
from schemas.events import UNAVAILABLE
from schemas.kafka import KafkaSettings
from schemas.registry import RegistrySettings
from spark_consumers.blame import blame
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.kafka.formats import as_plain_json
from spark_consumers.operations import Operator
from spark_consumers.verify.as_of import verify_as_of
from spark_consumers.verify.comparison import verify_tables
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.tables import ROWS, TABLES
from tests.providers.interface import Provider
from tests.providers.registry import Registry, registry
from tests.providers.waiting import patient

FORMATS = ("json_schema_envelope", "json_schema", "avro", "protobuf")
UNFIT = {
    "'{{1,2},{3,4}}', '{NULL}'": "'{1,2,3,4}', '{NULL}'",
    """'{{a,b},{c,"d e"}}', '{{{1},{2}},{{3},{4}}}'""": """'{a,b,c,"d e"}', '{1,2}'""",
    "'{{happy}}'": "'{happy}'",
    "'[0:1][5:6]={{1,2},{3,4}}'": "'[5:6]={1,2}'",
}
"""What no schema has a place for, and what stands for it here."""
NOT_FINITE = {
    "0, 'NaN', '-Infinity', 0, 1e50": "0, 1e23, -0, 0, 1e50",
    "'{0.1,NaN,-Infinity,1e-300,NULL,-0}'": "'{0.1,1e23,123456789012345678,1e-300,NULL,-0}'",
}
LARGE = """
    CREATE TABLE large (
        id int PRIMARY KEY, n int, t text, b bytea, words text[], blobs bytea[], ints int[],
        reals float4[], doubles float8[], truths bool[], "größe 1.a" text, huge numeric
    );
    ALTER TABLE large ALTER t SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL,
        ALTER words SET STORAGE EXTERNAL, ALTER blobs SET STORAGE EXTERNAL,
        ALTER ints SET STORAGE EXTERNAL, ALTER reals SET STORAGE EXTERNAL,
        ALTER doubles SET STORAGE EXTERNAL, ALTER truths SET STORAGE EXTERNAL,
        ALTER "größe 1.a" SET STORAGE EXTERNAL, ALTER huge SET STORAGE EXTERNAL;
"""
CHANGES = (
    """INSERT INTO large SELECT n, 1, repeat('0123456789', 500), repeat('x', 5000)::bytea,
       array_agg('w' || i), array_agg(('b' || i)::bytea), array_agg(i), array_agg(i / 3::float4),
       array_agg(i / 7::float8), array_agg(i % 2 = 0), repeat('ö', 5000),
       repeat('12', 9000)::numeric
       FROM generate_series(1, 3000) i, generate_series(1, 3) n GROUP BY n""",
    "UPDATE large SET n = 2 WHERE id < 3",  # all others are unchanged, and not in the WAL
    'ALTER TABLE large ADD COLUMN more float4 DEFAULT 1e6, ADD "a:[95,95" text',
    'INSERT INTO large (id, n, more, "a:[95,95") VALUES (4, 4, 0.1, \'":[95,95,100]\')',
    "UPDATE large SET n = 3, more = 16777216 WHERE id = 1",
    "DELETE FROM large WHERE id = 2",
    # What stands for an unchanged value, as somebody's own: alone, and beside unchanged ones.
    f"""INSERT INTO large (id, t, b, words, blobs)
        VALUES (5, '{UNAVAILABLE}', '{UNAVAILABLE}', '{{{UNAVAILABLE}}}', '{{{UNAVAILABLE}}}')""",
    f"UPDATE large SET t = '{UNAVAILABLE}', blobs = '{{{UNAVAILABLE}}}' WHERE id = 3",
    "UPDATE large SET n = 9 WHERE id IN (3, 5)",
    "UPDATE large SET id = 6 WHERE id = 5",
    "ALTER TABLE whole ADD COLUMN rest text DEFAULT 'rest'",
    "UPDATE whole SET rest = '__debezium' WHERE id = 3",
    "ALTER TABLE log DROP COLUMN n",
    "INSERT INTO log VALUES ('more'), (NULL)",
)


def rows_in(form: str) -> str:
    """The rows of all types, without values that the format has no place for."""
    text = ROWS
    for old, new in (UNFIT | (NOT_FINITE if form.startswith("json_schema") else {})).items():
        assert old in text
        text = text.replace(old, new)
    return text


def both(form: str) -> dict[str, Any]:
    """The settings of keys and values in one format."""
    return dict.fromkeys(("key_format", "value_format"), form)


class Followed:
    """A source whose changes a bridge writes in a format."""

    def __init__(
        self, conninfo: str, prefix: str, new_bridge: NewBridge, new_pipeline: NewPipeline
    ) -> None:
        self.conninfo, self.prefix = conninfo, prefix
        self._bridges, self._pipelines = new_bridge, new_pipeline

    def bridge(self, found: Registry, formats: dict[str, Any]) -> Bridge:
        """A bridge that streams."""
        registered = {"url": found.url}
        return self._bridges(self.conninfo, formats=formats, registry=registered).start()

    def pipeline(self, found: Registry, formats: dict[str, Any], **settings: Any) -> Pipeline:
        """What follows it."""
        registered = {"url": found.url, **settings.pop("registry", {})}
        return self._pipelines(
            self.conninfo,
            publication=f"p_{self.prefix}",
            formats=formats,
            registry=registered,
            **settings,
        )

    def run(self, *statements: str) -> None:
        """Each in a transaction of its own."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


@pytest.fixture
def followed(
    pair: Provider,
    fresh_database: str,
    topic_prefix: str,
    new_bridge: NewBridge,
    new_pipeline: NewPipeline,
) -> Followed:
    conninfo = pair.primary.conninfo(fresh_database)
    return Followed(conninfo, topic_prefix, new_bridge, new_pipeline)


@pytest.mark.long
@pytest.mark.parametrize(("form", "again"), [("avro", False), *((form, True) for form in FORMATS)])
def test_all_types_and_changes_are_in_the_tables(
    followed: Followed, schemas: Registry, form: str, *, again: bool
) -> None:
    """`again`: their topics are also read as of an LSN, for `blame` and for a rebuild."""
    followed.run(TABLES, LARGE)
    bridge = followed.bridge(schemas, both(form)).streaming()
    followed.run(rows_in(form), *CHANGES)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    pipeline = followed.pipeline(schemas, both(form))
    assert pipeline.stream()
    compared = verify_tables(pipeline.spark, pipeline.settings, examples_max=5)
    assert {found.table: found.table_rows for found in compared if found.equal} == {
        "Odd one.T-1": 2,
        "public.emptied": 3,
        "public.large": 4,
        "public.lists": 3,
        "public.log": 7,
        "public.types": 5,
        "public.whole": 5,
    }, [found.line() for found in compared]
    if again:
        read_again(pipeline)


def read_again(pipeline: Pipeline) -> None:
    """Compare as of the last epoch, tell who wrote a row, and rebuild a table of all types."""
    last = pipeline.runner.record.commit_lsn
    compared = verify_as_of(pipeline.spark, pipeline.settings, last, examples_max=5)
    assert all(found.equal for found in compared), [found.line() for found in compared]
    told = blame(pipeline.spark, pipeline.settings, "public.large", ["1"])
    assert [version.operation for version in told] == ["insert", "update", "update"]
    assert told[1].changed == ("n",) and "doubles" in told[1].unchanged
    assert told[2].changed == ("n", "more") and told[2].xid
    before = pipeline.rows("large")
    list(Operator(pipeline.spark, pipeline.settings).rebuild(["public.large"]))
    pipeline.stream()
    assert pipeline.rows("large") == before
    assert not pipeline.runner.states["public.large"].note.rebuild


@pytest.mark.long
def test_a_topic_has_records_of_several_formats_and_schemas(
    followed: Followed, schemas: Registry
) -> None:
    followed.run('CREATE TABLE t (id int PRIMARY KEY, n float8, "the note" text)')
    followed.run("ALTER TABLE t REPLICA IDENTITY FULL")
    for number, form in enumerate(("json", *FORMATS, "avro"), 1):
        bridge = followed.bridge(schemas, both(form)).streaming()
        followed.run(
            f"INSERT INTO t VALUES ({number}, {number}.5, '{form}')",
            f"INSERT INTO t VALUES (0, 0.1, '{form}') ON CONFLICT (id) DO UPDATE SET n = t.n + 1",
        )
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    pipeline = followed.pipeline(schemas, {"key_format": "protobuf", "value_format": "avro"})
    reports = pipeline.stream()
    assert len(reports) == 1 and reports[0].transactions == 12
    (found,) = verify_tables(pipeline.spark, pipeline.settings)
    assert found.equal and found.table_rows == 7, found.line()
    last = pipeline.runner.record.commit_lsn
    (found,) = verify_as_of(pipeline.spark, pipeline.settings, last)
    assert found.equal and found.table_rows == 7, found.line()
    told = blame(pipeline.spark, pipeline.settings, "public.t", ["0"])
    assert [version.operation for version in told] == ["insert", *5 * ["update"]]


def write_raw(kafka: KafkaSettings, topic: str, *values: bytes) -> None:
    """Write records into the first partition."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for value in values:
        producer.produce(topic, value, b'{"id":9}', partition=0)
    assert producer.flush(patient(30)) == 0


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS)
def test_records_that_can_not_be_read_are_named_and_put_aside(
    followed: Followed, schemas: Registry, form: str
) -> None:
    followed.run("CREATE TABLE t (id int PRIMARY KEY, note text)")
    bridge = followed.bridge(schemas, both(form)).streaming()
    followed.run("INSERT INTO t VALUES (1, 'good')")
    bridge.caught_up()
    pipeline = followed.pipeline(schemas, both(form))
    topic = f"{followed.prefix}.public.t"
    bad = [b"\0\x7f\xff\xff\xffunknown", b"\0\0", b"\0\0\0\0\1\xff\xfe", b"no JSON"]
    write_raw(pipeline.kafka, topic, *bad)
    followed.run("INSERT INTO t VALUES (2, 'good')")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    with pytest.raises(BadInput, match="not an event") as raised:
        pipeline.stream()
    assert raised.value.exit_code == ExitCode.RECORD_REFUSED
    assert re.fullmatch(rf"{topic}, partition 0, offset \d+", raised.value.subject)
    careful = followed.pipeline(schemas, both(form), on_bad_event="quarantine")
    reports = careful.stream()
    assert sum(report.quarantined for report in reports) == len(bad)
    (found,) = verify_tables(careful.spark, careful.settings)
    assert found.equal and found.table_rows == 2, found.line()
    aside = careful.spark.table(careful.identifier("_quarantine")).orderBy("offset").collect()
    assert {row.reason for row in aside} == {"no event of a table"}
    if form in ("avro", "protobuf"):
        assert "the registry has no schema 2147483647" in aside[0].value
        assert "AH////91bmtub3du" in aside[0].value  # its bytes


@pytest.mark.long
def test_a_registry_that_fails_is_waited_for_and_nothing_is_lost(
    followed: Followed, tmp_path: Path
) -> None:
    with registry(tmp_path) as own:
        followed.run("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = followed.bridge(own, both("avro")).streaming()
        followed.run("INSERT INTO t VALUES (1)")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        hasty = followed.pipeline(own, both("avro"), registry={"deadline_ms": 1000})
        own.freeze()
        try:
            with pytest.raises(Retryable, match="schema registry does not answer") as raised:
                hasty.stream()
        finally:
            own.thaw()
        assert raised.value.exit_code == ExitCode.REGISTRY_UNREACHABLE
        assert raised.value.subject == own.url and "registry.url" in raised.value.hint
        hasty.restart()
        pipeline = followed.pipeline(own, both("avro"))
        assert pipeline.stream()
        assert [row.id for row in pipeline.rows("t")] == [1]


@pytest.mark.long
def test_the_registrys_password_is_in_no_plan(
    pipeline: Pipeline, capfd: pytest.CaptureFixture[str]
) -> None:
    kafka = KafkaSettings(bootstrap_servers="b:1", topic_prefix="x", value_format="avro")
    settings = RegistrySettings.model_validate(
        {
            "url": "http://127.0.0.1:1",
            "username": "u",
            "password": "secret-xyz",
            "deadline_ms": 1000,
        }
    )
    records = pipeline.spark.createDataFrame(
        [("t", 0, 0, None, bytearray(b"\0\0\0\0\1x"), None)],
        "topic string, partition int, offset bigint, key binary, value binary,"
        " placeholder_values string",
    )
    found = as_plain_json(records, kafka, settings)
    found.explain(extended=True)
    texts = [str(found._jdf.queryExecution().toString()), capfd.readouterr().out]
    with pytest.raises(Retryable) as raised:
        try:
            found.collect()
        except FOREIGN as error:
            texts.append(str(error))
            raise translated(error, "test") from error
    assert raised.value.exit_code == ExitCode.REGISTRY_UNREACHABLE
    shown = capfd.readouterr()
    assert not any("secret-xyz" in text for text in (*texts, str(raised.value), *shown))
    assert any("decode_records" in text for text in texts)


def test_an_executor_without_the_package_is_named() -> None:
    error = RuntimeError("ModuleNotFoundError: No module named 'spark_consumers'")
    failure = translated(error, "apply an epoch")
    assert isinstance(failure, SetupError) and failure.exit_code == ExitCode.PROGRAM_MISSING
    assert "PYSPARK_PYTHON" in failure.hint
