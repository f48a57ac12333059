"""The formats of keys and values that are raced: settings of the bridge, converters of Connect.

json                    JSON without schemas
json_schema_envelope    each record with its schema: JsonConverter with schemas.enable
json_schema             JSON with the id of its schema: Apicurio's ExtJsonConverter, whose schemas
                        are Connect's own, not JSON Schema
avro                    Apicurio's AvroConverter, with the bytes that Confluent's has
protobuf                the bridge alone: Maven Central has no converter of Connect for it

Both register schemas in the same registry (Apicurio, in memory).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

from schemas.kafka import Format

FORMATS: Final[tuple[Format, ...]] = get_args(Format)
_APICURIO: Final = {
    ".apicurio.registry.as-confluent": "true",
    ".apicurio.registry.use-id": "contentId",
    ".apicurio.registry.auto-register": "true",
    ".apicurio.registry.find-latest": "false",
}
_CONVERTERS: Final[Mapping[str, Mapping[str, str]]] = {
    "json": {},
    "json_schema_envelope": {".schemas.enable": "true"},
    "json_schema": {"": "io.apicurio.registry.utils.converter.ExtJsonConverter", **_APICURIO},
    "avro": {"": "io.apicurio.registry.utils.converter.AvroConverter", **_APICURIO},
}
_WITH_REGISTRY: Final = ("json_schema", "avro", "protobuf")


class RacedFormat(NamedTuple):
    """A format, and the registry of its schemas: by Confluent's API, and by Apicurio's own."""

    name: Format
    registry_url: str = ""
    native_url: str = ""

    @property
    def has_converter(self) -> bool:
        """Whether there is a converter for Kafka Connect."""
        return self.name in _CONVERTERS

    def of_bridge(self) -> dict[str, Any]:
        """Return the sections of the bridge's configuration, without what `kafka` has besides."""
        form = {"key_format": self.name, "value_format": self.name}
        found: dict[str, Any] = {"kafka": form}
        return found | ({"registry": {"url": self.registry_url}} if self._registers else {})

    def of_worker(self) -> dict[str, str]:
        """Return the properties of Connect's worker. Raise KeyError without a converter."""
        converter = dict(_CONVERTERS[self.name])
        if self._registers:
            converter[".apicurio.registry.url"] = self.native_url
        return {
            f"{part}.converter{key}": value
            for part in ("key", "value")
            for key, value in converter.items()
        }

    @property
    def jars(self) -> tuple[str, ...]:
        """The groups of jars that a worker of Debezium needs."""
        return ("debezium", "connect-avro") if self._registers else ("debezium",)

    @property
    def _registers(self) -> bool:
        return self.name in _WITH_REGISTRY


def needs_registry(names: Sequence[Format]) -> bool:
    """Tell whether a format of `names` keeps its schemas in a registry."""
    return any(name in _WITH_REGISTRY for name in names)
