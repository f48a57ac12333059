"""The settings of every service: one YAML file, each key also an environment variable.

    source:    the PostgreSQL pair, slot, publication          slotbridge, slottables verify
    kafka:     brokers, topic names, formats                   slotbridge, slottables
    registry:  the schema registry of formats that need one    slotbridge, slottables
    bridge:    group commit, limits, deadlines                 slotbridge
    shaping:   what is published, how, to which topics         slotbridge, slottables
    claim_check: where large values are stored                 slotbridge
    snapshot:  rows that the tables have already               slotbridge
    failover:  nodes, subscribers, deadlines                   slotfailover
    tables:    catalog, warehouse, trigger                     slottables
    tracing:   traces over OTLP                                slotbridge, slottables

`SLOTBRIDGE_SOURCE__SLOT=x` overrides `source.slot`. All services can share one file.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError as EnvironmentUnreadable

from schemas.acceptance import Acceptance, Token
from schemas.errors import SettingsError
from schemas.kafka import REGISTERED
from schemas.kafka import KafkaSettings as KafkaSettings
from schemas.large_values import ClaimCheckSettings as ClaimCheckSettings
from schemas.problems import explained, read_document
from schemas.registry import RegistrySettings as RegistrySettings
from schemas.shaping import ShapingSettings
from schemas.snapshot import SnapshotSettings
from schemas.source import SourceSettings as SourceSettings
from schemas.tables import Milliseconds, TablesSettings
from schemas.tracing import TracingSettings as TracingSettings
from schemas.watch_settings import WatchSettings as WatchSettings


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ValueSettings(_Section):
    """The JSON forms of values (docs/reference/events.md), as Debezium's keys of like names."""

    decimal_handling: Literal["string", "double", "precise"] = "string"
    """JSON form of numeric and money."""
    time_precision: Literal[
        "microseconds",
        "adaptive",
        "adaptive_time_microseconds",
        "nanoseconds",
        "isostring",
        "connect",
    ] = "microseconds"
    """JSON form of date, time and timestamp; timestamptz and timetz are always ISO 8601 in UTC."""
    interval_handling: Literal["text", "string", "numeric"] = "text"
    """Form of interval: `text` PostgreSQL's, `string` ISO 8601, `numeric` microseconds."""
    binary_handling: Literal["base64", "base64-url-safe", "hex"] = "base64"
    """JSON form of bytea."""
    hstore_handling: Literal["text", "json", "map"] = "text"
    """Form of hstore: `text` PostgreSQL's, `json` a JSON object in a string, `map` an object."""
    structures: Literal["text", "json"] = "text"
    """Form of bit strings, geometric types, sparsevec: PostgreSQL's text, or Debezium's objects."""


class BridgeSettings(ValueSettings):
    """Limits and intervals of the bridge. Every wait has a deadline, every buffer a bound."""

    commit_interval_ms: Milliseconds = 100
    """Age at which the bridge commits a Kafka transaction at the latest. Under low load it commits
    at once."""
    commit_bytes_max: int = Field(16 * 2**20, ge=2**16, le=2**30)
    """The bridge commits a Kafka transaction once it has this many bytes."""
    transaction_bytes_max: int = Field(16 * 2**20, ge=2**16, le=2**30)
    """The bridge splits a larger source transaction into several Kafka transactions."""
    streaming: bool = True
    """Receive large transactions while they are in progress, and spool them until their commit."""
    spool_folder: Path = Path(tempfile.gettempdir())
    """Folder for the spool. The bridge creates `slotbridge-<slot>.spool` in it, and empties that at
    every start."""
    spool_memory_bytes_max: int = Field(16 * 2**20, ge=0, le=2**32)
    """Bytes of open transactions' changes that stay in memory; more goes to disk."""
    spool_bytes_max: int = Field(16 * 2**30, ge=2**20)
    """Most bytes of the spool on disk, compressed. Beyond that the bridge continues without
    streaming, and the server spills to its own disk."""
    transaction_timeout_ms: Milliseconds = 120_000
    """How long Kafka may take nothing. After that the session ends, and the next one sends
    everything again that Kafka has not committed."""
    heartbeat_interval_ms: Milliseconds = 2_000
    """How often the bridge moves the replication origin and advances an idle slot."""
    connect_deadline_ms: Milliseconds = 120_000
    """How long a start or a reconnection may take. After that the process ends with an exit code
    from 10 to 19, and a supervisor may restart it."""
    standby: bool = False
    """Wait as a hot standby for as long as another bridge has the slot, instead of ending with
    exit code 11 at `connect_deadline_ms`."""
    wal_sender_timeout_ms: Milliseconds = 60_000
    """`wal_sender_timeout` of the bridge's own walsender."""
    tombstones: bool = True
    """Send a record without value after each delete, so that compaction removes the key."""
    on_refused: Literal["stop", "dead_letter"] = "stop"
    """What to do with a record that Kafka refuses (too large, its topic denied): stop and name it,
    or put it into <prefix>.dead and go on. A logical message is always put there: any login may
    write one."""
    accept: tuple[str, ...] = ()
    """Tokens from the errors of refused starts, as `--accept`: each accepts the refusal that
    printed it, and no other (docs/guides/recovery.md)."""
    transaction_metadata: bool = True
    """BEGIN and END events in <prefix>.transaction, and each event's place in its transaction."""
    sql_deadline_ms: Milliseconds = 20_000
    """How long one SQL statement may take before the bridge considers the server dead."""
    origin_idle_timeout_ms: Milliseconds = 300_000
    """`idle_session_timeout` of the session that owns the origin. A bridge that is frozen or cut
    off keeps another bridge waiting no longer than this."""
    http_host: str = "127.0.0.1"
    """Address that the HTTP server listens on; 0.0.0.0 lets other machines (probes, Prometheus,
    slotfailover) reach it."""
    http_port: int | None = Field(None, ge=0, le=65535)
    """/healthz, /readyz, /metrics, /v1/source and /v1/wait; unset: off; 0: a free port, which
    the log names."""
    token: SecretStr | None = None
    """Bearer token for POST /v1/source, which gives the bridge other hosts; unset: nobody can do
    so."""
    token_file: Path | None = None
    """A file that holds the token."""
    control_url: str = Field("", pattern=r"^(https?://[^/\s@]+/?)?$")
    """URL (http://host:port) by which `slotfailover` reaches POST /v1/source, to send the bridge to
    a new primary."""

    @field_validator("accept")
    @classmethod
    def _tokens(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse what is not a token."""
        return tuple(str(Token.parse(text)) for text in given)

    @property
    def acceptance(self) -> Acceptance:
        """The tokens of an operator, of which none is used yet."""
        return Acceptance(map(Token.parse, self.accept))

    @model_validator(mode="after")
    def _in_proportion(self) -> "BridgeSettings":
        """Require a commit interval and an idle timeout that fit the transaction timeout."""
        if self.commit_interval_ms * 2 > self.transaction_timeout_ms:
            raise ValueError("commit_interval_ms must be under half of transaction_timeout_ms")
        waits_ms = max(self.transaction_timeout_ms, self.heartbeat_interval_ms)
        if self.origin_idle_timeout_ms <= waits_ms:
            raise ValueError(
                "origin_idle_timeout_ms must be above transaction_timeout_ms and "
                "heartbeat_interval_ms"
            )
        return self


class MachineSettings(_Section):
    """Commands that act on a node's machine; run here, without a shell, until the step's deadline.

    In them {node}, {host}, {port} are the node's, {primary}, {primary_host}, {primary_port} the new
    primary's, {slot} is the node's physical slot there, {role} is `primary` or `standby`, {copy} is
    `--copy` where a base backup may be taken, else nothing.
    """

    stop: str = ""
    """Command that shuts the server down; default: `pg_ctl stop -m fast` in data_folder."""
    start: str = ""
    """Command that starts the server; default: `pg_ctl start` in data_folder."""
    fence: str = ""
    """Command that makes sure that the server can't write (STONITH, a cloud's API); default:
    `pg_ctl stop -m immediate` in data_folder."""
    rejoin: str = ""
    """Command that makes the node a streaming standby of {primary}; default: pg_rewind in
    data_folder."""
    label: str = ""
    """Command that publishes the node's {role}, as `kubectl label --overwrite pod {node}
    role={role}`."""
    data_folder: Path | None = None
    """The node's data folder on this machine; without it the commands above have no defaults."""
    bin_folder: Path | None = None
    """Where pg_ctl, pg_rewind and pg_basebackup are; unset: on the PATH."""
    server_options: tuple[str, ...] = ()
    """Options of the server's command line at `pg_ctl start`, as ["-c", "port=5433"]."""
    os_user: str = ""
    """User that PostgreSQL's programs run as, and with whose rights a rejoin works on files;
    empty: slotfailover's own. Only root can choose another."""
    environment: tuple[str, ...] = ()
    """Names of variables of slotfailover's environment that the commands get, beside PATH, HOME,
    LANG and the like: [KUBECONFIG, AWS_PROFILE]."""
    copies: bool = False
    """A rejoin may take a base backup where pg_rewind can't do it, as with `--copy`."""


class DrillSettings(_Section):
    """The rehearsal `slotfailover drill`: where its clone lives, and for how long."""

    folder: Path = Path(tempfile.gettempdir())
    """Folder for the clone, which is as large as the databases. The drill creates
    `slotfailover-drill-…` in it and removes that again."""
    bin_folder: Path | None = None
    """Folder of pg_basebackup and pg_ctl; unset: the standby's `bin_folder` in `machines`."""
    os_user: str = ""
    """User that the clone runs as; empty: the standby's `os_user` in `machines`, else
    slotfailover's own."""
    copy_deadline_ms: Milliseconds = 3_600_000
    """How long the base backup of the clone may take."""
    slots_deadline_ms: Milliseconds = 120_000
    """How long the clone may take to synchronize the slots."""
    settings: dict[str, str] = {}
    """PostgreSQL settings of the clone's server, which override the standby's."""


class StandbySettings(_Section):
    """Settings of one node as a standby."""

    follows: str = ""
    """Name of the standby that this node streams from (cascading); empty: the primary."""
    failover_priority: int = Field(100, ge=0, le=1000)
    """Of standbys with equal WAL, a failover promotes the one with the highest number; 0: only by
    --to."""
    synchronized: bool = True
    """Whether consumers wait until this standby has their changes (synchronized_standby_slots);
    false for a standby that is far away or delayed."""


class FailoverSettings(_Section):
    """The nodes of the pair, the subscriber databases, and how long a step may take."""

    nodes: dict[str, SecretStr] = Field(min_length=1)
    """Name -> conninfo of each server that is or may become the primary."""
    advertised: dict[str, tuple[str, ...]] = {}
    """Name of a node -> `host=… port=…` (or a list) by which subscribers reach it. slotfailover
    writes the first one into subscriptions."""
    admins: dict[str, SecretStr] = {}
    """Name of a server -> conninfo of a superuser, for commands that promote, rejoin or fix."""
    managed_by: Literal["patroni", "cloudnative-pg", "none"] | None = None
    """Manager that promotes the pair; `none`: slotfailover does, and looks for no other manager."""
    others: tuple[str, ...] = ()
    """`host=… port=…` of publishers of other clusters from which the subscribers also subscribe."""
    subscribers: dict[str, SecretStr] = {}
    """Name -> conninfo of each database that has subscriptions to the pair."""
    machines: dict[str, MachineSettings] = {}
    """Name of a node -> the commands that stop, start, fence, rejoin and label it."""
    standbys: dict[str, StandbySettings] = {}
    """Name of a node -> its settings as a standby."""
    synchronous_standbys: int = Field(0, ge=0, le=16)
    """How many standbys a commit waits for; set again after each rejoin. 0: left as it is."""
    lag_bytes_max: int = Field(16 * 2**20, ge=2**16)
    """A switchover fences writes only once standby and consumers lag by less than this."""
    lag_bytes_max_on_failover: int = Field(16 * 2**20, ge=0)
    """A failover is refused where the new primary would lack more than this of the last known WAL
    of the old one; `check` calls that lag critical."""
    lag_seconds_max_on_failover: int = Field(0, ge=0)
    """A failover is refused where the newest commit of the new primary is older than the last
    observation of the old one by more than this; 0: never."""
    step_deadline_ms: Milliseconds = 60_000
    """How long one step of a failover may take."""
    rejoin_deadline_ms: Milliseconds = 6 * 3600 * 1000
    """How long a rejoin may take: pg_rewind or a base backup, and the standby's catching up."""
    replication: SecretStr | None = None
    """Role by which standbys stream (`user=… passfile=…`), if no primary_conninfo names one."""
    connect_timeout_s: int = Field(3, ge=2, le=60)
    """How long to wait for a node to answer."""
    journal: Path | None = None
    """File to which slotfailover appends each performed step, as JSON lines."""
    journal_database: str = Field("postgres", min_length=1, max_length=63)
    """Database on the primary that holds the journal's table and the lock of the commands."""
    watch: WatchSettings = WatchSettings()
    drill: DrillSettings = DrillSettings()

    @field_validator("watch", "drill", mode="before")
    @classmethod
    def _empty(cls, section: object) -> object:
        """Read null, which is a section with all keys commented out, as an empty section."""
        return {} if section is None else section

    @field_validator("advertised", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        """Read a single address as a list of one."""
        if not isinstance(value, dict):
            return value
        return {n: (each,) if isinstance(each, str) else each for n, each in value.items()}


class Settings(BaseSettings):
    """All sections; absent ones are None until a service requires them."""

    model_config = SettingsConfigDict(
        env_prefix="SLOTBRIDGE_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    source: SourceSettings | None = None
    kafka: KafkaSettings | None = None
    registry: RegistrySettings | None = None
    bridge: BridgeSettings = BridgeSettings()
    shaping: ShapingSettings = ShapingSettings()
    claim_check: ClaimCheckSettings | None = None
    snapshot: SnapshotSettings = SnapshotSettings()
    failover: FailoverSettings | None = None
    tables: TablesSettings | None = None
    tracing: TracingSettings = TracingSettings()

    @model_validator(mode="before")
    @classmethod
    def _texts(cls, sections: Any) -> Any:
        """Refuse texts that neither PostgreSQL nor a file's name can have."""
        for name, section in sections.items():
            text = json.dumps(section, ensure_ascii=False, default=str, skipkeys=True)
            if "\\u0000" in text or any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(
                    f"`{name}` has a text with a NUL, or with half a character (UTF-8)"
                )
        return sections

    @model_validator(mode="after")
    def _registered(self) -> "Settings":
        """Refuse a format whose schemas have nowhere to be."""
        if self.kafka is not None and self.kafka.needs_registry and self.registry is None:
            raise ValueError(f"{', '.join(REGISTERED)} in kafka need registry.url")
        return self

    @model_validator(mode="after")
    def _snapshot(self) -> "Settings":
        """Refuse signals that can't be read, and repairs of topics that can't be compared."""
        kafka, snapshot = self.kafka, self.snapshot
        if kafka is not None:
            if kafka.value_format in REGISTERED and snapshot.signal_table:
                raise ValueError("snapshot.signal_table needs a kafka.value_format in plain JSON")
            if (snapshot.signal_topic or "").startswith(f"{kafka.topic_prefix}."):
                raise ValueError("snapshot.signal_topic begins as the bridge's own topics do")
            plain = kafka.key_format == kafka.value_format == "json" and not self.shaping.flat
            if snapshot.mode == "when_needed" and (kafka.cloudevents or not plain):
                raise ValueError("snapshot.mode when_needed repairs topics of plain JSON alone")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let the environment override the file, and leave out pydantic's other sources."""
        return env_settings, init_settings


Section = TypeVar("Section", bound=BaseModel)


def require(section: Section | None, name: str) -> Section:
    """Return `section`, or raise SettingsError that names the missing one."""
    if section is None:
        raise SettingsError(
            f"the section `{name}` is missing",
            operation="read settings",
            hint=f"add `{name}:` to the file; docs/reference/settings.md has all keys",
        )
    return section


def load_settings(path: Path) -> Settings:
    """Read `path` (YAML) and the environment. Raise SettingsError naming file, key and remedy."""
    document = read_document(path)
    try:
        return Settings(**{key: value for key, value in document.items() if value is not None})
    except ValidationError as error:
        raise explained(error, path, Settings) from None
    except TypeError as error:
        raise SettingsError(f"{path}: {error}", operation="read settings") from None
    except EnvironmentUnreadable as error:  # names the section, never the value
        raise SettingsError(
            f"{error}: it is not JSON",
            operation="read settings",
            hint="write a key with keys of its own as JSON: "
            """SLOTBRIDGE_KAFKA__OPTIONS='{"sasl.password": "…"}'""",
        ) from None
