"""The settings of `slotfailover watch`: the section `failover.watch`."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from schemas.tables import Milliseconds


class WatchSettings(BaseModel):
    """The daemon `slotfailover watch`: how often it looks, and when it may act."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repoint: bool = False
    """Move subscriptions and bridge by itself once somebody has promoted a standby."""
    interval_ms: Milliseconds = 2_000
    """How often it looks at the cluster."""
    quorum: int = Field(3, ge=2, le=1000)
    """It acts only on so many observations in a row that say the same."""
    settle_ms: Milliseconds = 5_000
    """… and that have said so for at least this long."""
    silence_ms: Milliseconds = 30_000
    """… or this long, where a node neither answers nor refuses: it may be cut off, not dead."""
    first_ms: Milliseconds = 300_000
    """So long it only looks where nothing remembers a timeline and not every node has answered."""
    cooldown_ms: Milliseconds = 30_000
    """Between two acts; doubled with each act that failed, up to 64 times."""
    http_host: str = "127.0.0.1"
    """Address that the HTTP server listens on; 0.0.0.0 lets other machines reach it."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which the page and /v1/ may be asked (the header Host), beside IP addresses."""
    token_to_read: bool = False
    """Whoever reads the page and /v1/ must show the token, too: as Bearer, or as the password."""
    http_port: int = Field(9188, ge=0, le=65535)
    """The page, /v1/…, /metrics and /healthz; 0: a free port, which the log names."""
    token: SecretStr | None = None
    """Whoever pauses or resumes must show it (Authorization: Bearer …); without, nobody can."""
    token_file: Path | None = None
    """A file with the same."""
    history_points_max: int = Field(720, ge=10, le=100_000)
    """How many observations the curves of lag are drawn from."""
