"""A row of an outbox table, or a logical message, as a Kafka message of its own. Pure.

    aggregate type -> topic    aggregate id -> key    payload -> value, as it is
    id, type, others -> headers        commit_lsn, seq -> headers: identity and order, as everywhere
    partition -> the partition, if there is such a column

As Debezium's EventRouter has it. A NULL payload is a tombstone. A logical message is a JSON object
whose members are named as the columns; it needs no table.
"""

import json
from collections.abc import Callable, Collection
from typing import Final

from schemas.errors import SettingsError
from schemas.naming import Naming
from schemas.shaping import OutboxSettings
from services.bridge.events.values.plain import bytea_bytes
from services.bridge.pgoutput.messages import UNCHANGED, Relation, Row

_BYTEA_OID = 17
_REQUIRED = ("aggregate_type", "aggregate_id", "payload")
_ROLES = ("id", "aggregate_type", "aggregate_id", "type", "payload")
_DIGITS_MAX = 10
_SPACE = " \t\r\n"
PLACE_HEADER = "commit_lsn"
"""A header that each message of an outbox has, and no other record."""
Headers = list[tuple[str, str | bytes | None]]
Message = tuple[str, bytes | None, bytes | None, Headers, int | None]
"""Topic, key, value, headers, partition. The topic is "" where none follows from the type."""
NO_PARTITION: Final = -2
"""Stands for a partition that is not a number."""


class _Router:
    """Makes the Kafka message of the values that an outbox gives."""

    def __init__(self, settings: OutboxSettings, naming: Naming) -> None:
        self._naming = naming
        self._topics: dict[bytes, str] = {}
        self.names = [getattr(settings, role) for role in _ROLES] + list(settings.headers)
        """Names of what the values are: of the five roles, of headers, of the partition."""
        self._placed = settings.partition is not None
        if settings.partition is not None:
            self.names.append(settings.partition)
        self._headers = list(settings.headers.values())

    def message(
        self, values: list[bytes | None], payload: bytes | None, commit_lsn: int, seq: int
    ) -> Message:
        """Return the message of values in the order of `names`."""
        identity, aggregate_type, aggregate_id, kind, _, *others = values
        headers: Headers = [("id", identity), ("type", kind)]
        headers += [(PLACE_HEADER, str(commit_lsn)), ("seq", str(seq))]
        partition = _partition(others.pop()) if self._placed else None
        headers += zip(self._headers, others, strict=True)
        return self._topic(aggregate_type), aggregate_id, payload, headers, partition

    def _topic(self, aggregate_type: bytes | None) -> str:
        """Return the topic of an aggregate type, "" if it is NULL or empty."""
        if not aggregate_type:
            return ""
        topic = self._topics.get(aggregate_type)
        if topic is None:
            topic = self._naming.outbox(aggregate_type.decode("utf-8"))
            self._topics[aggregate_type] = topic
        return topic


class OutboxTable:
    """Reads the rows of `relation`. Raises SettingsError for a column that it lacks."""

    def __init__(self, settings: OutboxSettings, naming: Naming, relation: Relation) -> None:
        self._router = _Router(settings, naming)
        indexes = {column.name: index for index, column in enumerate(relation.columns)}
        keys = [*_ROLES, *(f"headers.{name}" for name in settings.headers), "partition"]
        for key, name in zip(keys, self._router.names, strict=False):
            if name not in indexes:
                raise SettingsError(
                    f"the outbox {relation.schema}.{relation.table} has no column {name}",
                    operation="describe a table",
                    hint=f"correct shaping.outbox.{key}",
                )
        self._indexes = [indexes[name] for name in self._router.names]
        payload = relation.columns[indexes[settings.payload]]
        binary = payload.type_oid == _BYTEA_OID
        self._content: Callable[[bytes], bytes] = bytea_bytes if binary else bytes

    def message(self, row: Row, commit_lsn: int, seq: int) -> Message:
        """Return the message of a row."""
        values = [_given(row, index) for index in self._indexes]
        payload = values[len(_ROLES) - 1]
        value = None if payload is None else self._content(payload)
        return self._router.message(values, value, commit_lsn, seq)


class OutboxMessages:
    """Reads the logical messages of an outbox."""

    def __init__(self, settings: OutboxSettings, naming: Naming) -> None:
        assert settings.message_prefix
        self.prefix = settings.message_prefix
        """The prefix that these messages have."""
        self._router = _Router(settings, naming)
        self._required = {getattr(settings, role) for role in _REQUIRED}

    def message(self, content: bytes, commit_lsn: int, seq: int) -> Message:
        """Return the message that a logical message holds.

        The message has no topic, and the whole content as its value, if the content is not a JSON
        object or lacks one of _REQUIRED, which may be null except for the type, or if no topic
        follows from the type.
        """
        names = self._router.names
        try:
            given = members(content.decode("utf-8"), names)
        except (ValueError, RecursionError):
            given = {}
        values = [given.get(name) for name in names]
        if given.keys() >= self._required:
            found = self._router.message(values, values[len(_ROLES) - 1], commit_lsn, seq)
            if found[0]:
                return found
        return self._router.message([None] * len(names), content, commit_lsn, seq)


def members(text: str, names: Collection[str]) -> dict[str, bytes | None]:
    """Return members of a JSON object: strings without quotes, null as None, others as written.

    Only the members in `names` are returned, and not those that are absent. Raise ValueError for a
    text that is not one JSON object.
    """
    json.loads(text, parse_float=str, parse_int=str)  # the whole must be JSON
    decoder = json.JSONDecoder(parse_float=str, parse_int=str)
    at = _after_space(text, 0)
    if text[at] != "{":
        raise ValueError("not a JSON object")
    found: dict[str, bytes | None] = {}
    at = _after_space(text, at + 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        at = _after_space(text, _after_space(text, at) + 1)  # behind the colon
        value, end = decoder.raw_decode(text, at)
        if name not in names:
            pass
        elif text[at] == '"':
            found[name] = value.encode("utf-8")
        else:
            found[name] = None if value is None else text[at:end].encode("utf-8")
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


def _partition(value: bytes | None) -> int | None:
    if value is None:
        return None
    return int(value) if value.isdigit() and len(value) < _DIGITS_MAX else NO_PARTITION


def _after_space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _given(row: Row, index: int) -> bytes | None:
    value = row[index]
    assert value is not UNCHANGED, "an inserted row is whole"
    return value  # type: ignore[return-value]
