"""Errors of pgoutput's bytes. Pure."""

from schemas.errors import BadInput, ExitCode


class DecodeError(BadInput):
    """Bytes are not a pgoutput message, or the message does not fit the one before."""

    exit_code = ExitCode.UNDECODABLE


def misplaced(what: str, lsn: int) -> DecodeError:
    """Return the error of a message that is valid alone but does not fit the one before."""
    return DecodeError(f"{what} is out of place", operation="assemble transactions", lsn=lsn)
