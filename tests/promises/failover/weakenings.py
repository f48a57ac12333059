"""Each field of what is observed, not known or out of date: what may be missing of a View.

A table of every field of every class that a View is made of: the values that the field has where
nobody knows better, or in words why that can't be. A test compares the table with the classes, so
that a new field is thought about before a plan believes it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import strategies as st

from services.failover.model.kafka_progress import KafkaProgress
from services.failover.model.loss_limit import LossLimit, Sighting
from services.failover.model.replication import Replication
from services.failover.model.subscription import Subscription
from services.failover.model.timelines import Feeding, Milestone, Provenance
from services.failover.model.view import Node, NodeState, Reach, Subscriber, View
from services.postgres.server import Server
from services.postgres.slots import Slot
from tests.promises.failover.views import PORTS, views

CLASSES = (
    *(View, Node, NodeState, Replication, Provenance, Server, Slot),
    *(Subscriber, Subscription, KafkaProgress, Sighting),
)
SETTING = "the settings say it"
CATALOG = "a catalog that hides it from no role; who can't read the rest of it is BARRED"
PART = "its own fields are in the table"
TOLD = "it is told, and nothing depends on it"
CHECK = "only `check` reads it (test_knowing_less_never_makes_a_problem_ok)"
RECALLED = "what can't be read of it is noted when it is recalled, for every command"
AGED = "it is a lower bound, told with its age"


@dataclass(frozen=True, slots=True)
class Unknown:
    """What a field has where it is not known. `said`: a plan may go on without, and says so."""

    values: tuple[Any, ...]
    said: bool = False


def _unknown(*values: Any, said: bool = False) -> Unknown:
    return Unknown(values, said)


def _each(names: str, value: Unknown | str) -> dict[str, Unknown | str]:
    return dict.fromkeys(names.split(), value)


def _no_origins(state: NodeState) -> NodeState:
    return replace(state, origins={}, may_see_origins=False)


def _no_answer(subscriber: Subscriber) -> Subscriber:
    return replace(subscriber, reach=Reach.SILENT, detail="weakened", subscriptions=())


TABLE: dict[type, dict[str, Unknown | str]] = {
    View: {
        **_each("nodes subscribers", PART),
        **_each("bridge_slot bridge_url loss_limit managed_by", SETTING),
        **_each("published milestones promotions promoted_from unread", RECALLED),
        **_each("known_slots known_slots_at synchronous_before", TOLD),
        "sighting": _unknown(None, said=True),
        "known_standbys": _unknown(frozenset()),
        "seen_writable": _unknown(""),
    },
    Node: {
        **_each("name address endpoints machine follows priority synchronized", SETTING),
        **_each("reach detail state", "NODES of test_weakened_views, and the fields of NodeState"),
        "private": _unknown(True),
    },
    NodeState: {
        **_each("server replication provenance", PART),
        **_each("slots leaks", CATALOG),
        **_each("next_xid read_only switch_lsn", TOLD),
        "settings": _unknown({}),
        "origins": "may_see_origins says whether they are known",
        "may_see_origins": _unknown(_no_origins, said=True),
        "upstream": _unknown(None),
        "early_sessions": "a fence needs a superuser, who sees every session",
        "details": CHECK,
        "fence_mark": _unknown("", "timeline 99 by x"),
        "cut": "it is part of primary_conninfo, as `upstream` is",
    },
    Replication: {
        "received_lsn": _unknown(None, said=True),
        "written_lsn": "a primary that answers knows it",
        "receiver_streaming": _unknown(True),
        "replay_waits": "it is asked again right before the order to promote",
        "slotsync_worker": CHECK,
        "followers": _unknown(()),
        **_each("may_promote may_configure may_fence may_cut", _unknown(False)),
        **_each("may_replicate may_rewind", _unknown(False)),
        "withheld_by": _unknown(()),
        "replayed_lsn": TOLD,
        "replayed_age_s": _unknown(None),
        "heard_age_s": _unknown(None),
        "upstream_lsn": _unknown(None, said=True),
        "received_all": _unknown(False),
        "replay_pause": CATALOG,
    },
    Provenance: {
        **_each("started managers", CATALOG),
        "history": _unknown(None),
        "may_read_history": _unknown(False),
        "feeds": _unknown(()),
        "fed": _unknown(None),
    },
    Server: _each(
        "system_identifier timeline version database in_recovery wal_level effective_wal_level "
        "synchronized_standby_slots wal_sender_timeout_ms",
        "every role may ask for it; a node that does not tell has no state",
    ),
    Slot: _each(
        "slot_name plugin slot_type database temporary active_pid restart_lsn confirmed_flush_lsn "
        "wal_status two_phase failover synced invalidation_reason safe_wal_size inactive_since "
        "xmin_age catalog_xmin_age slotsync_skip_reason",
        CATALOG,
    ),
    Subscriber: {
        **_each("name detail in_recovery", CATALOG),
        "reach": _unknown(_no_answer, said=True),
        "subscriptions": PART,
        "local": _unknown(False),
        "elsewhere": CHECK,
    },
    Subscription: {
        **_each("name enabled conninfo slot_name failover comment sync_slots copying", CATALOG),
        "foreign_server": CATALOG,
        "as_marked": CATALOG,
        "remote_lsn": "a role that may not see origins is BARRED; None: it has applied nothing",
        **_each("worker worker_age_s failing changeable", CHECK),
        "foreign_system": _unknown(""),
        "fed": _unknown(True),
        "identified": _unknown(False),
        "private": _unknown(True),
        "heard_age_s": _unknown(None),
    },
    KafkaProgress: {
        **_each("lsn latest system_identifier timeline problem began", RECALLED),
        **_each("origin late", CHECK),
    },
    Sighting: {
        **_each("node timeline lsn age_s synchronous by", AGED),
        "failover_slots": _unknown(None, said=True),
    },
}
WEAKENINGS = [
    (owner, name, value, unknown.said)
    for owner, its in TABLE.items()
    for name, unknown in its.items()
    if isinstance(unknown, Unknown)
    for value in unknown.values
]


def weaker(view: View, owner: type, name: str, value: Any, node: str) -> View:
    """The view without that knowledge: of one node, or of all subscribers or subscriptions."""

    def change(one: Any) -> Any:
        if callable(value):
            return value(one)
        return replace(one, **{name: value})

    def of_node(one: Node) -> Node:
        if one.name != node:
            return one
        if owner is Node:
            return replace(one, **{name: value})
        state = one.state
        if state is None:
            return one
        if owner is Replication:
            return replace(one, state=replace(state, replication=change(state.replication)))
        if owner is Provenance:
            return replace(one, state=replace(state, provenance=change(state.provenance)))
        return replace(one, state=change(state))

    def of_subscriber(one: Subscriber) -> Subscriber:
        if owner is Subscriber:
            return change(one)  # type: ignore[no-any-return]
        return replace(one, subscriptions=tuple(map(change, one.subscriptions)))

    if owner is View:
        return change(view)  # type: ignore[no-any-return]
    if owner is Sighting:
        seen = view.sighting
        return view if seen is None else replace(view, sighting=change(seen))
    if owner in (Subscriber, Subscription):
        return replace(view, subscribers=tuple(map(of_subscriber, view.subscribers)))
    return replace(view, nodes=tuple(map(of_node, view.nodes)))


def missing() -> set[str]:
    """The fields that the table does not have, and those that no class has any more."""
    real = {(c, f.name) for c in CLASSES for f in fields(c)}
    tabled = {(owner, name) for owner, its in TABLE.items() for name in its}
    return {f"{owner.__name__}.{name}" for owner, name in real ^ tabled}


@st.composite
def well_known(draw: st.DrawFn) -> View:
    """Views in which more is known than a pair of itself tells: what can be taken away again."""
    view = draw(views())

    def chance(some: Any, none: Any, often: int = 1) -> Any:
        return draw(st.sampled_from([some, *[none] * often]))

    def node(one: Node) -> Node:
        if one.state is None or not one.standby:
            return one
        receiver = replace(
            one.state.replication,
            receiver_streaming=chance(True, False, 5),
            heard_age_s=draw(st.sampled_from([None, 0.1, 9.0])),
            upstream_lsn=draw(st.sampled_from([None, 900, 1000, 1500])),
            replayed_age_s=draw(st.sampled_from([1.0, 100.0])),
            received_all=draw(st.sampled_from([True, True, False])),
        )
        led = "b" if one.name == "c" and draw(st.booleans()) else "a"
        fed = chance(Feeding("standby_1", "", 1, "db", PORTS[led]), None)
        provenance = replace(one.state.provenance, fed=fed)
        origins = chance({"slotbridge_kept": draw(st.sampled_from([900, 2000]))}, {})
        changed = {"replication": receiver, "provenance": provenance, "origins": origins}
        return replace(one, state=replace(one.state, **changed))

    names = draw(st.sampled_from(["", "", "ANY 1 (b, c)", "standby_1", "ANY 2 (*)"]))
    seen = Sighting("a", 1, draw(st.sampled_from([900, 1000, 1150, 1500])), 4.0, names)
    had = draw(st.sampled_from([None, frozenset[str](), frozenset({"lost"})]))
    return replace(
        view,
        nodes=tuple(map(node, view.nodes)),
        sighting=chance(replace(seen, failover_slots=had), None),
        loss_limit=LossLimit(100, draw(st.sampled_from([0, 10]))),
        known_standbys=chance(frozenset("c"), frozenset()),
        seen_writable=chance("a", ""),
        promotions=chance((("c", "2026-01-01T00:00:00+00:00"),), ()),
        milestones=chance((("Kafka", Milestone("7000", 1, None)),), ()),
        subscribers=tuple(
            replace(
                one,
                subscriptions=tuple(
                    replace(
                        found,
                        fed=chance(True, False, 5),
                        heard_age_s=draw(st.sampled_from([None, 0.1, 9.0])),
                        identified=chance(True, False),
                        foreign_system=draw(st.sampled_from(["", "", "9"])),
                    )
                    for found in one.subscriptions
                ),
            )
            for one in view.subscribers
        ),
    )
