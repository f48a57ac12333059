"""Slot synchronization between a standby and its primary: slot, connection, admission. Pure.

Source: PostgreSQL documentation 47.2.3 Replication Slot Synchronization; slotsync.c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from services.failover.checks import hba, remedies
from services.failover.checks.model import Needs, Seen, check
from services.failover.checks.standby import GROUP, NO_NEW_COPIES
from services.failover.model.conninfo import SECRETS
from services.failover.model.preconditions import outdated
from services.failover.model.receiver import reconnected
from services.failover.model.statements import RELOAD
from services.failover.model.topology import follows, slot_named_after

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemas.findings import Remedy
    from services.failover.checks.facts import Facts
    from services.failover.model.view import Node, NodeState


@check(
    "primary-slot-name",
    group=GROUP,
    title="primary_slot_name is set",
    consequence="synchronization stops, and the primary may remove WAL that the standby needs",
    needs=Needs.STANDBY,
    reads=("primary_slot_name",),
)
def primary_slot_name(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        name = state.setting("primary_slot_name")
        yield Seen(
            standby.name,
            f"primary_slot_name = '{name}'",
            "" if name else f"primary_slot_name is empty on {standby.name}",
            _name_a_slot(facts, standby),
        )


def _name_a_slot(facts: Facts, standby: Node) -> Remedy:
    """Return the remedy that gives a standby a physical slot, made where it is missing."""
    wanted = slot_named_after(standby.name)
    setting = remedies.alter_system(standby, "primary_slot_name", wanted)
    make = [
        remedies.order(primary.name, remedies.create_physical_slot(wanted))
        for primary, state in facts.above
        if state.slot(wanted) is None
    ]
    text = "give the standby a physical slot of its own on the primary"
    return remedies.run_statements(text, *make, *setting.orders, by_hand=setting.by_hand)


@check(
    "primary-slot",
    group=GROUP,
    title="the standby's physical slot is on the primary",
    consequence="the standby does not stream, so nothing newer can take over",
    needs=Needs.BOTH,
    reads=("primary_slot_name",),
)
def primary_slot(facts: Facts) -> Iterator[Seen]:
    for primary, above, standby, below in facts.both:
        name = below.setting("primary_slot_name")
        if not name:
            continue
        slot = above.slot(name)
        if slot is None:
            yield Seen(
                primary.name,
                f"primary_slot_name = '{name}' on {standby.name}, no such slot on {primary.name}",
                f"{primary.name} has no slot {name}, through which {standby.name} wants to stream",
                remedies.run_statements(
                    "", remedies.order(primary.name, remedies.create_physical_slot(name))
                ),
            )
        elif slot.slot_type != "physical":
            yield Seen(
                primary.name,
                f"slot_type = {slot.slot_type} of {name}",
                f"{name} is not a physical slot, and {standby.name} can't stream through it",
                _name_a_slot(facts, standby),
            )
        else:
            yield Seen(primary.name, f"'{name}', active_pid = {slot.active_pid}")


@check(
    "standby-streams",
    group=GROUP,
    title="the standby streams from the primary",
    consequence="transactions that the standby does not have are lost, and its copies grow old",
    needs=Needs.BOTH,
)
def standby_streams(facts: Facts) -> Iterator[Seen]:
    for primary, _, standby, state in facts.both:
        streams = state.replication.receiver_streaming
        yield Seen(
            standby.name,
            f"pg_stat_wal_receiver.status {'=' if streams else '<>'} streaming",
            "" if streams else f"{standby.name} does not stream",
            remedies.repaired_with_cause(
                f"read the log of {standby.name}: its primary_conninfo must lead to {primary.name}"
            ),
        )


@check(
    "standby-cut-off",
    group=GROUP,
    title="no node that answers is cut off from every primary",
    consequence="the node receives nothing: it lacks all later commits, and its copies of slots "
    "grow old",
)
def standby_cut_off(facts: Facts) -> Iterator[Seen]:
    """Look for nodes that a failover cut off and did not reconnect.

    A failover cuts off every receiver. A run that was killed may not have restored one.
    """
    for node in facts.view.nodes:
        state = node.state
        if state is None or not state.cut:
            continue
        led = f"{state.upstream.address}" if state.upstream else "an unknown place"
        yield Seen(
            node.name,
            f"primary_conninfo has the host /slotfailover-cut/…; it led to {led}",
            f"a failover has cut {node.name} off from every primary, and did not restore it",
            _reconnect(facts, node),
            severity=Severity.WARNING if node.leading else None,
        )


def _reconnect(facts: Facts, node: Node) -> Remedy:
    """Return the remedy that leads a node back to the server it streamed from.

    The remedy is manual unless the present primary is still that server.
    """
    around = node.state.details if node.state is not None else None
    primary = facts.view.primary
    right = primary is not None and primary.writable and not outdated(facts.view, primary)
    if not node.leading and not (right and primary is not None and follows(node, primary)):
        return remedies.manual(
            f"complete the interrupted command with slotfailover resume, which leads {node.name} "
            "to the primary; or, if nothing was promoted, take it back with slotfailover resume "
            "--rollback",
            because="the primary that fed it before may not be the right one now",
        )
    if around is None or around.upstream is None:
        return remedies.manual(
            f"set primary_conninfo of {node.name} as it was: slotfailover resume does it",
            because="primary_conninfo was not read",
        )
    return remedies.alter_system_conninfo(node, "primary_conninfo", reconnected(around.upstream))


@check(
    "primary-conninfo-dbname",
    group=GROUP,
    title="primary_conninfo names a database for the slotsync worker",
    consequence=NO_NEW_COPIES,
    needs=Needs.STANDBY,
)
def primary_conninfo_dbname(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        upstream = state.upstream
        dbname = upstream.value("dbname") if upstream else ""
        there = _databases(facts)
        unknown = "" if there else "the databases of the primary are not known"
        if upstream is None:
            wrong, unknown = f"{standby.name} has no primary_conninfo", ""
        elif not dbname:
            wrong = "primary_conninfo has no dbname (pg_basebackup -R writes none)"
        elif there and dbname not in there:
            wrong = f"the primary has no database {dbname}, to which the worker wants to connect"
        else:
            wrong = ""
        unknown = "" if wrong else unknown
        remedy = _with_dbname(facts, standby)
        yield Seen(standby.name, f"dbname = '{dbname}'", wrong, remedy, unknown=unknown)


def _with_dbname(facts: Facts, standby: Node) -> Remedy:
    """Return the order that adds a database to primary_conninfo: postgres, if it is there."""
    there = _databases(facts)
    around = standby.state.details if standby.state is not None else None
    if standby.state is not None and standby.state.cut:
        return remedies.repaired_with_cause("repair standby-cut-off first")
    if around is None or around.upstream is None or not there:
        return remedies.manual(
            f"set primary_conninfo with dbname=… on {standby.name}",
            because="the primary is not known",
        )
    dbname = "postgres" if "postgres" in there else min(there)
    changed = around.upstream.with_value("dbname", dbname)
    return remedies.alter_system_conninfo(standby, "primary_conninfo", changed)


def _databases(facts: Facts) -> frozenset[str]:
    for _, state in facts.above:
        if state.details is not None:
            return state.details.databases
    return frozenset()


@check(
    "primary-conninfo-password",
    group=GROUP,
    title="primary_conninfo has no password",
    consequence="PostgreSQL writes the password into the server's log, as at each change of "
    "primary_conninfo",
    severity=Severity.WARNING,
    needs=Needs.STANDBY,
)
def primary_conninfo_password(facts: Facts) -> Iterator[Seen]:
    for standby in facts.view.standbys:
        details = standby.state.details if standby.state is not None else None
        upstream = details.upstream if details is not None else None
        if upstream is None:
            continue
        secret = any(keyword in SECRETS for keyword, _ in upstream.pairs)
        yield Seen(
            standby.name,
            f"primary_conninfo of {standby.name}: {upstream.masked}",
            f"primary_conninfo of {standby.name} has a password" if secret else "",
            remedies.manual(
                f"name a file with the password on {standby.name} (passfile=… in "
                "primary_conninfo), and take the password out",
                because="the file belongs to the server's user",
            ),
        )


@check(
    "pg-hba",
    group=GROUP,
    title="pg_hba.conf of the primary lets the slotsync worker in",
    consequence=NO_NEW_COPIES,
    needs=Needs.BOTH,
)
def pg_hba(facts: Facts) -> Iterator[Seen]:
    """Judge the slotsync worker's connection by the primary's pg_hba.conf.

    The worker connects as the walreceiver does, from the same address and with the same role, but
    to a database.
    """
    for primary, above, standby, below in facts.both:
        around = above.details
        dbname = below.upstream.value("dbname") if below.upstream else ""
        slot = below.setting("primary_slot_name")
        if around is None or around.hba is None:
            why = f"our role may not read pg_hba_file_rules of {primary.name}"
            yield Seen(primary.name, "", unknown=why)
            continue
        if not dbname or not slot:
            yield Seen(
                primary.name,
                "",
                unknown=f"the database or slot that {standby.name} connects to is unknown",
            )
            continue
        followers = [f for f in around.followers if f.slot == slot]
        if not followers:
            yield Seen(primary.name, "", unknown=f"{standby.name} is not connected to {slot}")
        for follower in followers:
            verdict = hba.verdict(
                around.hba,
                database=dbname,
                user=follower.user,
                address=follower.address,
                encrypted=follower.encrypted,
            )
            where = f"from {follower.address}" if follower.address else "from a socket"
            line = hba.line_for(dbname, follower.user, follower.address)
            yield Seen(
                primary.name,
                f"role {follower.user} {where}, database {dbname}: {verdict}",
                f"{primary.name} lets {standby.name} replicate, but not connect to {dbname}"
                if verdict.refuses
                else "",
                unknown=str(verdict) if verdict.unknown else "",
                remedy=remedies.run_statements(
                    f"in pg_hba.conf of {primary.name}, before any line that rejects it, add "
                    f"`{line}`",
                    remedies.order(primary.name, RELOAD),
                    by_hand="pg_hba.conf is a file on the server",
                ),
            )


@check(
    "cascading-standby",
    group=GROUP,
    title="the standby is fed by the primary itself",
    consequence="slots are never synchronized to a standby of a standby: all are lost with it",
    needs=Needs.STANDBY,
)
def cascading_standby(facts: Facts) -> Iterator[Seen]:
    for standby, state in facts.below:
        feeder = _feeding_standby(facts, standby, state)
        upstream = state.upstream.address if state.upstream else ""
        yield Seen(
            standby.name,
            f"primary_conninfo leads to {upstream or 'an unknown place'}"
            + (f", which is the standby {feeder.name}" if feeder else ""),
            f"{standby.name} is a standby of the standby {feeder.name}" if feeder else "",
            remedies.manual(
                f"let primary_conninfo and primary_slot_name of {standby.name} lead to the primary",
                because="which server feeds which is a decision",
            ),
        )


def _feeding_standby(facts: Facts, standby: Node, state: NodeState) -> Node | None:
    """Return the standby from which this one streams, None if it streams from the primary."""
    if state.upstream is None:
        return None
    for node in facts.view.standbys:
        if node.name != standby.name and state.upstream.names(node.endpoints):
            return node
    return None
