"""Encoders as tests ask for them: by type name and settings."""

import json
from typing import Any

from schemas.settings import ValueSettings
from services.bridge.events.values.encoders import Encoder, Encoders
from services.bridge.pgoutput.pg_types import TYPE_NAMES

OIDS = {name: oid for oid, name in TYPE_NAMES.items()}
DEBEZIUM: dict[str, Any] = {
    "decimal_handling": "precise",
    "time_precision": "adaptive",
    "interval_handling": "numeric",
    "hstore_handling": "json",
    "structures": "json",
}
"""The settings that give Debezium's default forms."""


def encoder(name: str, typmod: int = -1, **settings: Any) -> Encoder:
    """The encoder of the built-in type `name`."""
    return Encoders(ValueSettings(**settings)).of(OIDS[name], typmod)


def form(name: str, text: str | bytes, typmod: int = -1, **settings: Any) -> Any:
    """The JSON form of a value's text, read again."""
    value = text if isinstance(text, bytes) else text.encode()
    return json.loads(encoder(name, typmod, **settings).encode(value))


def numeric(precision: int, scale: int) -> int:
    """The typmod of numeric(precision, scale)."""
    return (precision << 16 | scale & 0x7FF) + 4
