"""Changes that no event can be made of, with their remedies. Pure."""

from schemas.errors import BadInput, ExitCode


def updated_outbox(table: str, lsn: int) -> BadInput:
    """An update where only inserts have a meaning."""
    return BadInput(
        "a row of the outbox was updated; its message is published already",
        operation="encode an event",
        subject=table,
        lsn=lsn,
        hint=f"insert another row instead; to pass this by: shaping.skip: {{{table}: [u]}}",
        exit_code=ExitCode.RECORD_REFUSED,
    )


def without_key(table: str, lsn: int) -> BadInput:
    """An old row that can't be told from others."""
    return BadInput(
        "an update or delete does not tell the old row's key",
        operation="encode an event",
        subject=table,
        lsn=lsn,
        hint="give each partition the replica identity of the root that it is published as, or "
        "REPLICA IDENTITY FULL; to pass its changes by: shaping.exclude",
    )
