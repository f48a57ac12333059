# cython: language_level=3, boundscheck=False, wraparound=False
"""Records out, many for one step of the interpreter: librdkafka's own functions are called."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from libc.stdint cimport int32_t
cimport cython

include "digest.pxi"

cdef enum:
    PARTITION_UA = -1
    MSG_F_COPY = 2

ctypedef void* (*TopicNew)(void* producer, const char* topic, void* settings) noexcept
ctypedef void (*TopicDestroy)(void* topic) noexcept
ctypedef int (*Produce)(
    void* topic, int32_t partition, int flags, void* value, size_t value_size,
    const void* key, size_t key_size, void* opaque,
) noexcept
ctypedef int32_t (*Partitioner)(
    const void* topic, const void* key, size_t key_size, int32_t partitions, void* settings,
    void* opaque,
) noexcept
"""rd_kafka_topic_new, rd_kafka_topic_destroy, rd_kafka_produce, rd_kafka_msg_partitioner_murmur2
(rdkafka.h)."""


@cython.no_gc_clear
cdef class Records:
    """`topics`: addresses by name. They end before the producer, which lives as long as this."""

    cdef object producer
    cdef void* handle
    cdef TopicNew topic_new
    cdef TopicDestroy topic_destroy
    cdef Produce produce
    cdef Partitioner partitioner
    cdef dict topics

    def __cinit__(
        self, producer, size_t handle, size_t topic_new, size_t topic_destroy, size_t produce,
        size_t partitioner,
    ):
        self.producer, self.handle, self.topics = producer, <void*>handle, {}
        self.topic_new, self.topic_destroy = <TopicNew>topic_new, <TopicDestroy>topic_destroy
        self.produce, self.partitioner = <Produce>produce, <Partitioner>partitioner

    def __dealloc__(self):
        for address in self.topics.values():
            self.topic_destroy(<void*><size_t>address)

    def send(self, list events, Py_ssize_t index, Py_ssize_t end, dict ready, set touched):
        cdef tuple event
        cdef int32_t partition
        cdef object name, known = None
        cdef void* topic = NULL
        while index < end:
            event = <tuple>events[index]
            name = event[0]
            if name is not known:
                topic = self.topic(name, ready)
                if topic == NULL:
                    break
                known = name
                touched.add(name)
            if event[3] is not None or event[4]:
                break
            partition = PARTITION_UA
            if event[8] is not None:
                partition = self.partition(event[8], ready[name])
            if not self.taken(topic, partition, event[1], event[2]):
                break
            index += 1
        return index

    cdef int32_t partition(self, bytes placed_by, int32_t partitions) except -1:
        """As services.bridge.sink.batch_produce.partition_of."""
        return self.partitioner(
            NULL, PyBytes_AS_STRING(placed_by), PyBytes_GET_SIZE(placed_by), partitions, NULL, NULL
        )

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
