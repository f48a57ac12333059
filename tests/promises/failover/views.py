"""Views of a pair with a dead primary `a` and standbys, for the pure tests of plans."""

from typing import Any

from hypothesis import strategies as st

from services.failover.checks.capacity import RECOVERY_SETTINGS
from services.failover.model.conninfo import Address, Conninfo
from services.failover.model.destination import Destination
from services.failover.model.replication import Replication
from services.failover.model.subscription import Subscription
from services.failover.model.view import Node, NodeState, Reach, Subscriber, View
from services.postgres.server import Server, SettingValue
from services.postgres.slots import Slot

RECEIVED = 1000
PORTS = {"a": "5001", "b": "5002", "c": "5003"}


def slot(name: str, **changes: Any) -> Slot:
    """A failover slot as it is on a standby that has it ready."""
    values: dict[str, Any] = {
        "slot_name": name,
        "plugin": "pgoutput",
        "slot_type": "logical",
        "database": "bank",
        "temporary": False,
        "active_pid": None,
        "restart_lsn": 400,
        "confirmed_flush_lsn": 500,
        "wal_status": "reserved",
        "two_phase": False,
        "failover": True,
        "synced": True,
        "invalidation_reason": None,
    }
    return Slot(**{**values, **changes})


def state(
    *slots: Slot,
    standby: bool = True,
    received: int = RECEIVED,
    timeline: int = 1,
    system: str = "7000",
    synchronized: str = "",
    synchronous: str = "",
    source: str = "configuration file",
    may_promote: bool = True,
    may_configure: bool = True,
    switch_lsn: int | None = None,
    fenced: bool = False,
    early_sessions: int = 0,
    leaks: tuple[str, ...] = (),
    cut: bool = False,
    heard_age_s: float | None = None,
    may_cut: bool = True,
    alter_system: str = "on",
    follows: str = "a",
    streams: bool = False,
) -> NodeState:
    """What a node says; a standby unless told otherwise."""
    return NodeState(
        server=Server(
            system_identifier=system,
            timeline=timeline,
            version=180006,
            database="postgres",
            in_recovery=standby,
            wal_level="logical",
            synchronized_standby_slots=synchronized,
            wal_sender_timeout_ms=60000,
        ),
        replication=Replication(
            received_lsn=received if standby else None,
            written_lsn=None if standby else received,
            receiver_streaming=streams,
            replay_waits=True,
            slotsync_worker=standby,
            followers=(),
            may_promote=may_promote,
            may_configure=may_configure,
            heard_age_s=heard_age_s,
            may_cut=may_cut,
        ),
        settings={
            "wal_level": SettingValue("logical", source),
            "sync_replication_slots": SettingValue("on", source),
            "primary_slot_name": SettingValue("standby_1", source),
            "hot_standby_feedback": SettingValue("on", source),
            "synchronized_standby_slots": SettingValue(synchronized, source),
            "synchronous_standby_names": SettingValue(synchronous, source),
            "allow_alter_system": SettingValue(alter_system, source),
            **{name: SettingValue("100", source) for name in RECOVERY_SETTINGS},
        },
        slots=slots,
        origins={},
        upstream=Conninfo((("host", "db"), ("port", PORTS[follows]), ("dbname", "postgres"))),
        switch_lsn=switch_lsn,
        early_sessions=early_sessions,
        fence_mark=f"timeline {timeline} by x@y since then" if fenced else "",
        leaks=leaks,
        next_xid=None if standby else 800,
        cut=cut,
    )


def node(name: str, said: NodeState | None, reach: Reach = Reach.REFUSED) -> Node:
    """A node; one that said nothing is down."""
    address = Address("db", "", PORTS[name])
    reached = Reach.ANSWERS if said is not None else reach
    return Node(name, address, frozenset({("db", PORTS[name])}), reached, "no answer", said)


def subscription(
    name: str, *, at: str = "a", enabled: bool = True, marked: bool = False, **changes: Any
) -> Subscription:
    """A failover subscription of the slot of its own name, that leads to a node."""
    values: dict[str, Any] = {
        "name": name,
        "enabled": enabled and not marked,
        "conninfo": Conninfo((("host", "db"), ("port", PORTS.get(at, at)), ("dbname", "bank"))),
        "slot_name": name,
        "failover": True,
        "comment": f"mine {Destination('7000', 'b', None, 1).mark}" if marked else "mine",
        "remote_lsn": 450,
        "sync_slots": (),
        "foreign_system": "",
    }
    return Subscription(**{**values, **changes})


def subscriber(
    name: str, *subscriptions: Subscription, reach: Reach = Reach.ANSWERS, in_recovery: bool = False
) -> Subscriber:
    """A subscriber's database."""
    found = subscriptions if reach is Reach.ANSWERS else ()
    return Subscriber(name, reach, "no answer", in_recovery, found)


def dead_primary(*subscribers: Subscriber, slots: tuple[Slot, ...] = (), **said: Any) -> View:
    """`a` is down, `b` is its standby with these slots."""
    return View((node("a", None), node("b", state(*slots, **said))), subscribers)


SLOT_NAMES = ("s1", "s2", "s3", "s4")
_copies = st.sampled_from(
    [
        {},
        {},
        {},
        {"temporary": True},
        {"invalidation_reason": "rows_removed"},
        {"synced": False},
        {"active_pid": 7},
        None,
    ]
)
_subscriptions = st.builds(
    lambda at, enabled, marked, failover, position: {
        "at": at,
        "enabled": enabled,
        "marked": marked,
        "failover": failover,
        "remote_lsn": position,
    },
    st.sampled_from(["a", "a", "a", "b", "proxy"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([True, True, False]),
    st.sampled_from([None, 450, 500, 900, RECEIVED, RECEIVED + 1]),
)
_lists = st.sampled_from(["", "standby_1", "standby_1, standby_2", "physical"])
_names = st.sampled_from(["", "standby_1", "FIRST 1 (b, c)", "ANY 1 (*)"])


@st.composite
def views(draw: st.DrawFn) -> View:
    """Pairs and triples in any state, mostly with a dead primary; `kept` is always ready."""
    kinds = {name: draw(_copies) for name in SLOT_NAMES}
    copies = [slot(name, **changes) for name, changes in kinds.items() if changes is not None]
    physical = slot("physical", slot_type="physical", failover=False, synced=False, database=None)
    there = (slot("kept"), physical, *copies)

    def standby(received: int) -> NodeState:
        return state(*there, received=received, synchronized=draw(_lists), synchronous=draw(_names))

    old = draw(st.sampled_from([None, None, None, None, state(*there, standby=False)]))
    reach = draw(st.sampled_from([Reach.REFUSED, Reach.REFUSED, Reach.SILENT, Reach.CLOSED]))
    nodes = [node("a", old, reach), node("b", standby(RECEIVED))]
    if draw(st.booleans()):
        nodes.append(node("c", draw(st.sampled_from([None, standby(RECEIVED), standby(900)]))))
    subscribers = []
    for number, names in enumerate((SLOT_NAMES[:2], SLOT_NAMES[2:])):
        found = [
            subscription(name, **draw(_subscriptions)) for name in names if draw(st.booleans())
        ]
        reached = draw(st.sampled_from([Reach.ANSWERS, Reach.ANSWERS, Reach.SILENT]))
        recovering = draw(st.sampled_from([False, False, False, True]))
        subscribers.append(
            subscriber(f"sub{number}", *found, reach=reached, in_recovery=recovering)
        )
    return View(tuple(nodes), tuple(subscribers), draw(st.sampled_from([None, "kept", "gone"])))
