"""Masks: a column's text form to the JSON string that takes its place. Pure; never sees NULL."""

import hmac
from json.encoder import encode_basestring as quoted

from schemas.shaping import MaskSettings
from services.bridge.events.values.plain import Encode


def mask(settings: MaskSettings, salt: str) -> Encode:
    """Return the encoder of a masked column."""
    if settings.text is not None:
        fixed = quoted(settings.text)
        return lambda _value: fixed
    if settings.truncate is not None:
        length = settings.truncate
        return lambda value: quoted(value.decode("utf-8")[:length])
    secret = salt.encode()
    return lambda value: f'"{hmac.digest(secret, value, "sha256").hex()}"'
