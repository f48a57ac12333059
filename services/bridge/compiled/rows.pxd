"""From a row's bytes to its record: see rows.pyx."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from services.bridge.compiled.text cimport Text

cdef enum:
    FIELDS_MAX = 16
    SEQ = 0
    LSN = 1
    TOTAL = 2
    EVENTS = 3


cdef class RowWriter:
    cdef type event
    cdef object topic, table, placed_by, op, serialize_key, serialize_value
    cdef int count, published
    cdef bint metadata, old, flat, key_framed, places_by_bytes
    cdef bytes opening, names, closing, key_opening, key_closing
    cdef list encoders, heads, key_heads, unavailable, placeholders, keys, field_heads
    cdef int[FIELDS_MAX] field_kinds
    """Of a flat row, the fields that the row itself has: which number each is."""
    cdef int* kinds
    cdef int* indexes
    """Of each value that comes: the column that it is, or -1."""
    cdef Text out
    cdef Py_ssize_t* spans
    """Begin and end of each column's value in `out`; of the old row's behind them."""

    cdef tuple write(
        self, const uint8_t* text, Py_ssize_t at, Py_ssize_t end, uint64_t lsn, int64_t seq,
        int64_t total, int64_t events, Text head, Text order, Text tail, Text flat
    )
    cdef int fields(
        self, uint64_t lsn, int64_t seq, int64_t total, int64_t events, Text flat
    ) except -1
    cdef int rest(
        self, uint64_t lsn, int64_t seq, int64_t total, int64_t events, Text head, Text order,
        Text tail
    ) except -1
    cdef Py_ssize_t row(
        self, const uint8_t* data, Py_ssize_t at, Py_ssize_t end, int spans
    ) except -2
    cdef int value(self, int column, const uint8_t* text, Py_ssize_t size) except -1
    cdef bint is_placeholder(self, int column, Py_ssize_t since) noexcept
    cdef bint same_key(self) except -1
    cdef bytes key(self)

cdef bytes as_form(object serialize, const char* text, Py_ssize_t size)
cdef tuple new_event(
    type event, topic, bytes key, bytes value, table, int64_t seq, uint64_t lsn, object placed_by,
    object op
)
cdef tuple new_tuple(type kind, tuple fields)
