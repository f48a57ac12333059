"""A failure of the schema registry, encoded by an executor through an error of Spark. Pure."""

import json
from typing import Final

from schemas.errors import ExitCode, Retryable, SetupError, SlotbridgeError

_MARK: Final = "slottables can't ask the schema registry"


def failure_text(error: SlotbridgeError) -> str:
    """Return the text of an error to raise on an executor."""
    fields = {"message": error.message, "subject": error.subject, "hint": error.hint}
    return f"{_MARK} {json.dumps(fields | {'exit_code': int(error.exit_code)})}"


def failure_in(text: str, operation: str) -> SlotbridgeError | None:
    """Return the error that `failure_text` wrote somewhere in what Spark says, None without one."""
    _, mark, encoded = text.partition(f"{_MARK} ")
    if not mark:
        return None
    fields, _ = json.JSONDecoder().raw_decode(encoded)
    code = ExitCode(fields.pop("exit_code"))
    kind = Retryable if code == ExitCode.REGISTRY_UNREACHABLE else SetupError
    return kind(fields.pop("message"), operation=operation, exit_code=code, **fields)
