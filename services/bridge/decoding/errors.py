"""What is wrong with pgoutput's bytes. Pure."""

from schemas.errors import BadInput, ExitCode


class DecodeError(BadInput):
    """Bytes that are no pgoutput message, or one that does not fit what came before."""

    exit_code = ExitCode.UNDECODABLE


def misplaced(what: str, lsn: int) -> DecodeError:
    """`what` was understood, but does not fit what came before."""
    return DecodeError(f"{what} is out of place", operation="assemble transactions", lsn=lsn)
