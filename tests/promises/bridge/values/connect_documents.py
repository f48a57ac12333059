"""What a document in JSON means by its Connect schema, as a reader of Avro gets it."""

import base64
import struct
from decimal import Context, Decimal
from typing import Any

from services.bridge.events.formats.names import adjusted_column

EXACT = Context(prec=200_000)


def meaning(schema: dict[str, Any], document: Any) -> Any:
    """The value: bytes, numbers, decimals, dicts by the names that Avro allows."""
    if document is None:
        return None
    kind = schema["type"]
    if kind == "struct":
        return {
            adjusted_column(field["field"]): meaning(field, document[field["field"]])
            for field in schema["fields"]
        }
    if kind == "array":
        return [meaning(schema["items"], item) for item in document]
    if kind == "map" and schema["keys"]["type"] == "string":
        return document
    if kind == "map":
        return [{"key": key, "value": float(value)} for key, value in document]
    if kind == "bytes":
        data = base64.b64decode(document)
        if schema.get("name") != "org.apache.kafka.connect.data.Decimal":
            return data
        number = Decimal(int.from_bytes(data, "big", signed=True))
        return number.scaleb(-int(schema["parameters"]["scale"]), EXACT)
    if kind == "float":
        return struct.unpack("f", struct.pack("f", float(document)))[0]
    return float(document) if kind == "double" else document
