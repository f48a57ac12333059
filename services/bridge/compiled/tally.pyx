# cython: language_level=3, boundscheck=False, wraparound=False
"""Rows and bytes of a list of events by table and operation, as services.bridge.sink.row_tally."""

from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from services.bridge.compiled.event cimport EVENT_KEY, EVENT_OP, EVENT_TABLE, EVENT_VALUE

include "digest.pxi"

cdef enum:
    KINDS_MAX = 16

cdef struct Kind:
    # of the events, which keep both names alive
    PyObject* table
    PyObject* op
    int64_t rows
    int64_t size


def count(list events, dict counts):
    cdef Kind[KINDS_MAX] kinds
    cdef Kind* kind
    cdef int used = 0, at
    cdef tuple event
    cdef Py_ssize_t index
    cdef object table, op, key, value
    for index in range(len(events)):
        event = <tuple>events[index]
        table, op = event[EVENT_TABLE], event[EVENT_OP]
        if not op:
            continue
        for at in range(used):  # names that are equal, but not the same object, meet in `counts`
            kind = kinds + at
            if kind.table == <PyObject*>table and kind.op == <PyObject*>op:
                break
        else:
            if used == KINDS_MAX:
                settle(kinds, used, counts)
                used = 0
            kind = kinds + used
            used += 1
            kind[0] = Kind(<PyObject*>table, <PyObject*>op, 0, 0)
        key, value = event[EVENT_KEY], event[EVENT_VALUE]
        kind.rows += 1
        if value is not None:
            kind.size += PyBytes_GET_SIZE(value)
        if key is not None:
            kind.size += PyBytes_GET_SIZE(key)
    settle(kinds, used, counts)


cdef int settle(Kind* kinds, int used, dict counts) except -1:
    cdef int at
    for at in range(used):
        found = counts.setdefault((<object>kinds[at].table, <object>kinds[at].op), [0, 0])
        found[0] += kinds[at].rows
        found[1] += kinds[at].size
    return 0
