"""Obstacles for the standby as the primary, for its promotion and for the rejoin. Pure.

Source: PostgreSQL documentation 19.5.3 Archiving, 19.6.1 Sending Servers, 19.11.1 Statement
Behavior, 20.1 pg_hba.conf, pg_rewind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from services.failover.checks import hba, remedies
from services.failover.checks.model import Needs, Seen, check
from services.failover.model.standby_settings import why_fixed
from services.failover.model.statements import RELOAD
from services.failover.model.view import FENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.failover.checks.facts import Facts

GROUP = "promotion"
_PASSING = "the prepared transaction "
"""Of what a fence does not bind, that comes and goes: a switchover looks at the moment."""


@check(
    "standby-read-only",
    group=GROUP,
    title="the standby takes writes once it is promoted",
    consequence="the new primary is read-only: every write fails, and the failover does not end",
    needs=Needs.STANDBY,
)
def standby_read_only(facts: Facts) -> Iterator[Seen]:
    """Look for a standby whose transactions are read-only by default.

    A base backup of a fenced primary leaves it so, or a policy for standbys.
    """
    for standby, state in facts.below:
        read_only = state.details.read_only if state.details is not None else None
        if read_only is None:
            why = f"whether {standby.name} is read-only for others was not seen"
            yield Seen(standby.name, "", unknown=why)
            continue
        yield Seen(
            standby.name,
            f"{FENCE} is {'on' if read_only else 'off'} on {standby.name}",
            f"{FENCE} is on on {standby.name}" if read_only else "",
            remedies.run_statements(
                "where it stands in postgresql.conf, take it out there",
                remedies.order(standby.name, f"ALTER SYSTEM RESET {FENCE}", RELOAD),
                by_hand="somebody may want standbys to be read-only by name",
            ),
        )


@check(
    "standby-admits-consumers",
    group=GROUP,
    title="pg_hba.conf of the standby lets the consumers in",
    consequence="consumers are refused by the new primary: nothing flows until pg_hba.conf is "
    "corrected there",
    needs=Needs.BOTH,
)
def standby_admits_consumers(facts: Facts) -> Iterator[Seen]:
    """Judge whether the standby's pg_hba.conf admits each consumer of the primary.

    A consumer is judged as it is connected now: by role, address, database and encryption.
    """
    for _, above, standby, below in facts.both:
        if below.details is None or below.details.hba is None:
            why = f"our role may not read pg_hba_file_rules of {standby.name}"
            yield Seen(standby.name, "", unknown=why)
            continue
        if above.details is None:
            yield Seen(standby.name, "", unknown="who is connected to the primary was not asked")
            continue
        connected = {found.slot: found for found in above.details.consumers}
        for required in facts.required:
            consumer = connected.get(required.slot)
            if consumer is None:
                why = f"the consumer of {required.slot} is not connected: how it comes is not known"
                yield Seen(required.slot, "", unknown=why)
                continue
            verdict = hba.verdict(
                below.details.hba,
                database=consumer.database,
                user=consumer.user,
                address=consumer.address,
                encrypted=consumer.encrypted,
            )
            where = f"from {consumer.address}" if consumer.address else "from a socket"
            line = hba.line_for(consumer.database, consumer.user, consumer.address)
            yield Seen(
                required.slot,
                f"role {consumer.user} {where}, database {consumer.database}: {verdict}",
                f"{standby.name} does not let the consumer of {required.slot} in"
                if verdict.refuses
                else "",
                remedies.run_statements(
                    f"in pg_hba.conf of {standby.name}, before any line that rejects it, add "
                    f"`{line}`",
                    remedies.order(standby.name, RELOAD),
                    by_hand="pg_hba.conf is a file on the server",
                ),
                unknown=str(verdict) if verdict.unknown else "",
            )


@check(
    "fence-overrides",
    group=GROUP,
    title="a fence would keep everybody from writing",
    consequence="some sessions could write on after the final LSN: a switchover refuses",
    severity=Severity.WARNING,
    needs=Needs.PRIMARY,
)
def fence_overrides(facts: Facts) -> Iterator[Seen]:
    """Find roles and databases that can write past a fence.

    This does not matter where the primary's machine has a command that stops or fences it.
    """
    for primary, state in facts.above:
        stopped = primary.has_command("stop") or primary.has_command("fence")
        lasting = [leak for leak in state.leaks if not leak.startswith(_PASSING)]
        found = "; ".join(lasting)
        yield Seen(
            primary.name,
            f"what a fence does not bind on {primary.name}: {found or 'nothing'}"
            + (", and the node has a command that stops it" if stopped else ""),
            f"a fence of {primary.name} does not bind {found}" if found and not stopped else "",
            remedies.manual(
                "end, decide, disable or reset each of them; or give failover.machines."
                f"{primary.name} a `stop` command",
                because="somebody has made it for a reason",
            ),
        )


@check(
    "alter-system-allowed",
    group=GROUP,
    title="ALTER SYSTEM is allowed, and has an effect",
    consequence="slotfailover can't fence, or take standbys out of lists: it refuses to fail over",
    needs=Needs.BOTH,
)
def alter_system_allowed(facts: Facts) -> Iterator[Seen]:
    for node, state in (*facts.above, *facts.below):
        value = state.setting("allow_alter_system")
        if not value:
            yield Seen(node.name, "", unknown=f"allow_alter_system of {node.name} is not known")
            continue
        yield Seen(
            node.name,
            f"allow_alter_system = {value} on {node.name}",
            f"{why} on {node.name}" if (why := why_fixed(state)) else "",
            remedies.manual(
                "leave the promotion to what manages these servers, and use check, repoint and "
                "watch; or set allow_alter_system = on in postgresql.conf, and start the server "
                "without the setting on its command line",
                because="something else manages this server's settings",
            ),
        )


@check(
    "rewind-possible",
    group=GROUP,
    title="an old primary can be rewound",
    consequence="an old primary that has diverged must be copied anew: hours without a standby",
    severity=Severity.WARNING,
    needs=Needs.BOTH,
    reads=("wal_log_hints", "data_checksums"),
)
def rewind_possible(facts: Facts) -> Iterator[Seen]:
    for node, state in (*facts.above, *facts.below):
        hints, sums = state.setting("wal_log_hints"), state.setting("data_checksums")
        possible = "on" in (hints, sums)
        yield Seen(
            node.name,
            f"wal_log_hints = {hints}, data_checksums = {sums} on {node.name}",
            "" if possible else f"pg_rewind can't be used on {node.name}",
            remedies.restart_with(node, "wal_log_hints", "on"),
        )


@check(
    "archiving",
    group=GROUP,
    title="the standby archives WAL as the primary does, once it is promoted",
    consequence="from the failover on WAL is not archived: no point-in-time recovery, and a "
    "standby that falls behind can't be fed from the archive",
    severity=Severity.WARNING,
    needs=Needs.BOTH,
    reads=("archive_mode", "archive_command", "archive_library"),
)
def archiving(facts: Facts) -> Iterator[Seen]:
    for primary, above, standby, below in facts.both:
        mode = above.setting("archive_mode")
        here = below.setting("archive_mode")
        how = below.setting("archive_command").strip("( )") or below.setting("archive_library")
        how = "" if how == "disabled" else how
        wrong = ""
        if mode != "off" and here == "off":
            wrong = f"archive_mode is {mode} on {primary.name} and off on {standby.name}"
        elif mode != "off" and not how:
            wrong = f"{standby.name} has neither archive_command nor archive_library"
        yield Seen(
            standby.name,
            f"archive_mode = {mode} on {primary.name}, {here} on {standby.name}",
            wrong,
            remedies.manual(
                f"set archive_mode and archive_command on {standby.name} as on {primary.name}; "
                "archive_mode needs a restart",
                because="where a server archives to is a decision",
            ),
        )


@check(
    "idle-slot-timeout",
    group=GROUP,
    title="slots are not invalidated for being idle",
    consequence="a standby or a consumer that is away for longer loses its slot: the standby "
    "must be rebuilt, or the consumer's tables loaded anew",
    severity=Severity.WARNING,
    needs=Needs.BOTH,
)
def idle_slot_timeout(facts: Facts) -> Iterator[Seen]:
    """Look for idle_replication_slot_timeout, a setting of PostgreSQL 18 that 17 does not know."""
    for node, state in (*facts.above, *facts.below):
        value = state.setting("idle_replication_slot_timeout") or "0"
        yield Seen(
            node.name,
            f"idle_replication_slot_timeout = {value} s on {node.name}",
            f"slots of {node.name} are invalidated once they are idle for {value} s"
            if value != "0"
            else "",
            remedies.run_statements(
                "",
                *remedies.alter_system(node, "idle_replication_slot_timeout", "0").orders,
                by_hand="it was set so that forgotten slots do not fill the disk",
            ),
        )


@check(
    "subscriptions-elsewhere",
    group=GROUP,
    title="no other database of a subscriber has subscriptions to the pair",
    consequence="those subscriptions are not moved: they have no publisher, or are fed by the old "
    "primary when it comes back",
    severity=Severity.WARNING,
    applies=lambda facts: bool(facts.view.subscribers),
)
def subscriptions_elsewhere(facts: Facts) -> Iterator[Seen]:
    """Look for subscriptions to this pair in other databases of a subscriber.

    All databases of a server share pg_subscription.
    """
    known = {end for node in facts.view.nodes for end in node.endpoints}
    listed = {
        (found.name, found.conninfo.text)
        for subscriber in facts.view.subscribers
        for found in subscriber.subscriptions
    }
    by_server = {
        found.name
        for subscriber in facts.view.subscribers
        for found in subscriber.subscriptions
        if found.foreign_server
    }
    for subscriber in facts.view.subscribers:
        if subscriber.elsewhere is None:
            why = f"the other databases of {subscriber.name} were not seen"
            yield Seen(subscriber.name, "", unknown=why)
            continue
        for found in subscriber.elsewhere:
            if found.conninfo is None:
                if found.name not in by_server:
                    why = f"only the database {found.database} shows where its server leads"
                    yield Seen(f"{subscriber.name}/{found.name}", "", unknown=why)
                continue
            if not found.conninfo.names(known) or (found.name, found.conninfo.text) in listed:
                continue
            yield Seen(
                f"{subscriber.name}/{found.name}",
                f"pg_subscription of {subscriber.name}: {found.name} in the database "
                f"{found.database}",
                f"the subscription {found.name} in the database {found.database} of "
                f"{subscriber.name} leads to the pair, and the settings do not name that database",
                remedies.manual(
                    f"add the database {found.database} to failover.subscribers",
                    because="slotfailover does not write its own settings",
                ),
            )
