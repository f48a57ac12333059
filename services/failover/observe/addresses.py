"""Where a node is reached: by us, by subscribers and standbys, and by which other names."""

from collections.abc import Iterable
from dataclasses import dataclass

from schemas.errors import SettingsError
from schemas.settings import FailoverSettings
from services.failover.model.conninfo import Address, Conninfo, Endpoint, is_private
from services.failover.model.topology import slot_named_after
from services.failover.model.view import View
from services.failover.observe.server_link import parse_conninfo


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node is reached."""

    address: Address
    """The address that subscribers and standbys get."""
    known: frozenset[Endpoint]
    """Every name by which the settings know it."""
    own: frozenset[Endpoint]
    """The names of `address`."""
    given: frozenset[Endpoint]
    """The advertised ones: they mean the node wherever they are used."""
    private: bool
    """Only a loopback or socket address is known."""


def address_of(conninfo: Conninfo, advertised: tuple[str, ...], name: str) -> NodeAddress:
    """Return the address by which subscribers reach a node, and all its names in the settings.

    Raise SettingsError for an advertised address that is not one.
    """
    known = frozenset(end for names in conninfo.endpoints for end in names)
    if not advertised:
        address = conninfo.address
        return NodeAddress(address, known, conninfo.endpoints[0], frozenset(), is_private(address))
    addresses = []
    for text in advertised:
        parsed = parse_conninfo(text, subject=f"failover.advertised.{name}")
        extra = {key for key, _ in parsed.pairs} - {"host", "hostaddr", "port"}
        if extra or len(parsed.endpoints) != 1:
            raise SettingsError(
                "an advertised address has one host, hostaddr and port, and nothing else",
                operation="read settings",
                subject=f"failover.advertised.{name}",
                hint="write it as in host=db2.example port=5432; several as a list",
            )
        addresses.append(parsed)
    given = frozenset[Endpoint]().union(*(parsed.endpoints[0] for parsed in addresses))
    return NodeAddress(addresses[0].address, known | given, addresses[0].endpoints[0], given, False)


def require_own_addresses(addresses: dict[str, NodeAddress]) -> None:
    """Raise SettingsError where a node's first address is also another's: that one floats."""
    for name, own in addresses.items():
        for other, theirs in addresses.items():
            if other != name and own.own & theirs.known:
                raise SettingsError(
                    f"{own.address} is an address of {name} and of {other}",
                    operation="read settings",
                    subject=f"failover.advertised.{name}",
                    hint="let a node's list begin with an address that is its own; one that floats "
                    "between nodes comes after it, in the list of each",
                )


def require_own_slots(nodes: Iterable[str]) -> None:
    """Raise SettingsError where two nodes would stream by one physical slot."""
    owners: dict[str, str] = {}
    for name in nodes:
        other = owners.setdefault(slot_named_after(name), name)
        if other != name:
            raise SettingsError(
                f"{other} and {name} would share the physical slot {slot_named_after(name)}",
                operation="read settings",
                subject="failover.nodes",
                hint="let their names differ in the first 40 characters, by letters and digits",
            )


def require_names(key: str, names: Iterable[str], valid_names: Iterable[str]) -> None:
    """Raise SettingsError for a name of neither a node nor a subscriber."""
    unknown = sorted(set(names) - set(valid_names))
    if unknown:
        raise SettingsError(
            f"failover.{key} names {unknown[0]}, which is neither a node nor a subscriber",
            operation="read settings",
            hint="use the names of failover.nodes and failover.subscribers",
        )


def require_nodes(key: str, names: Iterable[str], settings: FailoverSettings) -> None:
    """Raise SettingsError for a name that is not in failover.nodes."""
    unknown = set(names) - set(settings.nodes)
    if unknown:
        raise SettingsError(
            f"failover.{key} names {', '.join(sorted(unknown))}, which is not a node",
            operation="read settings",
            hint="use the names of failover.nodes",
        )


def require_distinct(view: View) -> None:
    """Raise SettingsError where two names of failover.nodes lead to one server."""
    seen: dict[tuple[str, str], str] = {}
    for node in view.nodes:
        if node.state is None or not node.state.provenance.started:
            continue
        key = (node.state.server.system_identifier, node.state.provenance.started)
        other = seen.setdefault(key, node.name)
        if other != node.name:
            raise SettingsError(
                f"{other} and {node.name} are one server, reached by two addresses",
                operation="compare nodes",
                subject="failover.nodes",
                hint=f"give {node.name} the address of the other server; an address that floats "
                "between nodes belongs into failover.advertised",
            )
