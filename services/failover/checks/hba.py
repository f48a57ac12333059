"""Whether pg_hba.conf admits an ordinary connection, by the server's own reading of it. Pure.

The first line that fits decides; if none fits, the connection is refused. A line that can't be
judged from here (a group, a pattern, a host name, `samenet`) makes the verdict unknown, and an
unknown verdict refuses nothing.
Source: PostgreSQL documentation 20.1 The pg_hba.conf File.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.failover.model.node_details import HbaRule


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of pg_hba.conf on one connection."""

    text: str
    refuses: bool
    unknown: bool = False
    """The verdict can't be judged from here."""

    def __str__(self) -> str:
        return self.text


def verdict(
    rules: Iterable[HbaRule], *, database: str, user: str, address: str, encrypted: bool
) -> Verdict:
    """Judge whether `rules` admit a connection from `address` ("": a Unix-domain socket)."""
    for rule in rules:
        parts = (
            _type_fits(rule, address, encrypted),
            _address_fits(rule, address),
            _fits(rule.databases, database, {"sameuser": user == database, "replication": False}),
            _fits(rule.users, user, {}),
        )
        if rule.broken or (None in parts and False not in parts):
            return Verdict(
                f"line {rule.line} of pg_hba.conf can't be judged from here", False, True
            )
        if all(parts):
            text = f"line {rule.line} of pg_hba.conf says {rule.method}"
            return Verdict(text, rule.method == "reject")
    return Verdict("no line of pg_hba.conf admits it", True)


def line_for(database: str, user: str, address: str) -> str:
    """Return a line of pg_hba.conf that admits the connection."""
    if not address:
        return f"local {database} {user} scram-sha-256"
    width = ipaddress.ip_address(address).max_prefixlen
    return f"host {database} {user} {address}/{width} scram-sha-256"


def _type_fits(rule: HbaRule, address: str, encrypted: bool) -> bool | None:
    if rule.type == "local" or not address:
        return rule.type == "local" and not address
    if rule.type == "hostgssenc":
        return None
    return {"hostssl": encrypted, "hostnossl": not encrypted}.get(rule.type, True)


def _address_fits(rule: HbaRule, address: str) -> bool | None:
    """Tell whether a rule is for the address; None where the rule names hosts."""
    if not address or rule.address == "all":
        return True
    try:
        network = ipaddress.ip_address(rule.address)
        mask = int(ipaddress.ip_address(rule.netmask))
    except ValueError:
        return None  # a host name, samehost or samenet
    own = ipaddress.ip_address(address)
    return own.version == network.version and int(own) & mask == int(network) & mask


def _fits(items: tuple[str, ...], name: str, keywords: dict[str, bool]) -> bool | None:
    if "all" in items or name in items or any(keywords.get(item) for item in items):
        return True
    unknown = any(item[:1] in ("+", "/") or item in ("samerole", "samegroup") for item in items)
    return None if unknown else False
