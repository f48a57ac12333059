"""The pair and its subscribers, observed: every server asked at the same time, into one View.

Consumers are read before the standbys' WAL positions: read the other way round, a pair under load
would look as if consumers were ahead of the standby.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

from pydantic import SecretStr

from schemas.errors import ExitCode, SetupError, SlotbridgeError
from schemas.settings import FailoverSettings, StandbySettings
from services.failover.checks.registry import SETTINGS
from services.failover.model.conninfo import SECRETS, Address, Conninfo, Endpoint
from services.failover.model.host_commands import machine_of
from services.failover.model.kafka_progress import KafkaProgress
from services.failover.model.receiver import is_cut, reconnected
from services.failover.model.timelines import History, Milestone
from services.failover.model.view import (
    FENCE,
    Node,
    NodeState,
    Reach,
    Subscriber,
    View,
)
from services.failover.observe.addresses import (
    address_of,
    require_distinct,
    require_names,
    require_nodes,
    require_own_addresses,
    require_own_slots,
)
from services.failover.observe.bridge_client import Bridge
from services.failover.observe.bridge_positions import read_positions
from services.failover.observe.client_sessions import read_fence, read_leaks, sessions_before_reload
from services.failover.observe.last_contact import Sightings
from services.failover.observe.node_details import look, read_elsewhere
from services.failover.observe.provenance import read_history, read_newest_segment, read_provenance
from services.failover.observe.publishers import Publishers
from services.failover.observe.replication import read_replication
from services.failover.observe.server_link import (
    ServerLink,
    Unreachable,
    parse_conninfo,
    runs_here,
    with_service,
)
from services.failover.observe.subscriptions import (
    may_read_subscriptions,
    read_subscriptions,
    subscription_of,
)
from services.postgres import slots
from services.postgres.server import (
    Connection,
    SettingValue,
    read_received,
    read_server,
    read_settings,
)

_VERSION_MIN = 170000


class Cluster:
    """All servers of the settings, and the bridge where they have one."""

    def __init__(
        self, settings: FailoverSettings, bridge: Bridge | None = None, *, admin: bool = False
    ) -> None:
        """Read the settings; with `admin`, prefer the connection strings of failover.admins."""
        admins = settings.admins if admin else {}
        require_names("admins", settings.admins, {**settings.nodes, **settings.subscribers})
        require_nodes("advertised", settings.advertised, settings)
        require_nodes("machines", settings.machines, settings)
        require_nodes("standbys", settings.standbys, settings)
        require_nodes(
            "standbys.*.follows",
            filter(None, (standby.follows for standby in settings.standbys.values())),
            settings,
        )
        self._standbys = settings.standbys
        self.sightings = Sightings(settings)
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
        self._managed_by = settings.managed_by
        self.nodes = {n: self._configured(n, admins.get(n, c)) for n, c in settings.nodes.items()}
        self.subscribers = {
            n: self._configured(n, admins.get(n, c)) for n, c in settings.subscribers.items()
        }
        self._addresses = {
            name: address_of(link.conninfo, settings.advertised.get(name, ()), name)
            for name, link in self.nodes.items()
        }
        require_own_addresses(self._addresses)
        require_own_slots(settings.nodes)
        self._others = frozenset(
            end
            for text in settings.others
            for names in parse_conninfo(text, subject="failover.others").endpoints
            for end in names
        )
        self.machines = {
            name: machine_of(name, given, self.nodes[name].conninfo.address)
            for name, given in settings.machines.items()
        }
        self.bridge = bridge
        self._bridge_slot = bridge.slot if bridge is not None else None
        self._histories: dict[tuple[str, str, int], tuple[bool, History | None]] = {}
        servers = len(self.nodes) + len(self.subscribers)
        self._pool = ThreadPoolExecutor(servers + 2, thread_name_prefix="observe")
        self._publishers = Publishers(self._stranger, self._pool, float(self._timeout_s))
        self.milestones: tuple[tuple[str, Milestone], ...] = ()
        self.unread: tuple[str, ...] = ()
        self.published: KafkaProgress | None = None
        self.known_slots: frozenset[str] = frozenset()
        self.promotions: tuple[tuple[str, str], ...] = ()
        self.promoted_from = 0
        self.recorded_at = ""
        self.known_slots_at = ""
        """The memory of the journal and Kafka, for every view (execute.timeline_memory)."""

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
        self._publishers.close()
        self.sightings.close()

    def observe(self) -> View:
        """Ask every server. Raise SetupError where a node answers but our role may not look.

        A subscriber that can't be read is one fact among others: it may not stop a failover.
        """
        view, problems = self.observe_all()
        for error in problems.values():
            raise error
        return view

    def observe_all(self) -> tuple[View, dict[str, SlotbridgeError]]:
        """Observe every server; return the view, and why nodes could not be read, by name.

        Raise SettingsError for a server that has two names.
        """
        problems: dict[str, SlotbridgeError] = {}
        nodes = self._pool.map(lambda name: self._observe_node(name, problems), self.nodes)
        subscribers = self._pool.map(self._observe_subscriber, self.subscribers)
        url = self.bridge.control_url if self.bridge is not None else ""
        view = View(
            tuple(nodes),
            tuple(subscribers),
            self._bridge_slot,
            bridge_url=url,
            managed_by=self._managed_by,
        )
        require_distinct(view)
        view = self._publishers.identify(view)
        view = replace(view, nodes=tuple(self._pool.map(self._with_received, view.nodes)))
        return self.with_memory(view), problems

    def with_memory(self, view: View) -> View:
        """Return the view with the timelines that journals, Kafka and this machine remember."""
        remembering = replace(
            view,
            milestones=self.milestones,
            unread=self.unread,
            published=self.published,
            known_slots=self.known_slots,
            known_slots_at=self.known_slots_at,
            promotions=self.promotions,
            promoted_from=self.promoted_from,
        )
        return self.sightings.complete(remembering)

    @contextlib.contextmanager
    def in_database(self, name: str, dbname: str) -> Iterator[ServerLink]:
        """Open a link of its own to a node's database."""
        conninfo = self.nodes[name].conninfo
        pairs = (*((k, v) for k, v in conninfo.pairs if k != "dbname"), ("dbname", dbname))
        link = self._link(name, Conninfo(pairs).text)
        try:
            yield link
        finally:
            link.close()

    def address(self, name: str) -> Address:
        """Return the address by which others reach a node."""
        return self._addresses[name].address

    def endpoints(self, name: str) -> frozenset[Endpoint]:
        """Return every (host, port) by which the settings know a node."""
        return self._addresses[name].known

    def survey(self) -> View:
        """Observe with the queries of `check`. Raise SetupError if our role lacks the rights."""
        view, problems = self.survey_all()
        for error in problems.values():
            raise error
        return view

    def survey_all(self) -> tuple[View, dict[str, SlotbridgeError]]:
        """Observe as `observe_all` does, with the queries of `check`."""
        view, problems = self.observe_all()
        nodes = self._pool.map(lambda node: self._with_surroundings(node, problems), view.nodes)
        subscribers = tuple(self._pool.map(self._with_elsewhere, view.subscribers))
        return replace(view, nodes=tuple(nodes), subscribers=subscribers), problems

    def _with_elsewhere(self, subscriber: Subscriber) -> Subscriber:
        """Add to a subscriber the subscriptions in its server's other databases."""
        if subscriber.reach is not Reach.ANSWERS:
            return subscriber
        with contextlib.suppress(Unreachable, SlotbridgeError):
            found = self.subscribers[subscriber.name].ask(read_elsewhere)
            return replace(subscriber, elsewhere=found)
        return subscriber

    def _configured(self, name: str, conninfo: SecretStr) -> ServerLink:
        return self._link(name, with_service(conninfo.get_secret_value(), subject=name))

    def _stranger(self, name: str, conninfo: str) -> ServerLink:
        """Return a link to the server behind an address that the settings do not name."""
        return ServerLink(
            name,
            conninfo,
            connect_timeout_s=self._timeout_s,
            deadline_s=self._deadline_s,
            pooler_may_answer=True,
        )

    def _link(self, name: str, conninfo: str) -> ServerLink:
        return ServerLink(
            name, conninfo, connect_timeout_s=self._timeout_s, deadline_s=self._deadline_s
        )

    def _observe_node(self, name: str, problems: dict[str, SlotbridgeError]) -> Node:
        """Return a node with its state, or why it can't be read; add its error to `problems`."""
        own = self._addresses[name]
        given = self._standbys.get(name, StandbySettings())
        node = Node(
            name,
            own.address,
            own.known,
            Reach.ANSWERS,
            "",
            None,
            self.machines.get(name),
            given.follows,
            given.failover_priority,
            given.synchronized,
            own.private,
        )
        try:
            state = self.nodes[name].ask(lambda connection: self._state(connection, name))
        except Unreachable as error:
            return replace(node, reach=error.reach, detail=error.detail)
        except SlotbridgeError as error:
            problems[name] = error
            return replace(node, reach=Reach.BARRED, detail=error.message)
        return replace(node, state=state)

    def _state(self, connection: Connection, name: str) -> NodeState:
        """Return what planning needs to know of a server. Raise SetupError for an old version."""
        server = read_server(connection)
        _require_version(server.version, name)
        provenance = read_provenance(connection)
        if server.in_recovery:
            newest = read_newest_segment(connection)
            server = replace(server, timeline=max(server.timeline, newest))
        may, history = self._history(connection, name, provenance.started, server.timeline)
        replication = read_replication(connection)
        settings = read_settings(connection, [*SETTINGS, "primary_conninfo"])
        if upstream := settings.get("primary_conninfo"):
            settings["primary_conninfo"] = replace(upstream, value="")  # it has a password
        led = _without_secrets(upstream.value, name) if upstream else None
        mark, read_only, next_xid, source = read_fence(connection)
        origins = read_positions(connection, self._bridge_slot) if self._bridge_slot else {}
        return NodeState(
            server=server,
            replication=replication,
            settings={**settings, FENCE: SettingValue("", source)},
            slots=tuple(slots.read_slots(connection)),
            origins=origins or {},
            upstream=reconnected(led) if led else None,
            switch_lsn=history[-1][1] if history and not server.in_recovery else None,
            early_sessions=sessions_before_reload(connection, self._bridge_slot),
            provenance=replace(provenance, history=history, may_read_history=may),
            fence_mark=mark,
            read_only=read_only,
            leaks=() if server.in_recovery else read_leaks(connection),
            next_xid=next_xid,
            cut=led is not None and is_cut(led),
            may_see_origins=origins is not None,
        )

    def _history(
        self, connection: Connection, name: str, started: str, timeline: int
    ) -> tuple[bool, History | None]:
        """Return the timeline's history; read it once, as it stays while the server runs."""
        key = (name, started, timeline)
        found = self._histories.get(key) or read_history(connection, timeline)
        if found[1] is not None:
            self._histories[key] = found
        return found

    def _observe_subscriber(self, name: str) -> Subscriber:
        try:
            return self.subscribers[name].ask(lambda c: self._subscriptions(c, name))
        except Unreachable as error:
            return Subscriber(name, error.reach, error.detail, False, ())
        except SlotbridgeError as error:
            return Subscriber(name, Reach.BARRED, error.message, False, ())

    def _subscriptions(self, connection: Connection, name: str) -> Subscriber:
        """Return a subscriber with its subscriptions. Raise where our role can't see them."""
        server = read_server(connection)
        _require_version(server.version, name)
        if not may_read_subscriptions(connection):
            raise SetupError(
                "our role may not see where subscriptions lead, or whether anybody has changed "
                "them (pg_subscription.subconninfo, pg_subscription.xmin)",
                operation="read subscriptions",
                subject=name,
                hint=f"run sql/subscriber_roles.sql on {name}, or connect to it as a superuser",
                exit_code=ExitCode.PRIVILEGE_MISSING,
            )
        local = runs_here(connection)
        given = frozenset[Endpoint]().union(*(own.given for own in self._addresses.values()))
        found = tuple(
            subscription_of(
                row, name, local=local, node_endpoints=given, other_endpoints=self._others
            )
            for row in read_subscriptions(connection)
        )
        return Subscriber(name, Reach.ANSWERS, "", server.in_recovery, found, local)

    def _with_received(self, node: Node) -> Node:
        """Return the node with its WAL position as of now, after its consumers were read."""
        if node.state is None or not node.state.server.in_recovery:
            return node
        try:
            received = self.nodes[node.name].ask(read_received)
        except Unreachable as error:
            return replace(node, reach=error.reach, detail=error.detail, state=None)
        newer = replace(node.state.replication, received_lsn=received)
        return replace(node, state=replace(node.state, replication=newer)) if received else node

    def _with_surroundings(self, node: Node, problems: dict[str, SlotbridgeError]) -> Node:
        """Add to a node what checks need beyond planning: rules, followers, transactions."""
        if node.state is None:
            return node
        try:
            around, upstream = self.nodes[node.name].ask(lambda c: look(c, node.name))
        except Unreachable as error:
            return replace(node, reach=error.reach, detail=error.detail, state=None)
        except SlotbridgeError as error:
            problems[node.name] = error
            return replace(node, reach=Reach.BARRED, detail=error.message, state=None)
        settings = node.state.settings
        if upstream is not None and around.upstream is not None:
            masked = SettingValue(around.upstream.masked, upstream.source)
            settings = {**settings, "primary_conninfo": masked}
        return replace(node, state=replace(node.state, settings=settings, details=around))


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
