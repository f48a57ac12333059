"""The observed state of a pair and its subscribers, as immutable facts. Pure.

    View ── nodes ─────── Node ─────── state: NodeState, None where it does not answer
         └─ subscribers ─ Subscriber ─ subscriptions: Subscription

A server that can't be reached is a fact, not an error. Positions are WAL positions in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from services.failover.model.destination import timelines_in
from services.failover.model.loss_limit import LossLimit
from services.failover.model.timelines import Milestone, Provenance

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.failover.model.conninfo import Address, Conninfo, Endpoint
    from services.failover.model.host_commands import Machine
    from services.failover.model.kafka_progress import KafkaProgress
    from services.failover.model.loss_limit import Sighting
    from services.failover.model.node_details import Elsewhere, NodeDetails
    from services.failover.model.replication import Replication
    from services.failover.model.subscription import Subscription
    from services.postgres.server import Server, SettingValue
    from services.postgres.slots import Slot

FENCE = "default_transaction_read_only"
"""The setting that fences a primary."""
FENCE_MARK = "slotfailover.fenced"
"""Set beside FENCE, in the same file, by slotfailover and nobody else: whose fence it is."""


class Reach(StrEnum):
    """How a server answered an attempt to reach it."""

    ANSWERS = "answers"
    REFUSED = "refused"  # nothing listens there: it is down
    SILENT = "silent"  # no answer in time, or no such host: down, hung or cut off
    CLOSED = "closed"  # something listens and does not let us in: it may well be writing
    BARRED = "barred"  # it lets us in, and our role can't see what is needed, or not in time


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state that a node reports."""

    server: Server
    replication: Replication
    settings: dict[str, SettingValue]
    """Absent: unknown to the server or hidden from our role."""
    slots: tuple[Slot, ...]
    origins: dict[str, int]
    """Replication origin -> position; empty where our role may not see them, or no bridge is."""
    upstream: Conninfo | None
    """primary_conninfo without its secrets; None where hidden from our role or unset."""
    switch_lsn: int | None
    """Promoted primary: where its timeline left the one before."""
    early_sessions: int = 0
    """Client sessions from before the settings were last read; a fence has ended them."""
    details: NodeDetails | None = None
    """Only in a survey, for `check`."""
    provenance: Provenance = field(default_factory=Provenance)
    fence_mark: str = ""
    """FENCE_MARK: the timeline that is fenced, by whom and since when; "" where nobody did."""
    leaks: tuple[str, ...] = ()
    """Primary: what a fence does not keep from writing, as long as the server runs."""
    next_xid: int | None = None
    """Primary: the next transaction number; it moves only when something is written."""
    read_only: bool = False
    """FENCE is on in its own configuration, for every role: by us or by somebody else."""
    cut: bool = False
    """Standby: its receiver is kept from every primary, by a primary_conninfo that leads nowhere.
    `upstream` is what it was, and will be again."""

    may_see_origins: bool = True
    """Our role may see replication origins; also true where nobody asked, as no bridge is named."""

    @property
    def fenced(self) -> bool:
        """Whether a fence of ours on this timeline keeps ordinary transactions from writing.

        A base backup of a fenced primary carries the mark, on a timeline of its own once promoted.
        """
        return self.fence_mark.startswith(f"timeline {self.server.timeline} ")

    @property
    def failover_slots(self) -> frozenset[str]:
        """The names of its complete, permanent, logical failover slots."""
        return frozenset(
            slot.slot_name
            for slot in self.slots
            if slot.failover and not slot.temporary and slot.slot_type == "logical"
            if slot.confirmed_flush_lsn is not None or slot.invalidation_reason is not None
        )

    def setting(self, name: str) -> str:
        """Return a setting's value, "" where it is not known."""
        known = self.settings.get(name)
        return known.value if known else ""

    def slot(self, name: str) -> Slot | None:
        """Return the slot of that name, None without one."""
        return next((slot for slot in self.slots if slot.slot_name == name), None)


@dataclass(frozen=True, slots=True)
class Node:
    """A server of the pair."""

    name: str
    address: Address
    """The address that a repointed subscription gets."""
    endpoints: frozenset[Endpoint]
    """Every (host, port) by which the settings know it."""
    reach: Reach
    detail: str
    state: NodeState | None
    machine: Machine | None = None
    """The commands that act on its machine."""
    follows: str = ""
    """The node that the settings let it stream from while that is a standby; "": the primary."""
    priority: int = 100
    """Of standbys with equal WAL the highest is promoted; 0: never unless it is named."""
    synchronized: bool = True
    """Consumers are to wait for it, once it is a standby of the primary."""
    private: bool = False
    """Its address means another server elsewhere: a loopback address or a socket's folder."""

    @property
    def known_state(self) -> NodeState:
        """The state of a node that has answered.

        Raises LookupError for one that has not: the caller has to ask `state` first.
        """
        if self.state is None:
            raise LookupError(f"{self.name} has not answered: {self.detail}")
        return self.state

    @property
    def known_machine(self) -> Machine:
        """The commands of a node that has some.

        Raises LookupError for one without: the caller has to ask `machine` first.
        """
        if self.machine is None:
            raise LookupError(f"{self.name} has no commands in the settings")
        return self.machine

    @property
    def writable(self) -> bool:
        """Whether the node answers as a primary that is not fenced."""
        return self.leading and not self.fenced

    @property
    def fenced(self) -> bool:
        """Whether the node answers as a primary that refuses writes."""
        return self.leading and self.state is not None and self.state.fenced

    @property
    def leading(self) -> bool:
        """Whether the node answers as a primary, fenced or not."""
        return self.state is not None and not self.state.server.in_recovery

    @property
    def standby(self) -> bool:
        """Whether the node answers as a standby."""
        return self.state is not None and self.state.server.in_recovery

    @property
    def replay_paused(self) -> bool:
        """Whether the node answers as a standby whose replay is, or is about to be, paused."""
        return self.state is not None and self.state.replication.replay_paused

    def has_command(self, name: str) -> bool:
        """Tell whether failover.machines has a command of that name for the node."""
        return self.machine is not None and self.machine.has(name)

    def milestone(self, address: str) -> Milestone | None:
        """Return the timeline as a subscription that reaches the node at `address` notes it.

        None if the node does not answer, or the start of its timeline is unknown.
        """
        if self.state is None or self.state.provenance.history is None:
            return None
        server, history = self.state.server, self.state.provenance.history
        start = history[-1][1] if history else None
        return Milestone(server.system_identifier, server.timeline, start, address)

    @property
    def received(self) -> int:
        """How far the node has the WAL (bytes), 0 where that is unknown."""
        if self.state is None:
            return 0
        replication = self.state.replication
        return replication.received_lsn or replication.written_lsn or 0


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A database that holds subscriptions."""

    name: str
    reach: Reach
    detail: str
    in_recovery: bool
    subscriptions: tuple[Subscription, ...]
    local: bool = False
    """It runs on this machine: a loopback address means the same server there as here."""
    elsewhere: tuple[Elsewhere, ...] | None = None
    """The subscriptions of its other databases; only in a survey."""

    @property
    def usable(self) -> bool:
        """Whether the subscriber's subscriptions can be changed."""
        return self.reach is Reach.ANSWERS and not self.in_recovery


@dataclass(frozen=True, slots=True)
class View:
    """Everything that was seen at one time."""

    nodes: tuple[Node, ...]
    subscribers: tuple[Subscriber, ...]
    bridge_slot: str | None = None
    """The bridge's slot, where the settings name one."""
    published: KafkaProgress | None = None
    """The progress of Kafka, if the settings name it and it was asked."""
    bridge_url: str = ""
    """The URL by which the bridge is sent to a new primary."""
    milestones: tuple[tuple[str, Milestone], ...] = ()
    """(who says so, timeline) of what the journal and Kafka remember; see `met`."""
    unread: tuple[str, ...] = ()
    """The journals that could not be read, and why: what these remember is not known."""
    sighting: Sighting | None = None
    """While no node takes writes: the last that did, where that is remembered."""
    known_standbys: frozenset[str] = frozenset()
    """The nodes that were standbys when this machine last had an answer of them, and that no
    journal has begun to promote since: where one gives no answer now, it is not a primary."""
    seen_writable: str = ""
    """The primary that this very process has last seen taking writes; "": none."""
    promotions: tuple[tuple[str, str], ...] = ()
    """(node, UTC time in ISO 8601) of each order to promote that the journals have, in order."""
    promoted_from: int = 0
    """The timeline that the last of these promotions leaves; 0 where that is unknown."""
    synchronous_before: str = ""
    """synchronous_standby_names of the primary before this one, while this one has none."""
    loss_limit: LossLimit = LossLimit()  # noqa: RUF009 - it is frozen
    """The WAL of the last primary that a new one may lack."""
    known_slots: frozenset[str] = frozenset()
    """The failover slots that a primary had when one was last seen, as the journal has it."""
    known_slots_at: str = ""
    managed_by: str | None = None
    """The manager of the pair, as the settings have it; None where they say nothing."""

    @property
    def writable(self) -> tuple[Node, ...]:
        """The nodes that are primaries and take writes."""
        return tuple(node for node in self.nodes if node.writable)

    @property
    def primary(self) -> Node | None:
        """The primary, if there is exactly one; a fenced one only where no other is."""
        found = self.writable or tuple(node for node in self.nodes if node.fenced)
        return found[0] if len(found) == 1 else None

    @property
    def standbys(self) -> tuple[Node, ...]:
        """The standbys that answer, the one with the most WAL first."""
        found = [node for node in self.nodes if node.standby]
        return tuple(sorted(found, key=lambda node: (-node.received, node.name)))

    @property
    def slots_last_seen(self) -> frozenset[str] | None:
        """The failover slots of the last primary while none takes writes, None where unknown.

        A sighting on an older timeline than a standby's tells of a primary before the last one.
        """
        seen = self.sighting
        newest = max((n.known_state.server.timeline for n in self.standbys), default=0)
        return seen.failover_slots if seen is not None and seen.timeline >= newest else None

    def node(self, name: str) -> Node:
        """Return the node of that name. Raise KeyError for an unknown one."""
        return {node.name: node for node in self.nodes}[name]

    def subscription(self, subscriber: str, name: str) -> Subscription | None:
        """Return a subscription, None where it is gone or its subscriber does not answer."""
        for where, found in self.ours():
            if (where.name, found.name) == (subscriber, name):
                return found
        return None

    def ours(self) -> list[tuple[Subscriber, Subscription]]:
        """Return the subscriptions that the primary feeds, in order of subscriber and name."""
        return self._all(self._feeds)

    def fed_by_standbys(self) -> list[tuple[Subscriber, Subscription]]:
        """Return the subscriptions that a standby feeds, and that stay there whoever leads."""
        return self._all(lambda s: self._leads_here(s) and self._standby_feeds(s))

    def strangers(self) -> list[tuple[Subscriber, Subscription]]:
        """Return the subscriptions that another cluster feeds."""
        return self._all(lambda s: bool(s.foreign_system))

    def unidentified(self) -> list[tuple[Subscriber, Subscription]]:
        """Return the subscriptions whose feeding server nobody can identify."""
        return self._all(lambda s: not s.foreign_system and not self._leads_here(s))

    def marked_elsewhere(self) -> list[tuple[Subscriber, Subscription]]:
        """Return the subscriptions that lead here, and that a run of another cluster disabled."""
        return self._all(lambda s: s.marked and self._leads_here(s) and not self._feeds(s))

    def astray(self) -> list[tuple[Subscriber, Subscription]]:
        """Return the subscriptions that a run has disabled, and that lead to another cluster."""
        return [(where, s) for where, s in self.awaiting() if s.foreign_system]

    def awaiting(self) -> list[tuple[Subscriber, Subscription]]:
        """Return what a run of this cluster has disabled, also where a mark is void."""
        return self._all(self._awaits)

    def _awaits(self, subscription: Subscription) -> bool:
        """Tell whether a run of this cluster has disabled it, by its mark, which may be void."""
        led = subscription.disabled_for
        if led is not None and led.system and self.system:
            return led.system == self.system
        return led is not None and self._leads_here(subscription)

    def _all(self, chosen: Callable[[Subscription], bool]) -> list[tuple[Subscriber, Subscription]]:
        return [(where, s) for where in self.subscribers for s in where.subscriptions if chosen(s)]

    @property
    def system(self) -> str:
        """The system identifier of the nodes, "" where none answers."""
        found = {node.state.server.system_identifier for node in self.nodes if node.state}
        return min(found, default="")

    def met(self) -> list[tuple[str, Milestone]]:
        """Return (who remembers it, timeline) of each timeline of this cluster that was met."""
        noted = [
            (f"{where.name}/{found.name}", met)
            for where, found in self.ours()
            for met in timelines_in(found.comment)
        ]
        everything = (*noted, *self.milestones)
        return [(who, met) for who, met in everything if met.system == self.system]

    def _feeds(self, subscription: Subscription) -> bool:
        """Tell whether it is to be fed by the primary, and no other cluster's run disabled it."""
        mark = subscription.destination
        ours = mark is None or not mark.system or self.system in ("", mark.system)
        return ours and self._leads_here(subscription) and not self._standby_feeds(subscription)

    def _standby_feeds(self, subscription: Subscription) -> bool:
        """Tell whether it leads to a standby that answers, to a slot that was made there.

        No failover slot is made there: an old primary has left it, or it is a synchronized copy.
        """
        named = [n for n in self.nodes if subscription.conninfo.names(n.endpoints)]
        if subscription.disabled_for is not None or len(named) != 1 or not named[0].standby:
            return False
        slot = named[0].known_state.slot(subscription.slot_name or "")
        if slot is None or slot.failover or slot.synced:
            return False
        return slot.slot_type == "logical"

    def _leads_here(self, subscription: Subscription) -> bool:
        """Judge by a known address, the server that answered there, or what was noted about it.

        An equal slot name is not evidence: other clusters have slots of the same name.
        """
        if subscription.foreign_system:
            return False
        known = any(subscription.conninfo.names(node.endpoints) for node in self.nodes)
        if subscription.identified or (known and not subscription.private):
            return True
        met = subscription.milestone
        return (
            met is not None
            and met.system == self.system
            and met.address == str(subscription.conninfo.address)
        )
