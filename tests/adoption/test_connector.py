"""A connector's configuration as settings; the offset as Kafka Connect keeps it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas.errors import ExitCode
from schemas.settings import Settings
from services.adoption.command import app
from services.adoption.connector import connector_of
from services.adoption.offsets import (
    is_key,
    offset_key,
    offset_of,
    read_map,
    released_offset,
    write_map,
)
from services.adoption.translation import differences, translate

CONFIG = {
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "plugin.name": "pgoutput",
    "database.hostname": "pg-a",
    "database.port": "5433",
    "database.user": "debezium",
    "database.password": "secret",
    "database.dbname": "bank",
    "topic.prefix": "bank",
    "slot.name": "dbz",
    "publication.name": "dbz_pub",
}
WORKER = {
    "bootstrap.servers": "kafka-1:9092",
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "key.converter.schemas.enable": "false",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter.schemas.enable": "false",
    "group.id": "connect-1",
    "offset.storage.topic": "offsets",
    "offset.flush.interval.ms": "1000",
}


def translated(**more: Any) -> Any:
    config = {key.replace("__", "."): value for key, value in more.items()}
    connector = connector_of({"name": "bank", "config": {**CONFIG, **config}}, WORKER)
    return translate(connector)


def test_defaults_are_debeziums() -> None:
    found = translated()
    assert found.refusals == ()
    settings = Settings.model_validate(found.settings)
    assert settings.source is not None and settings.kafka is not None
    assert settings.source.slot == "dbz" and settings.source.publication == "dbz_pub"
    assert "secret" not in str(found.settings)
    assert (settings.kafka.topic_prefix, settings.kafka.value_format) == ("bank", "json")
    assert settings.bridge.decimal_handling == "precise"
    assert settings.bridge.time_precision == "adaptive"
    assert settings.bridge.tombstones and not settings.bridge.transaction_metadata
    assert settings.shaping.skip == {"*.*": ("t",)}
    assert [*differences(found.settings, settings.model_dump())] == []


def test_connector_settings_are_translated() -> None:
    config = {
        "table.include.list": r"public\.accounts,public.pgbench_.*",
        "column.exclude.list": r"public\.accounts\.pin",
        "skipped.operations": "none",
        "tombstones.on.delete": "FALSE",
        "provide.transaction.metadata": " True",
        "decimal.handling.mode": "string",
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "topic.creation.default.partitions": "6",
        "database.sslmode": "require",
    }
    connector = connector_of({"name": "x", **CONFIG, **config}, WORKER)
    found = translate(connector)
    assert found.refusals == ()
    assert found.settings["shaping"] == {
        "include": ["public.accounts", "public.pgbench_*"],
        "columns": {"public.accounts": {"exclude": ["pin"]}},
    }
    assert found.settings["kafka"]["value_format"] == "json_schema_envelope"
    assert found.settings["kafka"]["partitions"] == 6
    assert found.settings["bridge"]["tombstones"] is False
    assert found.settings["bridge"]["transaction_metadata"] is True
    assert "sslmode=require" in found.settings["source"]["conninfo"]
    Settings.model_validate(found.settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("plugin.name", "decoderbufs"),
        ("transforms", "unwrap"),
        ("message.key.columns", "public.t:a"),
        ("time.precision.mode", "connect"),
        ("column.mask.with.12.chars", "public.t.a"),
        ("table.include.list", r"public\.(a|b)"),
        ("table.include.list", "accounts"),
        ("value.converter", "io.confluent.connect.protobuf.ProtobufConverter"),
        ("value.converter", "io.confluent.connect.json.JsonSchemaConverter"),
        ("value.converter", "io.apicurio.registry.utils.converter.ExtJsonConverter"),
        ("key.converter", "org.apache.kafka.connect.storage.StringConverter"),
        ("skipped.operations", "t,u"),
        ("producer.override.partitioner.class", "org.example.ByRegion"),
        ("producer.override.partitioner.ignore.keys", "true"),
        ("topic.delimiter", "_"),
        ("event.processing.failure.handling.mode", "skip"),
        ("lsn.flush.mode", "manual"),
        ("some.new.key", "x"),
        ("connector.class", "io.debezium.connector.mysql.MySqlConnector"),
    ],
)
def test_connector_setting_without_a_counterpart_is_refused_by_name(key: str, value: str) -> None:
    (refusal,) = translated(**{key: value}).refusals
    assert key in refusal
    connector = connector_of({"name": "b", "config": {**CONFIG, key: value}}, WORKER)
    ignored = translate(connector, ignored=[key]).refusals
    assert ignored == () or key in ("plugin.name", "key.converter", "value.converter")


UNWRAP = {
    "transforms": "flat",
    "transforms.flat.type": "io.debezium.transforms.ExtractNewRecordState",
    "transforms.flat.delete.tombstone.handling.mode": "rewrite-with-tombstone",
    "transforms.flat.add.fields": "op,txId,lsn,source.ts_ms,table",
}


def test_the_usual_transformation_makes_flat_rows() -> None:
    found = translated(**UNWRAP, **{"skipped.operations": "none"})
    assert found.refusals == ()
    settings = Settings.model_validate(found.settings)
    flat = settings.shaping.flat
    assert flat is not None and flat.deletes == "rewrite"
    assert flat.fields == ("txId", "lsn", "source.ts_ms", "table")
    assert settings.bridge.tombstones and settings.shaping.skip == {"*.*": ("t",)}
    assert [*differences(found.settings, settings.model_dump())] == []
    without = translated(**UNWRAP | {"transforms.flat.delete.tombstone.handling.mode": "rewrite"})
    assert without.refusals == () and not without.settings["bridge"]["tombstones"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("delete.tombstone.handling.mode", "", "does not tell which change"),
        ("delete.tombstone.handling.mode", "drop", "does not tell which change"),
        ("add.fields", "op,lsn,source.ts_ms", "lacks txId"),
        ("add.fields", "op,txId:xid,source.txId,lsn,source.ts_ms", "txId:xid has no counterpart"),
        ("add.fields.prefix", "meta_", "the bridge has only __"),
        ("add.headers", "op", "add.headers=op has no counterpart"),
        ("route.by.field", "a", "route.by.field=a has no counterpart"),
        ("predicate", "p", "predicate=p has no counterpart"),
    ],
)
def test_transformation_options_without_a_counterpart_are_refused(
    key: str, value: str, reason: str
) -> None:
    changed = {**UNWRAP, f"transforms.flat.{key}": value}
    if not value:
        del changed[f"transforms.flat.{key}"]
    (refusal,) = translated(**changed).refusals
    assert refusal.startswith("transforms.flat.") and reason in refusal
    several = translated(**UNWRAP | {"transforms": "flat,other"}).refusals
    assert any(text.startswith("transforms=flat,other") for text in several)


def test_settings_that_differ_from_the_connectors_are_named() -> None:
    found = translated()
    given = Settings.model_validate(found.settings).model_dump()
    given["bridge"]["decimal_handling"] = "string"
    given["shaping"]["masks"] = {"public.t": {"a": {"text": "x"}}}
    given["shaping"]["keys"] = {"public.t": ("a",)}
    given["source"]["origin"] = "none"
    given["kafka"]["cloudevents"] = "binary"
    told = [*differences(found.settings, given)]
    assert [text.split()[0] for text in told] == [
        *("source.origin", "kafka.cloudevents", "bridge.decimal_handling", "shaping.masks")
    ]


def test_a_converters_options_are_those_of_where_it_is_named() -> None:
    """Connect does not mix them: a connector's converter has the defaults, not the worker's."""
    json = "org.apache.kafka.connect.json.JsonConverter"
    own = translated(**{"value.converter": json})
    assert own.settings["kafka"]["value_format"] == "json_schema_envelope"
    assert own.settings["kafka"]["key_format"] == "json"
    others = translated(**{"value.converter.schemas.enable": "true"})
    assert others.settings["kafka"]["value_format"] == "json"
    numeric = {"value.converter": json, "value.converter.decimal.format": "NUMERIC"}
    (refusal,) = translated(**numeric).refusals
    assert refusal == "value.converter.decimal.format=NUMERIC has no counterpart"


def test_settings_of_the_worker_without_a_counterpart_are_refused() -> None:
    config = {"name": "bank", "config": CONFIG}
    (refusal,) = translate(
        connector_of(config, {**WORKER, "producer.partitioner.class": "org.example.P"})
    ).refusals
    assert refusal == "producer.partitioner.class=org.example.P of the worker has no counterpart"
    unknown = translate(connector_of(config)).refusals
    assert [text.split()[0] for text in unknown] == ["key.converter", "value.converter"]


def test_names_of_schemas_are_adjusted_only_where_there_are_some() -> None:
    adjusted = {"schema.name.adjustment.mode": "avro"}
    assert translated(**adjusted).refusals == ()
    adjusted["value.converter"] = "org.apache.kafka.connect.json.JsonConverter"
    (refusal,) = translated(**adjusted).refusals
    assert refusal.startswith("schema.name.adjustment.mode=avro")


def test_a_connector_without_a_name_is_refused() -> None:
    for document in ({}, {"config": [1]}, {"name": "x", "config": {"a": {}}}):
        with pytest.raises(ValueError, match=r"name|neither"):
            connector_of(document)


def test_the_transactional_id_is_connects() -> None:
    worker = {**WORKER, "exactly.once.source.support": "ENABLED"}
    assert connector_of({"name": "b", "config": CONFIG}, worker).transactional_id == "connect-1-b-0"
    assert connector_of({"name": "b", "config": CONFIG}, WORKER).transactional_id == ""


def test_offsets() -> None:
    whole = (
        b'{"lsn_proc":560,"messageType":"UPDATE","lsn_commit":500,"lsn":560,"txId":14,"ts_usec":1}'
    )
    assert offset_of(whole) == (500, 560, "")
    assert offset_of(b'{"lsn":7,"snapshot":"INITIAL","last_snapshot_record":false}').unfinished
    assert not offset_of(b'{"lsn":7,"snapshot":"INITIAL","last_snapshot_record":true}').unfinished
    assert offset_of(b'{"lsn":7,"incremental_snapshot_collections":"[x]"}').unfinished
    assert offset_of(released_offset(1234, 5)) == (0, 1234, "")
    for value in (b"[]", b"x", b'"text"'):
        with pytest.raises(ValueError, match=r".*"):
            offset_of(value)
    key = offset_key("c", "bank")
    assert key == b'["c",{"server":"bank"}]' and is_key(key, "c", "bank")
    assert not is_key(key, "d", "bank") and not is_key(b"x", "c", "bank")


def test_the_offset_file_is_javas() -> None:
    """As a real worker has written it; a part of it is taken for nothing, as the worker does."""
    written = bytes.fromhex(
        "aced0005737200116a6176612e7574696c2e486173684d61700507dac1c31660d103000246000a6c6f6164466163"
        "746f724900097468726573686f6c6478703f4000000000000c770800000010000000017572"
        "00025b42acf317f8060854e002000078700000000161757100"
    ) + bytes.fromhex("7e00020000000162" + "78")
    assert read_map(written) == {b"a": b"b"}
    assert write_map({b"a": b"b"}) == written
    several = {b"a": b"1" * 3000, b"b": None, b"c": b"", b"d": b"\xac\xed"}
    assert read_map(write_map(several)) == several
    assert {*map(len, (read_map(written[:end]) for end in range(len(written))))} == {0}
    for other in (b"{}", written + b"x", written.replace(b"ur\x00\x02[B", b"ur\x00\x02[C")):
        with pytest.raises(ValueError, match=r"it (is not|has more)"):
            read_map(other)


@pytest.mark.parametrize("command", [("adopt", "--from-debezium"), ("release", "--to-debezium")])
def test_partitions_that_debezium_would_not_choose_are_refused(
    command: tuple[str, str], tmp_path: Path
) -> None:
    """Before anything is connected to."""
    connector = tmp_path / "connector.json"
    connector.write_text(json.dumps({"name": "bank", "config": {**CONFIG, **WORKER}}))
    config = tmp_path / "slotbridge.yaml"
    given = {
        "source": {"conninfo": "host=nobody.invalid"},
        "kafka": {"bootstrap_servers": "nobody.invalid:1", "topic_prefix": "bank"},
        "shaping": {"partition_by": {"public.t": ["tenant"]}},
    }
    config.write_text(json.dumps(given))
    name, option = command
    done = CliRunner().invoke(app, [name, option, str(connector), "--config", str(config)])
    assert done.exit_code == ExitCode.SETTINGS, done.output
    assert "shaping.partition_by by other columns" in done.output
