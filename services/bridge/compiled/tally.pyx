# cython: language_level=3, boundscheck=False, wraparound=False
"""Rows and bytes of a list of events by table and operation, as services.bridge.sink.row_tally."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport int64_t
from libc.string cimport memcmp

from services.bridge.compiled.event cimport (
    EVENT_HEADERS,
    EVENT_KEY,
    EVENT_TABLE,
    EVENT_TOPIC,
    EVENT_VALUE,
)

include "digest.pxi"

cdef enum:
    KINDS_MAX = 16
    OPENING_BYTES = 7
    ENVELOPE_BYTES = 18
    FLAT_BYTES = 9
    FLAT_ENVELOPE_BYTES = 20
    HEAD_BYTES = 5
    PROTOBUF_BYTES = 3
    AVRO_OP = 6

cdef struct Kind:
    PyObject* table
    char operation
    int64_t rows
    int64_t size


def count(list events, str schema_topic, dict counts):
    cdef Kind[KINDS_MAX] kinds
    cdef Kind* kind
    cdef int used = 0, at
    cdef tuple event
    cdef Py_ssize_t index, op_at
    cdef object table, value, key, headers
    cdef char operation
    for index in range(len(events)):
        event = <tuple>events[index]
        table, value = event[EVENT_TABLE], event[EVENT_VALUE]
        headers = event[EVENT_HEADERS]
        if not table:
            continue
        operation = c"c"
        if headers is not None and in_headers(<list>headers, &operation):
            pass
        elif value is None:
            continue
        elif op_of(<bytes>value, b'{"op":"', OPENING_BYTES, &operation):
            pass
        elif op_of(<bytes>value, b'{"payload":{"op":"', ENVELOPE_BYTES, &operation):
            pass
        elif op_of(<bytes>value, b'{"__op":"', FLAT_BYTES, &operation):
            pass
        elif op_of(<bytes>value, b"\0\x0a\1", PROTOBUF_BYTES, &operation):
            pass
        elif op_of(<bytes>value, b'{"payload":{"__op":"', FLAT_ENVELOPE_BYTES, &operation):
            pass
        elif (
            PyBytes_GET_SIZE(<bytes>value) > AVRO_OP
            and PyBytes_AS_STRING(<bytes>value)[0] == 0
            and PyBytes_AS_STRING(<bytes>value)[AVRO_OP - 1] == 2
        ):
            op_at = AVRO_OP + (PyBytes_AS_STRING(<bytes>value)[AVRO_OP] == 2)
            if PyBytes_AS_STRING(<bytes>value)[op_at] in b"crudt":
                operation = PyBytes_AS_STRING(<bytes>value)[op_at]
        elif event[EVENT_TOPIC] == schema_topic:
            continue
        for at in range(used):
            kind = kinds + at
            if kind.table == <PyObject*>table and kind.operation == operation:
                break
        else:
            if used == KINDS_MAX:
                settle(kinds, used, counts)
                used = 0
            kind = kinds + used
            used += 1
            kind.table, kind.operation = <PyObject*>table, operation
            kind.rows = kind.size = 0
        key = event[EVENT_KEY]
        kind.rows += 1
        if value is not None:
            kind.size += PyBytes_GET_SIZE(<bytes>value)
        if key is not None:
            kind.size += PyBytes_GET_SIZE(<bytes>key)
    settle(kinds, used, counts)


cdef inline bint op_of(bytes value, const char* opening, Py_ssize_t size, char* operation):
    """Whether JSON begins with `opening`, also behind a schema's id; the letter there is put into
    `operation`."""
    cdef const char* text = PyBytes_AS_STRING(value)
    cdef Py_ssize_t length = PyBytes_GET_SIZE(value)
    if length > HEAD_BYTES and text[0] == 0:
        text += HEAD_BYTES
        length -= HEAD_BYTES
    if length <= size or memcmp(text, opening, size):
        return False
    if text[size] in b"crudt":
        operation[0] = text[size]
    return True


cdef bint in_headers(list headers, char* operation) except -1:
    """Whether a header tells the operation, which is then put into `operation`: c of an outbox."""
    for name, value in headers:
        if name == "__op":
            operation[0] = <char>ord(value[0])
            return True
        if name == "commit_lsn":
            return True
    return False


cdef int settle(Kind* kinds, int used, dict counts) except -1:
    """Add what was counted to `counts`. The events keep the tables' names alive."""
    cdef int at
    cdef Kind* kind
    for at in range(used):
        kind = kinds + at
        name = (<object>kind.table, chr(<unsigned char>kind.operation))
        found = counts.get(name)
        if found is None:
            counts[name] = [kind.rows, kind.size]
        else:
            found[0] += kind.rows
            found[1] += kind.size
    return 0
