"""The steps at subscribers: disable, repoint, enable. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.failover.model import statements
from services.failover.model.destination import Destination, named, without_mark
from services.failover.model.timelines import Milestone
from services.failover.plan.steps.step import Action, Step, with_subscription

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, Subscriber, View


def disable(
    subscriber: Subscriber, subscription: Subscription, node: Node, feeder: Node | None = None
) -> Step:
    """Stop the subscription from being fed by a primary that may come back.

    `feeder`: the primary that is seen to feed it now. The comment notes the feeder's timeline if
    that is known, and else the cluster alone, unless the comment has a note already.
    """
    address = str(subscription.conninfo.address)
    met = feeder.milestone(address) if feeder is not None else None
    if met is None and subscription.milestone is None:
        met = _cluster_of(node, subscription, address)
    noted = statements.noted(subscription.comment, met)
    comment = statements.marked(noted, _destination(node))
    sql = statements.disable(subscription.name, comment)
    return Step(
        action=Action.DISABLE,
        server=subscriber.name,
        subject=subscription.name,
        node=node.name,
        text=f"disable subscription {subscription.name} at {subscriber.name}",
        before="the subscription is enabled, or an earlier run disabled it",
        after="the subscription is disabled, and its comment tells to whom it is led",
        effect=_changing(
            subscriber,
            subscription,
            lambda s: replace(s, enabled=False, comment=comment, as_marked=True),
        ),
        holds=_asking(subscriber, subscription, lambda s: _led_to(s) == named(node.name)),
        shown=sql,
        sql=sql,
    )


def repoint(subscriber: Subscriber, subscription: Subscription, node: Node) -> Step:
    """Point the subscription at the new primary."""
    conninfo = subscription.conninfo.at(node.address)
    if subscription.conninfo.leads_to(node.endpoints):  # by its list, which must skip a fenced one
        conninfo = subscription.conninfo.with_value("target_session_attrs", "read-write")
    noted = statements.noted(
        subscription.comment, _cluster_of(node, subscription, str(node.address))
    )
    marked = subscription.marked
    comment = statements.marked(noted, _destination(node)) if marked else without_mark(noted)
    return Step(
        action=Action.REPOINT,
        server=subscriber.name,
        subject=subscription.name,
        node=node.name,
        text=f"point subscription {subscription.name} at {subscriber.name} to {node.address}",
        before=f"the subscription is disabled, and {node.name} is writable",
        after=f"the subscription's connection string leads to {node.name}",
        effect=_changing(
            subscriber, subscription, lambda s: replace(s, conninfo=conninfo, comment=comment)
        ),
        holds=_asking(
            subscriber,
            subscription,
            lambda s: s.conninfo.leads_to(node.endpoints) and not s.conninfo.takes_any_primary,
        ),
        shown=statements.connection(subscription, conninfo, comment, masked=True),
        sql=statements.connection(subscription, conninfo, comment, masked=False),
    )


def enable(subscriber: Subscriber, subscription: Subscription, node: Node) -> Step:
    """Enable a subscription, which then continues from the new primary."""
    milestone = node.milestone(str(subscription.conninfo.address))
    comment = statements.unmarked(subscription.comment, milestone)
    sql = statements.enable(subscription.name, comment)
    return Step(
        action=Action.ENABLE,
        server=subscriber.name,
        subject=subscription.name,
        node=node.name,
        text=f"enable subscription {subscription.name} at {subscriber.name}",
        before=f"the subscription leads to {node.name}, whose slot is valid and not ahead of it",
        after="the subscription is enabled, and the mark is gone from its comment",
        effect=_changing(
            subscriber, subscription, lambda s: replace(s, enabled=True, comment=comment)
        ),
        holds=_asking(subscriber, subscription, lambda s: s.enabled),
        shown=sql,
        sql=sql,
    )


def _cluster_of(node: Node, subscription: Subscription, address: str) -> Milestone | None:
    """Return the cluster that feeds the subscription by `address`, to be noted in its comment.

    The note keeps the timeline that has fed it, if that is known, and identifies the cluster later
    if no server answers. Only `enable` may note the node's own timeline.
    """
    if node.state is None:
        return subscription.milestone
    system, met = node.state.server.system_identifier, subscription.milestone
    if met is not None and met.system == system:
        return replace(met, address=address)
    return Milestone(system, 0, None, address)


def _led_to(subscription: Subscription) -> str:
    return subscription.destination.node if subscription.destination is not None else ""


def leads(subscription: Subscription, node: Node) -> bool:
    """Tell whether the subscription is disabled, and marked for this node as it is now."""
    led = subscription.destination
    if led is None or node.state is None or _led_to(subscription) != named(node.name):
        return False
    left = led.met.timeline if led.met is not None else led.left
    return left == node.state.server.timeline


def _destination(node: Node) -> Destination:
    """Return whom subscriptions are led to, for their mark: a primary, or one to be promoted."""
    if node.state is None:
        return Destination()
    server, replication = node.state.server, node.state.replication
    system, name = server.system_identifier, named(node.name)
    if server.in_recovery:
        return Destination(system, name, None, server.timeline, replication.replayed_lsn)
    met = node.milestone("") or Milestone(system, server.timeline, None)
    return Destination(system, name, met)


def _changing(
    subscriber: Subscriber,
    subscription: Subscription,
    change: Callable[[Subscription], Subscription],
) -> Callable[[View], View]:
    return lambda view: with_subscription(view, subscriber.name, subscription.name, change)


def _asking(
    subscriber: Subscriber, subscription: Subscription, holds: Callable[[Subscription], bool]
) -> Callable[[View], bool]:
    """Return a condition of a view: the subscription is there, and `holds` is true of it."""

    def ask(view: View) -> bool:
        found = view.subscription(subscriber.name, subscription.name)
        return found is not None and holds(found)

    return ask
