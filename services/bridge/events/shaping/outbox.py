"""A row of an outbox table as a message of its own. Pure.

    aggregate type -> topic    aggregate id -> key    payload -> value, as it is
    id, type -> headers        commit_lsn, seq -> headers: identity and order, as everywhere

As Debezium's EventRouter has it. A NULL payload is a tombstone.
"""

from collections.abc import Callable

from schemas.errors import SettingsError
from schemas.naming import Naming
from schemas.shaping import OutboxSettings
from services.bridge.events.values.plain import bytea_bytes
from services.bridge.pgoutput.messages import UNCHANGED, Relation, Row

_BYTEA_OID = 17
Headers = list[tuple[str, str | bytes | None]]


class Outbox:
    """Reads the rows of `relation`. Raises SettingsError for a column that it lacks."""

    def __init__(self, settings: OutboxSettings, naming: Naming, relation: Relation) -> None:
        indexes = {column.name: index for index, column in enumerate(relation.columns)}
        for role in ("id", "aggregate_type", "aggregate_id", "type", "payload"):
            name = getattr(settings, role)
            if name not in indexes:
                raise SettingsError(
                    f"the outbox {relation.schema}.{relation.table} has no column {name}",
                    operation="describe a table",
                    hint=f"correct shaping.outbox.{role}",
                )
        self._naming = naming
        self._topics: dict[bytes, str] = {}
        self._id = indexes[settings.id]
        self._aggregate_type = indexes[settings.aggregate_type]
        self._aggregate_id = indexes[settings.aggregate_id]
        self._type = indexes[settings.type]
        self._payload = indexes[settings.payload]
        binary = relation.columns[self._payload].type_oid == _BYTEA_OID
        self._content: Callable[[bytes], bytes] = bytea_bytes if binary else bytes

    def message(
        self, row: Row, commit_lsn: int, seq: int
    ) -> tuple[str, bytes | None, bytes | None, Headers]:
        """Return (topic, key, value, headers); the topic is "" when the row does not name one."""
        kind = _given(row, self._aggregate_type)
        payload = _given(row, self._payload)
        headers: Headers = [
            ("id", _given(row, self._id)),
            ("type", _given(row, self._type)),
            ("commit_lsn", str(commit_lsn)),
            ("seq", str(seq)),
        ]
        value = None if payload is None else self._content(payload)
        return self._topic(kind), _given(row, self._aggregate_id), value, headers

    def _topic(self, kind: bytes | None) -> str:
        if not kind:
            return ""
        topic = self._topics.get(kind)
        if topic is None:
            topic = self._topics[kind] = self._naming.outbox(kind.decode("utf-8"))
        return topic


def _given(row: Row, index: int) -> bytes | None:
    value = row[index]
    assert value is not UNCHANGED, "an inserted row is whole"
    return value  # type: ignore[return-value]
