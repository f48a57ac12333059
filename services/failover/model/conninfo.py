"""Where a server is reached, and connection strings edited keyword by keyword. Pure.

A connection string is held as libpq parsed it (`psycopg.conninfo.conninfo_to_dict`, at the seam),
so that quoting, escapes and the URI form need no second parser here. `text` writes it again:

    host='10.0.0.2' port='5432' password='it\\'s'

Source: PostgreSQL documentation 32.1.1 Connection Strings; libpq's fe-connect.c (options shown
with `*` are secret).
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SECRETS = frozenset(
    {
        "password",
        "sslpassword",
        "oauth_client_secret",
        "scram_client_key",
        "scram_server_key",
    }
)
MASK = "********"
DEFAULT_PORT = "5432"
_FOLLOWING = frozenset({"read-write", "primary"})
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})

Endpoint = tuple[str, str]
"""(host or host address, port)."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: what a repointed subscription gets as host, hostaddr and port."""

    host: str
    hostaddr: str
    port: str

    def __str__(self) -> str:
        return f"{self.host or self.hostaddr}:{self.port}"


@dataclass(frozen=True, slots=True, repr=False)
class Conninfo:
    """A parsed connection string: (keyword, value) each, in order. Its repr hides secrets."""

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "Conninfo":
        """Make a Conninfo from the result of `conninfo_to_dict`."""
        return cls(tuple((key, str(value)) for key, value in values.items() if value is not None))

    def __repr__(self) -> str:
        return f"Conninfo({self.masked})"

    def value(self, keyword: str) -> str:
        """Return the keyword's value, "" where it has none."""
        return dict(self.pairs).get(keyword, "")

    def with_value(self, keyword: str, value: str) -> "Conninfo":
        """Return the same connection string with that keyword set."""
        return Conninfo((*(pair for pair in self.pairs if pair[0] != keyword), (keyword, value)))

    @property
    def text(self) -> str:
        """The connection string, with its secrets."""
        return " ".join(f"{key}={_quoted(value)}" for key, value in self.pairs)

    @property
    def masked(self) -> str:
        """The connection string, for people."""
        return " ".join(
            f"{key}={MASK if key in SECRETS else _quoted(value)}" for key, value in self.pairs
        )

    @property
    def endpoints(self) -> tuple[frozenset[Endpoint], ...]:
        """For each host it lists, the names that host has in it (host, hostaddr), with port.

        None where a service file, which only its own machine can read, says which host or port.
        """
        if self.by_service:
            return (frozenset(),)
        hosts = _listed(self.value("host"))
        addresses = _listed(self.value("hostaddr"))
        ports = _listed(self.value("port"))
        return tuple(
            frozenset(
                (name, _nth(ports, n) or DEFAULT_PORT)
                for name in {_nth(hosts, n), _nth(addresses, n)}
                if name or not (hosts or addresses)
            )
            for n in range(max(len(hosts), len(addresses), 1))
        )

    @property
    def address(self) -> Address:
        """The address of the first host."""
        service = f"service={self.value('service')}" if self.by_service else ""
        return Address(
            service or _nth(_listed(self.value("host")), 0),
            _nth(_listed(self.value("hostaddr")), 0),
            _nth(_listed(self.value("port")), 0) or DEFAULT_PORT,
        )

    @property
    def by_service(self) -> bool:
        """A service file tells its host or port, and `server_link.with_service` has not read it."""
        has_address = self.value("port") and (self.value("host") or self.value("hostaddr"))
        return bool(self.value("service")) and not has_address

    def names(self, endpoints: Iterable[Endpoint]) -> bool:
        """Tell whether any host of the connection string is one of `endpoints`."""
        known = frozenset(endpoints)
        return any(names & known for names in self.endpoints)

    def leads_to(self, endpoints: Iterable[Endpoint]) -> bool:
        """Tell whether the connection ends at `endpoints`: its only host, or one libpq chooses.

        With several hosts libpq finds the writable one by itself if target_session_attrs says so.
        """
        several = len(self.endpoints) > 1
        follows = self.value("target_session_attrs") in _FOLLOWING
        return self.names(endpoints) and (follows or not several)

    @property
    def takes_any_primary(self) -> bool:
        """Of its several hosts libpq takes any primary, also one that takes no writes."""
        return len(self.endpoints) > 1 and self.value("target_session_attrs") == "primary"

    def at(self, address: Address) -> "Conninfo":
        """Return the same connection string with host, hostaddr and port of `address` alone."""
        wanted = {
            key: value
            for key, value in (
                ("host", address.host),
                ("hostaddr", address.hostaddr),
                ("port", address.port),
            )
            if value
        }
        if self.value("service"):
            wanted.setdefault("hostaddr", "")  # else that of the service file would be used
        keys = ("host", "hostaddr", "port")
        kept = [
            (key, wanted.pop(key) if key in wanted else value)
            for key, value in self.pairs
            if key not in keys or key in wanted
        ]
        return Conninfo((*kept, *wanted.items()))


def is_private(address: Address) -> bool:
    """Tell whether an address means another server on each machine: loopback, a socket, no host."""
    names = [name for name in (address.hostaddr, address.host) if name]
    return not names or any(_is_private(name) for name in names)


def _is_private(name: str) -> bool:
    """Tell whether a host leads to the own machine: a socket, or loopback."""
    if name.startswith(("/", "@")) or name.rstrip(".").lower() in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def at_any(addresses: Iterable[Address]) -> Conninfo:
    """Return a connection string that lists these addresses, and says nothing else."""
    found = tuple(addresses)
    lists = {
        "host": [address.host for address in found],
        "hostaddr": [address.hostaddr for address in found],
        "port": [address.port for address in found],
    }
    return Conninfo(tuple((key, ",".join(each)) for key, each in lists.items() if any(each)))


def _listed(text: str) -> list[str]:
    return text.split(",") if text else []


def _nth(values: list[str], number: int) -> str:
    if len(values) == 1:
        return values[0]
    return values[number] if number < len(values) else ""


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
