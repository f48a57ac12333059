"""Debezium's transformation ExtractNewRecordState as flat rows (`shaping.flat`). Pure.

    delete.tombstone.handling.mode    deletes    bridge.tombstones
    rewrite                           rewrite    false
    rewrite-with-tombstone            rewrite    true
    drop, tombstone (the default),    no counterpart: the record of a delete does not tell which
    delete-to-tombstone               change it is of

    add.fields                        fields; op, txId, lsn and source.ts_ms tell where a row stands

Source: ExtractNewRecordStateConfigDefinition, AbstractExtractNewRecordState.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from schemas.shaping import FIELDS
from services.adoption.lists import split

TYPE: Final = "io.debezium.transforms.ExtractNewRecordState"
_MODE: Final = "delete.tombstone.handling.mode"
_MODES: Final = ("rewrite", "rewrite-with-tombstone")
_NEEDED: Final = (("op",), ("txId", "source.txId"), ("lsn", "source.lsn"), ("source.ts_ms",))
_ANY: Final = ("type", _MODE, "add.fields", "replace.null.with.default")


class Unwrapped(NamedTuple):
    """The settings `flat`, whether deletes have tombstones, and what has no counterpart.

    `keys`: those of the connector that say it.
    """

    flat: Mapping[str, Any]
    tombstones: bool
    refusals: list[str]
    keys: frozenset[str]


def unwrapped(own: Mapping[str, str]) -> Unwrapped | None:
    """Return the flat rows that equal a connector's only transformation, None for others."""
    names = split(own.get("transforms", ""))
    if len(names) != 1 or own.get(f"transforms.{names[0]}.type") != TYPE:
        return None
    start = f"transforms.{names[0]}."
    options = {key.removeprefix(start): one for key, one in own.items() if key.startswith(start)}
    fields = split(options.get("add.fields", ""))
    flat = {
        "tables": ["*.*"],
        "fields": [field for field in fields if field != "op"],
        "deletes": "rewrite",
    }
    return Unwrapped(
        flat,
        options.get(_MODE, "").strip().lower() == _MODES[1],
        [f"{start}{refusal}" for refusal in _refusals(options, fields)],
        frozenset({"transforms", *(f"{start}{key}" for key in options)}),
    )


def _refusals(options: Mapping[str, str], fields: list[str]) -> Iterator[str]:
    """Yield the options of Debezium's unwrapping that the bridge has no counterpart of."""
    mode = options.get(_MODE, "tombstone").strip().lower()
    if mode not in _MODES:
        yield f"{_MODE}={mode}: a delete's record does not tell which change it is of"
    for names in _NEEDED:
        if not {*names} & {*fields}:
            yield f"add.fields lacks {names[0]}: a row does not tell where it stands"
    for field in fields:
        if field not in FIELDS:
            yield f"add.fields: {field} has no counterpart"
    if options.get("add.fields.prefix", "__") != "__":
        yield f"add.fields.prefix={options['add.fields.prefix']}: the bridge has only __"
    for key, value in options.items():
        if value and key not in (*_ANY, "add.fields.prefix"):
            yield f"{key}={value} has no counterpart"
