"""The settings of every service: one YAML file, each key also an environment variable.

    source:    the PostgreSQL pair, slot, publication          slotbridge, slottables verify
    kafka:     brokers, topic names, formats                   slotbridge, slottables
    registry:  the schema registry of formats that need one    slotbridge
    bridge:    group commit, limits, deadlines                 slotbridge
    shaping:   what is published, how, to which topics         slotbridge, slottables
    snapshot:  rows that the tables have already               slotbridge
    failover:  nodes, subscribers, deadlines                   slotfailover
    tables:    catalog, warehouse, trigger                     slottables

`SLOTBRIDGE_SOURCE__SLOT=x` overrides `source.slot`. All services can share one file: each reads the
sections it needs and `require` names the one that is missing.
"""

import tempfile
from pathlib import Path
from typing import Literal, TypeVar

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

from schemas.errors import SettingsError
from schemas.kafka import KafkaSettings as KafkaSettings
from schemas.problems import explained, read_document
from schemas.registry import RegistrySettings as RegistrySettings
from schemas.shaping import ShapingSettings
from schemas.snapshot import SnapshotSettings
from schemas.tables import Milliseconds, TablesSettings
from schemas.watching import WatchSettings as WatchSettings

_SLOT_NAME = r"^[a-z0-9_]{1,40}$"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceSettings(_Section):
    """The database that changes are read from; `conninfo` may list several hosts (libpq syntax)."""

    conninfo: SecretStr
    """Connection string of libpq: every host of the pair, and `target_session_attrs=read-write`.
    Keep the password in a file (`passfile=`) or in the environment."""
    slot: str = Field("slotbridge", pattern=_SLOT_NAME)
    """Logical slot, made with `failover` at the first start."""
    publication: str = Field("slotbridge", min_length=1, max_length=63)
    """Made at the first start when it is missing, if the role may."""
    tables: tuple[str, ...] = ()
    """`schema.table` each; empty publishes every table."""
    origin: Literal["any", "none"] = "any"
    """`none`: without transactions that logical replication brought from elsewhere."""
    two_phase: bool = False
    """Decode at PREPARE, publish at COMMIT PREPARED (PostgreSQL 18). A slot stays two-phase."""
    connect_timeout_s: int = Field(5, ge=2, le=300)
    """How long to wait for one host to answer."""

    @field_validator("tables")
    @classmethod
    def _qualified(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        for table in tables:
            if table.count(".") != 1 or not all(table.split(".")):
                raise ValueError(f"{table!r} is not of the form schema.table")
        return tables

    @model_validator(mode="after")
    def _decided_where_prepared(self) -> "SourceSettings":
        """Refuse `two_phase` with `origin: none`.

        The server filters a PREPARE, and later its COMMIT or ROLLBACK, each by the origin of the
        session that ran it: a prepared transaction could arrive without its decision.
        """
        if self.two_phase and self.origin == "none":
            raise ValueError("two_phase and origin: none can't go together")
        return self


class ValueSettings(_Section):
    """The JSON forms of values (docs/DEBEZIUM.md): what Debezium's keys of like names choose."""

    decimal_handling: Literal["string", "double", "precise"] = "string"
    """numeric and money."""
    time_precision: Literal[
        "microseconds", "adaptive", "adaptive_time_microseconds", "nanoseconds", "isostring"
    ] = "microseconds"
    """date, time and timestamp; timestamptz and timetz are ISO 8601 in UTC in any case."""
    interval_handling: Literal["text", "string", "numeric"] = "text"
    """PostgreSQL's text, ISO 8601, or microseconds."""
    binary_handling: Literal["base64", "base64-url-safe", "hex"] = "base64"
    """bytea."""
    hstore_handling: Literal["text", "json", "map"] = "text"
    """PostgreSQL's text, a JSON object in a string, or an object."""
    structures: Literal["text", "json"] = "text"
    """Bit strings, geometric types, sparsevec: PostgreSQL's text, or Debezium's objects."""


class BridgeSettings(ValueSettings):
    """Limits and intervals of the bridge. Every wait has a deadline, every buffer a bound."""

    commit_interval_ms: Milliseconds = 100
    """A Kafka transaction with finished source transactions in it is committed at this age at the
    latest: at once while few come."""
    commit_bytes_max: int = Field(16 * 2**20, ge=2**16, le=2**30)
    """A Kafka transaction is committed once it has this many bytes."""
    transaction_bytes_max: int = Field(16 * 2**20, ge=2**16, le=2**30)
    """A source transaction above this leaves in several Kafka transactions."""
    streaming: bool = True
    """Take large transactions while they are in progress and spool them until their commit."""
    spool_folder: Path = Path(tempfile.gettempdir())
    """A folder `slotbridge-<slot>.spool` is made in it, and emptied at every start."""
    spool_memory_bytes_max: int = Field(16 * 2**20, ge=0, le=2**32)
    """Changes of open transactions that stay in memory; what is above goes to disk."""
    spool_bytes_max: int = Field(16 * 2**30, ge=2**20)
    """On disk, compressed. Past it the bridge goes on without streaming: the server spills."""
    transaction_timeout_ms: Milliseconds = 120_000
    """How long Kafka may stand still before the session ends and everything since is read again."""
    heartbeat_interval_ms: Milliseconds = 2_000
    """How often the replication origin is moved and an idle slot is advanced."""
    connect_deadline_ms: Milliseconds = 120_000
    """How long start or recovery may go on before the process gives up with a retry exit code."""
    standby: bool = False
    """Wait as a hot standby for as long as another bridge has the slot, instead of ending with
    exit code 11 at `connect_deadline_ms`."""
    wal_sender_timeout_ms: Milliseconds = 60_000
    """`wal_sender_timeout` of the bridge's own walsender."""
    tombstones: bool = True
    """Send a record without value after each delete, so that compaction removes the key."""
    on_refused: Literal["stop", "dead_letter"] = "stop"
    """What to do with a record that Kafka refuses (too large, its topic denied): stop and name it,
    or put it into <prefix>.dead and go on."""
    on_divergence: Literal["stop", "continue"] = "stop"
    """What to do where Kafka has transactions that the database lost at a failover: stop and name
    them, or put them into <prefix>.divergence and go on from the new timeline (for one start)."""
    accept_unsent_changes_of: str = ""
    """`publication/oid/origin`, as the refusal names it: go on with this other publication or
    source.origin, though changes that were committed before are not sent. Of no effect for any
    other: it may stay."""
    on_lost_records: Literal["stop", "continue"] = "stop"
    """What to do where Kafka has lost the last records of a topic: stop and name it, or go on
    without them (for one start)."""
    transaction_metadata: bool = True
    """BEGIN and END events in <prefix>.transaction, and each event's place in its transaction."""
    sql_deadline_ms: Milliseconds = 20_000
    """How long one statement may take before the server is taken for dead."""
    origin_idle_timeout_ms: Milliseconds = 300_000
    """After this long without a word the server ends the session that owns the origin: a bridge
    that is frozen or cut off unnoticed keeps another one waiting no longer."""
    http_host: str = "127.0.0.1"
    """Address that the HTTP server listens on; 0.0.0.0 lets other machines (probes, Prometheus,
    slotfailover) reach it."""
    http_port: int | None = Field(None, ge=0, le=65535)
    """/healthz, /readyz, /metrics and /v1/source; unset: off; 0: a free port, named in the log."""
    token: SecretStr | None = None
    """Whoever gives the bridge other hosts (POST /v1/source) must show it; without, nobody can."""
    token_file: Path | None = None
    """A file with the same."""
    control_url: str = Field("", pattern=r"^(https?://[^/\s@]+/?)?$")
    """Where `slotfailover` reaches that (http://host:port), to send the bridge to a new primary."""

    @model_validator(mode="after")
    def _in_proportion(self) -> "BridgeSettings":
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
    """Stops the server in order; by default `pg_ctl stop -m fast` in data_folder."""
    start: str = ""
    """By default `pg_ctl start` in data_folder."""
    fence: str = ""
    """Makes sure that it can't write (STONITH, cloud API); by default pg_ctl stop -m immediate."""
    rejoin: str = ""
    """Makes it a streaming standby of {primary}; by default done in data_folder (pg_rewind)."""
    label: str = ""
    """Tells the outside of its {role}, as `kubectl label --overwrite pod {node} role={role}`."""
    data_folder: Path | None = None
    """Where the node's data is on this machine; without it there are no defaults."""
    bin_folder: Path | None = None
    """Where pg_ctl, pg_rewind and pg_basebackup are; unset: on the PATH."""
    server_options: tuple[str, ...] = ()
    """For the server's command line at `pg_ctl start`: ["-c", "port=5433"]."""
    os_user: str = ""
    """Whom those programs run as; empty: as ourselves. Only root can choose another."""
    environment: tuple[str, ...] = ()
    """Names of variables of slotfailover's environment that the commands get, beside PATH, HOME,
    LANG and the like: [KUBECONFIG, AWS_PROFILE]."""
    copies: bool = False
    """A rejoin may take a base backup where pg_rewind can't do it, as with `--copy`."""


class DrillSettings(_Section):
    """The rehearsal `slotfailover drill`: where its clone lives, and for how long."""

    folder: Path = Path(tempfile.gettempdir())
    """A folder `slotfailover-drill-…` is made in it and removed; as large as the databases."""
    bin_folder: Path | None = None
    """Where pg_basebackup and pg_ctl are; unset: as `machines` has it for the standby."""
    os_user: str = ""
    """Whom the clone runs as; empty: as `machines` has it, else as ourselves."""
    copy_deadline_ms: Milliseconds = 3_600_000
    """How long the base backup of the clone may take."""
    slots_deadline_ms: Milliseconds = 120_000
    """How long the clone may take to have the slots."""
    settings: dict[str, str] = {}
    """Further settings of the clone's server, where its own do not do."""


class StandbySettings(_Section):
    """What a node is as a standby, where it is not like the others."""

    follows: str = ""
    """The node that it streams from while that is a standby itself; empty: from the primary."""
    failover_priority: int = Field(100, ge=0, le=1000)
    """Of standbys with equal WAL the highest is promoted; 0: never without --to."""
    synchronized: bool = True
    """Consumers wait until it has their changes (synchronized_standby_slots); false for a standby
    that is far away or delayed."""


class FailoverSettings(_Section):
    """The nodes of the pair, the subscriber databases, and how long a step may take."""

    nodes: dict[str, SecretStr] = Field(min_length=1)
    """name -> conninfo of every server that is or may become primary."""
    advertised: dict[str, tuple[str, ...]] = {}
    """name -> `host=… port=…` (or a list) by which subscribers reach it; the first is written."""
    admins: dict[str, SecretStr] = {}
    """name of a server -> conninfo of a superuser, for whatever promotes, rejoins or fixes."""
    managed_by: Literal["patroni", "cloudnative-pg", "none"] | None = None
    """Who promotes the pair; `none`: we do, and no other manager is looked for."""
    others: tuple[str, ...] = ()
    """`host=… port=…` of publishers of other clusters, which subscriptions of ours may lead to."""
    subscribers: dict[str, SecretStr] = {}
    """name -> conninfo of every database that holds subscriptions to the pair."""
    machines: dict[str, MachineSettings] = {}
    """name of a node -> how it is stopped, started, fenced, rejoined, labelled."""
    standbys: dict[str, StandbySettings] = {}
    """name of a node -> what it is as a standby."""
    synchronous_standbys: int = Field(0, ge=0, le=16)
    """How many standbys a commit waits for, set anew once one has rejoined; 0: left as it is."""
    lag_bytes_max: int = Field(16 * 2**20, ge=2**16)
    """A switchover fences writes only once standby and consumers are nearer than this."""
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
    """The role that standbys stream as (`user=… passfile=…`), where no primary_conninfo has
    one."""
    connect_timeout_s: int = Field(3, ge=2, le=60)
    """How long to wait for a node to answer."""
    journal: Path | None = None
    """A JSON-lines file of the steps performed."""
    journal_database: str = Field("postgres", min_length=1, max_length=63)
    """The database on the primary that holds the journal as a table, and the commands' lock."""
    watch: WatchSettings = WatchSettings()
    drill: DrillSettings = DrillSettings()

    @field_validator("watch", "drill", mode="before")
    @classmethod
    def _empty(cls, section: object) -> object:
        """Read null, which is a section with all keys commented out, as an empty section."""
        return {} if section is None else section

    @field_validator("advertised", mode="before")
    @classmethod
    def _listed(cls, given: object) -> object:
        """Read a single address as a list of one."""
        if not isinstance(given, dict):
            return given
        return {n: (each,) if isinstance(each, str) else each for n, each in given.items()}


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
    snapshot: SnapshotSettings = SnapshotSettings()
    failover: FailoverSettings | None = None
    tables: TablesSettings | None = None

    @model_validator(mode="after")
    def _registered(self) -> "Settings":
        """Refuse a format whose schemas have nowhere to be."""
        if self.kafka is not None and self.kafka.needs_registry and self.registry is None:
            raise ValueError("kafka.key_format and kafka.value_format avro need registry.url")
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
            hint=f"add `{name}:` to the configuration file (docs/OPERATIONS.md lists its keys)",
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
