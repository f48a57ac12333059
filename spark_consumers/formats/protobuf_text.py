"""Protobuf messages of the bridge as JSON text, by their .proto file alone. Pure.

The inverse of services.bridge.events.formats.protobuf, by the names and fields of the messages:

    Decimal (value, precision, scale)   the bytes of `value` in base64
    only `items`, repeated              an array; of messages …Item: their `value`, or null
    only `entries`, repeated            an object, or pairs where keys are not texts
    other messages                      an object with the fields' `json_name`

Protobuf has no names for types: a bit string in bytes is written as a bytea is. A list of doubles
that are never null is a vector of float4.
"""

from collections.abc import Callable
from json.encoder import encode_basestring as quoted
from typing import Any, Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from schemas.events import UNAVAILABLE
from schemas.wire import FIRST_MESSAGE
from spark_consumers.formats import json_forms
from spark_consumers.formats.floats import double_text, real_text, short_text
from spark_consumers.formats.json_forms import UNAVAILABLE_TEXT, UnreadableRecord, Write
from spark_consumers.formats.proto_files import OPTIONAL, proto_descriptor

Read = Callable[[bytes], str]
_PLAIN: Final[dict[int, Write]] = {
    FieldDescriptor.TYPE_STRING: quoted,
    FieldDescriptor.TYPE_BOOL: json_forms.boolean,
    FieldDescriptor.TYPE_INT32: str,
    FieldDescriptor.TYPE_INT64: str,
    FieldDescriptor.TYPE_FLOAT: real_text,
    FieldDescriptor.TYPE_DOUBLE: double_text,
    FieldDescriptor.TYPE_BYTES: json_forms.encoded,
}
_STRUCTS: Final = (
    *("VariableScaleDecimal", "SparseDoubleVector"),
    *("Point", "Line", "Circle", "Geometry", "Geography"),
)
"""Debezium's structs of a value, which a placeholder may stand for."""


def protobuf_reader(schema_text: str) -> Read:
    """Return the reader of messages of a file's first type. Raise UnreadableRecord for others."""
    try:
        file = proto_descriptor(schema_text)
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        name = f"{file.package}.{file.message_type[0].name}".removeprefix(".")
        found = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
        write = _Writers().of(found.DESCRIPTOR)
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise UnreadableRecord("the bridge does not write such a .proto file") from error

    def text(content: bytes) -> str:
        if content[:1] != FIRST_MESSAGE:
            raise UnreadableRecord("the message is not the first one of its file")
        try:
            message = found.FromString(content[1:])
            return write(message)
        except (DecodeError, UnicodeDecodeError) as error:
            raise UnreadableRecord("the bytes do not fit the .proto file") from error

    return text


class _Writers:
    """The writers of one file's messages."""

    def __init__(self) -> None:
        self._messages: dict[str, Write] = {}

    def of(self, message: Any) -> Write:
        """Return the writer of a message, made where it is not there yet."""
        if message.full_name not in self._messages:
            self._messages[message.full_name] = self._message(message)
        return self._messages[message.full_name]

    def _message(self, message: Any) -> Write:
        """Return what writes a message as its JSON: a number, a list, a map, or an object."""
        fields = {field.json_name: field for field in message.fields}
        if {*fields} == {"value", "precision", "scale"} and message.name.startswith("Decimal"):
            name = fields["value"].name
            return lambda found: json_forms.encoded_number(getattr(found, name))
        (only, *others) = fields.values()
        if not others and only.is_repeated:
            return self._list(only) if only.json_name == "items" else self._map(only)
        write = self._object(message)
        if any(message.name.startswith(name) for name in _STRUCTS):
            return _or_unavailable(write, write(_placeholder(message)))
        return write

    def _object(self, message: Any) -> Write:
        """Return what writes a message as a JSON object; absent optional fields are null."""
        parts = [
            (json_forms.label(field.json_name), *self._reading(field)) for field in message.fields
        ]

        def written(row: Message) -> str:
            texts = [
                label
                + (write(getattr(row, name)) if not optional or row.HasField(name) else "null")
                for label, name, optional, write in parts
            ]
            return f"{{{','.join(texts)}}}"

        return written

    def _reading(self, field: Any, *, short: bool = False) -> tuple[str, bool, Write]:
        """Return a field's name, whether it is null if absent, and what writes its value."""
        if field.message_type is not None:
            return field.name, True, self.of(field.message_type)
        write = short_text if short and field.type == field.TYPE_DOUBLE else _PLAIN[field.type]
        return field.name, field.name.startswith(OPTIONAL), write

    def _list(self, items: Any) -> Write:
        """Return what writes a repeated field as a JSON array.

        Items that may be null are messages with one field `value`.
        """
        name, kind = items.name, items.message_type
        if kind is None:
            _, _, write = self._reading(items, short=True)
            write_items = json_forms.list_of_plain(write)
            return lambda found: write_items([*getattr(found, name)])
        inner = kind.fields[0] if len(kind.fields) == 1 else None
        if inner is None or inner.json_name != "value":
            write_items = json_forms.list_of(self.of(kind))
            return lambda found: write_items(getattr(found, name))
        value, optional, write = self._reading(inner)
        is_plain = inner.type not in (inner.TYPE_MESSAGE, inner.TYPE_STRING, inner.TYPE_BYTES)
        listed = json_forms.list_of_plain if is_plain else json_forms.list_of
        write_items = listed(json_forms.or_null(write))

        def written(message: Any) -> str:
            return write_items(
                [
                    getattr(item, value) if not optional or item.HasField(value) else None
                    for item in getattr(message, name)
                ]
            )

        return written

    def _map(self, entries: Any) -> Write:
        """Return what writes pairs as a JSON object; as an array of pairs if keys are not text."""
        name = entries.name
        key, value = entries.message_type.fields
        textual = key.type == key.TYPE_STRING
        key_name, _, write_key = self._reading(key)
        value_name, optional, write_value = self._reading(value, short=not textual)

        def written(message: Any) -> str:
            texts = []
            for entry in getattr(message, name):
                there = not optional or entry.HasField(value_name)
                text = write_value(getattr(entry, value_name)) if there else "null"
                first = write_key(getattr(entry, key_name))
                texts.append(f"{first}:{text}" if textual else f"[{first},{text}]")
            return f"{{{','.join(texts)}}}" if textual else f"[{','.join(texts)}]"

        return written


def _placeholder(message: Descriptor) -> Any:
    """Return the message that stands for an unchanged value of a struct."""
    found: Any = message_factory.GetMessageClass(message)()
    for field in message.fields:
        _fill(found, field)
    return found


def _fill(message: Any, field: Any) -> None:
    """Set a field of a message to the placeholder of an unavailable value."""
    if field.type == field.TYPE_STRING:
        setattr(message, field.name, UNAVAILABLE)
    elif field.type == field.TYPE_BYTES:
        setattr(message, field.name, UNAVAILABLE.encode())
    elif field.message_type is None:
        return
    elif [one.json_name for one in field.message_type.fields] == ["entries"]:
        _fill_map(getattr(message, field.name), field.message_type.fields[0])
    else:
        inner = getattr(message, field.name)
        inner.SetInParent()
        for one in field.message_type.fields:
            _fill(inner, one)


def _fill_map(message: Any, entries: Any) -> None:
    """Set a map's field to the placeholder: one pair of text, or its bytes by their places."""
    key, value = entries.message_type.fields
    if key.type == key.TYPE_STRING:
        entry = getattr(message, entries.name).add()
        setattr(entry, key.name, UNAVAILABLE)
        setattr(entry, value.name, UNAVAILABLE)
        return
    for place, code in enumerate(UNAVAILABLE.encode()):
        entry = getattr(message, entries.name).add()
        setattr(entry, key.name, place)
        setattr(entry, value.name, code)


def _or_unavailable(write: Write, unavailable: str) -> Write:
    def written(message: Any) -> str:
        text = write(message)
        return UNAVAILABLE_TEXT if text == unavailable else text

    return written
