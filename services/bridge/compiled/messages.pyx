# cython: language_level=3, boundscheck=False, wraparound=False
"""Messages in, many for one step of the interpreter."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcpy

include "digest.pxi"

cdef enum:
    XLOG_HEADER_BYTES = 25
    VALUE_HEAD_BYTES = 5
    FIRST_ITEMS = 256
    FIRST_BYTES = 65536
    KEPT_BYTES_MAX = 1048576

ctypedef int (*GetCopyData)(void* connection, char** buffer, int nonblocking) noexcept nogil
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
        self.grow(size)
        memcpy(self.data + self.size, payload, size)
        self.put(size, lsn)
        return 0

    cdef int add_line(
        self, const uint8_t* line, Py_ssize_t size, const uint8_t* head, Py_ssize_t head_size,
        int width
    ) except -1 nogil:
        """Append the first `width` fields of a line of COPY, as pgoutput writes a row."""
        cdef const uint8_t* field = line
        cdef const uint8_t* end
        cdef Py_ssize_t length
        cdef int left
        cdef bint escaped = memchr(line, b"\\", size) != NULL
        self.grow(head_size + size + VALUE_HEAD_BYTES * width)
        cdef uint8_t* begin = self.data + self.size
        cdef uint8_t* to = begin + head_size
        memcpy(begin, head, head_size)
        for left in range(width, 0, -1):
            end = <const uint8_t*>memchr(field, b"\t", line + size - field)
            if end == NULL:
                end = line + size
                if left > 1:
                    with gil:
                        raise ValueError("a line of COPY has too few fields")
            length = end - field
            if escaped and length == 2 and field[0] == b"\\" and field[1] == b"N":
                to[0] = b"n"
                to += 1
            else:
                to[0] = b"t"
                if escaped:
                    length = unescaped(to + VALUE_HEAD_BYTES, field, length)
                else:
                    memcpy(to + VALUE_HEAD_BYTES, field, length)
                to[1], to[2], to[3], to[4] = length >> 24, length >> 16, length >> 8, length
                to += VALUE_HEAD_BYTES + length
            field = end + 1
        self.put(to - begin, 0)
        return 0

    cdef int grow(self, Py_ssize_t size) except -1 nogil:
        """Make room for one message more, of up to `size` bytes, behind the others."""
        cdef Message* items
        cdef Py_ssize_t room
        if self.count == self.room:
            room = max(FIRST_ITEMS, 2 * self.room)
            items = <Message*>realloc(self.items, room * sizeof(Message))
            if items == NULL:
                with gil:
                    raise MemoryError
            self.items, self.room = items, room
        if self.size + size > self.capacity:
            self.resize(max(FIRST_BYTES, 2 * self.capacity, self.size + size))
        return 0

    cdef void put(self, Py_ssize_t size, uint64_t lsn) noexcept nogil:
        """Count the message whose `size` bytes stand behind the others."""
        self.items[self.count] = Message(self.data + self.size, size, lsn)
        self.count += 1
        self.size += size

    cdef int resize(self, Py_ssize_t capacity) except -1 nogil:
        cdef uint8_t* data = <uint8_t*>realloc(self.data, capacity)
        cdef Py_ssize_t index, at = 0
        if data == NULL:
            with gil:
                raise MemoryError
        self.data, self.capacity = data, capacity
        for index in range(self.count):
            self.items[index].payload = data + at
            at += self.items[index].size
        return 0


cdef Py_ssize_t unescaped(uint8_t* to, const uint8_t* text, Py_ssize_t size) noexcept nogil:
    """Write a field of COPY without its escapes; return its bytes. As CopyAttributeOutText."""
    cdef uint8_t* begin = to
    cdef const uint8_t* end = text + size
    cdef const uint8_t* next_one
    cdef uint8_t byte
    while True:
        next_one = <const uint8_t*>memchr(text, b"\\", end - text)
        size = (end if next_one == NULL else next_one) - text
        memcpy(to, text, size)
        to += size
        if next_one == NULL:
            return to - begin
        byte = next_one[1]
        if byte == b"n":
            byte = b"\n"
        elif byte == b"t":
            byte = b"\t"
        elif byte == b"r":
            byte = b"\r"
        elif byte == b"b":
            byte = 8
        elif byte == b"f":
            byte = 12
        elif byte == b"v":
            byte = 11
        to[0] = byte
        to += 1
        text = next_one + 2


def copy_lines(
    size_t function, size_t connection, bint nonblocking, Messages messages, bytes head, int width,
    int keys, bint filtered, Py_ssize_t rows_max, Py_ssize_t bytes_max,
):
    cdef GetCopyData get = <GetCopyData>function
    cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(head)
    cdef Py_ssize_t head_size = PyBytes_GET_SIZE(head), count = 0, size = 0, last_size = 0, at
    cdef char* buffer = NULL
    cdef char* last = NULL
    cdef int length = 1, left = keys + filtered
    try:
        with nogil:
            while count < rows_max and size < bytes_max:
                length = get(<void*>connection, &buffer, nonblocking)
                if length <= 0:
                    break
                free(last)
                last, last_size = buffer, length - 1  # behind it stands the line's end
                if not filtered or last[last_size - 1] == b"t":
                    messages.add_line(<uint8_t*>last, last_size, start, head_size, width)
                count += 1
                size += length
        at = last_size
        while at and left:
            at -= 1
            left -= last[at] == b"\t"
        return length, count, size, PyBytes_FromStringAndSize(last + at, last_size - at)
    finally:
        free(last)


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
