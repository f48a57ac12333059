"""The exact SQL of every step, as text that is both shown and run. Pure.

Only `connection` has two forms: the one that is run, and the one with masked secrets to show.
Source: PostgreSQL documentation 4.1 Lexical Structure, ALTER SUBSCRIPTION, ALTER SERVER, ALTER
SYSTEM.
"""

from collections.abc import Iterator

from schemas.events import MARKER_PREFIX
from services.failover.model.conninfo import Conninfo
from services.failover.model.destination import Destination, mark_in, without_mark
from services.failover.model.subscription import Subscription
from services.failover.model.timelines import Milestone, without_milestone
from services.failover.model.view import FENCE, FENCE_MARK
from services.postgres.identifiers import identifier, literal

PROMOTE = "SELECT pg_promote(false)"
CHECKPOINT = "CHECKPOINT"
RELOAD = "SELECT pg_reload_conf()"
FENCED_BY_US = f"ALTER SYSTEM SET {FENCE_MARK} = "
FENCED = f"ALTER SYSTEM SET {FENCE} = on"
UNFENCED = (f"ALTER SYSTEM RESET {FENCE_MARK}", f"ALTER SYSTEM RESET {FENCE}", RELOAD)
"""The mark goes first, and comes last: broken off half-way, no mark stands without a fence."""
SNAPSHOT = "SELECT pg_log_standby_snapshot()"
"""Lets a new slot's copy become persistent on a standby soon; else it may take 15 s."""


def disable(subscription: str, comment: str) -> tuple[str, ...]:
    """Return the SQL, for one transaction, that disables a subscription and sets its `comment`.

    The comment has the mark.
    """
    name = identifier(subscription)
    return (f"ALTER SUBSCRIPTION {name} DISABLE", comment_on(subscription, comment))


def enable(subscription: str, comment: str) -> tuple[str, ...]:
    """Return the SQL, for one transaction, that enables a subscription and sets its `comment`.

    The comment has the mark no more.
    """
    name = identifier(subscription)
    return (f"ALTER SUBSCRIPTION {name} ENABLE", comment_on(subscription, comment))


def connection(
    subscription: Subscription, conninfo: Conninfo, comment: str, *, masked: bool
) -> tuple[str, ...]:
    """Return the SQL that leads a subscription to another server and sets its comment.

    The comment notes the timeline that it is fed from. Where the subscription connects by a foreign
    server, that server is led elsewhere, with all subscriptions that use it; the subscription gets
    it once more, so that its row is of the comment's transaction.
    """
    name = identifier(subscription.name)
    if subscription.foreign_server:
        server = identifier(subscription.foreign_server)
        options = ", ".join(_changed_options(subscription.conninfo, conninfo))
        change: tuple[str, ...] = (
            f"ALTER SERVER {server} OPTIONS ({options})",
            f"ALTER SUBSCRIPTION {name} SERVER {server}",
        )
    else:
        text = conninfo.masked if masked else conninfo.text
        change = (f"ALTER SUBSCRIPTION {name} CONNECTION {literal(text)}",)
    return (*change, comment_on(subscription.name, comment))


def _changed_options(before: Conninfo, after: Conninfo) -> Iterator[str]:
    """Yield what ALTER SERVER changes: only what differs, so that no secret is part of it."""
    old, new = dict(before.pairs), dict(after.pairs)
    for key, value in new.items():
        if old.get(key) != value:
            yield f"{'SET' if key in old else 'ADD'} {identifier(key)} {literal(value)}"
    yield from (f"DROP {identifier(key)}" for key in old if key not in new)


def comment_on(subscription: str, comment: str) -> str:
    """Return the SQL that sets a subscription's comment."""
    text = literal(comment) if comment else "NULL"
    return f"COMMENT ON SUBSCRIPTION {identifier(subscription)} IS {text}"


def fenced(by_whom: str) -> tuple[str, ...]:
    """Return the SQL that fences a primary and marks the fence as ours, in one reload."""
    return (FENCED, f"{FENCED_BY_US}{literal(by_whom)}", RELOAD)


def alter_system(setting: str, items: tuple[str, ...]) -> tuple[str, ...]:
    """Set a list setting on the server, and have the server read it."""
    value = ", ".join(literal(item) for item in items) or "''"
    return (f"ALTER SYSTEM SET {identifier(setting)} = {value}", RELOAD)


def marker(text: str) -> tuple[str, ...]:
    """Return the SQL of a logical message in its own transaction.

    The commit does not wait for standbys.
    """
    return (
        "SET LOCAL synchronous_commit = local",
        f"SELECT pg_logical_emit_message(true, {literal(MARKER_PREFIX)}, {literal(text)})",
    )


def create_physical_slot(name: str) -> tuple[str, ...]:
    """Return the SQL that creates a slot which keeps WAL from now on."""
    return (f"SELECT pg_create_physical_replication_slot({literal(name)}, true)",)


def drop_slots(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the SQL that drops slots, one by one."""
    return tuple(f"SELECT pg_drop_replication_slot({literal(name)})" for name in names)


def primary_conninfo(text: str) -> tuple[str, ...]:
    """Return the SQL that sets where a standby streams from."""
    return (f"ALTER SYSTEM SET primary_conninfo = {literal(text)}", RELOAD)


def marked(comment: str, destination: Destination) -> str:
    """Return the comment with our mark at its end, in place of a former one."""
    return f"{without_mark(comment)} {destination.mark}".strip()


def unmarked(comment: str, milestone: Milestone | None) -> str:
    """Return the comment of a subscription that is fed again: without a mark, with `milestone`."""
    return noted(without_mark(comment), milestone)


def noted(comment: str, milestone: Milestone | None) -> str:
    """Return the comment with `milestone` in place of the former one; unchanged for None."""
    if milestone is None:
        return comment
    text = without_milestone(without_mark(comment))
    return f"{text} {milestone.note}{mark_in(comment)}".strip()


def end_other_standbys(slot: str, application: str = "") -> str:
    """Return SQL that ends all physical standbys' streams but that of `slot`.

    The server's stop would wait for each. `application`: the name of a standby without a slot whose
    stream is kept, too, or "".
    """
    kept = f"active_pid IS NOT NULL AND (slot_type = 'logical' OR slot_name = {literal(slot)})"
    return (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_replication WHERE pid NOT IN "  # noqa: S608
        f"(SELECT active_pid FROM pg_replication_slots WHERE {kept})"
        + (f" AND application_name <> {literal(application)}" if application else "")
    )
