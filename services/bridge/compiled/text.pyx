# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A growing text: services/bridge/compiled/text.pxd has its methods."""

from libc.stdlib cimport free, malloc

include "digest.pxi"


cdef class Text:
    def __cinit__(self):
        self.capacity = KEPT_BYTES
        self.buffer = <uint8_t*>malloc(self.capacity)
        if self.buffer == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.buffer)
