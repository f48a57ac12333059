"""Values' text forms as JSON, where that needs no Python: see forms.pyx."""

from libc.stdint cimport uint8_t

from services.bridge.compiled.text cimport Text

cdef bint put_form(Text out, int kind, const uint8_t* text, Py_ssize_t size) except -1
