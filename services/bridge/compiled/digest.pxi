# Of the sources that the module was built from (sources.py, setup.py).
cdef extern from *:
    const char* SOURCES_DIGEST

DIGEST = SOURCES_DIGEST.decode()
