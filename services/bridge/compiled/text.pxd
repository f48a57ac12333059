"""A growing text. Its methods are inlined where they are called."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, memmove

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef enum:
    KEPT_BYTES = 1024
    KEPT_BYTES_MAX = 1048576
    VARINT_BYTES_MAX = 10


cdef inline int varint(uint8_t* to, uint64_t number) noexcept nogil:
    cdef int size = 0
    while number >= 128:
        to[size] = 128 | number & 127
        size += 1
        number >>= 7
    to[size] = number
    return size + 1


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

    cdef inline int put_byte(self, uint8_t byte) except -1:
        self.grow(1)
        self.buffer[self.size] = byte
        self.size += 1
        return 0

    cdef inline int put_varint(self, uint64_t number) except -1:
        """Seven bits a byte, the lowest first, as Avro and Protobuf have numbers."""
        self.grow(VARINT_BYTES_MAX)
        self.size += varint(self.buffer + self.size, number)
        return 0

    cdef inline Py_ssize_t open(self) except -1:
        """Leave a byte for the length or count of what follows; it is put by `close`."""
        self.put_byte(0)
        return self.size

    cdef inline Py_ssize_t close(self, Py_ssize_t begin, uint64_t number) except -1:
        """Put `number` before what begins at `begin`, where `open` left a byte.

        Return how far this was moved.
        """
        cdef uint8_t digits[VARINT_BYTES_MAX]
        cdef int moved = varint(digits, number) - 1
        if moved:
            self.grow(moved)
            memmove(self.buffer + begin + moved, self.buffer + begin, self.size - begin)
            self.size += moved
        memcpy(self.buffer + begin - 1, digits, moved + 1)
        return moved

    cdef inline bytes whole(self):
        return PyBytes_FromStringAndSize(<char*>self.buffer, self.size)
