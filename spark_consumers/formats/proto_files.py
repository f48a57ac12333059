"""The text of a .proto file of the bridge as a descriptor. Pure.

    file     = "syntax" … ";"  "package" NAME ";"  message…
    message  = "message" NAME "{" (message | field)… "}"
    field    = ["optional" | "repeated"] TYPE NAME "=" NUMBER ["[" "json_name" "=" STRING "]"] ";"

A registry may lay the text out anew, and put comments and options into it. The inverse of
services.bridge.events.formats.proto_text, but for two things: no name is in a message's bytes, so
that fields are named by their numbers, o1 if they are optional, else a1; and all fields know
whether they are there (proto2).
"""

import json
import re
from collections.abc import Iterator
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from spark_consumers.formats.json_forms import UnreadableRecord

_WORD: Final = re.compile(
    r"(?P<skipped>\s+|//[^\n]*|/\*.*?\*/)|(?P<word>[.\w]+|[-+{}\[\]();=,]"
    r"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""",
    re.DOTALL,
)
OPTIONAL: Final = "o"
"""The first letter of a field that is null where it is not there; any message is."""
_LABELS: Final = ("optional", "repeated")
_PASSED_OVER: Final = ("option", "reserved", "syntax", "edition")
_SCALARS: Final = {
    kind: FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    for kind in ("bool", "int32", "int64", "float", "double", "string", "bytes")
}


def proto_descriptor(text: str) -> FileDescriptorProto:
    """Return the descriptor of a file. Raise UnreadableRecord for what the bridge does not write.

    The `json_name` of a field is its column's name.
    """
    file = FileDescriptorProto(name="schema.proto", syntax="proto2")
    words = _Words(text)
    for word in words:
        if word == "message":
            _message(file.message_type.add(), words)
        elif word == "package":
            file.package = words.required()
            words.expect(";")
        elif word in _PASSED_OVER:
            words.pass_over()
        elif word != ";":
            raise _unknown()
    if not file.message_type:
        raise _unknown()
    return file


class _Words(Iterator[str]):
    """The words of a text, without comments and blanks."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def __next__(self) -> str:
        while self._at < len(self._text):
            match = _WORD.match(self._text, self._at)
            if match is None:
                raise _unknown()
            self._at = match.end()
            if match["word"]:
                return match["word"]
        raise StopIteration

    def required(self) -> str:
        """Return the next word."""
        found = next(self, None)
        if found is None:
            raise _unknown()
        return found

    def expect(self, word: str) -> None:
        """Read the next word, which must be `word`."""
        if self.required() != word:
            raise _unknown()

    def pass_over(self) -> None:
        """Pass over the rest of a statement."""
        while self.required() != ";":
            pass


def _message(message: DescriptorProto, words: _Words) -> None:
    """Read a message from its name on."""
    message.name = words.required()
    words.expect("{")
    while (word := words.required()) != "}":
        if word == "message":
            _message(message.nested_type.add(), words)
        elif word in _PASSED_OVER:
            words.pass_over()
        elif word != ";":
            _field(message.field.add(), word, words)


def _field(field: FieldDescriptorProto, first: str, words: _Words) -> None:
    """Read a field from its label or type on."""
    label = first if first in _LABELS else ""
    kind = words.required() if label else first
    field.json_name = words.required()
    words.expect("=")
    number = words.required()
    if not number.isdecimal():
        raise _unknown()
    field.number, field.name = int(number), f"{OPTIONAL if label == 'optional' else 'a'}{number}"
    field.label = (
        FieldDescriptorProto.LABEL_REPEATED
        if label == "repeated"
        else FieldDescriptorProto.LABEL_OPTIONAL
    )
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, kind
    _options(field, words)


def _options(field: FieldDescriptorProto, words: _Words) -> None:
    """Read a field's options up to `;`; json_name is kept, others are passed over."""
    word = words.required()
    while word != ";":
        if word == "json_name":
            words.expect("=")
            field.json_name = _string(words.required())
        word = words.required()


def _string(word: str) -> str:
    try:
        return str(json.loads(word))
    except ValueError as error:
        raise _unknown() from error


def _unknown() -> UnreadableRecord:
    return UnreadableRecord("the bridge does not write such a .proto file")
