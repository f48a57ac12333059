# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Values' text forms as JSON: those that are as usual, of the kinds that most columns have.

What is unusual (infinity, BC, a year of five digits, no text form at all) is left to the encoder of
the type (services.bridge.events.values), which gives the same for what is taken here.
"""

from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy

from services.bridge.compiled.text cimport Text

include "digest.pxi"

cdef extern from *:
    """
    #define ONES 0x0101010101010101ULL
    #define HIGHS 0x8080808080808080ULL
    """
    const uint64_t ONES
    const uint64_t HIGHS

cdef enum:
    STRING = 1
    INTEGER = 2
    BOOLEAN = 3
    FLOATING = 4
    INSTANT = 5
    TIMESTAMP = 6
    DATE = 7
    INSTANT_BYTES = 29
    DATE_BYTES = 10
    WHOLE_DIGITS_MAX = 100
    STRING_BYTES_MAX = 1048576

KINDS = {
    "string": STRING,
    "integer": INTEGER,
    "boolean": BOOLEAN,
    "floating": FLOATING,
    "instant": INSTANT,
    "timestamp": TIMESTAMP,
    "date": DATE,
}
cdef const char* HEX = b"0123456789abcdef"


cdef bint put_form(Text out, int kind, const uint8_t* text, Py_ssize_t size) except -1:
    """Whether the value was put. Raises UnicodeDecodeError, with something put."""
    cdef bint negative
    if kind == STRING:
        if size > STRING_BYTES_MAX:
            return False
        put_string(out, text, size)
        return True
    if kind == INTEGER:
        negative = size > 0 and text[0] == b"-"
        if all_digits(text + negative, size - negative):
            out.put(text, size)
            return True
    elif kind == BOOLEAN:
        if size == 1 and (text[0] == b"t" or text[0] == b"f"):
            out.put_bytes(b"true" if text[0] == b"t" else b"false")
            return True
    elif kind == FLOATING:
        if is_plain_float(text, size):
            out.put(text, size)
            return True
    elif kind == INSTANT:
        if size == INSTANT_BYTES and is_date(text) and text[10] == b" " and is_clock(text + 11):
            if text[19] == b"." and all_digits(text + 20, 6) and not memcmp(text + 26, "+00", 3):
                out.put_bytes(b'"')
                out.put(text, DATE_BYTES)
                out.put_bytes(b"T")
                out.put(text + 11, 15)
                out.put_bytes(b'Z"')
                return True
    elif kind == TIMESTAMP:
        return put_timestamp(out, text, size)
    elif kind == DATE:
        if size == DATE_BYTES and is_date(text):
            out.put_number(days(text))
            return True
    return False


cdef int put_string(Text out, const uint8_t* text, Py_ssize_t size) except -1:
    """As json.encoder.encode_basestring of what must be UTF-8; eight bytes at once if it may."""
    cdef uint64_t word
    cdef uint8_t byte
    cdef Py_ssize_t at = 0
    cdef bint ascii = True
    out.grow(6 * size + 2)
    cdef uint8_t* to = out.buffer + out.size
    to[0] = b'"'
    to += 1
    while at < size:
        while at + 8 <= size:
            memcpy(&word, text + at, 8)
            if word & HIGHS:
                ascii = False
            if (
                (word - 32 * ONES) & ~word & HIGHS
                | zero_byte_in(word ^ (34 * ONES))
                | zero_byte_in(word ^ (92 * ONES))
            ):
                break
            memcpy(to, &word, 8)
            to += 8
            at += 8
        if at >= size:
            break
        byte = text[at]
        at += 1
        if byte >= 128:
            ascii = False
        if byte >= 32 and byte != b'"' and byte != b"\\":
            to[0] = byte
            to += 1
        else:
            to = escaped(to, byte)
    if not ascii:
        PyUnicode_DecodeUTF8(<char*>text, size, NULL)
    to[0] = b'"'
    out.size = to + 1 - out.buffer
    return 0


cdef inline uint64_t zero_byte_in(uint64_t word) noexcept nogil:
    return (word - ONES) & ~word & HIGHS


cdef uint8_t* escaped(uint8_t* to, uint8_t byte) noexcept nogil:
    cdef uint8_t short_form = byte
    if byte == 8:
        short_form = b"b"
    elif byte == 9:
        short_form = b"t"
    elif byte == 10:
        short_form = b"n"
    elif byte == 12:
        short_form = b"f"
    elif byte == 13:
        short_form = b"r"
    elif byte < 32:
        memcpy(to, <const char*>b"\\u00", 4)
        to[4] = HEX[byte >> 4]
        to[5] = HEX[byte & 15]
        return to + 6
    to[0] = b"\\"
    to[1] = short_form
    return to + 2


cdef bint put_timestamp(Text out, const uint8_t* text, Py_ssize_t size) except -1:
    """Microseconds since 1970 of YYYY-MM-DD HH:MM:SS[.ffffff]."""
    cdef int64_t since, fraction = 0
    cdef Py_ssize_t digits
    if size < 19 or not is_date(text) or text[10] != b" " or not is_clock(text + 11):
        return False
    if size > 19:
        if size < 21 or size > 26 or text[19] != b"." or not all_digits(text + 20, size - 20):
            return False
        fraction = number(text + 20, size - 20)
        for digits in range(size - 20, 6):
            fraction *= 10
    since = number(text + 11, 2) * 3600 + number(text + 14, 2) * 60 + number(text + 17, 2)
    out.put_number((days(text) * 86400 + since) * 1000000 + fraction)
    return True


cdef inline bint digit(uint8_t byte) noexcept nogil:
    return b"0" <= byte <= b"9"


cdef inline bint all_digits(const uint8_t* text, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t index
    for index in range(size):
        if not digit(text[index]):
            return False
    return size > 0


cdef inline int64_t number(const uint8_t* text, Py_ssize_t size) noexcept nogil:
    cdef int64_t found = 0
    cdef Py_ssize_t index
    for index in range(size):
        found = found * 10 + text[index] - 48
    return found


cdef bint is_date(const uint8_t* text) noexcept nogil:
    """YYYY-MM-DD, not of the year 0000."""
    return (
        all_digits(text, 4) and text[4] == b"-" and all_digits(text + 5, 2) and text[7] == b"-"
        and all_digits(text + 8, 2) and number(text, 4) > 0
    )


cdef int64_t days(const uint8_t* text) noexcept nogil:
    """Since 1970-01-01, as services.bridge.events.values.datetimes has it."""
    cdef int64_t year = number(text, 4), month = number(text + 5, 2), day = number(text + 8, 2)
    if month <= 2:
        year -= 1
    cdef int64_t era = year // 400, of_era = year % 400
    cdef int64_t of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468


cdef bint is_clock(const uint8_t* text) noexcept nogil:
    """HH:MM:SS."""
    return (
        all_digits(text, 2) and text[2] == b":" and all_digits(text + 3, 2) and text[5] == b":"
        and all_digits(text + 6, 2)
    )


cdef bint is_plain_float(const uint8_t* text, Py_ssize_t size) noexcept nogil:
    """-1.5e-07 and the like, far from where a double ends."""
    cdef Py_ssize_t at = size > 0 and text[0] == b"-", since
    since = at
    while at < size and digit(text[at]):
        at += 1
    if at == since or at - since > WHOLE_DIGITS_MAX:
        return False
    if at < size and text[at] == b".":
        since = at + 1
        at = since
        while at < size and digit(text[at]):
            at += 1
        if at == since:
            return False
    if at < size and text[at] == b"e":
        at += 1
        if at < size and (text[at] == b"+" or text[at] == b"-"):
            at += 1
        since = at
        while at < size and digit(text[at]):
            at += 1
        if at == since or at - since > 2:
            return False
    return at == size
