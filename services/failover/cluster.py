"""The pair and its subscribers, observed: every server asked at the same time, into one View.

Consumers are read before the standbys' WAL positions: read the other way round, a pair under load
would look as if consumers were ahead of the standby.
"""

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

import psycopg
from pydantic import SecretStr

from schemas.errors import ExitCode, SettingsError, SetupError
from schemas.lsn import parse_lsn
from schemas.settings import FailoverSettings, StandbySettings
from services import slots
from services.failover.address import SECRETS, Address, Conninfo, Endpoint
from services.failover.bridging import Bridge
from services.failover.checks.registry import SETTINGS
from services.failover.links import Link, Unreachable, parse_conninfo, with_service
from services.failover.machine import machine_of
from services.failover.replication import read_replication
from services.failover.sessions import sessions_before_reload
from services.failover.subscriptions import (
    SubscriptionRow,
    may_read_subscriptions,
    read_subscriptions,
)
from services.failover.surroundings import Surroundings, may_look, read_surroundings
from services.failover.view import FENCE, Node, NodeState, Reach, Subscriber, Subscription, View
from services.slots import Connection, SettingValue

_VERSION_MIN = 170000


class Cluster:
    """All servers of the settings, and the bridge where they have one."""

    def __init__(self, settings: FailoverSettings, bridge: Bridge | None = None) -> None:
        _require_nodes("advertised", settings.advertised, settings)
        _require_nodes("machines", settings.machines, settings)
        _require_nodes("standbys", settings.standbys, settings)
        _require_nodes(
            "standbys.*.follows",
            filter(None, (standby.follows for standby in settings.standbys.values())),
            settings,
        )
        self._standbys = settings.standbys
        self._timeout_s = settings.connect_timeout_s
        self._deadline_s = settings.step_deadline_ms / 1000
        self.rejoin_deadline_s = settings.rejoin_deadline_ms / 1000
        given = settings.replication
        self.replication = (
            parse_conninfo(given.get_secret_value(), subject="failover.replication")
            if given is not None
            else None
        )
        """As which role a standby streams, where no server tells it."""
        self.nodes = {n: self._configured(n, c) for n, c in settings.nodes.items()}
        self.subscribers = {n: self._configured(n, c) for n, c in settings.subscribers.items()}
        self._places = {
            name: _place(link.conninfo, settings.advertised.get(name, ""), name)
            for name, link in self.nodes.items()
        }
        self.machines = {
            name: machine_of(name, given, self.nodes[name].conninfo.address)
            for name, given in settings.machines.items()
        }
        self.bridge = bridge
        self._bridge_slot = bridge.slot if bridge is not None else None
        self._systems: dict[str, str] = {}
        servers = len(self.nodes) + len(self.subscribers)
        self._pool = ThreadPoolExecutor(servers, thread_name_prefix="observe")

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        for link in (*self.nodes.values(), *self.subscribers.values()):
            link.close()

    def observe(self) -> View:
        """Ask every server. Raises SetupError where one answers but our role may not look."""
        nodes = self._pool.map(self._observe_node, self.nodes)
        subscribers = self._pool.map(self._observe_subscriber, self.subscribers)
        url = self.bridge.control_url if self.bridge is not None else ""
        view = View(tuple(nodes), tuple(subscribers), self._bridge_slot, bridge_url=url)
        view = self._with_systems(view)
        return replace(view, nodes=tuple(self._pool.map(self._with_received, view.nodes)))

    @contextlib.contextmanager
    def in_database(self, name: str, dbname: str) -> Iterator[Link]:
        """A link of its own to a node's database."""
        conninfo = self.nodes[name].conninfo
        pairs = (*((k, v) for k, v in conninfo.pairs if k != "dbname"), ("dbname", dbname))
        link = self._link(name, Conninfo(pairs).text)
        try:
            yield link
        finally:
            link.close()

    def address(self, name: str) -> Address:
        """Where others reach a node."""
        return self._places[name][0]

    def endpoints(self, name: str) -> frozenset[Endpoint]:
        """Every (host, port) by which the settings know a node."""
        return self._places[name][1]

    def survey(self) -> View:
        """As `observe`, with what only `check` asks. Raises SetupError where our role sees less."""
        view = self.observe()
        return replace(view, nodes=tuple(self._pool.map(self._with_surroundings, view.nodes)))

    def _configured(self, name: str, conninfo: SecretStr) -> Link:
        return self._link(name, with_service(conninfo.get_secret_value(), subject=name))

    def _link(self, name: str, conninfo: str) -> Link:
        return Link(name, conninfo, connect_timeout_s=self._timeout_s, deadline_s=self._deadline_s)

    def _observe_node(self, name: str) -> Node:
        address, endpoints = self._places[name]
        machine = self.machines.get(name)
        given = self._standbys.get(name, StandbySettings())
        policy = (given.follows, given.failover_priority, given.synchronized)
        try:
            state = self.nodes[name].ask(lambda connection: self._state(connection, name))
        except Unreachable as error:
            return Node(name, address, endpoints, error.reach, error.detail, None, machine, *policy)
        return Node(name, address, endpoints, Reach.ANSWERS, "", state, machine, *policy)

    def _state(self, connection: Connection, name: str) -> NodeState:
        server = slots.read_server(connection)
        _require_version(server.version, name)
        replication = read_replication(connection)
        history = None if server.in_recovery else slots.read_history(connection, server.timeline)
        settings = slots.read_settings(connection, [*SETTINGS, "primary_conninfo", FENCE])
        upstream = settings.pop("primary_conninfo", None)
        return NodeState(
            server=server,
            replication=replication,
            settings=settings,
            slots=tuple(slots.read_slots(connection)),
            origins=_origins(connection) if self._bridge_slot else {},
            upstream=_without_secrets(upstream.value, name) if upstream else None,
            switch_lsn=_switch(history),
            early_sessions=sessions_before_reload(connection),
        )

    def _observe_subscriber(self, name: str) -> Subscriber:
        try:
            return self.subscribers[name].ask(lambda connection: _subscriber(connection, name))
        except Unreachable as error:
            return Subscriber(name, error.reach, error.detail, False, ())

    def _with_received(self, node: Node) -> Node:
        """The node with what WAL it has now, after its consumers were read."""
        if node.state is None or not node.state.server.in_recovery:
            return node
        try:
            received = self.nodes[node.name].ask(slots.read_received)
        except Unreachable as error:
            return replace(node, reach=error.reach, detail=error.detail, state=None)
        newer = replace(node.state.replication, received_lsn=received)
        return replace(node, state=replace(node.state, replication=newer)) if received else node

    def _with_surroundings(self, node: Node) -> Node:
        if node.state is None:
            return node
        try:
            around, upstream = self.nodes[node.name].ask(lambda c: _look(c, node.name))
        except Unreachable as error:
            return replace(node, reach=error.reach, detail=error.detail, state=None)
        settings = node.state.settings
        if upstream is not None and around.upstream is not None:
            masked = SettingValue(around.upstream.masked, upstream.source)
            settings = {**settings, "primary_conninfo": masked}
        return replace(node, state=replace(node.state, settings=settings, surroundings=around))

    def _with_systems(self, view: View) -> View:
        """Ask where subscriptions lead that lead to none of the known addresses."""
        known = {end for node in view.nodes for end in node.endpoints}
        ours = {n.state.server.system_identifier for n in view.nodes if n.state is not None}

        def identified(subscription: Subscription) -> Subscription:
            if subscription.conninfo.names(known):
                return subscription
            system = self._system_at(subscription.conninfo)
            return replace(subscription, foreign_system="" if system in ours else system)

        return replace(
            view,
            subscribers=tuple(
                replace(s, subscriptions=tuple(map(identified, s.subscriptions)))
                for s in view.subscribers
            ),
        )

    def _system_at(self, conninfo: Conninfo) -> str:
        """The system_identifier that answers there, "" where nothing does; asked once a run."""
        key = conninfo.text
        if key not in self._systems:
            link = self._link("a subscription's publisher", key)
            try:
                self._systems[key] = link.ask(slots.read_server).system_identifier
            except (Unreachable, SetupError):
                self._systems[key] = ""
            finally:
                link.close()
        return self._systems[key]


def _require_nodes(key: str, names: Iterable[str], settings: FailoverSettings) -> None:
    unknown = set(names) - set(settings.nodes)
    if unknown:
        raise SettingsError(
            f"failover.{key} names {', '.join(sorted(unknown))}, which is no node",
            operation="read settings",
            hint="use the names of failover.nodes",
        )


def _look(connection: Connection, name: str) -> tuple[Surroundings, SettingValue | None]:
    """The surroundings, and primary_conninfo where it is set."""
    if not may_look(connection):
        raise SetupError(
            "our role may not see the settings and activity of others, so nothing can be judged",
            operation="check",
            subject=name,
            hint=f"connect to {name} as a superuser, or GRANT pg_monitor to the role",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
    found = slots.read_settings(connection, ["primary_conninfo"]).get("primary_conninfo")
    around = read_surroundings(connection)
    if found is None or not found.value:
        return around, None
    upstream = parse_conninfo(found.value, subject=f"primary_conninfo of {name}")
    return replace(around, upstream=upstream), found


def _place(conninfo: Conninfo, advertised: str, name: str) -> tuple[Address, frozenset[Endpoint]]:
    """How subscribers reach a node, and every name by which the settings know it."""
    known = frozenset(end for names in conninfo.endpoints for end in names)
    if not advertised:
        return conninfo.address, known
    parsed = parse_conninfo(advertised, subject=f"failover.advertised.{name}")
    extra = {key for key, _ in parsed.pairs} - {"host", "hostaddr", "port"}
    if extra or len(parsed.endpoints) != 1:
        raise SettingsError(
            "an advertised address has one host, hostaddr and port, and nothing else",
            operation="read settings",
            subject=f"failover.advertised.{name}",
            hint="write it as in host=db2.example port=5432",
        )
    return parsed.address, known | parsed.endpoints[0]


def _subscriber(connection: Connection, name: str) -> Subscriber:
    server = slots.read_server(connection)
    _require_version(server.version, name)
    if not may_read_subscriptions(connection):
        raise SetupError(
            "our role may not see where subscriptions lead (pg_subscription.subconninfo)",
            operation="read subscriptions",
            subject=name,
            hint=f"connect to {name} as a superuser",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
    rows = read_subscriptions(connection)
    found = tuple(_subscription(row, name) for row in rows)
    return Subscriber(name, Reach.ANSWERS, "", server.in_recovery, found)


def _subscription(row: SubscriptionRow, subscriber: str) -> Subscription:
    return Subscription(
        name=row.subname,
        enabled=row.subenabled,
        conninfo=parse_conninfo(row.subconninfo, subject=f"{subscriber}/{row.subname}"),
        slot_name=row.subslotname,
        failover=row.subfailover,
        comment=row.comment or "",
        remote_lsn=row.remote_lsn,
        sync_slots=row.sync_slots,
        foreign_system="",
        worker=row.worker_pid is not None,
        copying=row.copying,
        fed=row.fed,
    )


def _origins(connection: Connection) -> dict[str, int]:
    try:
        return slots.read_origins(connection)
    except psycopg.errors.InsufficientPrivilege:
        return {}  # a witness more, not one that is needed


def _switch(history: str | None) -> int | None:
    """Where the newest timeline began, from a history file: `parent TAB lsn TAB reason` a line."""
    lines = [line.split("\t") for line in (history or "").splitlines() if "\t" in line]
    return parse_lsn(lines[-1][1]) if lines else None


def _without_secrets(text: str, name: str) -> Conninfo:
    parsed = parse_conninfo(text, subject=f"primary_conninfo of {name}")
    return Conninfo(tuple(pair for pair in parsed.pairs if pair[0] not in SECRETS))


def _require_version(version: int, name: str) -> None:
    if version < _VERSION_MIN:
        raise SetupError(
            f"{name} is PostgreSQL {version // 10000}; failover slots came with 17",
            operation="observe",
            subject=name,
            hint="upgrade it to PostgreSQL 17 or newer",
            exit_code=ExitCode.SERVER_VERSION,
        )
