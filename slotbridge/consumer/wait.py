"""Read your writes: waits until Kafka has what was committed up to a position."""

import json
import urllib.error
import urllib.parse
import urllib.request

from schemas.errors import ExitCode, Retryable


def wait_for(bridge_url: str, lsn: str, *, timeout_s: float = 30.0) -> None:
    """Return once Kafka has everything that was committed before `lsn`.

    bridge_url: of the bridge's HTTP port (`bridge.http_port`). lsn: as `SELECT
    pg_current_wal_insert_lsn()` tells it after the COMMIT. Raise Retryable at the time-out, or
    where the bridge does not answer.
    """
    query = urllib.parse.urlencode({"lsn": lsn, "timeout_s": timeout_s})
    url = f"{bridge_url.rstrip('/')}/v1/wait?{query}"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s + 5):  # noqa: S310
            return
    except urllib.error.HTTPError as error:
        reason = _reason(error)
    except OSError as error:
        reason = str(error)
    raise Retryable(
        f"Kafka does not have the changes yet: {reason}",
        operation="wait for changes",
        subject=bridge_url,
        hint="slotbridge status tells how far the bridge is",
        exit_code=ExitCode.DEADLINE,
    )


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        document = json.loads(error.read())
    except ValueError:
        return str(error)
    return str(document.get("error", error)) if isinstance(document, dict) else str(error)
