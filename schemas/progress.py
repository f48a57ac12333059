"""The records of `<prefix>.progress`: up to where Kafka has events, and by which evidence. Pure.

    part       tells                                          judged by
    position   which transactions are in Kafka                the ledger, the slot, the server's WAL
    server     the server that the events were read from      its identity and its history
    witness    where the witness in the database was          the origin, or the sequence
    kafka      who wrote, and where partitions ended          Kafka's topics
    settings   how changes became events of a place           the settings of the next start

schemas/progress_record.json is an example. Every part is a lower bound: it was true when the record
was committed (docs/why/delivery.md, "The evidence at a start"). There is one form; a record of any
other is refused.
"""

from typing import Literal

from pydantic import Field

from schemas.events import Contract


class ProgressPosition(Contract):
    """`end_lsn` is the resume point: just after the last transaction that is in Kafka whole.

    With `seq` > 0 Kafka also has what has a number below `seq` of the transaction that commits at
    `commit_lsn`: `counts` events by table (`schema.table`, of logical messages under ``""``).
    """

    commit_lsn: int
    end_lsn: int
    seq: int
    counts: dict[str, int] = Field(default_factory=dict)
    ahead_lsn: int = 0
    """If beyond `end_lsn`: the slot may be confirmed up to here, over WAL without events."""
    xid: int = 0
    """Of the commit at `commit_lsn` in the WAL, as `commit_time_us` (since 1970). 0: not known."""
    commit_time_us: int = 0


class ProgressServer(Contract):
    """The server that the events were read from."""

    system_identifier: str
    timeline: int
    history: dict[int, int]
    """Each ancestor of `timeline` -> the LSN at which the server left it."""


class ProgressWitness(Contract):
    """Where the witness in the database durably was, on the server's timeline; 0: not known."""

    kind: Literal["origin", "sequence"]
    """source.witness."""
    lsn: int = 0
    wal_lsn: int = 0
    """The commit that moved the witness to `lsn` ends here or before."""


class ProgressKafka(Contract):
    """Who wrote the record, and where the partitions ended that were written last."""

    producer: int = 0
    """Which of the bridge's two producers."""
    ends: dict[str, list[tuple[int, int, int]]] = Field(default_factory=dict)
    """topic -> [partition, offset after what the slot has written there, leader epoch]; {} in most
    records."""
    topic_ids: dict[str, str] = Field(default_factory=dict)
    """The ids of these topics, where they are known."""
    partitions: dict[str, int] = Field(default_factory=dict)
    """How many partitions these topics had."""


class ProgressSettings(Contract):
    """How changes became events, and where these went."""

    publication: str
    publication_oid: int
    source_origin: str
    placement: dict[str, str] | None = None
    """Digests of the settings that place rows, and of the expressions; null: not known."""
    storage_id: str | None = None
    """Of the object storage that has the large values; empty: none was used under this prefix,
    null: not known."""
    reads_rows: bool = False
    """Rows from before the slot are published, unless snapshot.mode says otherwise."""


class ProgressRecord(Contract):
    """The authority on what Kafka has, written in the same Kafka transaction as the events."""

    slot: str
    ts_ms: int
    repairing: bool = False
    """`slotbridge recover` was about to make the slot anew; only its end may follow."""
    position: ProgressPosition
    server: ProgressServer
    witness: ProgressWitness
    kafka: ProgressKafka
    settings: ProgressSettings

    @property
    def committed_us(self) -> int:
        """When its last commit was, else when it was written; microseconds since 1970."""
        return self.position.commit_time_us or self.ts_ms * 1000


class HangingRange(Contract):
    """Offsets [start, end) of a partition, where `records` are, committed or not."""

    topic: str
    partition: int
    start: int
    end: int
    records: int


class SettlingNote(Contract):
    """A note that the bridge is about to commit a transaction that hangs in these partitions.

    `record` covers what is to be committed; null: nothing does. Written before a marker can reach
    it, and replaced by a tombstone after that (services/bridge/hanging/notes.py). While
    it is there, the next start compares what the partitions show. For the bridge alone.
    """

    version: Literal[1] = 1
    slot: str
    ranges: list[HangingRange]
    record: ProgressRecord | None
    ts_ms: int
