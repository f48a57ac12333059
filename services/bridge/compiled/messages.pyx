# cython: language_level=3, boundscheck=False, wraparound=False
"""Messages in, many for one step of the interpreter."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

include "digest.pxi"

cdef enum:
    XLOG_HEADER_BYTES = 25
    FIRST_ITEMS = 256
    FIRST_BYTES = 65536
    KEPT_BYTES_MAX = 1048576

ctypedef int (*GetCopyData)(void* connection, char** buffer, int nonblocking) noexcept
"""PQgetCopyData. What it hands out is freed with PQfreemem, which is free() (fe-exec.c)."""


cdef class Messages:
    def __dealloc__(self):
        free(self.items)
        free(self.data)

    def __len__(self):
        return self.count

    def __getitem__(self, Py_ssize_t index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        cdef Message* found = self.items + index
        return found.lsn, PyBytes_FromStringAndSize(<char*>found.payload, found.size)

    def append(self, tuple message):
        cdef bytes payload = message[1]
        self.add(PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload), message[0])

    def clear(self):
        """One large message is no reason to keep its room for ever."""
        self.count = self.size = 0
        if self.capacity > KEPT_BYTES_MAX:
            self.resize(FIRST_BYTES)

    cdef int add(self, const char* payload, Py_ssize_t size, uint64_t lsn) except -1:
        cdef Message* items
        cdef Py_ssize_t room
        if self.count == self.room:
            room = max(FIRST_ITEMS, 2 * self.room)
            items = <Message*>realloc(self.items, room * sizeof(Message))
            if items == NULL:
                raise MemoryError
            self.items, self.room = items, room
        if self.size + size > self.capacity:
            self.resize(max(FIRST_BYTES, 2 * self.capacity, self.size + size))
        memcpy(self.data + self.size, payload, size)
        self.items[self.count] = Message(self.data + self.size, size, lsn)
        self.count += 1
        self.size += size
        return 0

    cdef int resize(self, Py_ssize_t capacity) except -1:
        cdef uint8_t* data = <uint8_t*>realloc(self.data, capacity)
        cdef Py_ssize_t index, at = 0
        if data == NULL:
            raise MemoryError
        self.data, self.capacity = data, capacity
        for index in range(self.count):
            self.items[index].payload = data + at
            at += self.items[index].size
        return 0


def gather(size_t function, size_t connection, Messages messages):
    cdef GetCopyData get = <GetCopyData>function
    cdef char* buffer = NULL
    cdef uint64_t lsn
    cdef Py_ssize_t size = 0
    cdef int index, length
    while True:
        length = get(<void*>connection, &buffer, 1)
        if length <= 0:
            return length, b"", size
        try:
            if buffer[0] != b"w" or length < XLOG_HEADER_BYTES:
                return length, PyBytes_FromStringAndSize(buffer, length), size
            lsn = 0
            for index in range(1, 9):
                lsn = lsn << 8 | <uint8_t>buffer[index]
            messages.add(buffer + XLOG_HEADER_BYTES, length - XLOG_HEADER_BYTES, lsn)
        finally:
            free(buffer)
        size += length
