"""The state of a node that only `check` queries. Pure."""

from dataclasses import dataclass

from services.failover.model.conninfo import Conninfo


@dataclass(frozen=True, slots=True)
class HbaRule:
    """A line of pg_hba.conf as the server reads it now; `address` "" for type `local`."""

    line: int
    type: str
    databases: tuple[str, ...]
    users: tuple[str, ...]
    address: str
    netmask: str
    method: str
    broken: bool


@dataclass(frozen=True, slots=True)
class Follower:
    """A standby that streams from the node; `address` "" on a Unix-domain socket."""

    name: str
    slot: str
    user: str
    address: str
    encrypted: bool


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer that is connected to a logical slot of the node."""

    slot: str
    database: str
    user: str
    address: str
    encrypted: bool


@dataclass(frozen=True, slots=True, repr=False)
class Elsewhere:
    """A subscription of another database of a subscriber; its repr hides secrets."""

    database: str
    name: str
    conninfo: Conninfo | None
    """None where it connects by a foreign server, which only its own database shows."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction with an xid that has not ended; `pid` 0 and a `gid` where it is prepared."""

    pid: int
    gid: str
    since: str


@dataclass(frozen=True, slots=True)
class NodeDetails:
    """The rest of a node."""

    databases: frozenset[str]
    followers: tuple[Follower, ...]
    hba: tuple[HbaRule, ...] | None
    """In order; None where our role may not see them."""
    oldest: OpenTransaction | None
    """The oldest open transaction; None also on a standby."""
    upstream: Conninfo | None = None
    """primary_conninfo, secrets and all."""
    consumers: tuple[Consumer, ...] = ()
    read_only: bool | None = None
    """default_transaction_read_only is on for all; None where only our role's is known."""
