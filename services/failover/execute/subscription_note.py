"""Writes down, at a subscription that is fed, which timeline feeds it."""

from collections.abc import Iterator

import psycopg

from services.failover.model.statements import comment_on, unmarked
from services.failover.model.timelines import Milestone
from services.failover.model.view import Node, View
from services.failover.plan.feeding import moves
from services.postgres.server import Connection


def notes_due(view: View, primary: Node) -> Iterator[tuple[str, str, Milestone, str]]:
    """Yield (subscriber, subscription, timeline, comment) for each outdated comment."""
    for subscriber, found in view.ours():
        milestone = primary.milestone(str(found.conninfo.address))
        comment = unmarked(found.comment, milestone)
        fed = subscriber.usable and found.enabled and found.fed and not moves(found, primary)
        if fed and milestone is not None and found.comment != comment:
            yield subscriber.name, found.name, milestone, comment


def note_feeding(connection: Connection, name: str, comment: str) -> bool:
    """Set the comment of a subscription, if it is enabled still; return whether it was.

    COMMENT waits for whoever changes the subscription, and keeps others from that until the end. A
    run that has disabled the subscription meanwhile left a mark in its comment, which must stay.
    """
    enabled = False
    with connection.transaction():
        connection.execute(comment_on(name, comment))  # type: ignore[arg-type, unused-ignore]
        row = connection.execute(
            "SELECT subenabled FROM pg_subscription WHERE subname = %s AND subdbid ="
            " (SELECT oid FROM pg_database WHERE datname = current_database())",
            [name],
        ).fetchone()
        enabled = bool(row and row[0])
        if not enabled:
            raise psycopg.Rollback
    return enabled
