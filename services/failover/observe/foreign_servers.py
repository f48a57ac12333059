"""The foreign servers that subscriptions connect by (CREATE SUBSCRIPTION … SERVER).

Such a subscription has no connection string: libpq's options stand at the foreign server and at the
owner's user mapping. Source: PostgreSQL 19 documentation, CREATE SUBSCRIPTION, pg_foreign_server.
"""

from dataclasses import dataclass

from psycopg.pq import Conninfo as Options

from services.failover.model.conninfo import Conninfo
from services.postgres.server import Connection

_SINCE = 190000
"""pg_subscription has the column subserver since PostgreSQL 19."""


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """The foreign server of a subscription, with the options by which it connects."""

    name: str
    conninfo: Conninfo
    changeable: bool
    """We have its owner's rights."""


def read_foreign_servers(connection: Connection) -> dict[int, ForeignServer]:
    """Return the oid of each subscription that connects by a foreign server -> that server.

    Only those of the connected database: a foreign server is not visible from another one. A user
    mapping that our role may not read is left out, and its user and password with it.
    """
    if connection.info.server_version < _SINCE:
        return {}
    rows = connection.execute(
        """
        SELECT s.oid::bigint, f.srvname::text, coalesce(f.srvoptions, '{}'),
               coalesce((SELECT m.umoptions FROM pg_user_mappings m
                          WHERE m.srvid = f.oid AND m.umuser IN (s.subowner, 0)
                          ORDER BY m.umuser DESC LIMIT 1), '{}'),
               pg_has_role(f.srvowner, 'USAGE')
          FROM pg_subscription s JOIN pg_foreign_server f ON f.oid = s.subserver
         WHERE s.subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())
        """
    ).fetchall()
    return {
        oid: ForeignServer(name, _conninfo([*of_server, *of_user]), changeable)
        for oid, name, of_server, of_user, changeable in rows
    }


def _conninfo(options: list[str]) -> Conninfo:
    """Return the options that libpq knows, of texts such as `host=10.0.0.2`."""
    known = {option.keyword.decode() for option in Options.get_defaults()}
    pairs = (option.partition("=") for option in options)
    return Conninfo.of({key: value for key, _, value in pairs if key in known})
