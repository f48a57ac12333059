"""Functions of the libpq that psycopg has loaded, for the C extension (services.bridge.compiled).

psycopg's own call makes three objects for each message.
"""

import sys
from typing import Final

from psycopg import pq

from services.bridge.compiled import foreign


def address(connection: pq.abc.PGconn) -> int:
    """Return the address of libpq's connection, 0 if it is closed."""
    return getattr(connection, "pgconn_ptr", None) or 0


GET_COPY_DATA: Final = foreign.address(sys.modules[pq.PGconn.__module__], "PQgetCopyData")
"""0: psycopg has no C module of its own. Source: PostgreSQL documentation 32.10.2 "Functions for
Receiving COPY Data".
"""
