"""Functions of the libpq that psycopg has loaded, for the compiled way (services.bridge.compiled).

psycopg's own call makes three objects for each message.
"""

import ctypes
import sys
from typing import Final

from psycopg import pq


def address(connection: pq.abc.PGconn) -> int:
    """Where libpq has the connection; 0: it is closed."""
    return getattr(connection, "pgconn_ptr", None) or 0


def _address(name: str) -> int:
    """Where the function is; 0: not found, as psycopg has no C module of its own."""
    try:
        library = ctypes.CDLL(sys.modules[pq.PGconn.__module__].__file__)
        return ctypes.cast(library[name], ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


GET_COPY_DATA: Final = _address("PQgetCopyData")
"""Source: PostgreSQL documentation 32.10.2 "Functions for Receiving COPY Data"."""
