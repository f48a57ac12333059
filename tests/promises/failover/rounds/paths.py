"""A proxy for each way from one taking part to another, so that each can be cut by itself.

manager ──► a, b, sub        bridge ──► a, b        client ──► a, b
standby, subscriber ──► a, b, once they were led there (`lead_standby`, `lead_subscriber`)
"""

from collections.abc import Mapping

from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.promises.failover.servers import ask
from tests.providers.databases import connect
from tests.providers.interface import Server
from tests.providers.proxy import Proxy
from tests.providers.waiting import eventually

WORKER = "SELECT pid FROM pg_stat_subscription WHERE last_msg_receipt_time IS NOT NULL"
ACTORS = ("manager", "standby", "subscriber", "bridge", "client")


class Paths:
    """All proxies; close it when done."""

    def __init__(self, servers: Mapping[str, Server]) -> None:
        self._servers = servers
        self._proxies = {
            (actor, name): Proxy(server.port)
            for actor in ACTORS
            for name, server in servers.items()
            if name != "sub" or actor == "manager"
        }

    def proxy(self, actor: str, name: str) -> Proxy:
        """The way from there to that server."""
        return self._proxies[actor, name]

    def ports_of(self, name: str) -> list[int]:
        """Where standbys and subscriptions are led to that node."""
        return [self.proxy(actor, name).port for actor in ("standby", "subscriber")]

    def heal(self) -> None:
        """Let everything through."""
        for proxy in self._proxies.values():
            proxy.heal()

    def close(self) -> None:
        """End all connections."""
        for proxy in self._proxies.values():
            proxy.close()

    def lead_standby(self, standby: str, primary: str) -> None:
        """Let the standby stream through its own proxy; return once it does."""
        server, port = self._servers[standby], self.proxy("standby", primary).port
        given = conninfo_to_dict(ask(server, "SHOW primary_conninfo"))
        given["port"] = str(port)
        changed = sql.Literal(make_conninfo("", **given))
        with connect(server) as connection:
            connection.execute(sql.SQL("ALTER SYSTEM SET primary_conninfo = {}").format(changed))
            connection.execute("SELECT pg_reload_conf()")
        streams = (
            "SELECT EXISTS (SELECT FROM pg_stat_wal_receiver"
            f" WHERE status = 'streaming' AND sender_port = {port})"
        )
        eventually(
            lambda: ask(server, streams), what=f"{standby} streams through its proxy", timeout_s=120
        )

    def lead_subscriber(self, dbname: str, primary: str) -> None:
        """Let the subscription s1 come through its own proxy; return once it does."""
        server, port = self._servers["sub"], self.proxy("subscriber", primary).port
        given = conninfo_to_dict(ask(server, "SELECT subconninfo FROM pg_subscription", dbname))
        given["port"] = str(port)
        changed = sql.Literal(make_conninfo("", **given))
        before = ask(server, WORKER, dbname)
        with connect(server, dbname) as connection:
            connection.execute(sql.SQL("ALTER SUBSCRIPTION s1 CONNECTION {}").format(changed))
        eventually(
            lambda: ask(server, WORKER, dbname) not in (None, before),
            what="the subscription comes through its proxy",
            timeout_s=120,
        )
