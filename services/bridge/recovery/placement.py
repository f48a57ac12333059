"""Which partition rows go to, by the settings: noted in the progress record, compared at a start.

Where it has changed, later events of a row may be in another partition or topic than earlier ones,
and no consumer sees their order. Pure but for the log.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

import structlog

from schemas.kafka import KafkaSettings
from schemas.naming import column_matches
from schemas.settings import ValueSettings
from schemas.shaping import ShapingSettings
from services.bridge.events.shaping.tables import PARTITION_BY

logger = structlog.get_logger(__name__)

EXPRESSIONS: Final = "shaping.filters and computed"
_COLUMNS: Final = "the columns that shaping.partition_by may have"
_OF_FIT: Final = (EXPRESSIONS, _COLUMNS)
"""The digests of settings that do not place rows: see `recovery.fit`."""
_KEYS: Final = "shaping.keys"
_BYTES: Final = "kafka.key_bytes"
_DIGITS: Final = 16


def placement_of(
    shaping: ShapingSettings, values: ValueSettings, kafka: KafkaSettings
) -> dict[str, str]:
    """Return a digest of each group of settings that decides on the place of rows.

    And of those that must fit the tables.
    """
    salt = shaping.salt.get_secret_value()
    hashed = {
        tables: sorted(column for column, mask in masks.items() if mask.hash)
        for tables, masks in shaping.masks.items()
    }
    forms = {name: getattr(values, name) for name in sorted(ValueSettings.model_fields)}
    outbox = shaping.outbox.model_dump(exclude={"headers"}) if shaping.outbox else None
    return {
        _KEYS: _digest(shaping.keys, ordered=True),
        PARTITION_BY: _digest(shaping.partition_by, ordered=True),
        "shaping.masks of partition_by": _digest(_masks_of_places(shaping), ordered=True),
        "shaping.columns of partition_by: row": _digest(_columns_of_rows(shaping)),
        "shaping.masks of keys": _digest([hashed, salt] if any(hashed.values()) else []),
        "shaping.topic and routes": _digest(
            [shaping.topic, [route.model_dump() for route in shaping.routes]]
        ),
        "shaping.outbox": _digest(outbox),
        "the forms of values in keys": _digest([forms, _encoders(kafka)]),
        _BYTES: _digest(kafka.key_bytes),
        EXPRESSIONS: _digest([shaping.filters, shaping.computed]),
        _COLUMNS: _digest(_columns_of_places(shaping)),
    }


def _encoders(kafka: KafkaSettings) -> str:
    """Name what the formats make of values, as records of all releases have it in their digests."""
    formats = {kafka.key_format, kafka.value_format}
    if formats == {"json"}:
        return "Encoders"
    return "FiniteEncoders" if "json_schema" in formats else "StrictEncoders"


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the groups of settings that are known of both times, and differ.

    A record without `shaping.partition_by` is of an adoption: see `with_keyless_spread`.
    """
    then = {PARTITION_BY: _digest({}), **then}
    return [
        name
        for name, digest in now.items()
        if name not in _OF_FIT and then.get(name, digest) != digest
    ]


def refitted(then: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Tell whether settings that must fit the tables are known of both times, and differ."""
    then = {PARTITION_BY: _digest({}), **then}
    names = (*_OF_FIT, PARTITION_BY, _KEYS)
    return any(then.get(name, now[name]) != now[name] for name in names)


def spreads_keyless(then: Mapping[str, str] | None) -> bool:
    """Tell whether the records so far may have rows without a key in any partition."""
    return then is None or PARTITION_BY not in then


def with_keyless_spread(now: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of records by another program, with rows without a key in any partition.

    The next start then names the tables whose rows go to other partitions.
    """
    return {name: digest for name, digest in now.items() if name != PARTITION_BY}


def log_changed(then: Mapping[str, str] | None, now: Mapping[str, str]) -> None:
    """Warn of settings that place rows elsewhere since the last progress record."""
    if then is None:
        logger.info("not judged: the progress record does not tell how rows were placed")
    elif names := changed(then, now):
        logger.warning(
            "rows may go to other partitions or topics than before: their order is kept only "
            "within each (docs/guides/shaping.md, Placement)",
            changed=names,
        )


def _masks_of_places(shaping: ShapingSettings) -> list[Any]:
    """Return the masks of columns that may choose a partition, and the salt of the hashes."""
    chosen = shaping.partition_by.values()
    whole = "row" in chosen
    columns = {column for found in chosen if not isinstance(found, str) for column in found}
    masks = [
        (tables, of_column, mask.model_dump())
        for tables, of_columns in shaping.masks.items()
        for of_column, mask in of_columns.items()
        if whole or any(column_matches(of_column, column) for column in columns)
    ]
    salt = shaping.salt.get_secret_value()
    return [masks, salt if any(mask["hash"] for *_, mask in masks) else ""]


def _columns_of_rows(shaping: ShapingSettings) -> list[Any]:
    """Return the settings that choose the columns of rows which choose a partition whole."""
    if "row" not in shaping.partition_by.values():
        return []
    return sorted(
        (tables, sorted(columns.include), sorted(columns.exclude))
        for tables, columns in shaping.columns.items()
    )


def _columns_of_places(shaping: ShapingSettings) -> list[Any]:
    """Return what decides whether the columns in `partition_by` and `keys` are published."""
    if not (shaping.partition_by or shaping.keys):
        return []
    names = {"columns", "include", "exclude", "skip"}
    return [shaping.model_dump(include=names)]


def _digest(settings: Any, *, ordered: bool = False) -> str:
    """Return a digest; `ordered`: of patterns whose first match applies."""
    text = json.dumps(settings, sort_keys=not ordered)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
