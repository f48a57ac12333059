"""The snapshot: its settings, and the records of `<prefix>.snapshot`, one for each table. Pure.

    topic               key                  value
    <prefix>.snapshot   SnapshotKey          SnapshotProgress
    compacted           SnapshotRequestKey   SnapshotRequest
                        SlotBeginningKey     SlotBeginning
                        SignalPositionKey    SignalPosition

A SnapshotProgress is written in the same Kafka transaction as the rows that it counts, a
SnapshotRequest in the one of the source transaction that inserted the signal, or with the
SignalPosition behind the signal's record. A SlotBeginning is with the first progress record.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from schemas.shaping import TablePattern

SNAPSHOT_PREFIX = "slotbridge.snapshot"
"""The prefix of the logical messages that mark where a chunk of rows belongs in the stream."""
ReadFrom = Literal["", "primary", "standby"]
Mode = Literal["never", "initial", "initial_only", "when_needed", "always", "on_request"]
READ_ALL: Mapping[Mode, bool] = {
    "never": False,
    "initial": True,
    "initial_only": True,
    "when_needed": True,
    "always": True,
    "on_request": False,
}
"""Whether a mode reads all tables by itself."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _condition(text: str) -> str:
    if not text.strip() or ";" in text or "\0" in text:
        raise ValueError("write one SQL condition, without `;`")
    return text


Condition = Annotated[str, AfterValidator(_condition)]


class SnapshotSettings(_Part):
    """Rows that the tables had before the bridge started: whether it publishes them, and which."""

    mode: Mode | None = None
    """null: `initial` for a new topic prefix; a prefix that began without stays without.
    `initial`: publish the rows of each published table once, beside the stream of changes.
    `initial_only`: the same, then stop. `when_needed`: as `initial`, and the bridge repairs the
    topics like `slotbridge recover` where slot and Kafka disagree. `always`: all rows again at each
    start of the bridge. `on_request`: the rows of tables that a signal names. `never`: changes
    alone."""
    conninfo: SecretStr | None = None
    """Connection string of a standby that rows are read from, to spare the primary; null: the
    primary. Rows of tables without a key are read from the primary all the same. The role needs
    pg_read_all_stats, granted on the primary (docs/guides/snapshots.md)."""
    standby_wait_ms: int = Field(5_000, ge=1, le=600_000)
    """Longest time that the stream of changes may stand still, for each chunk, until the standby of
    conninfo has replayed what the chunk needs. A standby that always lags more never serves."""
    signal_table: TablePattern | None = None
    """`schema.table` of a published table with the columns id, type, data. A row inserted there
    requests a snapshot, as in Debezium. A condition there can only compare columns of its
    table."""
    signal_topic: str | None = Field(None, pattern=r"^[a-zA-Z0-9._-]{1,249}$")
    """A topic with one partition. A record there requests a snapshot, as in Debezium: its key is
    kafka.topic_prefix, its value a document with id, type and data. The bridge creates a missing
    topic. A condition there can only compare columns of its table."""
    exclude: tuple[TablePattern, ...] = ()
    """`schema.table` (`*` for any characters) of tables whose rows are not read; their changes are
    published all the same."""
    order: tuple[TablePattern, ...] = ()
    """Tables that the bridge reads first, in this order. It reads the others in order of names."""
    where: dict[TablePattern, Condition] = {}
    """Table -> SQL condition for the rows that a snapshot reads. It does not filter changes."""
    without_key: Literal["refuse", "read"] = "read"
    """Tables without a key. `read`: the bridge publishes their rows from before the slot once, and
    all later ones as changes; only where the bridge has created the slot
    (docs/guides/snapshots.md). `refuse`: it begins no snapshot while the publication has such a
    table, as with mode always."""
    workers: int = Field(1, ge=1, le=16)
    """How many connections read a chunk at the same time, each a range of its rows. More than one
    helps where the server, its disk or the network is slower than the bridge."""
    chunk_rows_max: int = Field(50_000, ge=1, le=1_000_000)
    """Most rows in a chunk. Each chunk is one Kafka transaction."""
    hold_ms: int = Field(100, ge=1, le=10_000)
    """About how long the stream of changes may pause for a chunk; it determines the size of
    chunks."""
    rows_per_second_max: int | None = Field(None, ge=1)
    """Most rows that a snapshot reads in a second, to spare the primary. null: as many as
    possible."""

    @model_validator(mode="after")
    def _signals(self) -> "SnapshotSettings":
        """Refuse signals and connections that the mode does not use, or lacks."""
        if self.mode == "never" and self.conninfo is not None:
            raise ValueError("conninfo needs another mode than never")
        if self.mode == "on_request" and not (self.signal_table or self.signal_topic):
            raise ValueError("mode on_request needs signal_table or signal_topic")
        if self.mode == "never" and self.signal_topic is not None:
            raise ValueError("signal_topic needs another mode than never")
        if self.signal_table is not None and (self.mode == "never" or "*" in self.signal_table):
            raise ValueError("signal_table is one table, and needs another mode than never")
        asked = self.without_key == "read" and "without_key" in self.model_fields_set
        if self.mode == "always" and asked:
            raise ValueError("mode always would send rows of tables without a key again")
        return self

    def in_effect(self, *, reads_rows: bool) -> "SnapshotSettings":
        """Return these with the mode that holds where none is set.

        `reads_rows`: that of the prefix's progress record; True where Kafka has none yet.
        """
        if self.mode is not None:
            return self
        signals = self.signal_table or self.signal_topic
        without: Mode = "on_request" if signals else "never"
        return self.model_copy(update={"mode": "initial" if reads_rows else without})

    @property
    def reads_all(self) -> bool:
        """Whether the mode, which is set or in effect, reads all tables by itself."""
        assert self.mode is not None
        return READ_ALL[self.mode]

    @property
    def reads_without_key(self) -> bool:
        """Whether rows of tables without a key are published."""
        return self.without_key == "read" and self.mode != "always"


class SnapshotKey(_Part):
    """The key of a SnapshotProgress."""

    slot: str
    schema_: str = Field(alias="schema")
    table: str


class SnapshotProgress(_Part):
    """How much of a table's rows is in Kafka, as events with op `r`.

    `done`: all of them. Else rows are read on after `last`, the values of the columns `key` in
    PostgreSQL's text form; null: from the beginning. The last chunk's events have `commit_lsn`, and
    a number (seq) up to `seq`. Rows of another `oid`, or of a timeline that was left before
    `commit_lsn` or `seen_lsn`, count for nothing: that table is read anew.
    """

    slot: str
    schema_: str = Field(alias="schema")
    table: str
    oid: int
    """pg_class.oid."""
    key: list[str]
    last: list[str] | None
    rows: int
    chunks: int
    done: bool
    timeline: int
    commit_lsn: int
    seq: int
    seen_lsn: int = 0
    """The chunk's rows show nothing that was committed after this LSN; 0: not known."""
    bytes: int = 0
    """Of the rows' events, keys and values."""
    rows_estimate: int = -1
    """How many rows the server believes the table to have; -1: not known."""
    began_ms: int = 0
    waiting: int
    """How many of the snapshot's tables had rows left to read then."""
    refused: dict[str, str] = {}
    """`schema.table` -> why its rows could not be read then."""
    read_from: ReadFrom = ""
    """Where the last chunk's rows were read; "": not known."""
    ts_ms: int

    @property
    def rows_per_second(self) -> float:
        """How many rows were published a second since the first chunk."""
        took_s = (self.ts_ms - self.began_ms) / 1000 if self.began_ms else 0.0
        return self.rows / took_s if took_s > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at that rate; None: not known."""
        rate, left = self.rows_per_second, self.rows_estimate - self.rows
        if self.done:
            return 0.0
        return left / rate if rate > 0 and left > 0 else None


class SlotBeginningKey(_Part):
    """The key of a SlotBeginning."""

    slot: str
    beginning: Literal[True] = True


class SlotBeginning(_Part):
    """Which rows of tables without a key are from before the slot: the others come as changes.

    A row is from before `lsn`, where the slot begins, if its xmin is seen by `sight` (as
    pg_current_snapshot() prints it, with subtransactions).
    """

    slot: str
    lsn: int
    timeline: int
    sight: str
    all_tables: bool
    """Whether the publication has all tables: also those that are made later, from their first row
    on."""
    files: dict[int, int]
    """pg_class.oid -> relfilenode of each published table without a key, as it was there."""
    ts_ms: int


class SnapshotRequestKey(_Part):
    """The key of a SnapshotRequest: a later one of its kind for the same tables replaces it."""

    slot: str
    request: Literal["read", "pause"]
    tables: str


class SnapshotRequest(_Part):
    """A signal about `tables` (`*`: any characters), which counts from (`commit_lsn`, `seq`) on.

    That is the position of its insert, or where the record of `topic` was taken.

    `read`: read the rows for which `where` holds, from the beginning, whatever was read before
    `commit_lsn`. `stop`: read no more. `pause`: read no more until `resume`.
    """

    slot: str
    id: str
    type: Literal["read", "stop", "pause", "resume"]
    tables: str
    where: str
    timeline: int
    commit_lsn: int
    seq: int
    ts_ms: int
    topic: str = ""
    """The signal topic that it came by; "": the signal table."""
    offset: int = -1
    """That of its record in the signal topic, whose records are in order whatever place they got;
    -1: none, or not known."""


class SignalPositionKey(_Part):
    """The key of a SignalPosition."""

    slot: str
    signals: str


class SignalPosition(_Part):
    """How far the records of a signal topic are taken: `offset` is the next one's."""

    slot: str
    topic: str
    topic_id: str = ""
    """Kafka's id of the topic, which another one of that name does not have; "": not known."""
    offset: int
    ts_ms: int
