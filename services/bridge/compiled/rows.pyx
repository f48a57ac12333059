# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""From a row's pgoutput bytes straight to its record.

What is not as expected goes the long way (services.bridge.events.envelope), which says what is
wrong with it.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_SET_ITEM
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp

from services.bridge.compiled.codecs cimport Transcoder
from services.bridge.compiled.event cimport (
    EVENT_BROADCAST,
    EVENT_FIELDS,
    EVENT_HEADERS,
    EVENT_KEY,
    EVENT_LSN,
    EVENT_OP,
    EVENT_PLACED_BY,
    EVENT_SEQ,
    EVENT_TABLE,
    EVENT_TOPIC,
    EVENT_VALUE,
)
from services.bridge.compiled.forms cimport put_form
from services.bridge.compiled.text cimport Text

include "digest.pxi"

KINDS = ("seq", "lsn", "total", "events")
FIELDS = {
    "Event": (
        "topic", "key", "value", "headers", "broadcast", "table", "seq", "lsn", "placed_by", "op"
    ),
    "Stamp": ("xid", "commit_lsn", "commit_time_us", "previous_commit_lsn", "encoded_us"),
    "Ended": ("events", "stamp", "end_lsn"),
}

cdef extern from "Python.h":
    """
    #if PY_VERSION_HEX >= 0x030E0000  /* a tuple keeps its hash, -1 until it is asked for */
    #define slotbridge_no_hash_yet(made) (((PyTupleObject *)(made))->ob_hash = -1)
    #else
    #define slotbridge_no_hash_yet(made) ((void)0)
    #endif
    """
    object PyType_GenericAlloc(PyTypeObject* kind, Py_ssize_t count)
    void slotbridge_no_hash_yet(object made)


cdef bytes as_bytes(str text):
    """As schemas.wire.text_as_bytes."""
    return text.encode("utf-8", "surrogateescape")


cdef class RowWriter:
    def __cinit__(self, type event, topic, table, columns, int count, frame, kinds):
        cdef int index, source_index
        self.event, self.topic, self.table = event, topic, table
        self.count, self.published = count, len(columns)
        self.opening, self.names = as_bytes(frame.opening), frame.names.encode()
        self.closing = frame.closing.encode()
        self.key_opening, self.key_closing = as_bytes(frame.key_opening), frame.key_closing.encode()
        self.placed_by, self.op = frame.placed_by, frame.op
        self.serialize_key, self.serialize_value = frame.serialize_key, frame.serialize_value
        self.places_by_bytes = frame.places_by_bytes
        self.key_framed = bool(self.key_opening or self.key_closing)
        self.metadata, self.old = frame.metadata, frame.old
        self.encoders = [column.encode for column in columns]
        self.unavailable = [column.unavailable.encode() for column in columns]
        self.placeholders = [column.placeholder.encode() for column in columns]
        self.flat = frame.flat is not None
        self.heads = [
            (b"," if i or self.flat else b"") + c.name.encode() for i, c in enumerate(columns)
        ]
        self.field_heads = []
        for index, (text, kind) in enumerate(frame.flat or ()):
            self.field_heads.append(text.encode())
            if index == FIELDS_MAX:
                raise ValueError("a row has too many fields")
            self.field_kinds[index] = KINDS.index(kind)
        self.keys = [i for i, column in enumerate(columns) if column.key]
        self.key_heads = [
            (b"," if number else b"{") + columns[i].name.encode()
            for number, i in enumerate(self.keys)
        ]
        self.out = Text()
        self.spans = <Py_ssize_t*>malloc((4 * self.published + 1) * sizeof(Py_ssize_t))
        self.kinds = <int*>malloc((self.published + 1) * sizeof(int))
        self.indexes = <int*>malloc((count + 1) * sizeof(int))
        if not (self.spans and self.kinds and self.indexes):
            raise MemoryError
        for source_index in range(count):
            self.indexes[source_index] = -1
        for index in range(self.published):
            source_index = columns[index].source_index
            self.indexes[source_index] = index
            self.kinds[index] = kinds[index]

    def __dealloc__(self):
        free(self.spans)
        free(self.kinds)
        free(self.indexes)

    cdef tuple write(
        self, const uint8_t* text, Py_ssize_t at, Py_ssize_t end, uint64_t lsn, int64_t seq,
        int64_t total, int64_t events, Text head, Text order, Text tail, Text flat
    ):
        """The event, or None."""
        cdef bytes key = None, value
        cdef object placed_by = self.placed_by
        cdef Py_ssize_t since = 0
        self.out.clear()
        try:
            if not self.flat:
                self.out.put_bytes(self.opening)
            if self.old:
                at = self.row(text, at, end, 2 * self.published)
                if at < 0 or at + 3 > end or text[at] != b"N":
                    return None
                if text[at + 1] << 8 | text[at + 2] != self.count:
                    return None
                if not self.flat:
                    self.out.put_bytes(b'},"after":{')
                at += 3
            if self.flat:  # an old row stands before the value, to compare keys
                since = self.out.size
                self.fields(lsn, seq, total, events, flat)
            if self.row(text, at, end, 0) != end:
                return None
        except (ValueError, LookupError):
            return None
        if self.old and not self.same_key():
            return None
        try:
            if self.keys:
                key = self.key()
                if self.key_framed:
                    placed_by, key = key, self.key_opening + key + self.key_closing
                elif self.serialize_key is not None:
                    if not self.places_by_bytes:
                        placed_by = key
                    key = as_form(
                        self.serialize_key, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
                    )
            if self.flat:
                self.out.put_bytes(b"}")
                self.out.put_bytes(self.closing)
            else:
                self.rest(lsn, seq, total, events, head, order, tail)
            value = as_form(
                self.serialize_value, <char*>self.out.buffer + since, self.out.size - since
            )
        except ValueError:  # of a binary form
            return None
        return new_event(
            self.event, self.topic, key, value, self.table, seq, lsn, placed_by, self.op
        )

    cdef int fields(
        self, uint64_t lsn, int64_t seq, int64_t total, int64_t events, Text flat
    ) except -1:
        """What precedes the columns of a flat row."""
        cdef Text out = self.out
        cdef int index, kind
        out.put_bytes(self.opening)
        out.put_text(flat)
        for index in range(len(self.field_heads)):
            out.put_bytes(<bytes>self.field_heads[index])
            kind = self.field_kinds[index]
            if kind == SEQ:
                out.put_number(seq)
            elif kind == LSN:
                out.put_number(lsn)
            elif kind == TOTAL:
                out.put_number(total)
            else:
                out.put_number(events)
        return 0

    cdef int rest(
        self, uint64_t lsn, int64_t seq, int64_t total, int64_t events, Text head, Text order,
        Text tail
    ) except -1:
        """What follows the row."""
        cdef Text out = self.out
        out.put_bytes(b"},")
        out.put_text(head)
        out.put_number(lsn)
        out.put_bytes(b'\\"]",')
        out.put_bytes(self.names)
        out.put_bytes(b'"lsn":')
        out.put_number(lsn)
        out.put_bytes(b',"seq":')
        out.put_number(seq)
        out.put_bytes(b"},")
        out.put_text(order)
        if self.metadata:
            out.put_number(total)
            out.put_bytes(b',"data_collection_order":')
            out.put_number(events)
            out.put_bytes(b"}")
        out.put_bytes(b",")
        out.put_text(tail)
        return out.put_bytes(self.closing)

    cdef Py_ssize_t row(
        self, const uint8_t* data, Py_ssize_t at, Py_ssize_t end, int spans
    ) except -2:
        """The values from `at` on; where they end, or -1: another way. `spans`: where to note."""
        cdef int source_index, column
        cdef uint8_t kind
        cdef Py_ssize_t length
        for source_index in range(self.count):
            if at >= end:
                return -1
            kind = data[at]
            at += 1
            length = 0
            if kind == b"t":
                if at + 4 > end:
                    return -1
                length = (
                    <Py_ssize_t>data[at] << 24 | <Py_ssize_t>data[at + 1] << 16
                    | <Py_ssize_t>data[at + 2] << 8 | <Py_ssize_t>data[at + 3]
                )
                at += 4
                if at + length > end:
                    return -1
            elif kind != b"n" and (kind != b"u" or self.old):
                return -1
            column = self.indexes[source_index]
            if column >= 0:
                self.out.put_bytes(<bytes>self.heads[column])
                self.spans[spans + 2 * column] = self.out.size
                if kind == b"t":
                    self.value(column, data + at, length)
                    if self.is_placeholder(column, self.spans[spans + 2 * column]):
                        return -1  # the long way says that it is a value
                elif kind == b"n":
                    self.out.put_bytes(b"null")
                else:
                    self.out.put_bytes(<bytes>self.unavailable[column])
                self.spans[spans + 2 * column + 1] = self.out.size
            at += length
        return at

    cdef int value(self, int column, const uint8_t* text, Py_ssize_t size) except -1:
        """One value as JSON. Raises ValueError for what is no text form of its type."""
        if put_form(self.out, self.kinds[column], text, size):
            return 0
        encode = self.encoders[column]
        return self.out.put_str(encode(PyBytes_FromStringAndSize(<char*>text, size)))

    cdef bint is_placeholder(self, int column, Py_ssize_t since) noexcept:
        """Whether the value that begins there is what stands for an unchanged one."""
        cdef bytes placeholder = <bytes>self.placeholders[column]
        cdef Py_ssize_t length = PyBytes_GET_SIZE(placeholder)
        return length == self.out.size - since and not memcmp(
            self.out.buffer + since, PyBytes_AS_STRING(placeholder), length
        )

    cdef bint same_key(self) except -1:
        """Whether the old row has the key of the new one."""
        cdef int index
        cdef Py_ssize_t new, old, length
        for index in self.keys:
            new, old = self.spans[2 * index], self.spans[2 * (self.published + index)]
            length = self.spans[2 * index + 1] - new
            if length != self.spans[2 * (self.published + index) + 1] - old:
                return False
            if memcmp(self.out.buffer + new, self.out.buffer + old, length):
                return False
        return True

    cdef bytes key(self):
        """`{"id":1}`, put behind what is there and taken away again."""
        cdef int number, index
        cdef Text out = self.out
        cdef Py_ssize_t since = out.size, length
        for number in range(len(self.keys)):
            index = self.keys[number]
            out.put_bytes(<bytes>self.key_heads[number])
            length = self.spans[2 * index + 1] - self.spans[2 * index]
            out.grow(length)
            out.put(out.buffer + self.spans[2 * index], length)
        out.put_bytes(b"}")
        key = PyBytes_FromStringAndSize(<char*>out.buffer + since, out.size - since)
        out.size = since
        return key


cdef bytes as_form(object serialize, const char* text, Py_ssize_t size):
    """A JSON text as bytes, in a binary form if there is one. Raises ValueError as `serialize`."""
    if serialize is None:
        return PyBytes_FromStringAndSize(text, size)
    if type(serialize) is Transcoder:
        return (<Transcoder>serialize).serialized(<const uint8_t*>text, size)
    return serialize(text[:size].decode())


cdef tuple new_event(
    type event, topic, bytes key, bytes value, table, int64_t seq, uint64_t lsn, object placed_by,
    object op
):
    """`event(topic, key, value, None, False, table, seq, lsn, placed_by, op)`, as `new_tuple`."""
    cdef tuple made = <tuple>PyType_GenericAlloc(<PyTypeObject*>event, EVENT_FIELDS)
    slotbridge_no_hash_yet(made)
    put(made, EVENT_TOPIC, topic)
    put(made, EVENT_KEY, key)
    put(made, EVENT_VALUE, value)
    put(made, EVENT_HEADERS, None)
    put(made, EVENT_BROADCAST, False)
    put(made, EVENT_TABLE, table)
    put(made, EVENT_SEQ, seq)
    put(made, EVENT_LSN, lsn)
    put(made, EVENT_PLACED_BY, placed_by)
    put(made, EVENT_OP, op)
    return made


cdef tuple new_tuple(type kind, tuple fields):
    """`kind(*fields)`, of a NamedTuple, as tuple_subtype_new makes it (tupleobject.c)."""
    cdef Py_ssize_t index, count = PyTuple_GET_SIZE(fields)
    cdef tuple made = <tuple>PyType_GenericAlloc(<PyTypeObject*>kind, count)
    slotbridge_no_hash_yet(made)
    for index in range(count):
        put(made, index, <object>PyTuple_GET_ITEM(fields, index))
    return made


cdef inline void put(tuple made, Py_ssize_t index, object value) noexcept:
    Py_INCREF(value)
    PyTuple_SET_ITEM(made, index, value)
