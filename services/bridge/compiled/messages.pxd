"""Messages one behind the other: see messages.pyx."""

from libc.stdint cimport uint8_t, uint64_t


cdef struct Message:
    uint8_t* payload
    Py_ssize_t size
    uint64_t lsn


cdef class Messages:
    cdef Message* items
    cdef Py_ssize_t count, room
    cdef uint8_t* data
    """The payloads, of `size` bytes together."""
    cdef Py_ssize_t size, capacity

    cdef int add(self, const char* payload, Py_ssize_t size, uint64_t lsn) except -1
    cdef int add_line(
        self, const uint8_t* line, Py_ssize_t size, const uint8_t* head, Py_ssize_t head_size,
        int width
    ) except -1 nogil
    cdef int grow(self, Py_ssize_t size) except -1 nogil
    cdef void put(self, Py_ssize_t size, uint64_t lsn) noexcept nogil
    cdef int resize(self, Py_ssize_t capacity) except -1 nogil
