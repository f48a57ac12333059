# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Rows of an open transaction, and whole small transactions, as Assembler and Envelope have them.

Nothing is done by halves: a transaction that is not whole among the messages, or that has anything
but rows whose writers are known, is left where it is.
"""

from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from services.bridge.compiled.event cimport EVENT_KEY, EVENT_VALUE
from services.bridge.compiled.messages cimport Message, Messages
from services.bridge.compiled.rows cimport RowWriter, new_event, new_tuple
from services.bridge.compiled.text cimport Text

include "digest.pxi"

KINDS = ("", "commit_lsn", "xid", "commit_ms", "commit_us", "commit_ns", "encoded_ms", "id")

cdef enum:
    COMMIT_LSN = 1
    XID = 2
    COMMIT_MS = 3
    COMMIT_US = 4
    COMMIT_NS = 5
    ENCODED_MS = 6
    ID = 7

cdef enum:
    KIND_BYTES = 8
    BEGIN_BYTES = 21
    COMMIT_BYTES = 26

cdef int64_t POSTGRES_EPOCH_US = 946684800000000
cdef int64_t TIME_US_MAX = 9000000000000000
"""Its nanoseconds fit 64 bits."""


cdef class Rows:
    """A run of rows into one transaction: what it has so far.

    `at`: where a row's values begin; `skipped`: bytes of the xid behind the kind, in a stream.
    """

    cdef list events, touched
    cdef dict writers
    cdef Py_ssize_t at, skipped
    cdef int64_t overhead_bytes, seq, total, size, of_table, numbers
    cdef uint8_t[KIND_BYTES] kind
    cdef RowWriter writer
    cdef object counter

    def __cinit__(self, dict writers, Py_ssize_t at, int64_t overhead_bytes):
        self.writers, self.at, self.overhead_bytes = writers, at, overhead_bytes
        self.skipped = at - KIND_BYTES

    cdef bint choose(self, const Message* message) except -1:
        """Whether the message is a row with a compiled writer, which is then the current one."""
        cdef PyObject* found
        cdef tuple parts
        cdef const uint8_t* text = message.payload
        cdef const uint8_t* rest = text + 1 + self.skipped
        if message.size < self.at:
            return False
        if self.writer is not None:
            if text[0] == self.kind[0] and not memcmp(rest, self.kind + 1, KIND_BYTES - 1):
                return True
            self.settle()
        self.kind[0] = text[0]
        memcpy(self.kind + 1, rest, KIND_BYTES - 1)
        found = PyDict_GetItem(self.writers, <bytes>(<char*>self.kind)[:KIND_BYTES])
        if found == NULL:
            return False
        parts = <tuple><object>found
        if type(parts[0]) is not RowWriter:
            return False
        self.writer, self.counter, self.numbers = parts[0], parts[1], parts[2]
        self.of_table = self.counter.events
        return True

    cdef bint add(
        self, const Message* message, uint64_t lsn, Text head, Text order, Text tail, Text flat
    ) except -1:
        """Whether the row, which is of the current writer, became an event."""
        cdef tuple event = self.writer.write(
            message.payload, self.at, message.size, lsn, self.seq, self.total + 1,
            self.of_table + 1, head, order, tail, flat
        )
        if event is None:
            return False
        if not self.of_table:
            self.touched.append(self.counter)
        self.of_table += 1
        self.total += 1
        self.seq += self.numbers
        self.hold(event)
        return True

    cdef int hold(self, tuple event) except -1:
        self.events.append(event)
        self.size += self.overhead_bytes + PyBytes_GET_SIZE(<bytes>event[EVENT_VALUE])
        if event[EVENT_KEY] is not None:
            self.size += PyBytes_GET_SIZE(<bytes>event[EVENT_KEY])
        return 0

    cdef int settle(self) except -1:
        """Put the current writer's count where it belongs."""
        if self.writer is not None:
            self.counter.events = self.of_table
            self.writer = None
        return 0


def take_rows(
    Messages messages, Py_ssize_t index, Py_ssize_t end, Py_ssize_t at, dict writers, list events,
    list touched, uint64_t lsn, int64_t seq, int64_t total, int64_t room_bytes,
    int64_t overhead_bytes, str head, str order, str tail, str flat,
):
    cdef Message* message
    cdef Text head_text = Text(), order_text = Text(), tail_text = Text(), flat_text = Text()
    cdef Rows rows = Rows(writers, at, overhead_bytes)
    head_text.put_str(head)
    order_text.put_str(order)
    tail_text.put_str(tail)
    flat_text.put_str(flat)
    rows.events, rows.touched, rows.seq, rows.total = events, touched, seq, total
    while index < min(end, messages.count) and rows.size <= room_bytes:
        message = messages.items + index
        if not rows.choose(message):
            break
        if not rows.add(
            message, lsn or message.lsn, head_text, order_text, tail_text, flat_text
        ):
            break
        index += 1
    rows.settle()
    return index, rows.seq, rows.total, rows.size


cdef class Transactions:
    cdef type event, stamp, ended
    cdef str topic
    cdef bytes source, source_db, source_timeline
    cdef int64_t overhead_bytes
    cdef list fields
    cdef Text head, order, tail, id, out, flat
    cdef Rows rows

    def __cinit__(
        self, type event, type stamp, type ended, str topic, str source, str source_db,
        str source_timeline, fields, int64_t overhead_bytes,
    ):
        self.event, self.stamp, self.ended, self.topic = event, stamp, ended, topic
        self.source, self.source_db = source.encode(), source_db.encode()
        self.source_timeline = source_timeline.encode()
        self.overhead_bytes = overhead_bytes
        self.head, self.order, self.tail = Text(), Text(), Text()
        self.id, self.out, self.flat = Text(), Text(), Text()
        self.fields = [(text.encode(), KINDS.index(kind)) for text, kind in fields]

    def take(
        self, Messages messages, Py_ssize_t index, Py_ssize_t at, dict writers,
        uint64_t previous_lsn, uint64_t floor_lsn, int64_t now_us, int64_t room_bytes,
        int64_t bytes_max,
    ):
        cdef Py_ssize_t commit
        cdef list events = [], ends = []
        self.rows = Rows(writers, at, self.overhead_bytes)
        self.rows.events = events
        self.write_tail(now_us)
        while index < messages.count and self.rows.size <= room_bytes:
            commit = self.whole(messages, index, floor_lsn)
            if commit < 0:
                break
            if not self.transaction(
                messages, index, commit, previous_lsn, now_us, bytes_max, ends
            ):
                break
            previous_lsn = number(messages.items[commit].payload + 2, 8)
            index = commit + 1
        room_bytes = self.rows.size
        self.rows = None  # the events are the caller's
        return index, events, ends, room_bytes

    cdef Py_ssize_t whole(self, Messages messages, Py_ssize_t begin, uint64_t floor_lsn) except -2:
        """Where the transaction that begins at `begin` ends; -1: it does not go this way."""
        cdef const Message* message = messages.items + begin
        cdef const Message* end = messages.items + messages.count
        cdef uint64_t lsn, end_lsn
        cdef int64_t time_us
        if message.size != BEGIN_BYTES or message.payload[0] != b"B":
            return -1
        lsn = number(message.payload + 1, 8)
        time_us = <int64_t>number(message.payload + 9, 8) + POSTGRES_EPOCH_US
        if lsn < floor_lsn or not 0 <= time_us <= TIME_US_MAX:
            return -1
        while True:
            message += 1
            if message >= end:
                return -1
            if message.size and message.payload[0] == b"C":
                break
            if not self.rows.choose(message):
                return -1
        if message.size != COMMIT_BYTES or message == messages.items + begin + 1:
            return -1
        end_lsn = number(message.payload + 10, 8)
        if number(message.payload + 2, 8) != lsn or end_lsn <= lsn:
            return -1
        return message - messages.items

    cdef bint transaction(
        self, Messages messages, Py_ssize_t begin, Py_ssize_t commit, uint64_t previous_lsn,
        int64_t now_us, int64_t bytes_max, list ends,
    ) except -1:
        """Put its events behind the others; False, and none: it needs another way."""
        cdef Rows rows = self.rows
        cdef const Message* message = messages.items + begin
        cdef uint64_t commit_lsn = number(message.payload + 1, 8)
        cdef uint64_t xid = number(message.payload + 17, 4)
        cdef int64_t time_us = <int64_t>number(message.payload + 9, 8) + POSTGRES_EPOCH_US
        cdef Py_ssize_t index, before = len(rows.events)
        cdef int64_t size = rows.size
        cdef bint good = True
        self.write_head(xid, commit_lsn, time_us, previous_lsn)
        self.write_flat(xid, commit_lsn, time_us, now_us)
        rows.touched, rows.seq, rows.total = [], 0, 0
        self.boundary(commit_lsn, time_us, begins=True)
        cdef int64_t announced = rows.size - size
        for index in range(begin + 1, commit):
            message = messages.items + index
            if not rows.choose(message) or not rows.add(
                message, message.lsn, self.head, self.order, self.tail, self.flat
            ):
                good = False
                break
            if rows.size - size - announced > bytes_max:  # it leaves in parts
                good = False
                break
        rows.settle()
        if good:
            self.boundary(commit_lsn, time_us, begins=False)
            message = messages.items + commit
            stamp = new_tuple(self.stamp, (xid, commit_lsn, time_us, previous_lsn, now_us))
            end = (len(rows.events), stamp, number(message.payload + 10, 8))
            ends.append(new_tuple(self.ended, end))
        else:
            del rows.events[before:]
            rows.size = size
        for counter in rows.touched:
            counter.events = 0
        return good

    cdef int boundary(self, uint64_t commit_lsn, int64_t time_us, bint begins) except -1:
        """BEGIN, or END with the counts."""
        cdef Text out = self.out
        cdef bint first = True
        cdef bytes key
        out.clear()
        out.put_bytes(b'{"id":"')
        out.put_text(self.id)
        out.put_bytes(b'"}')
        key = out.whole()
        out.clear()
        out.put_bytes(b'{"status":"BEGIN","id":"' if begins else b'{"status":"END","id":"')
        out.put_text(self.id)
        out.put_bytes(b'","ts_ms":')
        out.put_number(time_us // 1000)
        out.put_bytes(b',"commit_lsn":')
        out.put_number(commit_lsn)
        if begins:
            out.put_bytes(b',"event_count":null,"data_collections":null}')
        else:
            out.put_bytes(b',"event_count":')
            out.put_number(self.rows.total)
            out.put_bytes(b',"data_collections":[')
            for counter in self.rows.touched:
                out.put_bytes(b'{"data_collection":' if first else b',{"data_collection":')
                out.put_str(counter.name)
                out.put_bytes(b',"event_count":')
                out.put_number(counter.events)
                out.put_bytes(b"}")
                first = False
            out.put_bytes(b"]}")
        return self.rows.hold(
            new_event(self.event, self.topic, key, out.whole(), "", -1, 0, None, "")
        )

    cdef int write_head(
        self, uint64_t xid, uint64_t commit_lsn, int64_t time_us, uint64_t previous_lsn
    ) except -1:
        """As Envelope.begin."""
        cdef Text out = self.head
        out.clear()
        out.put_bytes(self.source)
        out.put_number(time_us // 1000)
        self.put_finer(out, time_us)
        out.put_bytes(self.source_db)
        out.put_number(xid)
        out.put_bytes(b',"xmin":null,"commit_lsn":')
        out.put_number(commit_lsn)
        out.put_bytes(self.source_timeline)
        out.put_number(previous_lsn)
        out.put_bytes(b'\\",\\"')
        self.id.clear()
        self.id.put_number(xid)
        self.id.put_bytes(b":")
        self.id.put_number(commit_lsn)
        self.order.clear()
        self.order.put_bytes(b'"transaction":{"id":"')
        self.order.put_text(self.id)
        return self.order.put_bytes(b'","total_order":')

    cdef int write_flat(
        self, uint64_t xid, uint64_t commit_lsn, int64_t time_us, int64_t now_us
    ) except -1:
        """As Fields.of_transaction."""
        cdef Text out = self.flat
        cdef bytes text
        cdef int kind
        out.clear()
        for text, kind in self.fields:
            out.put_bytes(text)
            if kind == COMMIT_LSN:
                out.put_number(commit_lsn)
            elif kind == XID:
                out.put_number(xid)
            elif kind == COMMIT_MS:
                out.put_number(time_us // 1000)
            elif kind == COMMIT_US:
                out.put_number(time_us)
            elif kind == COMMIT_NS:
                out.put_number(time_us * 1000)
            elif kind == ENCODED_MS:
                out.put_number(now_us // 1000)
            elif kind == ID:
                out.put_bytes(b'"')
                out.put_text(self.id)
                out.put_bytes(b'"')
        return 0

    cdef int write_tail(self, int64_t now_us) except -1:
        self.tail.clear()
        self.tail.put_bytes(b'"ts_ms":')
        self.tail.put_number(now_us // 1000)
        self.put_finer(self.tail, now_us)
        return self.tail.put_bytes(b"}")

    cdef int put_finer(self, Text out, int64_t time_us) except -1:
        out.put_bytes(b',"ts_us":')
        out.put_number(time_us)
        out.put_bytes(b',"ts_ns":')
        return out.put_number(time_us * 1000)


cdef inline uint64_t number(const uint8_t* text, int size):
    """Big-endian, `size` bytes."""
    cdef uint64_t found = 0
    cdef int index
    for index in range(size):
        found = found << 8 | text[index]
    return found
