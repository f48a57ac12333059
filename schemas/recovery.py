"""The records of `<prefix>.recovery`: one for each repair by `slotbridge recover`. Pure."""

from pydantic import BaseModel, ConfigDict


class TableRepair(BaseModel):
    """How many rows of a table were published to make its topic equal to it.

    `emptied`: Kafka had removed its first events, so that all rows were published anew behind an
    event that empties the table.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int
    """Rows that the table had."""
    created: int
    updated: int
    deleted: int
    emptied: bool


class RecoveryRecord(BaseModel):
    """A repair: the topics were made equal to the tables as of `lsn`, where the new slot begins.

    Between `from_lsn` (0: not known) and `lsn`, single changes are not in Kafka, only what they
    amount to: the events with `source.commit_lsn` = `commit_lsn`. `left_out`: tables that were not
    compared, with the reason. Written in the Kafka transaction of those events.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    slot: str
    system_identifier: str
    timeline: int
    reason: str
    """Why the bridge did not start, or `--force`."""
    from_lsn: int
    lsn: int
    commit_lsn: int
    tables: dict[str, TableRepair]
    left_out: dict[str, str]
    ts_ms: int
