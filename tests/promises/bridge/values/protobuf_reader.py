"""Protobuf messages as documents, by a reader that knows their file and docs/guides/formats.md."""

from decimal import Decimal
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import Message
from grpc_tools import protoc

from tests.promises.bridge.values.connect_documents import EXACT


def compiled(text: str, folder: Path) -> FileDescriptorProto:
    """What protoc makes of a .proto file."""
    (folder / "t.proto").write_text(text, encoding="utf-8")
    out = folder / "t.pb"
    assert protoc.main(["", f"-I{folder}", f"--descriptor_set_out={out}", "t.proto"]) == 0
    (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def document(value: Any) -> Any:
    """A value as tests.promises.bridge.values.connect_documents.meaning has it."""
    if not isinstance(value, Message):
        return value
    fields: dict[str, Any] = {field.name: field for field in value.DESCRIPTOR.fields}
    found = {name: _of_field(value, field) for name, field in fields.items()}
    if value.DESCRIPTOR.name.startswith("Decimal") and "precision" in fields:
        number = Decimal(int.from_bytes(found["value"], "big", signed=True))
        return number.scaleb(-found["scale"], EXACT)
    (first, *others) = fields.values() or [None]
    if others or first is None or not first.is_repeated:
        return found
    if first.name == "items":
        named = first.message_type is not None and first.message_type.name.endswith("Item")
        return [item["value"] if named else item for item in found["items"]]
    textual = first.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
    entries = found["entries"]
    return {pair["key"]: pair["value"] for pair in entries} if textual else entries


def _of_field(message: Any, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    found = getattr(message, field.name)
    return [document(item) for item in found] if field.is_repeated else document(found)
