"""Remedies: the exact statements, and whether a program may run them by itself. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Order, Remedy
from services.failover.model import statements
from services.failover.model.conninfo import MASK
from services.failover.model.standby_settings import on_command_line
from services.postgres.identifiers import literal

if TYPE_CHECKING:
    from services.failover.model.conninfo import Conninfo
    from services.failover.model.view import Node


def order(server: str, *sql: str) -> Order:
    """Return statements that have no secrets in them."""
    return Order(server, sql, sql)


def run_statements(text: str, *orders: Order, by_hand: str = "") -> Remedy:
    """Return a remedy of statements on servers; `by_hand` says why a person has to run them."""
    return Remedy(text, orders, by_hand)


def manual(text: str, *, because: str = "no SQL can do it") -> Remedy:
    """Return a remedy for a person: no statement can do it."""
    return Remedy(text, (), because)


def repaired_with_cause(text: str) -> Remedy:
    """Return the remedy of a problem that ends by itself once its cause is repaired."""
    return Remedy(text, (), "the cause must be repaired; this follows", follows=True)


def alter_system(node: Node, setting: str, *items: str, text: str = "") -> Remedy:
    """Return the remedy that sets a setting (a list: to these items) and reloads."""
    obstacle = _obstacle(node, setting)
    if obstacle:
        value = f"{setting} = '{', '.join(items)}'"
        return manual(f"{text or 'set'} {value} on {node.name}", because=obstacle)
    return run_statements(text, order(node.name, *statements.alter_system(setting, items)))


def alter_system_conninfo(node: Node, setting: str, conninfo: Conninfo) -> Remedy:
    """Set a connection string, shown with its secrets masked, and reload."""
    obstacle = _obstacle(node, setting)
    if obstacle:
        return manual(f"set {setting} on {node.name} to {conninfo.masked}", because=obstacle)
    shown, real = (
        statements.alter_system(setting, (text,)) for text in (conninfo.masked, conninfo.text)
    )
    secret = "" if shown == real else f"by check --fix, or with its secret in place of {MASK}"
    return run_statements(secret, Order(node.name, shown, real))


def restart_with(node: Node, setting: str, value: str) -> Remedy:
    """Return the remedy that sets a parameter which takes effect at a restart."""
    obstacle = _obstacle(node, setting)
    if obstacle:
        return manual(f"set {setting} = {value} on {node.name}, and restart it", because=obstacle)
    change = statements.alter_system(setting, (value,))[:1]
    return run_statements(
        "",
        order(node.name, *change),
        by_hand=f"{node.name} must be restarted then",
    )


def create_physical_slot(slot: str) -> str:
    """Return the statement that creates a physical slot which reserves WAL at once."""
    return f"SELECT pg_create_physical_replication_slot({literal(slot)}, true)"


def drop_slot(slot: str) -> str:
    """Return the statement that drops a slot."""
    return f"SELECT pg_drop_replication_slot({literal(slot)})"


def _obstacle(node: Node, setting: str) -> str:
    if node.state is not None and on_command_line(node.state, setting):
        return f"it comes from the command line of {node.name}, which ALTER SYSTEM can't override"
    return ""
