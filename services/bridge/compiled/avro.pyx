# cython: language_level=3, boundscheck=False, wraparound=False
"""From JSON text to Avro's binary form, as services.bridge.events.formats.avro has it of fastavro.

    number          its sign in the lowest bit (zigzag), seven bits a byte
    union           which branch: 0 or 1, as a number; then the value, nothing of null
    string, bytes   size as a number, content
    array, map      count as a number, items, 0; 0 alone where there are none
"""

from libc.math cimport isinf
from libc.stdint cimport INT32_MAX, INT32_MIN, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp

from sys import byteorder

from services.bridge.compiled.codecs cimport Codec, Fields, Transcoder
from services.bridge.compiled.scan cimport (
    Scan, boolean, integer, null, put_base64, put_string, real, taken
)
from services.bridge.compiled.text cimport Text

include "digest.pxi"

cdef enum:
    BOOLEAN = 1
    INT = 2
    LONG = 3
    FLOAT = 4
    DOUBLE = 5
    STRING = 6
    BYTES = 7
    STRUCT = 8
    ARRAY = 9
    MAP = 10
    PAIRS = 11

KINDS = {
    "boolean": BOOLEAN,
    "int8": INT,
    "int16": INT,
    "int32": INT,
    "int64": LONG,
    "float": FLOAT,
    "double": DOUBLE,
    "string": STRING,
    "bytes": BYTES,
    "struct": STRUCT,
    "array": ARRAY,
    "map": MAP,
}


def transcoder(schema, bytes head, otherwise):
    if byteorder != "little":  # doubles are copied as they are
        return otherwise
    return Transcoder(fields_of(schema, Text()), head, otherwise)


cdef Fields fields_of(schema, Text sorted):
    names = [field["field"] for field in schema["fields"]]
    return Fields(names, [codec_of(field, sorted) for field in schema["fields"]], sorted)


cdef AvroCodec codec_of(schema, Text sorted):
    cdef AvroCodec made = AvroCodec()
    made.kind = KINDS[schema["type"]]
    made.optional = schema["optional"]
    made.null_first = "default" not in schema
    if made.kind == STRUCT:
        made.fields = fields_of(schema, sorted)
    elif made.kind == ARRAY:
        made.item = codec_of(schema["items"], sorted)
    elif made.kind == MAP:
        made.key = codec_of(schema["keys"], sorted)
        made.item = codec_of(schema["values"], sorted)
        if made.key.kind != STRING:
            made.kind = PAIRS
    return made


cdef class AvroCodec(Codec):
    """`null_first`: null is the first branch of the union of a value that may be null."""

    cdef int kind
    cdef bint null_first
    cdef Fields fields
    cdef AvroCodec key, item

    cdef bint put(self, Scan* scan, Text out) except -1:
        if self.optional:
            if null(scan):
                return self.put_null(out)
            out.put_byte(2 if self.null_first else 0)
        return self.put_value(scan, out)

    cdef bint put_null(self, Text out) except -1:
        if self.optional:
            out.put_byte(0 if self.null_first else 2)
        return self.optional

    cdef bint put_value(self, Scan* scan, Text out) except -1:
        """As `put`, of a value that is not null, without its branch."""
        cdef int truth
        cdef int64_t number
        cdef double double_number
        cdef float float_number
        if self.kind == STRING:
            return put_string(scan, out, 1) >= 0
        if self.kind == LONG or self.kind == INT:
            if not integer(scan, &number):
                return False
            if self.kind == INT and not INT32_MIN <= number <= INT32_MAX:
                return False
            out.put_varint(<uint64_t>number << 1 ^ <uint64_t>(number >> 63))
            return True
        if self.kind == STRUCT:
            return self.fields.put(scan, out)
        if self.kind == BYTES:
            return put_base64(scan, out, 1) >= 0
        if self.kind == BOOLEAN:
            truth = boolean(scan)
            if truth >= 0:
                out.put_byte(truth)
            return truth >= 0
        if self.kind == DOUBLE:
            if real(scan, &double_number):
                out.put(&double_number, 8)
                return True
            return False
        if self.kind == FLOAT:
            if not real(scan, &double_number):
                return False
            float_number = <float>double_number
            if isinf(float_number) and not isinf(double_number):
                return False
            out.put(&float_number, 4)
            return True
        if self.kind == MAP:
            return self.put_map(scan, out)
        return self.put_list(scan, out)

    cdef bint put_list(self, Scan* scan, Text out) except -1:
        """An array, or pairs of keys and values."""
        cdef int64_t count = 0
        cdef Py_ssize_t begin = out.open()
        if not taken(scan, b"["):
            return False
        if taken(scan, b"]"):
            return True
        while True:
            if self.kind == ARRAY:
                if not self.item.put(scan, out):
                    return False
            elif not (
                taken(scan, b"[") and self.key.put(scan, out) and taken(scan, b",")
                and self.item.put(scan, out) and taken(scan, b"]")
            ):
                return False
            count += 1
            if taken(scan, b"]"):
                break
            if not taken(scan, b","):
                return False
        out.close(begin, count << 1)
        out.put_byte(0)
        return True

    cdef bint put_map(self, Scan* scan, Text out) except -1:
        """A map whose keys come in hstore's order, so that no key comes twice."""
        cdef int64_t count = 0
        cdef Py_ssize_t begin = out.open(), size, last_size = -1, last = 0
        if not taken(scan, b"{"):
            return False
        if taken(scan, b"}"):
            return True
        while True:
            size = put_string(scan, out, 1)
            if size < 0 or size < last_size:
                return False
            if size == last_size and (
                memcmp(out.buffer + out.size - size, out.buffer + last, size) <= 0
            ):
                return False
            last_size, last = size, out.size - size
            if not taken(scan, b":") or not self.item.put(scan, out):
                return False
            count += 1
            if taken(scan, b"}"):
                break
            if not taken(scan, b","):
                return False
        out.close(begin, count << 1)
        out.put_byte(0)
        return True
