"""Connection strings as libpq reads them, with what it takes from elsewhere."""

from typing import Final

import psycopg
from psycopg import pq

_UNRESOLVED: Final = "unresolved"


def resolved(conninfo: str) -> dict[str, str]:
    """Return all parameters of a connection string, but target_session_attrs.

    Also those of its service file and of the environment; without what is libpq's own default. The
    host of a default socket is its folder. Raise psycopg.ProgrammingError for a text that libpq
    does not take, and a service that no file defines.

    Only a beginning connection reads the file. With a value that libpq refuses nothing is asked.
    """
    text = psycopg.conninfo.make_conninfo(conninfo, target_session_attrs=_UNRESOLVED)
    attempt = pq.PGconn.connect_start(text.encode())
    try:
        known = {
            one.keyword.decode(): one.val.decode()
            for one in attempt.info
            if one.val and (one.val != one.compiled or one.keyword == b"port")
        }
        if known.pop("target_session_attrs", "") != _UNRESOLVED:
            raise psycopg.ProgrammingError(attempt.get_error_message())
        if not (known.get("host") or known.get("hostaddr")):
            known["host"] = attempt.host.decode()
    finally:
        attempt.finish()
    known.pop("service", None)
    return known
