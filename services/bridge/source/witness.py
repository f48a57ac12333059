"""The second witness of Kafka's position, in the database: a replication origin or a sequence.

    source.witness   position                      moved by
    origin           slotbridge_<slot>             pg_replication_origin_xact_setup, at the commit
    sequence         slotbridge.witness_<slot>     setval, before the commit that flushes it

Both are moved only to positions that Kafka has, and only forward. Both travel to standbys in the
WAL. One session owns an origin; an advisory lock keeps two bridges of any witness apart.
"""

from typing import Final, Literal, Protocol

import psycopg
import structlog

from schemas.errors import ExitCode, Retryable, SetupError
from schemas.lsn import format_lsn
from services.postgres import origins, witness_sequences
from services.postgres.server import Connection

logger = structlog.get_logger(__name__)

ORIGIN_PREFIX: Final = "slotbridge_"
Kind = Literal["origin", "sequence"]


class Witness(Protocol):
    """A position in the database that only the bridge of one slot moves."""

    name: str

    def exists(self, connection: Connection) -> bool:
        """Tell whether the server has it."""

    def create(self, connection: Connection) -> None:
        """Create it; raise SetupError where our role may not."""

    def own(self, connection: Connection) -> None:
        """Make this session its only owner, and check that our role may move it."""

    def position(self, connection: Connection) -> int | None:
        """Return its position in bytes, None where it was never moved or is not there."""

    def readable(self, connection: Connection) -> bool:
        """Tell whether our role may read its position."""

    def move(self, connection: Connection, lsn: int) -> None:
        """Move it to `lsn`, within the caller's transaction."""

    def forget(self, connection: Connection) -> None:
        """Leave no trace of a position, in the session that owns it."""


class OriginWitness:
    """The replication origin of a slot."""

    def __init__(self, slot: str) -> None:
        self.name = ORIGIN_PREFIX + slot

    def exists(self, connection: Connection) -> bool:
        """Tell whether the server knows the origin, in any database."""
        return origins.origin_exists(connection, self.name)

    def create(self, connection: Connection) -> None:
        """Create the origin, which all databases of the server share."""
        origins.create_origin(connection, self.name)

    def own(self, connection: Connection) -> None:
        """Take the origin; the server refuses a second session (SQLSTATE 55006)."""
        connection.execute("SELECT pg_replication_origin_session_setup(%s)", [self.name])

    def position(self, connection: Connection) -> int | None:
        """Return the origin's position, None where it was never moved or is not there."""
        if not self.exists(connection):
            return None
        return origins.origin_progress(connection, self.name)

    def readable(self, connection: Connection) -> bool:
        """Tell whether our role may call pg_replication_origin_progress."""
        return origins.may_read_progress(connection)

    def move(self, connection: Connection, lsn: int) -> None:
        """Let the commit of this transaction move the origin."""
        connection.execute(
            "SELECT pg_replication_origin_xact_setup(%s::pg_lsn, clock_timestamp())",
            [format_lsn(lsn)],
        )

    def forget(self, connection: Connection) -> None:
        """Give the origin up, and drop it."""
        origins.drop_own_origin(connection, self.name)


class SequenceWitness:
    """The sequence of a slot, which needs no function of replication origins."""

    def __init__(self, slot: str) -> None:
        self._slot = slot
        self.name = f"{witness_sequences.SCHEMA}.{witness_sequences.sequence_name(slot)}"

    def exists(self, connection: Connection) -> bool:
        """Tell whether the database has the sequence."""
        return witness_sequences.sequence_rights(connection, self._slot) is not None

    def create(self, connection: Connection) -> None:
        """Create the sequence, and its schema where that is missing."""
        try:
            witness_sequences.create_sequence(connection, self._slot)
        except psycopg.errors.InsufficientPrivilege as error:
            raise self._not_permitted(error.diag.message_primary or str(error)) from error

    def own(self, connection: Connection) -> None:
        """Check that our role may read and move the sequence; the advisory lock owns it."""
        rights = witness_sequences.sequence_rights(connection, self._slot)
        if rights != (True, True):
            raise self._not_permitted("the role may not read and move the sequence")

    def position(self, connection: Connection) -> int | None:
        """Return the sequence's position, None where it was never moved or is not there."""
        return witness_sequences.sequence_position(connection, self._slot)

    def readable(self, connection: Connection) -> bool:
        """Tell whether our role may read the sequence."""
        rights = witness_sequences.sequence_rights(connection, self._slot)
        return rights is not None and rights[0]

    def move(self, connection: Connection, lsn: int) -> None:
        """Move the sequence at once. Raise SetupError where somebody has dropped it."""
        if not witness_sequences.move_sequence(connection, self._slot, lsn):
            raise SetupError(
                "the sequence was dropped while the bridge ran",
                operation="move the witness",
                subject=f"sequence {self.name}",
                hint="start the bridge again: its error then tells how to restore the position",
            )

    def forget(self, connection: Connection) -> None:
        """Make the sequence one that was never moved: its owner may be another role."""
        witness_sequences.forget_position(connection, self._slot)

    def _not_permitted(self, message: str) -> SetupError:
        """Return the error of a role that can't make or use the sequence, with what to grant."""
        schema = witness_sequences.SCHEMA
        return SetupError(
            message,
            operation="prepare the witness",
            subject=f"sequence {self.name}",
            hint=f"as the database's owner: CREATE SCHEMA IF NOT EXISTS {schema}; CREATE SEQUENCE "
            f"IF NOT EXISTS {self.name}; GRANT SELECT, UPDATE ON SEQUENCE {self.name} TO the "
            "bridge's role",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )


def witness_of(kind: Kind, slot: str) -> Witness:
    """Return the witness that `source.witness` names."""
    return OriginWitness(slot) if kind == "origin" else SequenceWitness(slot)


def former_witness(kind: Kind, slot: str) -> Witness:
    """Return the witness of the other kind, which an earlier setting may have used."""
    return witness_of("sequence" if kind == "origin" else "origin", slot)


def former_position(connection: Connection, former: Witness) -> int | None:
    """Return how far the bridge was by a former witness, None where nothing is known of it."""
    if not former.exists(connection):
        return None
    if former.readable(connection):
        return former.position(connection)
    logger.info("not judged: the position of a former witness", witness=former.name)
    return None


def lock(connection: Connection, slot: str) -> None:
    """Keep other bridges of this slot away while the session lasts. Raise Retryable where one runs.

    The lock is of the database, as the slot is. It is the same for both kinds of witness, so that a
    change of `source.witness` does not let two bridges run.
    """
    row = connection.execute(
        "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [ORIGIN_PREFIX + slot]
    ).fetchone()
    if row != (True,):
        raise Retryable(
            "another session holds the bridge's advisory lock",
            operation="take the witness",
            subject=f"slot {slot}",
            hint="another bridge of this slot runs: stop it, or let this one wait as a hot standby "
            "(bridge.standby)",
            exit_code=ExitCode.SLOT_IN_USE,
        )
