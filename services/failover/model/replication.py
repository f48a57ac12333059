"""A node as a standby, or as one that may become primary. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replication:
    """A server as a standby, or as one that may become primary; positions in bytes."""

    received_lsn: int | None
    """Standby: the WAL it has, received or replayed, whichever is more. None on a primary."""
    written_lsn: int | None
    """Primary: the WAL it has flushed. None on a standby."""
    receiver_streaming: bool
    replay_waits: bool
    """Standby: everything that was received has been replayed."""
    slotsync_worker: bool
    followers: tuple[str, ...]
    """application_name of every standby that streams from it."""
    may_promote: bool
    may_configure: bool
    """ALTER SYSTEM of the two settings that name standbys, and pg_reload_conf()."""
    may_fence: bool = True
    """Our role is a superuser: it may end other sessions."""
    may_replicate: bool = True
    """Our role may make and drop slots, and take a base backup."""
    may_rewind: bool = True
    """Our role may call the functions by which pg_rewind reads the server's files."""
    withheld_by: tuple[str, ...] = ()
    """Primary: the slots of synchronized_standby_slots without a standby, while a consumer waits.
    Decoding of failover slots stands still as long as they are named."""
    replayed_lsn: int | None = None
    """Standby: the WAL it has replayed."""
    replayed_age_s: float | None = None
    """Standby: seconds since the last commit that it has replayed, by both servers' clocks."""
    heard_age_s: float | None = None
    """Standby: seconds since the last message of the server that feeds it; None without one."""
    upstream_lsn: int | None = None
    """Standby: the end of WAL of the server that feeds it, as that server last said."""
    may_cut: bool = True
    """Our role may ALTER SYSTEM primary_conninfo, and so cut the receiver off."""
    received_all: bool = True
    """Standby: received_lsn is the end of its WAL. One that was started anew may have more, and
    tells only how far it has read, until it waits for what comes."""
    replay_pause: str = "not paused"
    """Standby: `not paused`, `pause requested`, `paused`; "" on a primary."""

    @property
    def replay_paused(self) -> bool:
        """Whether replay is, or is about to be, paused: by a person, or by limits too low."""
        return self.replay_pause not in ("", "not paused")
