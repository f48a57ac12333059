# cython: language_level=3, boundscheck=False, wraparound=False
"""From JSON text to Avro's binary form, as services.bridge.events.formats.avro has it of fastavro.

    number          its sign in the lowest bit (zigzag), seven bits a byte
    union           which branch: 0 or 1, as a number; then the value, nothing of null
    string, bytes   size as a number, content
    array, map      count as a number, items, 0; 0 alone where there are none
"""

from libc.stdint cimport int64_t, uint64_t

from sys import byteorder

from services.bridge.compiled.codecs cimport (
    ARRAY, BYTES, INT, LONG, MAP, PAIRS, STRING, STRUCT, Codec, Fields, MapKeys, Transcoder, begun,
    follows, kind_of, more, number_of, put_pair, put_plain
)
from services.bridge.compiled.scan cimport Scan, null, put_base64, put_string, taken
from services.bridge.compiled.text cimport Text

include "digest.pxi"

def transcoder(schema, bytes head, otherwise):
    if byteorder != "little":  # doubles are copied as they are
        return otherwise
    return Transcoder(fields_of(schema, Text()), head, otherwise)


cdef Fields fields_of(schema, Text sorted):
    names = [field["field"] for field in schema["fields"]]
    return Fields(names, [codec_of(field, sorted) for field in schema["fields"]], sorted)


cdef AvroCodec codec_of(schema, Text sorted):
    cdef AvroCodec made = AvroCodec()
    made.kind = kind_of(schema)
    made.optional = schema["optional"]
    made.null_first = "default" not in schema
    if made.kind == STRUCT:
        made.fields = fields_of(schema, sorted)
    elif made.kind == ARRAY:
        made.item = codec_of(schema["items"], sorted)
    elif made.kind == MAP or made.kind == PAIRS:
        made.key = codec_of(schema["keys"], sorted)
        made.item = codec_of(schema["values"], sorted)
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
        cdef int64_t number
        if self.kind == STRING:
            return put_string(scan, out, 1) >= 0
        if self.kind == LONG or self.kind == INT:
            if not number_of(self.kind, scan, &number):
                return False
            out.put_varint(<uint64_t>number << 1 ^ <uint64_t>(number >> 63))
            return True
        if self.kind == STRUCT:
            return self.fields.put(scan, out)
        if self.kind == BYTES:
            return put_base64(scan, out, 1) >= 0
        if self.kind == ARRAY or self.kind == PAIRS:
            return self.put_list(scan, out)
        if self.kind == MAP:
            return self.put_map(scan, out)
        return put_plain(self.kind, scan, out)

    cdef bint put_list(self, Scan* scan, Text out) except -1:
        """An array, or pairs of keys and values."""
        cdef int64_t count = 0
        cdef Py_ssize_t begin = out.open()
        cdef int comes = begun(scan, b"[", b"]")
        if comes == 0:
            return True
        while comes > 0:
            if self.kind == ARRAY:
                if not self.item.put(scan, out):
                    return False
            elif not put_pair(self.key, self.item, scan, out):
                return False
            count += 1
            comes = more(scan, b"]")
        if comes < 0:
            return False
        out.close(begin, count << 1)
        out.put_byte(0)
        return True

    cdef bint put_map(self, Scan* scan, Text out) except -1:
        """A map whose keys come in hstore's order."""
        cdef int64_t count = 0
        cdef Py_ssize_t begin = out.open(), size
        cdef MapKeys last = MapKeys(0, -1)
        cdef int comes = begun(scan, b"{", b"}")
        if comes == 0:
            return True
        while comes > 0:
            size = put_string(scan, out, 1)
            if not follows(&last, out, out.size - size, size):
                return False
            if not taken(scan, b":") or not self.item.put(scan, out):
                return False
            count += 1
            comes = more(scan, b"}")
        if comes < 0:
            return False
        out.close(begin, count << 1)
        out.put_byte(0)
        return True
