"""Which server is behind an address that the settings do not name: an alias, a VIP, a service.

asked                                                            then
the resolver: the address is that of a node's conninfo           another name of that node
the server itself: a system identifier, and when it started      another name of that node, or
                                                                 of none of ours, or a stranger
nobody answers                                                   not known; never remembered

An answer counts for ANSWER_S: what an address leads to can change while a command runs.
"""

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from schemas.errors import SlotbridgeError
from services.failover.model.conninfo import DEFAULT_PORT, Conninfo, Endpoint
from services.failover.model.subscription import Subscription
from services.failover.model.view import Node, View
from services.failover.observe.provenance import read_provenance
from services.failover.observe.server_link import ServerLink, Unreachable
from services.postgres.server import Connection, read_server

ANSWER_S = 2.0
_UNSAFE = frozenset({"gssdelegation", "sslkeylogfile", "service", "servicefile"})
"""Keywords by which another's connection string would act on this machine."""
NewLink = Callable[[str, str], ServerLink]


@dataclass(frozen=True, slots=True)
class Answered:
    """Who answered: the cluster, the server, and by which of the hosts listed."""

    system: str
    started: str
    endpoint: Endpoint


class Publishers:
    """Asked by one thread at a time. `new_link(name, conninfo)` makes a link."""

    def __init__(self, new_link: NewLink, pool: ThreadPoolExecutor, timeout_s: float) -> None:
        self._new_link = new_link
        self._pool = pool
        self._timeout_s = timeout_s
        self._answers: dict[str, tuple[float, Answered]] = {}
        self._links: dict[str, ServerLink] = {}
        self._resolved: dict[Endpoint, tuple[float, frozenset[Endpoint]]] = {}

    def identify(self, view: View) -> View:
        """Return the view in which every address that leads to a node is one of that node's."""
        strange = [
            s for where in view.subscribers for s in where.subscriptions if self._odd(s, view)
        ]
        upstreams = [
            state.upstream
            for node in view.nodes
            if (state := node.state) is not None and node.standby and state.upstream is not None
        ]
        known = {end for node in view.nodes for end in node.endpoints}
        others = [found for found in upstreams if found.pairs and not found.names(known)]
        if not strange and not others:
            return view
        conninfos = {s.conninfo.text: s.conninfo for s in strange}
        conninfos |= {found.text: found for found in others}
        view = self._with_aliases(view, conninfos.values())
        strange = [s for s in strange if self._odd(s, view)]
        answers = self._ask({s.conninfo.text: s.conninfo for s in strange})
        return _identified(view, answers)

    def close(self) -> None:
        """Let go of all connections."""
        for link in self._links.values():
            link.close()

    def _odd(self, subscription: Subscription, view: View) -> bool:
        """Return whether the subscription leads to an unknown address that means one server."""
        known = any(subscription.conninfo.names(node.endpoints) for node in view.nodes)
        return not (known or subscription.private or subscription.foreign_system)

    def _with_aliases(self, view: View, conninfos: Iterable[Conninfo]) -> View:
        """Return the view with the names that resolve to a node's own address."""
        wanted = {end for found in conninfos for names in found.endpoints for end in names}
        resolved = self._resolve(wanted | {end for node in view.nodes for end in node.endpoints})

        def named(node: Node) -> Node:
            own = frozenset().union(*(resolved.get(end, frozenset()) for end in node.endpoints))
            more = {end for end in wanted if resolved.get(end, frozenset()) & own}
            return replace(node, endpoints=node.endpoints | more) if more else node

        return replace(view, nodes=tuple(map(named, view.nodes)))

    def _resolve(self, wanted: Iterable[Endpoint]) -> dict[Endpoint, frozenset[Endpoint]]:
        """Return the IP addresses of names, as far as the resolver answers in time."""
        now = time.monotonic()
        found = {end: kept[1] for end, kept in self._resolved.items() if now - kept[0] < ANSWER_S}
        asked = {self._pool.submit(_addresses, end): end for end in set(wanted) - set(found)}
        wait(asked, self._timeout_s)
        for future, end in asked.items():
            if future.done():
                found[end] = future.result()
                self._resolved[end] = (now, found[end])
        return found

    def _ask(self, conninfos: dict[str, Conninfo]) -> dict[str, Answered]:
        """Ask the servers at these addresses who they are; return the answers that came."""
        now = time.monotonic()
        found = {k: kept[1] for k, kept in self._answers.items() if now - kept[0] < ANSWER_S}
        wanted = {key: c for key, c in conninfos.items() if key not in found}
        asked: dict[str, Future[Answered | None]] = {
            key: self._pool.submit(self._who, key, conninfo) for key, conninfo in wanted.items()
        }
        for key, future in asked.items():
            answer = future.result()
            if answer is not None:
                found[key] = answer
                self._answers[key] = (now, answer)
        return found

    def _who(self, key: str, conninfo: Conninfo) -> Answered | None:
        """Ask who answers at a subscription's connection string; None where nobody does."""
        if conninfo.by_service:
            return None  # without its service it would lead to whoever is at the default address
        safe = Conninfo(tuple(pair for pair in conninfo.pairs if pair[0] not in _UNSAFE))
        if not safe.value("port"):
            safe = safe.with_value("port", DEFAULT_PORT)  # not that of our environment
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = self._new_link("a subscription's publisher", safe.text)
        try:
            return link.ask(_who)
        except (Unreachable, SlotbridgeError):
            return None
        finally:
            link.close()  # a kept connection would go on to whoever was there before


def _who(connection: Connection) -> Answered:
    info = connection.info
    return Answered(
        read_server(connection).system_identifier,
        read_provenance(connection).started,
        (info.host or info.hostaddr, str(info.port)),
    )


def _identified(view: View, answers: dict[str, Answered]) -> View:
    """Return the view with what the answers tell of subscriptions and of nodes' other names."""
    ours = {n.state.server.system_identifier for n in view.nodes if n.state is not None}

    def matched(subscription: Subscription) -> Subscription:
        answer = answers.get(subscription.conninfo.text)
        if answer is None or not ours or subscription.private:
            return subscription
        if answer.system not in ours:
            return replace(subscription, foreign_system=answer.system)
        return replace(subscription, identified=True)

    def named(node: Node) -> Node:
        if node.state is None:
            return node
        more = {
            answer.endpoint
            for answer in answers.values()
            if answer.system in ours and answer.started == node.state.provenance.started
        }
        return replace(node, endpoints=node.endpoints | more) if more else node

    return replace(
        view,
        nodes=tuple(map(named, view.nodes)),
        subscribers=tuple(
            replace(s, subscriptions=tuple(map(matched, s.subscriptions))) for s in view.subscribers
        ),
    )


def _addresses(endpoint: Endpoint) -> frozenset[Endpoint]:
    """Return the IP addresses of a name, each with its port; a socket has none."""
    host, port = endpoint
    if not host or host.startswith(("/", "@")):
        return frozenset()
    with contextlib.suppress(ValueError):
        return frozenset({(str(ipaddress.ip_address(host)), port)})
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return frozenset((str(item[4][0]), port) for item in found)
    return frozenset()
