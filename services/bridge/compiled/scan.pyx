# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""JSON text, read token by token, as services.bridge.events.formats.row_json reads it.

What is not as the bridge writes it (blanks, a lone surrogate, base64 with other characters, a
number that is not one) is not read: whoever called then asks Python's reader.
"""

from cpython.object cimport PyObject
from libc.math cimport INFINITY, NAN, isinf
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from services.bridge.compiled.text cimport Text

include "digest.pxi"

cdef extern from *:
    """
    #define SCAN_ONES 0x0101010101010101ULL
    #define SCAN_HIGHS 0x8080808080808080ULL
    """
    const uint64_t SCAN_ONES
    const uint64_t SCAN_HIGHS

cdef extern from "Python.h":
    double PyOS_string_to_double(const char* text, char** end, PyObject* overflow) except? -1.0

cdef enum:
    NUMBER_BYTES_MAX = 63
    DIGITS_MAX = 18
    INT64_DIGITS = 19
    POWER_MAX = 22
    NO_DIGIT = 255

cdef const char* SIGNS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
cdef double POWERS[POWER_MAX + 1]
cdef uint8_t BASE64[256]
cdef uint8_t HEX[256]
cdef uint64_t EXACT_MAX = 1 << 53
cdef uint64_t INT64_MOST = (<uint64_t>1 << 63) - 1


cdef int fill() except -1:
    """Make the tables: powers of ten that a double has exactly, and characters' values."""
    cdef int index
    for index in range(POWER_MAX + 1):
        POWERS[index] = float(10**index)
    for index in range(256):
        BASE64[index] = HEX[index] = NO_DIGIT
    for index in range(64):
        BASE64[<uint8_t>SIGNS[index]] = index
    for index in range(10):
        HEX[48 + index] = index
    for index in range(6):
        HEX[65 + index] = HEX[97 + index] = 10 + index
    return 0


fill()


cdef int boolean(Scan* scan) noexcept nogil:
    """0 or 1 of false or true, which is passed; else -1."""
    if scan.end - scan.at >= 4 and not memcmp(scan.at, <const char*>b"true", 4):
        scan.at += 4
        return 1
    if scan.end - scan.at >= 5 and not memcmp(scan.at, <const char*>b"false", 5):
        scan.at += 5
        return 0
    return -1


cdef bint integer(Scan* scan, int64_t* number) noexcept nogil:
    """Whether a number of 64 bits came next, or the beginning of one with a fraction."""
    cdef const uint8_t* at = scan.at
    cdef bint negative = at < scan.end and at[0] == b"-"
    cdef uint64_t found = 0
    at += negative
    cdef const uint8_t* since = at
    while at < scan.end and b"0" <= at[0] <= b"9":
        found = found * 10 + at[0] - 48
        at += 1
    if at == since or at - since > INT64_DIGITS or (since[0] == b"0" and at - since > 1):
        return False
    if found > INT64_MOST + negative or (negative and not found):
        return False
    number[0] = <int64_t>(0 - found if negative else found)
    scan.at = at
    return True


cdef bint real(Scan* scan, double* number) except -1:
    """Whether a number came next, or the text of one that JSON lacks, as float() takes both."""
    cdef const uint8_t* at = scan.at
    cdef Py_ssize_t size = scan.end - at
    if size and at[0] == b'"':
        if size >= 5 and not memcmp(at, <const char*>b'"NaN"', 5):
            number[0] = NAN
            scan.at += 5
        elif size >= 10 and not memcmp(at, <const char*>b'"Infinity"', 10):
            number[0] = INFINITY
            scan.at += 10
        elif size >= 11 and not memcmp(at, <const char*>b'"-Infinity"', 11):
            number[0] = -INFINITY
            scan.at += 11
        else:
            return False
        return True
    return finite(scan, number)


cdef bint finite(Scan* scan, double* number) except -1:
    cdef const uint8_t* at = scan.at
    cdef const uint8_t* since
    cdef bint negative = at < scan.end and at[0] == b"-", minus
    cdef uint64_t digits = 0
    cdef int power = 0, written = 0
    cdef Py_ssize_t size
    cdef char text[NUMBER_BYTES_MAX + 1]
    at += negative
    since = at
    while at < scan.end and b"0" <= at[0] <= b"9":
        digits = digits * 10 + at[0] - 48
        at += 1
    if at == since or (since[0] == b"0" and at - since > 1):
        return False
    size = at - since
    if at < scan.end and at[0] == b".":
        at += 1
        since = at
        while at < scan.end and b"0" <= at[0] <= b"9":
            digits = digits * 10 + at[0] - 48
            at += 1
        if at == since:
            return False
        if at - since > NUMBER_BYTES_MAX:
            return False
        size += at - since
        power = -<int>(at - since)
    if at < scan.end and (at[0] == b"e" or at[0] == b"E"):
        at += 1
        minus = at < scan.end and at[0] == b"-"
        at += minus or (at < scan.end and at[0] == b"+")
        since = at
        while at < scan.end and b"0" <= at[0] <= b"9":
            if at - since < 4:
                written = written * 10 + at[0] - 48
            at += 1
        if at == since or at - since > 4:
            return False
        power += -written if minus else written
    if at - scan.at > NUMBER_BYTES_MAX:
        return False
    if size <= DIGITS_MAX and digits <= EXACT_MAX and -POWER_MAX <= power <= POWER_MAX:
        # Both are exact as doubles, so that one operation rounds as it should.
        number[0] = digits / POWERS[-power] if power < 0 else digits * POWERS[power]
        if negative:
            number[0] = -number[0]
    else:
        size = at - scan.at
        memcpy(text, scan.at, size)
        text[size] = 0
        number[0] = PyOS_string_to_double(text, NULL, NULL)
        if isinf(number[0]):
            return False
    scan.at = at
    return True


cdef Py_ssize_t put_string(Scan* scan, Text out, int shift) except -2:
    """Put a JSON string's UTF-8 behind its size, shifted to the left; return the size, or -1."""
    cdef const uint8_t* at
    cdef Py_ssize_t begin
    if not taken(scan, b'"'):
        return -1
    at = scan.at
    pass_plain(scan)
    if taken(scan, b'"'):
        out.put_varint(<uint64_t>(scan.at - 1 - at) << shift)
        out.put(at, scan.at - 1 - at)
        return scan.at - 1 - at
    begin = out.open()
    out.put(at, scan.at - at)
    while taken(scan, b"\\"):
        if not put_escaped(scan, out):
            return -1
        at = scan.at
        pass_plain(scan)
        out.put(at, scan.at - at)
    if not taken(scan, b'"'):
        return -1
    cdef Py_ssize_t size = out.size - begin
    out.close(begin, <uint64_t>size << shift)
    return size


cdef int pass_plain(Scan* scan) noexcept nogil:
    """Pass what stands for itself in a JSON string; eight bytes at once if it may."""
    cdef uint64_t word
    cdef uint8_t byte
    while scan.end - scan.at >= 8:
        memcpy(&word, scan.at, 8)
        if (
            (word - 32 * SCAN_ONES) & ~word & SCAN_HIGHS
            | zero_byte_in(word ^ (34 * SCAN_ONES))
            | zero_byte_in(word ^ (92 * SCAN_ONES))
        ):
            break
        scan.at += 8
    while scan.at < scan.end:
        byte = scan.at[0]
        if byte < 32 or byte == b'"' or byte == b"\\":
            break
        scan.at += 1
    return 0


cdef inline uint64_t zero_byte_in(uint64_t word) noexcept nogil:
    return (word - SCAN_ONES) & ~word & SCAN_HIGHS


cdef bint put_escaped(Scan* scan, Text out) except -1:
    """Whether what follows a backslash was put."""
    cdef uint8_t byte
    cdef uint32_t code, low
    cdef uint8_t utf8[4]
    if scan.at == scan.end:
        return False
    byte = scan.at[0]
    scan.at += 1
    if byte == b"n":
        byte = 10
    elif byte == b"t":
        byte = 9
    elif byte == b"r":
        byte = 13
    elif byte == b"b":
        byte = 8
    elif byte == b"f":
        byte = 12
    elif byte == b"u":
        if not hex_digits(scan, &code) or 0xDC00 <= code < 0xE000:
            return False
        if 0xD800 <= code < 0xDC00:
            if not (taken(scan, b"\\") and taken(scan, b"u") and hex_digits(scan, &low)):
                return False
            if not 0xDC00 <= low < 0xE000:
                return False
            code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00))
        out.put(utf8, encoded(utf8, code))
        return True
    elif byte != b'"' and byte != b"\\" and byte != b"/":
        return False
    out.put_byte(byte)
    return True


cdef bint hex_digits(Scan* scan, uint32_t* code) noexcept nogil:
    """Whether four of them came next."""
    cdef int index
    code[0] = 0
    if scan.end - scan.at < 4:
        return False
    for index in range(4):
        if HEX[scan.at[index]] == NO_DIGIT:
            return False
        code[0] = code[0] << 4 | HEX[scan.at[index]]
    scan.at += 4
    return True


cdef int encoded(uint8_t* to, uint32_t code) noexcept nogil:
    """How many bytes of UTF-8 a character has, which are put there."""
    if code < 0x80:
        to[0] = code
        return 1
    if code < 0x800:
        to[0] = 0xC0 | code >> 6
        to[1] = 0x80 | code & 63
        return 2
    if code < 0x10000:
        to[0] = 0xE0 | code >> 12
        to[1] = 0x80 | code >> 6 & 63
        to[2] = 0x80 | code & 63
        return 3
    to[0] = 0xF0 | code >> 18
    to[1] = 0x80 | code >> 12 & 63
    to[2] = 0x80 | code >> 6 & 63
    to[3] = 0x80 | code & 63
    return 4


cdef Py_ssize_t put_base64(Scan* scan, Text out, int shift) except -2:
    """Put the bytes of base64 behind their count, shifted to the left; return the count, or -1."""
    cdef const uint8_t* at
    cdef uint8_t* to
    cdef uint32_t word
    cdef Py_ssize_t signs, index, size
    cdef int padding = 0
    if not taken(scan, b'"'):
        return -1
    at = scan.at
    while scan.at < scan.end and BASE64[scan.at[0]] != NO_DIGIT:
        scan.at += 1
    signs = scan.at - at
    while padding < 2 and taken(scan, b"="):
        padding += 1
    if not taken(scan, b'"') or (signs + padding) % 4:
        return -1
    size = signs * 3 // 4
    out.put_varint(<uint64_t>size << shift)
    out.grow(size + 3)
    to = out.buffer + out.size
    for index in range(signs // 4):
        word = (
            <uint32_t>BASE64[at[0]] << 18 | <uint32_t>BASE64[at[1]] << 12
            | <uint32_t>BASE64[at[2]] << 6 | BASE64[at[3]]
        )
        to[0], to[1], to[2] = word >> 16, word >> 8 & 255, word & 255
        to += 3
        at += 4
    if padding:
        word = <uint32_t>BASE64[at[0]] << 18 | <uint32_t>BASE64[at[1]] << 12
        if padding == 1:
            word |= <uint32_t>BASE64[at[2]] << 6
        to[0], to[1] = word >> 16, word >> 8 & 255
    out.size += size
    return size
