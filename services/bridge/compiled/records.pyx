# cython: language_level=3, boundscheck=False, wraparound=False
"""Records out, many for one step of the interpreter: librdkafka's own functions are called."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint8_t, uint32_t
cimport cython

from services.bridge.compiled.event cimport (
    EVENT_BROADCAST,
    EVENT_HEADERS,
    EVENT_KEY,
    EVENT_PLACED_BY,
    EVENT_TOPIC,
    EVENT_VALUE,
)

include "digest.pxi"

cdef enum:
    PARTITION_UA = -1
    MSG_F_COPY = 2
    VTYPE_RKT = 2
    VTYPE_PARTITION = 3
    VTYPE_VALUE = 4
    VTYPE_KEY = 5
    VTYPE_MSGFLAGS = 7
    VTYPE_HEADER = 9
    FIXED = 5
    HEADERS_MAX = 32

cdef struct Memory:
    const char* data
    size_t size

cdef struct Header:
    const char* name
    const char* value
    Py_ssize_t size

cdef union Content:
    void* topic
    int number
    int32_t partition
    Memory memory
    Header header
    char pad[64]

cdef struct Argument:
    int kind
    Content content

ctypedef void* (*TopicNew)(void* producer, const char* topic, void* settings) noexcept
ctypedef void (*TopicDestroy)(void* topic) noexcept
ctypedef int (*Produce)(
    void* topic, int32_t partition, int flags, void* value, size_t value_size,
    const void* key, size_t key_size, void* opaque,
) noexcept
ctypedef void* (*ProduceArguments)(void* producer, const Argument* items, size_t count) noexcept
ctypedef void (*ErrorDestroy)(void* error) noexcept
"""rd_kafka_topic_new, rd_kafka_topic_destroy, rd_kafka_produce, rd_kafka_produceva,
rd_kafka_error_destroy; Argument is rd_kafka_vu_t (rdkafka.h)."""


cdef uint32_t POSITIVE = 0x7fffffff, FACTOR = 0x5bd1e995, SEED = 0x9747b28c


cpdef uint32_t murmur2(bytes text) noexcept:
    """As services.bridge.sink.batch_produce.murmur2."""
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(text)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(text), at
    cdef uint32_t word, found = SEED ^ <uint32_t>size
    for at in range(0, size - 3, 4):
        word = data[at] | data[at + 1] << 8 | data[at + 2] << 16 | <uint32_t>data[at + 3] << 24
        word *= FACTOR
        found = found * FACTOR ^ (word ^ word >> 24) * FACTOR
    if size % 4:
        word = 0
        for at in range(size - 1, size - size % 4 - 1, -1):
            word = word << 8 | data[at]
        found = (found ^ word) * FACTOR
    found = (found ^ found >> 13) * FACTOR
    return found ^ found >> 15


@cython.no_gc_clear
cdef class Records:
    """`topics`: addresses by name. They end before the producer, which lives as long as this."""

    cdef object producer
    cdef void* handle
    cdef TopicNew topic_new
    cdef TopicDestroy topic_destroy
    cdef Produce produce
    cdef ProduceArguments produce_arguments
    cdef ErrorDestroy error_destroy
    cdef dict topics

    def __cinit__(
        self, producer, size_t handle, size_t topic_new, size_t topic_destroy, size_t produce,
        size_t produce_arguments, size_t error_destroy,
    ):
        self.producer, self.handle, self.topics = producer, <void*>handle, {}
        self.topic_new, self.topic_destroy = <TopicNew>topic_new, <TopicDestroy>topic_destroy
        self.produce = <Produce>produce
        self.produce_arguments = <ProduceArguments>produce_arguments
        self.error_destroy = <ErrorDestroy>error_destroy

    def __dealloc__(self):
        for address in self.topics.values():
            self.topic_destroy(<void*><size_t>address)

    def send(self, list events, Py_ssize_t index, Py_ssize_t end, dict ready, set touched):
        cdef tuple event
        cdef int32_t partition
        cdef object name, placed_by, known = None
        cdef bytes key, value
        cdef void* topic = NULL
        while index < end:
            event = <tuple>events[index]
            name, placed_by = event[EVENT_TOPIC], event[EVENT_PLACED_BY]
            if name is not known:
                topic = self.topic(name, ready)
                if topic == NULL:
                    break
                known = name
                touched.add(name)
            if event[EVENT_BROADCAST]:
                break
            partition = PARTITION_UA
            if type(placed_by) is int:
                if not 0 <= placed_by < ready[name]:
                    break
                partition = placed_by
            elif placed_by is not None:
                partition = (murmur2(placed_by) & POSITIVE) % <uint32_t>ready[name]
            key, value = event[EVENT_KEY], event[EVENT_VALUE]
            if event[EVENT_HEADERS] is not None:
                if not self.taken_whole(topic, partition, key, value, event[EVENT_HEADERS]):
                    break
            elif not self.taken(topic, partition, key, value):
                break
            index += 1
        return index

    cdef bint taken(self, void* topic, int32_t partition, bytes key, bytes value) except -1:
        cdef char* key_text = NULL
        cdef char* value_text = NULL
        cdef Py_ssize_t key_size = 0, value_size = 0
        if key is not None:
            key_text, key_size = PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
        if value is not None:
            value_text, value_size = PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value)
        return not self.produce(
            topic, partition, MSG_F_COPY, value_text, value_size, key_text, key_size, NULL
        )

    cdef bint taken_whole(
        self, void* topic, int32_t partition, bytes key, bytes value, list headers
    ) except -1:
        """As `taken`, with headers; False: there are too many of them for this way."""
        cdef Argument[FIXED + HEADERS_MAX] items
        cdef Argument* item = items
        cdef list kept = []  # librdkafka copies them
        cdef bytes text
        cdef void* error
        if len(headers) > HEADERS_MAX:
            return False
        item.kind, item.content.topic = VTYPE_RKT, topic
        item += 1
        item.kind, item.content.partition = VTYPE_PARTITION, partition
        item += 1
        item.kind, item.content.number = VTYPE_MSGFLAGS, MSG_F_COPY
        item += 1
        item.kind = VTYPE_VALUE
        item.content.memory.data = NULL if value is None else PyBytes_AS_STRING(value)
        item.content.memory.size = 0 if value is None else PyBytes_GET_SIZE(value)
        item += 1
        item.kind = VTYPE_KEY
        item.content.memory.data = NULL if key is None else PyBytes_AS_STRING(key)
        item.content.memory.size = 0 if key is None else PyBytes_GET_SIZE(key)
        item += 1
        for name, content in headers:
            text = (<str>name).encode()
            kept.append(text)
            item.kind, item.content.header.name = VTYPE_HEADER, PyBytes_AS_STRING(text)
            item.content.header.value, item.content.header.size = NULL, 0
            if content is not None:
                text = (<str>content).encode() if type(content) is str else <bytes>content
                kept.append(text)
                item.content.header.value = PyBytes_AS_STRING(text)
                item.content.header.size = PyBytes_GET_SIZE(text)
            item += 1
        error = self.produce_arguments(self.handle, items, item - items)
        if error != NULL:
            self.error_destroy(error)
        return error == NULL

    cdef void* topic(self, str name, dict ready) except? NULL:
        """NULL: it is not ready."""
        cdef PyObject* found = PyDict_GetItem(self.topics, name)
        cdef void* topic
        if found != NULL:
            return <void*><size_t><object>found
        if name not in ready:
            return NULL
        topic = self.topic_new(self.handle, name.encode(), NULL)
        if topic != NULL:
            self.topics[name] = <size_t>topic
        return topic
