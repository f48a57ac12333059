"""The settings of `slotfailover watch`: the section `failover.watch`."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from schemas.tables import Milliseconds


class LeaseSettings(BaseModel):
    """The Kubernetes Lease by which replicas of `watch` elect their leader, beside the lock."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("", max_length=253, pattern=r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$")
    """The Lease in the pod's own namespace; empty: the lock on the primary alone elects."""
    duration_ms: int = Field(15_000, ge=1_000, le=3_600_000)
    """How long other replicas wait after the last renewal that they saw before one takes over."""
    renew_deadline_ms: int = Field(10_000, ge=500, le=3_600_000)
    """How long the leader leads after its last accepted renewal, if the API server is silent."""
    retry_ms: int = Field(2_000, ge=100, le=3_600_000)
    """How often the leader renews the Lease, and the other replicas ask for it."""

    @model_validator(mode="after")
    def _ordered(self) -> "LeaseSettings":
        """Refuse durations with which two replicas could lead, or one could not renew in time."""
        if not 2 * self.retry_ms <= self.renew_deadline_ms <= 0.9 * self.duration_ms:
            raise ValueError(
                "duration_ms, renew_deadline_ms and retry_ms do not fit: the deadline must be at "
                "least twice the retry, and at most nine tenths of the duration"
            )
        return self


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
    lease: LeaseSettings = LeaseSettings()

    @field_validator("lease", mode="before")
    @classmethod
    def _empty(cls, section: object) -> object:
        """Read null, which is a section with all keys commented out, as an empty section."""
        return {} if section is None else section
