"""Large values of a column: cut, or stored elsewhere and referred to. Pure, but for `deposit`.

    claim_check   text, json, xml, bytea …   -> a reference; `deposit` stores the value
    truncate      text, bytea …              -> its first whole characters and a mark

Key columns stay whole, else rows would have equal keys. A value that the WAL lacks stays the
placeholder.
"""

from collections.abc import Callable
from typing import Final

from schemas.errors import SettingsError
from schemas.large_values import (
    LargeValueSettings,
    Reference,
    begins_as_claim,
    ends_as_truncated,
    reference_text,
    truncated,
)
from services.bridge.events.shaping.tables import Limit, TableShaping
from services.bridge.events.values.encoders import Encoders
from services.bridge.events.values.plain import Encode, bytea_bytes
from services.bridge.pgoutput.messages import RelationColumn
from services.bridge.pgoutput.type_names import PgType, built_in

Deposit = Callable[[bytes], Reference]
"""Hands a value over for storage; it is stored before Kafka commits the event that refers to it."""
Replaced = Callable[[bytes], bytes | None]
"""Returns what stands for a value, None for the value itself."""

_TEXTS: Final = frozenset({"text", "varchar", "bpchar", "citext"})
_DOCUMENTS: Final = frozenset({"json", "jsonb", "xml"})
_BYTEA: Final = "bytea"
_HEX: Final = b"\\x"


def limits(plan: TableShaping, encoders: Encoders, deposit: Deposit | None) -> dict[str, Limit]:
    """Return column -> limit of those columns of a table that have one.

    Raise SettingsError for a column that is named without `*` and can't have one. `deposit`: None
    where nothing can be stored.
    """
    found = {}
    for column in plan.relation.columns:
        rule = plan.large_values.get(column.name)
        if rule is None:
            continue
        base, _ = encoders.base(column.type_oid, column.typmod)
        if base is None:  # the catalog does not show the type yet
            continue
        kind = _kind(base)
        why = _unfit(column, rule.settings, kind)
        if not why:
            found[column.name] = _limit(rule.settings, deposit, binary=kind == _BYTEA)
        elif rule.named:
            relation = plan.relation
            raise SettingsError(
                f"shaping.large_values can't apply to column {column.name} of "
                f"{relation.schema}.{relation.table}: {why}",
                operation="shape a table",
                hint="leave the column out of shaping.large_values; shaping.masks and "
                "shaping.columns apply to columns of any type",
            )
    return found


def _unfit(column: RelationColumn, settings: LargeValueSettings, kind: str) -> str:
    """Return why a column can't have large values, "" if it can."""
    if column.key:
        return "it is part of the key"
    if kind in _TEXTS or kind == _BYTEA:
        return ""
    if kind not in _DOCUMENTS:
        return "its type is none of text, varchar, char, citext, bytea, json, jsonb, xml"
    return "" if settings.truncate_bytes is None else f"{kind} that is cut can't be read"


def _kind(pg_type: PgType) -> str:
    """Return the name of a type whose values are bytes or one text, "" for others."""
    known = built_in(pg_type.oid) is not None or pg_type.extension == pg_type.name == "citext"
    return pg_type.name if known and not pg_type.element_oid else ""


def _limit(settings: LargeValueSettings, deposit: Deposit | None, *, binary: bool) -> Limit:
    """Return what limits an encoder's values: cut off, or stored and referred to."""
    if settings.truncate_bytes is not None:
        replaced = _truncate(settings.truncate_bytes, binary=binary)
    else:
        assert settings.claim_check_bytes is not None
        if deposit is None:
            raise ValueError("claim checks need an object storage")
        replaced = _claim_check(settings.claim_check_bytes, deposit)
    made = _of_bytea if binary else _of_text
    return lambda encode: made(encode, replaced)


def _of_text(encode: Encode, replaced: Replaced) -> Encode:
    def encoded(value: bytes) -> str:
        other = replaced(value)
        return encode(value if other is None else other)

    return encoded


def _of_bytea(encode: Encode, replaced: Replaced) -> Encode:
    def encoded(value: bytes) -> str:
        other = replaced(bytea_bytes(value))
        return encode(value if other is None else _HEX + other.hex().encode())

    return encoded


def _claim_check(bytes_max: int, deposit: Deposit) -> Replaced:
    """Return what stores a value of more than `bytes_max` and returns its reference's text.

    A shorter value that begins as a reference is stored, too: readers could not tell them apart.
    """

    def replaced(data: bytes) -> bytes | None:
        if len(data) <= bytes_max and not begins_as_claim(data):
            return None
        return reference_text(deposit(data))

    return replaced


def _truncate(bytes_max: int, *, binary: bool) -> Replaced:
    """Return what cuts a value off after `bytes_max`, not inside a character of text.

    A shorter value that ends as a truncated one is marked, too: readers could not tell them apart.
    """

    def replaced(data: bytes) -> bytes | None:
        if len(data) <= bytes_max:
            return truncated(data, data) if ends_as_truncated(data) else None
        kept = data[:bytes_max]
        if not binary:
            kept = kept.decode("utf-8", "ignore").encode()
        return truncated(kept, data)

    return replaced
