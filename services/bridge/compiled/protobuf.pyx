# cython: language_level=3, boundscheck=False, wraparound=False
"""From JSON text to Protobuf's wire form, as services.bridge.events.formats.protobuf has it.

    field           its number and the kind of what follows (tag), then the value
    number, bool    seven bits a byte; a negative one has ten
    string, bytes   size, content
    message         size, its fields in the order of their numbers

A field that may be null is there if it has a value, also 0; a needed one if that is not 0 or empty.
"""

from libc.stdint cimport int64_t, uint64_t

from sys import byteorder

from services.bridge.compiled.codecs cimport (
    ARRAY, BOOLEAN, BYTES, DECIMAL, DOUBLE, FLOAT, INT, LONG, MAP, PAIRS, STRING, STRUCT, Codec,
    Fields, MapKeys, Transcoder, begun, follows, kind_of, more, number_of, put_pair, put_plain
)
from services.bridge.compiled.scan cimport Scan, null, put_base64, put_string, taken
from services.bridge.compiled.text cimport Text

include "digest.pxi"

cdef enum:
    VARINT = 0
    FIXED64 = 1
    SIZED = 2
    FIXED32 = 5
    FIRST_FIELD = 10  # the tag of a field with a size and the number 1

def transcoder(schema, numbers, decimal_constants, bytes head, otherwise):
    if byteorder != "little":  # doubles are copied as they are
        return otherwise
    return Transcoder(Plan(numbers, decimal_constants).fields_of(schema), head, otherwise)


cdef class Plan:
    """Makes codecs, with the functions that protobuf.pyi describes."""

    cdef object numbers, decimal_constants
    cdef Text sorted

    def __cinit__(self, numbers, decimal_constants):
        self.numbers, self.decimal_constants, self.sorted = numbers, decimal_constants, Text()

    cdef Fields fields_of(self, schema):
        found = sorted(
            zip(self.numbers(schema), schema["fields"], strict=True), key=lambda pair: pair[0]
        )
        codecs = [self.codec_of(field, number) for number, field in found]
        return Fields([field["field"] for _, field in found], codecs, self.sorted)

    cdef ProtobufCodec codec_of(self, schema, int number):
        cdef ProtobufCodec made = ProtobufCodec()
        cdef Text tag = Text()
        constants = self.decimal_constants(schema)
        made.kind = kind_of(schema) if constants is None else DECIMAL
        made.optional = schema["optional"]
        if made.kind == DECIMAL:
            for number_of_field, value in enumerate(constants, 2):
                if value:
                    tag.put_varint(number_of_field << 3 | VARINT)
                    tag.put_varint(value)
            made.constant = tag.whole()
            tag.clear()
        elif made.kind == STRUCT:
            made.fields = self.fields_of(schema)
        elif made.kind == ARRAY:
            made.item = self.codec_of(schema["items"], 1)
        elif made.kind == MAP or made.kind == PAIRS:
            made.key = self.codec_of(schema["keys"], 1)
            made.item = self.codec_of(schema["values"], 2)
        tag.put_varint(<uint64_t>number << 3 | wire_type(made.kind))
        made.tag = tag.whole()
        return made


cdef int wire_type(int kind):
    if kind in (BOOLEAN, INT, LONG):
        return VARINT
    if kind == DOUBLE:
        return FIXED64
    return FIXED32 if kind == FLOAT else SIZED


cdef class ProtobufCodec(Codec):
    """`constant`: what follows the value in a Decimal."""

    cdef int kind
    cdef bytes tag, constant
    cdef Fields fields
    cdef ProtobufCodec key, item

    cdef bint put(self, Scan* scan, Text out) except -1:
        cdef Py_ssize_t since = out.size, at
        if null(scan):
            return self.optional
        out.put_bytes(self.tag)
        at = out.size
        if not self.put_value(scan, out):
            return False
        if not self.optional and self.kind <= BYTES and only_zeros(out, at):
            out.size = since
        return True

    cdef bint put_null(self, Text out) except -1:
        return self.optional

    cdef bint put_value(self, Scan* scan, Text out) except -1:
        """As `put`, of a value that is not null, without its tag."""
        cdef int64_t number
        cdef Py_ssize_t begin
        if self.kind == STRING:
            return put_string(scan, out, 0) >= 0
        if self.kind == LONG or self.kind == INT:
            if not number_of(self.kind, scan, &number):
                return False
            out.put_varint(<uint64_t>number)
            return True
        if self.kind == BYTES:
            return put_base64(scan, out, 0) >= 0
        if self.kind < STRING:
            return put_plain(self.kind, scan, out)
        begin = out.open()
        if not self.put_content(scan, out):
            return False
        out.close(begin, out.size - begin)
        return True

    cdef bint put_content(self, Scan* scan, Text out) except -1:
        """What a message has behind its size."""
        if self.kind == STRUCT:
            return self.fields.put(scan, out)
        if self.kind == DECIMAL:
            return self.put_decimal(scan, out)
        if self.kind == MAP:
            return self.put_map(scan, out)
        if self.kind == PAIRS:
            return self.put_pairs(scan, out)
        if self.item.optional or self.item.kind >= STRING:
            return self.put_items(scan, out)
        return self.put_numbers(scan, out)

    cdef bint put_decimal(self, Scan* scan, Text out) except -1:
        cdef Py_ssize_t since = out.size, size
        out.put_byte(FIRST_FIELD)
        size = put_base64(scan, out, 0)
        if size < 0:
            return False
        if size == 0:
            out.size = since
        out.put_bytes(self.constant)
        return True

    cdef bint put_items(self, Scan* scan, Text out) except -1:
        """One field for each item, which is a message of its own where it may be null."""
        cdef Py_ssize_t begin
        cdef int comes = begun(scan, b"[", b"]")
        while comes > 0:
            out.put_byte(FIRST_FIELD)
            if self.item.optional:
                begin = out.open()
                if not self.item.put(scan, out):
                    return False
                out.close(begin, out.size - begin)
            elif not self.item.put_value(scan, out):
                return False
            comes = more(scan, b"]")
        return comes == 0

    cdef bint put_numbers(self, Scan* scan, Text out) except -1:
        """One field for all items, one behind the other; none where there are none."""
        cdef Py_ssize_t begin
        cdef int comes = begun(scan, b"[", b"]")
        if comes == 0:
            return True
        out.put_byte(FIRST_FIELD)
        begin = out.open()
        while comes > 0:
            if not self.item.put_value(scan, out):
                return False
            comes = more(scan, b"]")
        if comes < 0:
            return False
        out.close(begin, out.size - begin)
        return True

    cdef bint put_pairs(self, Scan* scan, Text out) except -1:
        cdef Py_ssize_t begin
        cdef int comes = begun(scan, b"[", b"]")
        while comes > 0:
            out.put_byte(FIRST_FIELD)
            begin = out.open()
            if not put_pair(self.key, self.item, scan, out):
                return False
            out.close(begin, out.size - begin)
            comes = more(scan, b"]")
        return comes == 0

    cdef bint put_map(self, Scan* scan, Text out) except -1:
        """A map whose keys come in hstore's order."""
        cdef Py_ssize_t begin, size
        cdef MapKeys last = MapKeys(0, -1)
        cdef int comes = begun(scan, b"{", b"}")
        while comes > 0:
            out.put_byte(FIRST_FIELD)
            begin = out.open()
            out.put_byte(FIRST_FIELD)
            size = put_string(scan, out, 0)
            if not follows(&last, out, out.size - size, size):
                return False
            if size == 0 and not self.key.optional:  # as any needed string
                out.size = begin
            if not taken(scan, b":") or not self.item.put(scan, out):
                return False
            last.at += out.close(begin, out.size - begin)
            comes = more(scan, b"}")
        return comes == 0


cdef bint only_zeros(Text out, Py_ssize_t at) noexcept:
    """Whether a value is 0 or empty, which is put as zeros."""
    cdef Py_ssize_t index
    for index in range(at, out.size):
        if out.buffer[index]:
            return False
    return True
