"""A growing text. Its methods are inlined where they are called."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef enum:
    KEPT_BYTES = 1024
    KEPT_BYTES_MAX = 1048576


cdef class Text:
    cdef uint8_t* buffer
    cdef Py_ssize_t size, capacity

    cdef inline int clear(self) except -1:
        """Empty it; one large row is no reason to keep its room for ever."""
        self.size = 0
        if self.capacity > KEPT_BYTES_MAX:
            self.resize(KEPT_BYTES)
        return 0

    cdef inline int resize(self, Py_ssize_t capacity) except -1:
        cdef uint8_t* buffer = <uint8_t*>realloc(self.buffer, capacity)
        if buffer == NULL:
            raise MemoryError
        self.buffer, self.capacity = buffer, capacity
        return 0

    cdef inline int grow(self, Py_ssize_t more) except -1:
        if self.size + more > self.capacity:
            self.resize(max(2 * self.capacity, self.size + more))
        return 0

    cdef inline int put(self, const void* text, Py_ssize_t size) except -1:
        self.grow(size)
        memcpy(self.buffer + self.size, text, size)
        self.size += size
        return 0

    cdef inline int put_bytes(self, bytes text) except -1:
        return self.put(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))

    cdef inline int put_str(self, str text) except -1:
        cdef Py_ssize_t size
        cdef const char* utf8 = PyUnicode_AsUTF8AndSize(text, &size)
        return self.put(utf8, size)

    cdef inline int put_text(self, Text text) except -1:
        return self.put(text.buffer, text.size)

    cdef inline int put_number(self, int64_t number) except -1:
        cdef uint8_t digits[20]
        cdef int at = 20
        cdef uint64_t rest = number
        if number < 0:
            self.put(<const char*>b"-", 1)
            rest = 0 - rest
        while True:
            at -= 1
            digits[at] = 48 + rest % 10
            rest //= 10
            if not rest:
                break
        return self.put(digits + at, 20 - at)

    cdef inline bytes whole(self):
        return PyBytes_FromStringAndSize(<char*>self.buffer, self.size)
