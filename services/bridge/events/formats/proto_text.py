"""The descriptor of a .proto file as its text, which schema registries compare. Pure."""

import json
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)


def proto_text(file: FileDescriptorProto) -> str:
    """Return the text of a file that has a package and messages, without imports."""
    lines = ['syntax = "proto3";', f"package {file.package};", ""]
    for message in file.message_type:
        lines += _message(message)
    return "\n".join(lines) + "\n"


def _message(message: DescriptorProto) -> Iterator[str]:
    """Yield the lines of a message's definition."""
    yield f"message {message.name} {{"
    for field in message.field:
        yield f"  {_field(field)}"
    for nested in message.nested_type:
        yield from (f"  {line}" for line in _message(nested))
    yield "}"


def _field(field: FieldDescriptorProto) -> str:
    """Return a field's line, with json_name where protoc would derive another name."""
    label = "optional " if field.proto3_optional else ""
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        label = "repeated "
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    text = f"{label}{field.type_name or kind} {field.name} = {field.number}"
    name = field.json_name or field.name
    if (name == field.name and "_" not in name) or _bracketed(name):
        return f"{text};"
    return f"{text} [json_name = {json.dumps(name, ensure_ascii=False)}];"


def _bracketed(name: str) -> bool:
    """Tell whether a name is one that Protobuf keeps for extensions."""
    return name.startswith("[") and name.endswith("]")
