"""Changes that no event can be made of, with their remedies. Pure."""

from schemas.errors import BadInput, ExitCode


def updated_outbox(table: str, lsn: int) -> BadInput:
    """Return the error of an update of an outbox row."""
    return BadInput(
        "a row of the outbox was updated after its message was published",
        operation="encode an event",
        subject=table,
        lsn=lsn,
        hint=f"insert another row instead; to skip updates: shaping.skip: {{{table}: [u]}}",
        exit_code=ExitCode.RECORD_REFUSED,
    )


def without_key(table: str, lsn: int) -> BadInput:
    """Return the error of a change without the old row's key."""
    return BadInput(
        "an update or delete does not have the old row's key",
        operation="encode an event",
        subject=table,
        lsn=lsn,
        hint="give each partition the replica identity of the root table that it is published as, "
        "or REPLICA IDENTITY FULL; to skip the table: shaping.exclude",
    )
