"""From JSON text to a binary form, as a schema has it: see codecs.pyx."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint64_t

from services.bridge.compiled.scan cimport Scan, taken
from services.bridge.compiled.text cimport Text

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
    DECIMAL = 12


cdef inline int begun(Scan* scan, uint8_t open, uint8_t close) noexcept nogil:
    """1 of a list or an object with items, which come next, 0 of an empty one; else -1."""
    if not taken(scan, open):
        return -1
    return not taken(scan, close)


cdef inline int more(Scan* scan, uint8_t close) noexcept nogil:
    """1 where another item comes next, 0 at the end of a list or an object; else -1."""
    if taken(scan, b","):
        return 1
    return 0 if taken(scan, close) else -1


cdef int kind_of(schema)
cdef bint number_of(int kind, Scan* scan, int64_t* number) noexcept
cdef bint put_plain(int kind, Scan* scan, Text out) except -1
cdef bint put_pair(Codec key, Codec item, Scan* scan, Text out) except -1


cdef struct MapKeys:
    # of the last key: where it is in the output, and how many bytes it has
    Py_ssize_t at
    Py_ssize_t size


cdef bint follows(MapKeys* last, Text out, Py_ssize_t at, Py_ssize_t size) noexcept


cdef class Codec:
    """Of the values of one schema, in one place. `optional`: they may be null."""

    cdef bint optional

    cdef bint put(self, Scan* scan, Text out) except -1
    cdef bint put_null(self, Text out) except -1


cdef struct Field:
    # `"id":`
    const char* name
    Py_ssize_t name_bytes
    PyObject* codec
    # of its index as a place in the JSON: the field that was there last time
    int expected
    # where the field is in the output, and the last struct that had it
    Py_ssize_t begin
    Py_ssize_t end
    uint64_t turn


cdef class Fields:
    """Of a struct, in the order of the binary form."""

    cdef int count
    cdef uint64_t turn
    cdef list names, codecs
    cdef Field* fields
    cdef Text sorted

    cdef bint put(self, Scan* scan, Text out) except -1
    cdef int named(self, Scan* scan, int place) noexcept
    cdef bint put_missing(self, Text out) except -1
    cdef int sort(self, Text out, Py_ssize_t begin) except -1


cdef class Transcoder:
    cdef Fields fields
    cdef bytes head
    cdef object otherwise
    cdef Text out
    cdef readonly uint64_t declined

    cdef bytes transcoded(self, const uint8_t* text, Py_ssize_t size)
    cdef bytes serialized(self, const uint8_t* text, Py_ssize_t size)
