"""Read your writes: waits until Kafka, or the tables, have what was committed up to a position."""

import http.client
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SettingsError, SlotbridgeError

_OPERATION: Final = "wait for changes"
_HAVE: Final = {"kafka": "Kafka does", "tables": "the tables do"}


class Waited(NamedTuple):
    """An answer: Kafka, or the tables, have all that was committed before the LSN.

    `timeline`: the source's present timeline, None where it is not known. `parked`: source tables
    that stay behind the others, and do not have it.
    """

    timeline: int | None
    parked: Sequence[str]


def wait_for(
    url: str,
    lsn: str,
    *,
    within: Literal["kafka", "tables"] = "kafka",
    timeline: int | None = None,
    timeout_s: float = 30.0,
) -> Waited:
    """Return once Kafka has everything that was committed before `lsn`; or the tables, `within`.

    url: of the bridge's HTTP port (`bridge.http_port`), for tables that of `slottables run`
    (`tables.http_port`). lsn: as `SELECT pg_current_wal_insert_lsn()` tells it after the COMMIT.
    timeline: that on which it was read. Raise Retryable at the time-out, or where nothing answers;
    OperatorNeeded where the commit is lost by a failover; SettingsError for a wrong argument.
    """
    if not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise SettingsError(
            f"timeout_s is {timeout_s}",
            operation=_OPERATION,
            hint="give a number of seconds such as 30",
        )
    asked = {"lsn": lsn, "in": within, "timeout_s": str(timeout_s)}
    if timeline is not None:
        asked["timeline"] = str(timeline)
    address = f"{url.rstrip('/')}/v1/wait?{urllib.parse.urlencode(asked)}"
    try:
        with urllib.request.urlopen(address, timeout=timeout_s + 10) as answer:  # noqa: S310
            found = _document(answer.read())
    except urllib.error.HTTPError as error:
        raise _refused(error, url, within) from error
    except OSError as error:
        raise _not_yet(str(error), url, within) from error
    except http.client.HTTPException as error:
        raise _foreign(f"no answer of HTTP: {error!r}", url, within) from error
    if found.get("in") != within or "timeline" not in found:
        raise _foreign("it is not an answer of this program", url, within)
    return Waited(found["timeline"], sorted(found.get("parked", ())))


def _refused(error: urllib.error.HTTPError, url: str, within: str) -> SlotbridgeError:
    """Return our error for the page's status: 400, 409, or not yet."""
    reason = str(_document(error.read()).get("error", error))
    if error.code == 400:
        return SettingsError(reason, operation=_OPERATION, subject=url)
    if error.code == 409:
        return OperatorNeeded(
            reason,
            operation=_OPERATION,
            subject=url,
            hint="a failover lost the commit: make the change again on the present primary",
            exit_code=ExitCode.TIMELINE,
        )
    return _not_yet(reason, url, within)


def _foreign(reason: str, url: str, within: str) -> Retryable:
    setting = "bridge.http_port" if within == "kafka" else "tables.http_port"
    return Retryable(
        f"something else answers, so that nothing is known of the changes: {reason}",
        operation=_OPERATION,
        subject=url,
        hint=f"give the URL of the port that {setting} sets",
        exit_code=ExitCode.DEADLINE,
    )


def _not_yet(reason: str, url: str, within: str) -> Retryable:
    program = "slotbridge" if within == "kafka" else "slottables"
    return Retryable(
        f"{_HAVE.get(within, within)} not have the changes yet: {reason}",
        operation=_OPERATION,
        subject=url,
        hint=f"`{program} status` tells how far it is",
        exit_code=ExitCode.DEADLINE,
    )


def _document(text: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
