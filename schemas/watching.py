"""The settings of `slotfailover watch`: the section `failover.watch`."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from schemas.tables import Milliseconds


class WatchSettings(BaseModel):
    """The daemon `slotfailover watch`: how often it looks, and when it may act."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repoint: bool = False
    """Whether `watch` moves subscriptions and bridge by itself once somebody has promoted a
    standby."""
    interval_ms: Milliseconds = 2_000
    """How often `watch` observes the cluster."""
    quorum: int = Field(3, ge=2, le=1000)
    """How many consecutive observations must agree before `watch` acts."""
    settle_ms: Milliseconds = 5_000
    """How long observations must have agreed, at least, before `watch` acts."""
    silence_ms: Milliseconds = 30_000
    """As settle_ms, but while a node neither answers nor refuses: it may be cut off and alive."""
    first_ms: Milliseconds = 300_000
    """How long `watch` only observes after its start, if no timeline is on record and not every
    node has answered."""
    cooldown_ms: Milliseconds = 30_000
    """Pause between two repoints; doubled with each failed one, up to 64 times."""
    http_host: str = "127.0.0.1"
    """Address that the HTTP server listens on; 0.0.0.0 lets other machines reach it."""
    allowed_hosts: tuple[str, ...] = ()
    """Values of the header Host that the page and /v1/ accept, besides IP addresses."""
    token_to_read: bool = False
    """Reading the page and /v1/ needs the token, too: as Bearer, or as the password of Basic."""
    http_port: int = Field(9188, ge=0, le=65535)
    """The page, /v1/…, /metrics and /healthz; 0: a free port, which the log names."""
    token: SecretStr | None = None
    """Token for pausing and resuming (Authorization: Bearer …); unset, nobody can do either."""
    token_file: Path | None = None
    """A file that holds the token."""
    history_points_max: int = Field(720, ge=10, le=100_000)
    """How many observations the page's lag chart shows."""
