"""The bridge, as far as the failover manager deals with it: its slot, its control call, its topics.

The control call (services.bridge.session.control) sends it to the new primary's host. That it came
is seen in the database; with the section `kafka`, also in Kafka: the marker message itself is
looked for.
"""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException

from schemas.errors import ExitCode, Retryable, SetupError, SlotbridgeError
from schemas.events import MARKER_PREFIX, message_topic
from schemas.settings import KafkaSettings, Settings
from services.runtime.access import read_token

_DEADLINE_S = 15.0
_TAIL_RECORDS = 50
_TEXT_MAX = 300


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: they would carry the token, and turn the POST into a GET."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _StayHere)
"""Without the proxies of our environment, which would see the token."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """The bridge of the settings; `control_url`: "" if it can't be sent to another host."""

    slot: str
    control_url: str = ""
    token: bytes = field(default=b"", repr=False)
    kafka: KafkaSettings | None = None


def bridge_of(settings: Settings) -> Bridge | None:
    """Return the bridge that the settings describe, if any. Raise SettingsError for its token."""
    if settings.source is None:
        return None
    given = settings.bridge
    token = b""
    if given.control_url:
        token = read_token(given.token, given.token_file, section="bridge")
    url = given.control_url.rstrip("/")
    return Bridge(settings.source.slot, url, token, settings.kafka)


def send_to(bridge: Bridge, conninfo: str) -> None:
    """Call POST /v1/source of the bridge.

    Raise Retryable where nothing answers, SetupError where the bridge refuses.
    """
    request = urllib.request.Request(  # noqa: S310 - the setting admits http and https only
        f"{bridge.control_url}/v1/source",
        data=json.dumps({"conninfo": conninfo}).encode(),
        headers={
            "Authorization": f"Bearer {bridge.token.decode()}",
            "Content-Type": "application/json",
        },
    )
    try:
        with _OPENER.open(request, timeout=_DEADLINE_S):
            return
    except urllib.error.HTTPError as error:
        with error:
            text = _said(error.read(_TEXT_MAX * 4))
        raise SetupError(
            f"the bridge refuses ({error.code}): {text}",
            operation="send the bridge to the new primary",
            subject=bridge.control_url,
            hint="check that bridge.token is the same on both sides; or restart the bridge with a "
            "source.conninfo that names the new primary",
        ) from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise Retryable(
            f"the bridge does not answer: {reason}",
            operation="send the bridge to the new primary",
            subject=bridge.control_url,
            hint="start the bridge; its source.conninfo must name the new primary",
        ) from error


def marker_in_kafka(kafka: KafkaSettings, lsn: int) -> bool:
    """Tell whether the topic of messages has a committed marker message of ours, from `lsn` on.

    Raise Retryable (KAFKA_UNREACHABLE) where the topic can't be read.
    """
    from services.kafka.records import newest, no_such_topic  # imported late: it is slow
    from services.runtime.process import configure_logging

    configure_logging(json_lines=False)  # Kafka's client speaks, and stdout is taken
    key = json.dumps({"prefix": MARKER_PREFIX}, separators=(",", ":")).encode()
    try:
        found = newest(
            kafka, message_topic(kafka.topic_prefix), key, _TAIL_RECORDS, deadline_s=_DEADLINE_S
        )
        return any(json.loads(value)["source"]["lsn"] >= lsn for value in found)
    except SlotbridgeError as error:
        if no_such_topic(error):
            return False
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise Retryable(
            "the topic has a record that the bridge did not write",
            operation="look for the marker message",
            subject=message_topic(kafka.topic_prefix),
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        ) from error


def _said(body: bytes) -> str:
    """Return the error and hint of the bridge's answer, or its text."""
    try:
        document = json.loads(body)
        text = f"{document['error']}. {document.get('hint', '')}"
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:_TEXT_MAX]
