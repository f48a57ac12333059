"""Events/s of epochs in each format of the topics, as `slottables` reads them.

    python -m benchmarks.tables.formats [--events 100000] [--formats json,avro]

Each format has a broker, a Spark session and a table of its own: inserts, which warm Spark up, then
as many updates of random keys, which are measured. The registry is a real Apicurio.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any, Final, get_args

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from benchmarks.tables.rig import Rig, rig
from benchmarks.tables.source import TOPIC, Serialize, Source
from schemas.kafka import Format
from schemas.registry import RegistrySettings
from services.bridge.events.formats import avro, connect, protobuf
from services.testbed.java import short_lived_spark
from spark_consumers.epochs import job
from spark_consumers.epochs.report import EpochReport
from tests.providers.registry import Registry, registry

_COLUMNS: Final = {
    **dict.fromkeys(("aid", "bid", "abalance"), connect.plain("int32")),
    "filler": connect.STRING,
}
_SCHEMAS: Final = {
    "key": connect.key(TOPIC, {"aid": connect.needed(_COLUMNS["aid"])}),
    "value": connect.envelope(TOPIC, _COLUMNS),
}


def main() -> None:
    """Measure each format, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--formats", default=",".join(get_args(Format)))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        folder = Path(name)
        with registry(folder) as found:
            for form in options.formats.split(","):
                given = short_lived_spark(folder / form)
                with rig(
                    driver_memory="2g", offsets_per_trigger_max=1_000_000, spark_options=given
                ) as one:
                    line = _measure(one, found, form, options.events)
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


def _measure(one: Rig, found: Registry, form: str, events: int) -> dict[str, Any]:
    assert one.settings.kafka
    formats = {"key_format": form, "value_format": form}
    settings = one.settings.model_copy(
        update={
            "kafka": one.settings.kafka.model_copy(update=formats),
            "registry": RegistrySettings(url=found.url),
        }
    )
    source = Source(
        one.servers, key=_serializer(found, form, "key"), value=_serializer(found, form, "value")
    )
    measured: list[EpochReport] = []
    for load in ("insert", "update"):
        source.write(load, events)
        measured.clear()
        job.run_epochs(one.spark, settings, report=measured.append, stop=Event(), once=True)
    count = sum(table.events for report in measured for table in report.tables.values())
    assert count == events, (count, events)
    seconds = sum(report.seconds for report in measured)
    return {
        "format": form,
        "events": count,
        "epochs": len(measured),
        "seconds": round(seconds, 1),
        "events_per_s": round(count / seconds),
    }


def _serializer(found: Registry, form: str, part: str) -> Serialize:
    """Return the function from the JSON of a key or value to what the bridge writes."""
    schema = _SCHEMAS[part]
    if form == "json":
        return str.encode
    if form == "json_schema_envelope":
        text = json.dumps(schema, separators=(",", ":"))
        return lambda payload: f'{{"payload":{payload},"schema":{text}}}'.encode()
    texts: dict[str, Callable[[], tuple[str, str]]] = {
        "json_schema": lambda: ("{}", "JSON"),
        "avro": lambda: (avro.schema_text(schema), "AVRO"),
        "protobuf": lambda: (protobuf.schema_text(schema), "PROTOBUF"),
    }
    with SchemaRegistryClient({"url": found.url}) as client:
        schema_id = client.register_schema(f"{form}-{part}", Schema(*texts[form]()))
    if form == "json_schema":
        head = b"\0" + schema_id.to_bytes(4, "big")
        return lambda payload: head + payload.encode()
    module: Any = avro if form == "avro" else protobuf
    serialize: Serialize = module.serializer(schema, schema_id)
    return serialize


if __name__ == "__main__":
    main()
