"""Records of tables in any format as records in plain JSON: DataFrame -> DataFrame.

    json                                the records themselves
    json_schema, json_schema_envelope   by Spark: the text in the record, byte for byte
    avro, protobuf                      by Python on the executors, with the schemas of the registry

A reader of one format also takes records that are plain JSON, and one of avro or protobuf takes all
formats: a changed format applies to new records only. Executors need this package, and reach the
registry; each of their processes asks once for each schema. How they get its password: within the
function that Spark sends them, which no plan, page or command line shows.
"""

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from schemas.errors import SlotbridgeError
from schemas.events import UNAVAILABLE
from schemas.kafka import KafkaSettings
from schemas.registry import RegistrySettings
from schemas.wire import HEAD_BYTES, MAGIC
from spark_consumers.events.changes import PLACE_COLUMNS
from spark_consumers.formats.registry_failure import failure_text

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_consumers.formats.decoder import Decoder

_BINARY: Final = {"avro", "protobuf"}
_ENVELOPE: Final = b'{"payload":{'
_NUMBERS: Final = json.dumps([*UNAVAILABLE.encode()], separators=(",", ":"))
_BOOLEANS: Final = json.dumps(
    [bit == "1" for byte in UNAVAILABLE.encode() for bit in f"{byte:08b}"], separators=(",", ":")
)


def as_plain_json(
    records: DataFrame, kafka: KafkaSettings, registry: RegistrySettings | None
) -> DataFrame:
    """Return Kafka's records with keys and values as `kafka.value_format: json` has them.

    Of other formats: PLACE_COLUMNS, `placeholder_values`, key and value alone, without tombstones.
    A record that can't be read has a value that is not an event.
    """
    formats = {kafka.key_format, kafka.value_format}
    if formats == {"json"}:
        return records
    kept = [*PLACE_COLUMNS, "placeholder_values"]
    found = records.where("value IS NOT NULL").select(*kept, "key", "value")
    if formats & _BINARY and registry is not None:
        found = _decoded(found, registry)
    value = _with_plain_placeholders(_json_text("value"))
    return found.select(*kept, _json_text("key").alias("key"), value.alias("value"))


def _json_text(name: str) -> Column:
    """Return the JSON text in a key or value that has it behind an id, in an envelope or alone."""
    data = F.col(name)
    text = data.cast("string")
    content = F.substring(data, HEAD_BYTES + 1, 2**31 - 1)  # SQL counts from 1
    payload = F.from_json(text, "payload string").getField("payload")
    headed = data.startswith(F.lit(MAGIC))
    return (
        F.when(headed & content.startswith(F.lit(b"{")), content.cast("string"))
        .when(headed, F.base64(data))
        .when(data.startswith(F.lit(_ENVELOPE)), F.coalesce(payload, text))
        .otherwise(text)
    )


def _with_plain_placeholders(text: Column) -> Column:
    """Put the placeholder of plain JSON for that which fits an array of numbers or booleans.

    It stands behind a member's name, whose closing quote is not one within a text: those have a
    backslash before them, which has none itself.
    """
    plain = f'$1:["{UNAVAILABLE}"]'
    for form in (_NUMBERS, _BOOLEANS):
        pattern = rf'(?<!\\)((?:\\\\)*"):\Q{form}\E'
        replaced = F.regexp_replace(text, pattern, plain)
        text = F.when(F.contains(text, F.lit(form)), replaced).otherwise(text)
    return text


def _decoded(records: DataFrame, registry: RegistrySettings) -> DataFrame:
    """Return the records with keys and values in JSON, decoded by Python.

    `DataFrame.mapInArrow` itself would ask for pandas, which it does not use here.
    """
    certificates = None if registry.ca_file is None else registry.ca_file.read_bytes()
    function = UserDefinedFunction(
        _DecodeRecords(registry, certificates),
        returnType=records.schema,
        name="decode_records",
        evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF,
    )
    call: Any = function(*(records[name] for name in records.columns))
    frame: Any = records
    return DataFrame(frame._jdf.mapInArrow(call._jc, False, None), records.sparkSession)


class _DecodeRecords:
    """The function that executors run; `certificates`: the content of registry.ca_file."""

    def __init__(self, registry: RegistrySettings, certificates: bytes | None) -> None:
        self._registry = registry
        self._certificates = certificates

    def __call__(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        """Yield the batches with keys and values in JSON."""
        import pyarrow as pa

        decode = _decoder(self._registry, self._certificates).decoded
        for batch in batches:
            *places, keys, values = batch.columns
            pairs = zip(keys.to_pylist(), values.to_pylist(), strict=True)
            try:
                found = [decode(key, value) for key, value in pairs]
            except SlotbridgeError as error:
                raise RuntimeError(failure_text(error)) from error
            columns = [pa.array([one[part] for one in found], pa.binary()) for part in (0, 1)]
            yield pa.RecordBatch.from_arrays([*places, *columns], names=batch.schema.names)


@functools.lru_cache(maxsize=4)
def _decoder(registry: RegistrySettings, certificates: bytes | None) -> "Decoder":
    """Return the decoder of this process."""
    from services.kafka.schema_registry import SchemaRegistry
    from spark_consumers.formats.decoder import Decoder, WriterSchema

    if certificates is not None:
        with tempfile.NamedTemporaryFile(suffix=".pem", delete=False) as file:
            file.write(certificates)
        registry = registry.model_copy(update={"ca_file": Path(file.name)})
    client = SchemaRegistry(registry)

    def schema_of(schema_id: int) -> WriterSchema | None:
        found = client.schema(schema_id)
        return None if found is None else WriterSchema(*found)

    return Decoder(schema_of)
