"""JSON text, read token by token: see scan.pyx. What is not as the bridge writes it is not read."""

from libc.stdint cimport int64_t, uint8_t

from services.bridge.compiled.text cimport Text

cdef struct Scan:
    const uint8_t* at
    const uint8_t* end


cdef inline bint taken(Scan* scan, uint8_t byte) noexcept nogil:
    """Whether `byte` came next; it is passed then."""
    if scan.at < scan.end and scan.at[0] == byte:
        scan.at += 1
        return True
    return False


cdef inline bint null(Scan* scan) noexcept nogil:
    """Whether null came next; it is passed then."""
    if scan.end - scan.at < 4 or scan.at[0] != b"n":
        return False
    if scan.at[1] != b"u" or scan.at[2] != b"l" or scan.at[3] != b"l":
        return False
    scan.at += 4
    return True

cdef int boolean(Scan* scan) noexcept nogil
cdef bint integer(Scan* scan, int64_t* number) noexcept nogil
cdef bint real(Scan* scan, double* number) except -1
cdef Py_ssize_t put_string(Scan* scan, Text out, int shift) except -2
cdef Py_ssize_t put_base64(Scan* scan, Text out, int shift) except -2
