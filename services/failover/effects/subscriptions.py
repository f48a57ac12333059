"""The steps at subscribers: disable, repoint, enable. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.failover import statements
from services.failover.effects.step import Action, Step, with_subscription

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.failover.view import Node, Subscriber, Subscription, View


def disable(subscriber: Subscriber, subscription: Subscription, node: Node) -> Step:
    """Stop the subscription from being fed by a primary that may come back."""
    sql = statements.disable(subscription.name, subscription.comment)
    return Step(
        Action.DISABLE,
        subscriber.name,
        subscription.name,
        node.name,
        f"disable subscription {subscription.name} at {subscriber.name}",
        "it is enabled",
        "it is disabled, and marked so in its comment",
        _changing(subscriber, subscription, _disabled),
        _asking(subscriber, subscription, lambda s: not s.enabled),
        sql,
        sql,
    )


def repoint(subscriber: Subscriber, subscription: Subscription, node: Node) -> Step:
    """Point the subscription at the new primary."""
    conninfo = subscription.conninfo.at(node.address)
    return Step(
        Action.REPOINT,
        subscriber.name,
        subscription.name,
        node.name,
        f"point subscription {subscription.name} at {subscriber.name} to {node.address}",
        f"it is disabled, and {node.name} is writable",
        f"its connection string leads to {node.name}",
        _changing(subscriber, subscription, lambda s: replace(s, conninfo=conninfo)),
        _asking(subscriber, subscription, lambda s: s.conninfo.leads_to(node.endpoints)),
        statements.connection(subscription.name, conninfo, masked=True),
        statements.connection(subscription.name, conninfo, masked=False),
    )


def enable(subscriber: Subscriber, subscription: Subscription, node: Node) -> Step:
    """Let the subscription go on from the new primary."""
    sql = statements.enable(subscription.name, subscription.comment)
    return Step(
        Action.ENABLE,
        subscriber.name,
        subscription.name,
        node.name,
        f"enable subscription {subscription.name} at {subscriber.name}",
        f"it leads to {node.name}, whose slot is valid and at or before its position",
        "it is enabled, and the mark is gone",
        _changing(subscriber, subscription, _enabled),
        _asking(subscriber, subscription, lambda s: s.enabled),
        sql,
        sql,
    )


def _changing(
    subscriber: Subscriber,
    subscription: Subscription,
    change: Callable[[Subscription], Subscription],
) -> Callable[[View], View]:
    return lambda view: with_subscription(view, subscriber.name, subscription.name, change)


def _asking(
    subscriber: Subscriber, subscription: Subscription, holds: Callable[[Subscription], bool]
) -> Callable[[View], bool]:
    def ask(view: View) -> bool:
        found = view.subscription(subscriber.name, subscription.name)
        return found is not None and holds(found)

    return ask


def _disabled(subscription: Subscription) -> Subscription:
    return replace(subscription, enabled=False, comment=statements.marked(subscription.comment))


def _enabled(subscription: Subscription) -> Subscription:
    return replace(subscription, enabled=True, comment=statements.unmarked(subscription.comment))
