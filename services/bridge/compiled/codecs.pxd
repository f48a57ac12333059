"""From JSON text to a binary form, as a schema has it: see codecs.pyx."""

from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint64_t

from services.bridge.compiled.scan cimport Scan
from services.bridge.compiled.text cimport Text


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
