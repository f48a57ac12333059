# cython: language_level=3, boundscheck=False, wraparound=False
"""From JSON text to a binary form, as a schema has it: what Avro and Protobuf have in common.

A Transcoder takes what is as the bridge writes it, and declines all else (a field that is missing
or unknown, a number that does not fit, a NULL where there must be a value): the library then writes
the bytes, or tells what is wrong. So it never gives other bytes than the library. It keeps within
the text that it is given, whatever that has.

Fields are encoded as they come. Where that is not the order of the binary form, the parts are put
into it afterwards.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.math cimport isinf
from libc.stdint cimport INT32_MAX, INT32_MIN, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

from json.encoder import encode_basestring as quoted

from services.bridge.compiled.scan cimport Scan, boolean, integer, real, taken
from services.bridge.compiled.text cimport PyUnicode_AsUTF8AndSize, Text

include "digest.pxi"

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


cdef int kind_of(schema):
    """The kind of a schema's values; a map whose keys are not strings has pairs."""
    if schema["type"] == "map" and schema["keys"]["type"] != "string":
        return PAIRS
    return KINDS[schema["type"]]


cdef bint number_of(int kind, Scan* scan, int64_t* number) noexcept:
    """Whether a number came next that INT or LONG, `kind`, has; it is passed then."""
    return integer(scan, number) and (kind == LONG or INT32_MIN <= number[0] <= INT32_MAX)


cdef bint put_plain(int kind, Scan* scan, Text out) except -1:
    """Whether a value of BOOLEAN, FLOAT or DOUBLE was put, which all forms have alike."""
    cdef int truth
    cdef double double_number
    cdef float float_number
    if kind == BOOLEAN:
        truth = boolean(scan)
        if truth >= 0:
            out.put_byte(truth)
        return truth >= 0
    if not real(scan, &double_number):
        return False
    if kind == DOUBLE:
        out.put(&double_number, 8)
        return True
    float_number = <float>double_number
    if isinf(float_number) and not isinf(double_number):
        return False
    out.put(&float_number, 4)
    return True


cdef bint put_pair(Codec key, Codec item, Scan* scan, Text out) except -1:
    """Whether the list of a key and its value that comes next was put."""
    return (
        taken(scan, b"[") and key.put(scan, out) and taken(scan, b",")
        and item.put(scan, out) and taken(scan, b"]")
    )


cdef bint follows(MapKeys* last, Text out, Py_ssize_t at, Py_ssize_t size) noexcept:
    """Whether a map's key comes behind the last one in hstore's order: so no key comes twice.

    It is then the last one. `size` -1: there was none.
    """
    if size < last.size or size < 0:
        return False
    if size == last.size and memcmp(out.buffer + at, out.buffer + last.at, size) <= 0:
        return False
    last.at, last.size = at, size
    return True


cdef class Codec:
    cdef bint put(self, Scan* scan, Text out) except -1:
        """Whether the value that comes next was put, as it stands in a struct or a list."""
        raise NotImplementedError

    cdef bint put_null(self, Text out) except -1:
        """Whether null was put; it is not where there must be a value."""
        raise NotImplementedError


cdef class Fields:
    def __cinit__(self, names, codecs, Text sorted):
        """`sorted`: for use while fields are put into order, shared by all structs of a schema."""
        cdef int index
        self.count, self.sorted = len(names), sorted
        self.names, self.codecs = [f"{quoted(name)}:".encode() for name in names], list(codecs)
        self.fields = <Field*>calloc(self.count + 1, sizeof(Field))
        if self.fields == NULL:
            raise MemoryError
        for index in range(self.count):
            self.fields[index].name = PyBytes_AS_STRING(<bytes>self.names[index])
            self.fields[index].name_bytes = PyBytes_GET_SIZE(<bytes>self.names[index])
            self.fields[index].codec = <PyObject*><Codec>self.codecs[index]
            self.fields[index].expected = index

    def __dealloc__(self):
        free(self.fields)

    cdef bint put(self, Scan* scan, Text out) except -1:
        """Whether the struct that comes next was put."""
        cdef int index, last = -1, place = 0
        cdef bint ordered = True
        cdef Py_ssize_t begin = out.size
        cdef Field* field
        if not taken(scan, b"{"):
            return False
        self.turn += 1
        if not taken(scan, b"}"):
            while True:
                index = self.named(scan, place)
                if index < 0:
                    return False
                field = self.fields + index
                if field.turn == self.turn:
                    return False
                field.turn, field.begin = self.turn, out.size
                if not (<Codec>field.codec).put(scan, out):
                    return False
                field.end = out.size
                ordered &= index > last
                last = index
                place += 1
                if taken(scan, b"}"):
                    break
                if not taken(scan, b","):
                    return False
        if place < self.count:
            ordered = False
            if not self.put_missing(out):
                return False
        if not ordered:
            self.sort(out, begin)
        return True

    cdef int named(self, Scan* scan, int place) noexcept:
        """Which field's name comes next, and is passed, or -1."""
        cdef int index
        if place >= self.count:
            return -1
        if passed(scan, self.fields + self.fields[place].expected):
            return self.fields[place].expected
        for index in range(self.count):
            if passed(scan, self.fields + index):
                self.fields[place].expected = index
                return index
        return -1

    cdef bint put_missing(self, Text out) except -1:
        """Whether all fields that did not come may be null, and are put so."""
        cdef int index
        cdef Field* field
        for index in range(self.count):
            field = self.fields + index
            if field.turn != self.turn:
                field.begin = out.size
                if not (<Codec>field.codec).put_null(out):
                    return False
                field.end = out.size
        return True

    cdef int sort(self, Text out, Py_ssize_t begin) except -1:
        cdef int index
        cdef Field* field
        cdef Text sorted = self.sorted
        sorted.clear()
        for index in range(self.count):
            field = self.fields + index
            sorted.put(out.buffer + field.begin, field.end - field.begin)
        memcpy(out.buffer + begin, sorted.buffer, sorted.size)
        return 0


cdef inline bint passed(Scan* scan, const Field* field) noexcept nogil:
    """Whether the field's name came next; it is passed then."""
    if field.name_bytes > scan.end - scan.at:
        return False
    if memcmp(scan.at, field.name, field.name_bytes):
        return False
    scan.at += field.name_bytes
    return True


cdef class Transcoder:
    def __cinit__(self, Fields fields, bytes head, otherwise):
        self.fields, self.head, self.otherwise = fields, head, otherwise
        self.out = Text()

    def __call__(self, str text):
        cdef Py_ssize_t size
        cdef const char* utf8
        try:
            utf8 = PyUnicode_AsUTF8AndSize(text, &size)
        except UnicodeEncodeError:
            return self.otherwise(text)
        return self.serialized(<const uint8_t*>utf8, size)

    def transcode(self, bytes text):
        return self.transcoded(<const uint8_t*>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))

    cdef bytes serialized(self, const uint8_t* text, Py_ssize_t size):
        """The bytes of a JSON text in UTF-8. Raises UnfitValue as the library does."""
        cdef bytes found = self.transcoded(text, size)
        if found is None:
            self.declined += 1
            found = self.otherwise((<const char*>text)[:size].decode())
        return found

    cdef bytes transcoded(self, const uint8_t* text, Py_ssize_t size):
        """The bytes, or None: declined."""
        cdef Scan scan = Scan(text, text + size)
        self.out.clear()
        self.out.put_bytes(self.head)
        if not self.fields.put(&scan, self.out) or scan.at != scan.end:
            return None
        return None if self.out.size > INT32_MAX else self.out.whole()
