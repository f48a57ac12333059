"""The consumers: subscriptions and the bridge, as far as a failover depends on them. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from schemas.findings import Severity
from schemas.lsn import format_lsn
from services.failover.checks import remedies
from services.failover.checks.facts import bridge_position
from services.failover.checks.half_moved import enabling
from services.failover.checks.model import Needs, Seen, check
from services.failover.model.view import Reach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.failover.checks.facts import Facts
    from services.failover.model.subscription import Subscription

GROUP = "consumers"
_CONNECTING_S: Final = 10.0
_WAL_SENDER_TIMEOUT_MS: Final = 60_000
"""PostgreSQL's default, also of wal_receiver_timeout, after half of which a subscriber asks."""


def _has_subscribers(facts: Facts) -> bool:
    return bool(facts.view.subscribers)


def _has_bridge(facts: Facts) -> bool:
    return facts.view.bridge_slot is not None


def _reads_kafka(facts: Facts) -> bool:
    return facts.view.published is not None


def _unseen(facts: Facts) -> Iterator[Seen]:
    """Yield the subscribers that do not answer: their subscriptions were not seen."""
    for subscriber in facts.view.subscribers:
        if not subscriber.usable:
            yield Seen(subscriber.name, "", unknown=f"{subscriber.name} does not answer")


@check(
    "subscriber-answers",
    group=GROUP,
    title="every subscriber answers",
    consequence="the subscriber's subscriptions can't be moved, and their positions are unknown",
    severity=Severity.WARNING,
    applies=_has_subscribers,
)
def subscriber_answers(facts: Facts) -> Iterator[Seen]:
    for subscriber in facts.view.subscribers:
        answer = "it is a standby" if subscriber.in_recovery else subscriber.detail
        yield Seen(
            subscriber.name,
            f"{subscriber.name}: {subscriber.reach}" + (f", {answer}" if answer else ""),
            ""
            if subscriber.usable
            else f"the subscriptions at {subscriber.name} can't be seen or changed",
            remedies.manual(
                "start the subscriber, or correct its conninfo in failover.subscribers",
                because="a server must be started",
            ),
            Severity.CRITICAL if subscriber.reach is Reach.BARRED else None,
        )


@check(
    "subscription-enabled",
    group=GROUP,
    title="every subscription is enabled",
    consequence="the slot is not advanced: WAL piles up, and a new slot's copy does not become "
    "permanent",
    severity=Severity.WARNING,
    applies=_has_subscribers,
)
def subscription_enabled(facts: Facts) -> Iterator[Seen]:
    yield from _unseen(facts)
    for subscriber, subscription in (*facts.view.ours(), *facts.view.fed_by_standbys()):
        where = f"{subscriber.name}/{subscription.name}"
        state = "t" if subscription.enabled else "f"
        mark = ", disabled by slotfailover" if subscription.marked else ""
        yield Seen(
            where,
            f"{where}: subenabled = {state}{mark}",
            "" if subscription.enabled else f"the subscription {where} is disabled",
            enabling(facts.view, subscriber, subscription),
        )


@check(
    "subscription-changeable",
    group=GROUP,
    title="our role may change every subscription",
    consequence="the subscription can't be moved: it stands still until somebody repoints it",
    applies=_has_subscribers,
)
def subscription_changeable(facts: Facts) -> Iterator[Seen]:
    yield from _unseen(facts)
    for subscriber, subscription in facts.view.ours():
        where = f"{subscriber.name}/{subscription.name}"
        yield Seen(
            where,
            where,
            "" if subscription.changeable else f"our role may not change the subscription {where}",
            remedies.manual(
                f"run sql/subscriber_roles.sql on {subscriber.name}; where the subscription has "
                "password_required = false, only a superuser may change it: name one in "
                f"failover.subscribers.{subscriber.name}, or SET (password_required = true)",
                because="only a superuser may",
            ),
        )


@check(
    "subscription-worker",
    group=GROUP,
    title="every enabled subscription has its worker",
    consequence="the slot is not advanced: WAL piles up, and the subscription falls behind",
    severity=Severity.WARNING,
    needs=Needs.PRIMARY,
    applies=_has_subscribers,
)
def subscription_worker(facts: Facts) -> Iterator[Seen]:
    yield from _unseen(facts)
    for subscriber, subscription in (*facts.view.ours(), *facts.view.fed_by_standbys()):
        where = f"{subscriber.name}/{subscription.name}"
        if not subscription.enabled or not facts.above:
            continue
        if not subscription.worker:
            evidence = f"no pid in pg_stat_subscription for {where}"
            wrong = f"no worker applies the subscription {where}"
        elif _has_all(facts, subscription):
            continue
        elif subscription.failing is None:
            hidden = "the role may not see since when its worker runs, and others have failed"
            yield Seen(where, "", unknown=f"{where}: {hidden}")
            continue
        elif subscription.failing:
            evidence = f"{where}: {subscription.failing}"
            wrong = f"the worker of the subscription {where} was just started; others before failed"
        elif subscription.fed:
            continue
        elif (age_s := subscription.worker_age_s) is None or age_s <= _first_message_s(facts):
            age = "an unknown time" if age_s is None else f"{age_s:.1f} s"
            why = f"its worker was started {age} ago and has had no message yet"
            yield Seen(where, "", unknown=f"{where}: {why}")
            continue
        else:
            evidence = f"{where}: received_lsn is null {age_s:.0f} s after its worker was started"
            wrong = f"the worker of the subscription {where} is not fed"
        remedy = remedies.manual(
            f"read the log of {subscriber.name}: it says what stops the worker, or what it waits "
            "for; look at the subscription's conninfo, and whether its slot exists and is free",
            because="the log says why",
        )
        yield Seen(where, evidence, wrong, remedy)


def _has_all(facts: Facts, subscription: Subscription) -> bool:
    """Tell whether the worker has confirmed all WAL, whatever became of those before it.

    A failover, too, ends workers with an error.
    """
    slot = facts.upstream(subscription.slot_name or "")
    confirmed = slot.confirmed_flush_lsn if slot is not None and slot.active_pid else None
    written = [state.replication.written_lsn for _, state in facts.above]
    return confirmed is not None and all(lsn is not None and confirmed >= lsn for lsn in written)


def _first_message_s(facts: Facts) -> float:
    """Return the age at which a worker has had a message, if it is connected.

    A walsender that decodes a backlog, or has nothing to send, sends a keepalive after half of
    wal_sender_timeout; where that is 0, the subscriber asks for one. Source: walsender.c,
    WalSndKeepaliveIfNecessary; worker.c, LogicalRepApplyLoop.
    """
    timeouts = [state.server.wal_sender_timeout_ms for _, state in facts.above]
    return _CONNECTING_S + max(ms or _WAL_SENDER_TIMEOUT_MS for ms in timeouts) / 2000


@check(
    "initial-copy",
    group=GROUP,
    title="every table's initial copy is finished",
    consequence="unless the slot was synchronized, the initial copy starts again from the new "
    "primary",
    severity=Severity.WARNING,
    applies=_has_subscribers,
)
def initial_copy(facts: Facts) -> Iterator[Seen]:
    yield from _unseen(facts)
    for subscriber, subscription in facts.view.ours():
        if subscription.copying:
            where = f"{subscriber.name}/{subscription.name}"
            states = ", ".join(f"{name} {state}" for name, state in subscription.copying)
            yield Seen(
                where,
                f"pg_subscription_rel.srsubstate is not r or f: {states}",
                f"{len(subscription.copying)} table(s) of {where} are still being copied",
                remedies.manual(
                    "wait until the initial copy is finished",
                    because="the copy has to run to its end",
                ),
            )


@check(
    "slot-shared",
    group=GROUP,
    title="no two subscriptions use one slot",
    consequence="only one of the subscriptions is fed at a time, and the others miss what it gets",
    applies=_has_subscribers,
)
def slot_shared(facts: Facts) -> Iterator[Seen]:
    yield from _unseen(facts)
    users: dict[str, list[str]] = defaultdict(list)
    for subscriber, subscription in facts.view.ours():
        if subscription.slot_name:
            users[subscription.slot_name].append(f"{subscriber.name}/{subscription.name}")
    if facts.view.bridge_slot in users:
        users[facts.view.bridge_slot].append("the bridge")
    for slot, names in users.items():
        if len(names) > 1:
            yield Seen(
                slot,
                f"slot_name = {slot} of {', '.join(names)}",
                f"{len(names)} consumers use the slot {slot}",
                remedies.manual(
                    "give each a slot of its own, and load all but one of them anew",
                    because="each has missed a part",
                ),
            )


@check(
    "bridge-connected",
    group=GROUP,
    title="the bridge is connected to its slot",
    consequence="the slot is not advanced: WAL piles up, and the bridge falls behind",
    severity=Severity.WARNING,
    needs=Needs.PRIMARY,
    applies=_has_bridge,
)
def bridge_connected(facts: Facts) -> Iterator[Seen]:
    name = facts.view.bridge_slot
    slot = facts.upstream(name) if name is not None else None
    for primary, _ in facts.above:
        if slot is None:
            continue
        position = bridge_position(facts.view)
        at = format_lsn(position) if position is not None else "unknown"
        yield Seen(
            slot.slot_name,
            f"active_pid = {slot.active_pid or 'null'} on {primary.name}, its origin is at {at}",
            "" if slot.active_pid else "the bridge is not connected to its slot",
            remedies.manual("start slotbridge run", because="the bridge is another program"),
            since="" if slot.active_pid else slot.inactive_since or "",
        )


@check(
    "kafka-record",
    group=GROUP,
    title="Kafka's progress record fits the database",
    consequence="the bridge stops at its next start instead of losing or repeating events",
    applies=_reads_kafka,
)
def kafka_record(facts: Facts) -> Iterator[Seen]:
    """Judge Kafka's progress record, where the settings name Kafka.

    The record's position is also judged as a consumer's.
    """
    published, slot = facts.view.published, facts.view.bridge_slot
    if published is None or slot is None:
        return
    origin = bridge_position(facts.view)
    systems = {
        node.state.server.system_identifier for node in facts.view.nodes if node.state is not None
    }
    at = "none" if published.latest is None else format_lsn(published.latest)
    wrong = ""
    if published.problem:
        wrong = "Kafka's progress record can't be read"
    elif published.system_identifier and published.system_identifier not in systems:
        wrong = "Kafka's progress record is of another database"
    elif origin is not None and origin > (published.latest or 0) and not published.late:
        wrong = "Kafka has less than the bridge had published: it lost committed records"
    yield Seen(
        slot,
        published.problem
        or f"its record is at {at}, the origin at {format_lsn(origin) if origin else 'none'}, "
        f"system_identifier {published.system_identifier or 'none'}"
        + "; not judged: whether it has all up to the origin, as Kafka is slow" * published.late,
        wrong,
        remedies.manual(
            "start a broker, or correct kafka.bootstrap_servers"
            if published.problem
            else "restore the topics, correct the settings, or start over: docs/why/delivery.md",
            because="Kafka is another system",
        ),
        Severity.WARNING if published.problem else None,
    )
