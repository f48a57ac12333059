"""A Debezium connector as Kafka Connect has it. Pure."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

JSON_CONVERTER: Final = "org.apache.kafka.connect.json.JsonConverter"


class Connector(NamedTuple):
    """A connector as it is configured: its `own` properties, and its worker's."""

    name: str
    own: Mapping[str, str]
    worker: Mapping[str, str]

    @property
    def config(self) -> Mapping[str, str]:
        """The effective properties: the worker's, overridden by the connector's."""
        return {**self.worker, **self.own}

    def converter(self, part: str) -> Mapping[str, str]:
        """Return the properties of the converter of `part`, without what precedes their names.

        They are the connector's own where it names a converter, else the worker's. Source:
        Connect, Worker.startTask and Plugins.newConverter.
        """
        name = f"{part}.converter"
        of = self.own if name in self.own else self.worker
        return {key.removeprefix(name): value for key, value in of.items() if key.startswith(name)}

    @property
    def prefix(self) -> str:
        """The first part of its topics' names, and its `server` in Kafka Connect's offsets."""
        return self.config.get("topic.prefix", "")

    @property
    def slot(self) -> str:
        """The slot that it streams from."""
        return self.config.get("slot.name", "debezium")

    @property
    def takes_no_snapshot(self) -> bool:
        """Whether it never reads the tables' rows, so that it may stream without an offset."""
        return self.config.get("snapshot.mode", "initial") in ("no_data", "never")

    @property
    def driver_moves_slot(self) -> bool:
        """Whether the slot may be ahead of its offset, over WAL without events."""
        return self.config.get("lsn.flush.mode") == "connector_and_driver"

    @property
    def transactional_id(self) -> str:
        """The transactional id of its producer if Connect delivers exactly once, else "".

        Source: Connect, Worker.taskTransactionalId.
        """
        supports = self.config.get("exactly.once.source.support", "").lower() == "enabled"
        return f"{self.config.get('group.id', '')}-{self.name}-0" if supports else ""

    @property
    def offsets_topic(self) -> str:
        """The topic of its offsets, "" for a standalone worker."""
        found = self.config.get("offsets.storage.topic") or self.config.get("offset.storage.topic")
        return found or ""

    @property
    def offsets_file(self) -> str:
        """The file of its offsets, "" for a distributed worker."""
        return self.config.get("offset.storage.file.filename", "")

    @property
    def has_plain_keys(self) -> bool:
        """Whether keys are JSON without schemas: their bytes then choose the bridge's partition.

        Kafka Connect chooses the partition by the key's bytes, the bridge by its JSON.
        """
        options = self.converter("key")
        schemas = is_true(options.get(".schemas.enable", "true"))
        return options.get("") == JSON_CONVERTER and not schemas


def connector_of(document: Mapping[str, Any], worker: Mapping[str, str] | None = None) -> Connector:
    """Read what GET /connectors/NAME answers, or its `config` alone, over the worker's properties.

    Raise ValueError for anything else.
    """
    config = document.get("config", document)
    if not isinstance(config, Mapping) or any(isinstance(v, (dict, list)) for v in config.values()):
        raise ValueError("it is neither a connector's configuration nor what Connect's REST tells")
    text = {str(key): _text(value) for key, value in config.items()}
    name = _text(document.get("name") or text.get("name") or "")
    if not name:
        raise ValueError("it has no `name`: Kafka Connect keeps the offset under it")
    return Connector(name, text, worker or {})


def is_true(value: str) -> bool:
    """Tell whether Kafka Connect takes a property's value as true."""
    return value.strip().lower() == "true"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
