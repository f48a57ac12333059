# cython: language_level=3, boundscheck=False, wraparound=False
"""Messages in and records out, many for one step of the interpreter."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint64_t

include "digest.pxi"

cdef enum:
    XLOG_HEADER_BYTES = 25


def gather(get, list messages):
    cdef tuple got
    cdef bytes payload
    cdef Py_buffer view
    cdef const uint8_t* at
    cdef Py_ssize_t length
    cdef Py_ssize_t size = 0
    cdef uint64_t lsn
    cdef int index
    while True:
        got = get(1)
        length = got[0]
        if length <= 0:
            return length, b"", size
        PyObject_GetBuffer(got[1], &view, PyBUF_SIMPLE)
        try:
            at = <const uint8_t*>view.buf
            length = view.len
            if at[0] != b"w" or length < XLOG_HEADER_BYTES:
                return length, PyBytes_FromStringAndSize(<char*>at, length), size
            lsn = 0
            for index in range(1, 9):
                lsn = lsn << 8 | at[index]
            at += XLOG_HEADER_BYTES
            payload = PyBytes_FromStringAndSize(<char*>at, length - XLOG_HEADER_BYTES)
        finally:
            PyBuffer_Release(&view)
        size += length
        messages.append((lsn, payload))


def send(produce, list events, Py_ssize_t index, Py_ssize_t end, set ready, tuple not_taken):
    cdef tuple event
    cdef object topic, known = None
    while index < end:
        event = <tuple>events[index]
        topic = event[0]
        if topic is not known:
            if topic not in ready:
                break
            known = topic
        if event[3] is not None or event[4]:
            break
        try:
            produce(topic, event[2], event[1])
        except not_taken:
            break
        index += 1
    return index
