"""Connect schemas as messages of Protobuf (proto3), and JSON of the first as the second. Pure.

    struct            message; those within another are nested in the outermost
    optional          optional: a field without a value is null
    int8, int16       int32
    Decimal           message Decimal (value, precision, scale), as confluent.type.Decimal
    array, map        message with `items` or `entries`, so that null and empty are two things
    items, optional   message with `value`

Fields of Debezium's own structs are numbered in their order. A column's number is made of its name:
it stays when other columns come, go or change places, so that no reader takes one for another.
"""

from base64 import b64decode
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final
from zlib import crc32

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from schemas import wire
from schemas.shaping import POSITION, FlatSettings, field_name
from services.bridge import compiled
from services.bridge.events import fields
from services.bridge.events.errors import UnfitValue
from services.bridge.events.formats import connect
from services.bridge.events.formats.connect import Schema
from services.bridge.events.formats.names import adjusted, adjusted_fields
from services.bridge.events.formats.proto_text import proto_text
from services.bridge.events.formats.row_json import document_of

REGISTRY_TYPE: Final = "PROTOBUF"
Convert = Callable[[Any], Any]
Field = descriptor_pb2.FieldDescriptorProto
File = descriptor_pb2.FileDescriptorProto
_KINDS: Final = {
    "boolean": Field.TYPE_BOOL,
    **dict.fromkeys(("int8", "int16", "int32"), Field.TYPE_INT32),
    "int64": Field.TYPE_INT64,
    "float": Field.TYPE_FLOAT,
    "double": Field.TYPE_DOUBLE,
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
}
_DECIMAL: Final = connect.struct(
    "Decimal",
    {
        "value": connect.needed(connect.BYTES),
        "precision": connect.plain("int32", optional=False),
        "scale": connect.plain("int32", optional=False),
    },
    version=1,
)
_FLAT: Final = b"\x10"
"""The second field of a flat row is a number, that of an envelope a message."""
_OWN_NUMBERS: Final = {field_name(name): number for number, name in enumerate(POSITION, 1)}
_NUMBER_MIN, _NUMBER_MAX = 20_000, 2**25 - 1


def record_name(schema: Schema) -> str:
    """Return the name by which subjects name the schema of a struct."""
    return adjusted(schema["name"])


def schema_text(schema: Schema) -> str:
    """Return the messages of a struct as the text of a .proto file."""
    return proto_text(proto_file(schema))


def proto_file(schema: Schema) -> File:
    """Return the descriptor of the file whose first message is that of a struct."""
    name = record_name(schema)
    package, _, last = name.rpartition(".")
    file = File(name=f"{name}.proto", package=package, syntax="proto3")
    _Messages(file, last).root(schema)
    return file


def message_class(file: File) -> type[Message]:
    """Return the class of a file's first message."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName(f"{file.package}.{file.message_type[0].name}")
    return message_factory.GetMessageClass(found)


def serializer(schema: Schema, schema_id: int) -> Callable[[str], bytes]:
    """Return the function from JSON text that fits `schema` to what a Confluent consumer reads.

    The function raises UnfitValue for JSON that does not fit. It is a compiled transcoder if that
    was built, which leaves to the library what is not as usual.
    """
    head = wire.head(schema_id) + wire.FIRST_MESSAGE
    by_library = _library_serializer(schema, head)
    if (engine := compiled.engine) is None:
        return by_library
    parts = (schema, _field_numbers, _decimal_constants)
    made: Callable[[str], bytes] = engine.protobuf.transcoder(*parts, head, by_library)
    return made


def _library_serializer(schema: Schema, head: bytes) -> Callable[[str], bytes]:
    """Return what writes JSON text as Protobuf after `head`, by the library; see UnfitValue."""
    made = message_class(proto_file(schema))
    convert = _converter(schema)

    def serialize(text: str) -> bytes:
        try:
            return head + made(**convert(document_of(text))).SerializeToString()
        except (ValueError, TypeError, OverflowError, LookupError) as error:
            raise UnfitValue(f"Protobuf can't hold it ({type(error).__name__})") from error

    return serialize


def first_fields(content: bytes) -> dict[str, Any]:
    """Return the fields that give an event's position, as services.bridge.events.formats.avro.

    `content`: a value behind the schema's id. Raise ValueError for other bytes.
    """
    flat = content[4:5] == _FLAT
    try:
        found: Any = (_ROW if flat else _ENVELOPE).FromString(content[1:])
    except DecodeError as error:
        raise ValueError("the content is not a message") from error
    if not flat:
        names = [name for name, _ in connect.fields(connect.SOURCE)]
        source = {name: getattr(found.source, name) for name in names}
        return {"op": found.op, "source": source}
    if not all(map(found.HasField, _OWN_NUMBERS)):
        raise ValueError("the message lacks its position")
    return {name: getattr(found, name) for name in _OWN_NUMBERS}


class _Messages:
    """Puts the messages of one file together."""

    def __init__(self, file: File, name: str) -> None:
        self._root = file.message_type.add(name=name)
        self._scope = f".{file.package}.{name}"
        self._taken: set[str] = set()
        self._nested: dict[str, str] = {}

    def root(self, schema: Schema) -> None:
        """Add the message of the outermost struct, and with it all others."""
        self._taken = {*adjusted_fields(schema, "Protobuf"), self._root.name}
        self._fill(self._root, schema)

    def _fill(self, message: descriptor_pb2.DescriptorProto, schema: Schema) -> None:
        """Add a struct's fields to its message."""
        named = adjusted_fields(schema, "Protobuf")
        for number, (name, (column, field)) in zip(
            _field_numbers(schema), named.items(), strict=True
        ):
            self._field(message, name, number, field).json_name = column
        _add_presence(message)

    def _field(
        self, message: descriptor_pb2.DescriptorProto, name: str, number: int, schema: Schema
    ) -> Field:
        """Add a field to a message, and return it."""
        kind, type_name = self._type(schema)
        field = message.field.add(
            name=name, number=number, type=kind, label=Field.LABEL_OPTIONAL, json_name=name
        )
        if type_name:
            field.type_name = type_name
        elif schema["optional"]:
            field.proto3_optional = True
        return field

    def _type(self, schema: Schema) -> tuple[Any, str]:
        """Return the type of a field, and the name of its message."""
        kind = schema["type"]
        if schema.get("name") == connect.DECIMAL:
            return Field.TYPE_MESSAGE, self._struct(_DECIMAL)
        if kind == "struct":
            return Field.TYPE_MESSAGE, self._struct(schema)
        if kind == "array":
            return Field.TYPE_MESSAGE, self._list(schema["items"])
        if kind == "map":
            return Field.TYPE_MESSAGE, self._map(schema)
        return _KINDS[kind], ""

    def _struct(self, schema: Schema) -> str:
        name = adjusted(schema["name"]).rpartition(".")[2]
        return self._message(name, lambda message: self._fill(message, schema))

    def _list(self, items: Schema) -> str:
        """Return the name of the message that has a list; make it once.

        Optional items are messages of their own: repeated fields can't hold null.
        """

        def fill(message: descriptor_pb2.DescriptorProto) -> None:
            kind, type_name = self._type(items)
            if items["optional"]:
                kind, type_name = Field.TYPE_MESSAGE, self._item(items)
            message.field.add(
                name="items",
                number=1,
                type=kind,
                type_name=type_name or None,
                label=Field.LABEL_REPEATED,
            )

        return self._message(f"{self._base(items)}{'s' if items['optional'] else ''}List", fill)

    def _item(self, items: Schema) -> str:
        def fill(message: descriptor_pb2.DescriptorProto) -> None:
            self._field(message, "value", 1, items)
            _add_presence(message)

        return self._message(f"{self._base(items)}Item", fill)

    def _map(self, schema: Schema) -> str:
        """Return the name of the message that has a map as repeated pairs; make it once."""
        present = "Optional" if schema["values"]["optional"] else ""
        base = f"{self._base(schema['keys'])}To{present}{self._base(schema['values'])}"

        def fill_entry(message: descriptor_pb2.DescriptorProto) -> None:
            self._field(message, "key", 1, schema["keys"])
            self._field(message, "value", 2, schema["values"])
            _add_presence(message)

        def fill(message: descriptor_pb2.DescriptorProto) -> None:
            message.field.add(
                name="entries",
                number=1,
                type=Field.TYPE_MESSAGE,
                type_name=self._message(f"{base}Pair", fill_entry),
                label=Field.LABEL_REPEATED,
            )

        return self._message(f"{base}Map", fill)

    def _base(self, schema: Schema) -> str:
        """Return the name of a type, for the names of messages that hold such."""
        _, type_name = self._type(schema)
        return type_name.rpartition(".")[2] or str(schema["type"]).capitalize()

    def _message(self, name: str, fill: Callable[[descriptor_pb2.DescriptorProto], None]) -> str:
        """Return the full name of a nested message, made by `fill` where it is not there yet."""
        if name not in self._nested:
            found = name
            while found in self._taken:
                found += "Message"
            self._taken.add(found)
            self._nested[name] = f"{self._scope}.{found}"
            message = descriptor_pb2.DescriptorProto(name=found)
            fill(message)
            self._root.nested_type.append(message)
        return self._nested[name]


def _field_numbers(schema: Schema) -> Sequence[int]:
    """Return the numbers of a struct's fields in order: 1, 2, … if versioned, else by name."""
    if "version" in schema:
        return range(1, len(schema["fields"]) + 1)
    taken: dict[int, None] = {}
    for column, field in connect.fields(schema):
        taken[_number(column, field, taken)] = None
    return [*taken]


def _number(column: str, schema: Schema, taken: Collection[int]) -> int:
    """Return the number of a column's field, which hangs on its name and its unit of time.

    No schema here tells the unit: a reader of microseconds must not find milliseconds.
    """
    if column in _OWN_NUMBERS:
        return _OWN_NUMBERS[column]
    while schema["type"] == "array":
        schema = schema["items"]
    is_number = schema["type"] in ("int32", "int64")
    unit = schema.get("name", "").removeprefix(connect.TIME) if is_number else ""
    found = _NUMBER_MIN + crc32((column + unit).encode()) % (_NUMBER_MAX - _NUMBER_MIN)
    while found in taken:
        found += 1
    return found


def _add_presence(message: descriptor_pb2.DescriptorProto) -> None:
    """Put each optional field into a oneof of its own, named as protoc names them."""
    taken = {field.name for field in message.field}
    for field in message.field:
        if field.proto3_optional:
            name = field.name if field.name.startswith("_") else f"_{field.name}"
            while name in taken:
                name = f"X{name}"
            taken.add(name)
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=name)


def _converter(schema: Schema) -> Convert:
    """Return the function from a JSON document to what a message is made of."""
    change = _not_null(schema)
    if not schema["optional"]:
        return change
    return lambda document: None if document is None else change(document)


def _not_null(schema: Schema) -> Convert:
    """Return what makes the library's value of a JSON value that is not null."""
    kind = schema["type"]
    if schema.get("name") == connect.DECIMAL:
        return _decimal(schema)
    if kind == "bytes":
        return b64decode
    if kind in ("float", "double"):
        return float
    if kind == "array":
        return _items(schema["items"])
    if kind == "map":
        return _entries(schema)
    return _struct_fields(schema) if kind == "struct" else _present


def _present(document: Any) -> Any:
    if document is None:
        raise ValueError("a required value is null")
    return document


def _decimal_constants(schema: Schema) -> tuple[int, int] | None:
    """Return precision and scale of a Decimal, None for other schemas."""
    if schema.get("name") != connect.DECIMAL:
        return None
    parameters = schema["parameters"]
    return int(parameters.get("connect.decimal.precision", 0)), int(parameters["scale"])


def _decimal(schema: Schema) -> Convert:
    """Return what makes a decimal's message: unscaled bytes, precision and scale."""
    precision, scale = _decimal_constants(schema) or (0, 0)
    return lambda document: {
        "value": b64decode(document),
        "precision": precision,
        "scale": scale,
    }


def _items(items: Schema) -> Convert:
    change = _converter(items)
    if items["optional"]:
        return lambda document: {"items": [{"value": change(item)} for item in document]}
    return lambda document: {"items": [change(item) for item in document]}


def _entries(schema: Schema) -> Convert:
    """Return what makes a map's message: a list of pairs."""
    keys, values = _converter(schema["keys"]), _converter(schema["values"])

    def entries(document: Any) -> Any:
        pairs = document.items() if isinstance(document, dict) else document
        return {"entries": [{"key": keys(key), "value": values(value)} for key, value in pairs]}

    return entries


def _struct_fields(schema: Schema) -> Convert:
    """Return what makes a message's keyword arguments of a struct's JSON object."""
    changes = [
        (column, name, _converter(field))
        for name, (column, field) in adjusted_fields(schema, "Protobuf").items()
    ]

    def changed(document: dict[str, Any]) -> dict[str, Any]:
        return {name: change(document.get(column)) for column, name, change in changes}

    return changed


_ROW: Final = message_class(
    proto_file(connect.flat("b.First", fields.schemas(FlatSettings(deletes="tombstone")), {}))
)
_ENVELOPE: Final = message_class(proto_file(connect.envelope("b.First", {})))
