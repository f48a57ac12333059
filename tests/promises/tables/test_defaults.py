"""From ALTER TABLE … ADD COLUMN … DEFAULT at a real source to its tables, and both compared."""

import threading
from collections.abc import Iterator

import psycopg
import pytest
from typer.testing import CliRunner

from schemas.schema_events import SchemaEvent
from services.bridge.cli.app import app
from spark_consumers.audit.audit import Audit
from spark_consumers.verify.as_of import verify_as_of
from spark_consumers.verify.comparison import verify_tables
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import done
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.test_audit import beside, writer
from tests.providers.interface import Provider

TABLES = b"""
    CREATE TYPE mood AS ENUM ('sad', 'happy');
    CREATE DOMAIN positive AS int;
    CREATE TABLE items (id int PRIMARY KEY, note text);
    CREATE TABLE versions (id int PRIMARY KEY, note text);
    CREATE TABLE plain (id int, note text);
"""
NAMES = ("items", "versions", "plain")
DEFAULTS = {
    "truth bool": "true",
    "small int2": "-32768",
    "whole int": "7",
    "large int8": "9007199254740993",
    "r float4": "0.1",
    "d float8": "1e-300",
    "nan float8": "'NaN'",
    "price numeric(12, 2)": "-1234567890.12",
    "free numeric": "'1e20'",
    "m money": "12.34",
    "day date": "'0044-03-15 BC'",
    "at timestamp": "'2026-01-31 12:00:00.000001'",
    "instant timestamptz": "'2026-01-31 12:00:00.5+02'",
    "made timestamptz": "now()",
    "clock time": "'23:59:59.999999'",
    "zoned timetz": "'10:20:30.5+02'",
    "span interval": "'1 mon -2 days 03:00:01.5'",
    "b bytea": r"'\x00ff80'",
    "t text": "E'a \"b\"\\\\\\n,\\'é💡'",
    "nothing text": "''",
    "padded char(8)": "'ab'",
    "j jsonb": "'{\"a\": [1, null]}'",
    "u uuid": "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",
    "ints int[]": "'{1,NULL,3}'",
    "words text[]": '\'{"a b","c,d"}\'',
    "edges box": "'(1,1),(0,0)'",
    "kind mood": "'happy'",
    "number positive": "3",
    "net inet": "'10.0.0.1'",
    "required int NOT NULL": "5",
}


class Source:
    """A source whose changes a bridge sends, and the tables that follow it."""

    def __init__(self, bridge: Bridge, pipeline: Pipeline) -> None:
        self.bridge, self.pipeline = bridge, pipeline

    def run(self, *statements: str) -> None:
        with psycopg.connect(self.bridge.conninfo, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def apply(self) -> None:
        if not self.bridge.running:
            self.bridge.start().streaming()
        self.bridge.caught_up()
        assert self.pipeline.stream(once=True)

    def shape(self, table: str) -> SchemaEvent:
        """The table's last schema event."""
        events = [SchemaEvent.model_validate_json(v) for _, v in self.bridge.records("schema") if v]
        return [event for event in events if event.table == table][-1]

    def differing(self) -> list[str]:
        """The tables that do not equal the source."""
        found = verify_tables(self.pipeline.spark, self.pipeline.settings)
        assert len(found) >= len(NAMES)
        return [comparison.table for comparison in found if not comparison.equal]


@pytest.fixture
def source(
    pair: Provider,
    fresh_database: str,
    topic_prefix: str,
    new_bridge: NewBridge,
    new_pipeline: NewPipeline,
) -> Iterator[Source]:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(TABLES)
    snapshot = {"mode": "on_request", "signal_topic": f"{topic_prefix}-signal"}
    bridge = new_bridge(conninfo, snapshot=snapshot)
    pipeline = new_pipeline(
        conninfo,
        publication=bridge.publication,
        slot=bridge.slot,
        audit_busy_percent=100,
        rules={"public.versions": {"kind": "history"}},
    )
    bridge.start().streaming()
    made = Source(bridge, pipeline)
    for name in NAMES:
        made.run(f"INSERT INTO {name} SELECT i, 'n' || i FROM generate_series(1, 5) i")
    made.run("UPDATE versions SET note = 'changed' WHERE id = 1")
    made.apply()
    yield made


@pytest.mark.long
def test_defaults_of_every_type_are_in_the_tables(source: Source) -> None:
    added = ", ".join(f"ADD {name} DEFAULT {value}" for name, value in DEFAULTS.items())
    for name in NAMES:
        source.run(
            f"ALTER TABLE {name} {added}, ADD plain int",
            f"INSERT INTO {name} (id, note) VALUES (6, 'new')",
            f"INSERT INTO {name} (id, whole, t) VALUES (7, NULL, NULL)",
        )
    source.apply()
    told = source.shape("items")
    assert (len(told.missing), told.unsent) == (len(DEFAULTS), [])
    assert source.differing() == []
    for name in NAMES:
        found = source.pipeline.spark.table(source.pipeline.identifier(name))
        holding = found.where("_valid_to IS NULL") if name == "versions" else found
        assert (holding.where("whole = 7").count(), holding.where("whole IS NULL").count()) == (
            6,
            1,
        )
        assert holding.where("plain IS NOT NULL").count() == 0
    runner = source.pipeline.runner
    lsn = runner.record.commit_lsn
    for one in verify_as_of(source.pipeline.spark, source.pipeline.settings, lsn):
        assert one.equal, one.line()
    audit(source)


def audit(source: Source) -> None:
    """`slottables audit` beside `run` finds all tables equal."""
    with beside(writer(source.pipeline)):
        stop = threading.Event()
        found = Audit(source.pipeline.spark, source.pipeline.settings, stop=stop).run(())
    assert {one.verdict for one in found} == {"equal"}, [
        line for one in found for line in one.lines()
    ]


@pytest.mark.long
def test_what_the_wal_lacks_comes_with_a_snapshot(source: Source) -> None:
    """A volatile default, and another type by USING."""
    source.run(
        "ALTER TABLE items ADD u uuid DEFAULT gen_random_uuid()",
        "INSERT INTO items (id) VALUES (6)",
        "ALTER TABLE versions ALTER id TYPE int8 USING id * 10",
        "INSERT INTO versions (id) VALUES (60)",
    )
    source.apply()
    assert (source.shape("items").unsent, source.shape("items").missing) == (["u"], {})
    assert source.shape("versions").unsent == ["id"]
    assert source.differing() == ["public.items", "public.versions"]
    assert "`slotbridge snapshot start public.items`" in source.bridge.output
    command = ["snapshot", "start", "public.items", "--config", str(source.bridge.config)]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    done(source.bridge)
    source.apply()
    assert source.differing() == ["public.versions"]


@pytest.mark.long
def test_what_is_not_certain_is_not_told(source: Source) -> None:
    """The catalog is read when the bridge comes to the change, which may be long after it."""
    assert source.bridge.stop() == 0, source.bridge.output
    for name in NAMES:
        source.run(f"ALTER TABLE {name} ADD c int DEFAULT 7", f"INSERT INTO {name} VALUES (6, 'x')")
    source.run(
        "VACUUM FULL items",
        "ALTER TABLE versions DROP c, ADD c int DEFAULT 8",
        "ALTER TABLE plain RENAME c TO d",
    )
    source.apply()
    for name in NAMES:
        assert (source.shape(name).unsent, source.shape(name).missing) == (["c"], {}), name
    assert source.differing() == ["public.items", "public.plain", "public.versions"]
