"""The settings of the section `kafka`: the brokers, and how topics are named and made."""

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Format = Literal["json", "json_schema_envelope", "json_schema", "avro", "protobuf"]
REGISTERED: tuple[Format, ...] = ("json_schema", "avro", "protobuf")
"""Formats whose schemas are in a schema registry."""
_TOPIC_NAME = r"^[A-Za-z0-9._-]{1,100}$"
_TOPIC_PATTERN = r"^[A-Za-z0-9._*-]{1,249}$"
TopicPattern = Annotated[str, Field(pattern=_TOPIC_PATTERN)]


class TopicSettings(BaseModel):
    """How the bridge creates some topics of tables or outboxes; unset: as all others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    partitions: int | None = Field(None, ge=1, le=10_000)
    """Partitions of each of these topics."""
    replication_factor: Annotated[int, Field(ge=1, le=32)] | Literal[-1] | None = None
    """Replicas of each of these topics; unset: kafka.replication_factor."""
    config: dict[str, str | int | float | bool] = {}
    """The topic's configuration (cleanup.policy, retention.ms, compression.type …)."""


class KafkaSettings(BaseModel):
    """The broker and how topics are named and made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bootstrap_servers: str = Field(min_length=1)
    """`host:port` of some brokers, separated by commas."""
    topic_prefix: str = Field(pattern=_TOPIC_NAME)
    """The first part of the name of every topic."""
    partitions: int = Field(3, ge=1, le=10_000)
    """Partitions of a table's topic that the bridge creates."""
    replication_factor: Annotated[int, Field(ge=1, le=32)] | Literal[-1] | None = None
    """Replicas of each topic that the bridge creates. Unset: 3, or as many as there are brokers
    (with fewer than 3, a warning: a topic is lost with its brokers); -1: the broker's default."""
    topics: dict[TopicPattern, TopicSettings] = {}
    """Topic name (`*` for any characters) -> how the bridge creates topics of tables and outboxes;
    the first match applies. The bridge never changes an existing topic; a start warns of each
    difference."""
    key_format: Format = "json"
    """How keys of tables' records are written (docs/guides/formats.md)."""
    value_format: Format = "json"
    """How values of tables' records are written. `json_schema_envelope`: with their schema, as
    Connect's JsonConverter with schemas.enable=true; `json_schema`, `avro`, `protobuf`: with a
    schema registry (section `registry`)."""
    key_bytes: Literal["own", "connect"] = "own"
    """`connect`: for topics taken over from Debezium whose keys have schemas: docs/guides/adopt.md.
    A key has the bytes that Kafka Connect gives it, with the schema, or its id in the registry,
    that the topic's last key has; these bytes choose a row's partition. `slotbridge adopt` sets it.
    Each table needs a topic of its own."""
    cloudevents: Literal["binary", "structured"] | None = None
    """Make CloudEvents of tables' records: `binary` puts the attributes into headers and leaves the
    values, `structured` puts attributes and JSON into one document, which `slottables` does not
    read (docs/guides/formats.md)."""
    options: dict[str, str | int | float | bool] = Field({}, repr=False)
    """Passed to librdkafka as they are (security.protocol, sasl.*, ssl.*, compression.type …)."""

    @model_validator(mode="after")
    def _data_of_cloudevents(self) -> "KafkaSettings":
        """Refuse values that a CloudEvent can't have as its data."""
        if self.cloudevents == "structured" and self.value_format != "json":
            raise ValueError("cloudevents: structured needs value_format: json; or take binary")
        if self.cloudevents and self.value_format == "json_schema":
            raise ValueError("cloudevents has no media type for values in json_schema")
        return self

    @model_validator(mode="after")
    def _keys_with_schemas(self) -> "KafkaSettings":
        """Refuse keys whose bytes Kafka Connect does not choose."""
        if self.key_bytes == "connect" and self.key_format not in ("json_schema_envelope", "avro"):
            raise ValueError("key_bytes: connect is for keys in json_schema_envelope or avro")
        return self

    def of_topic(self, topic: str) -> TopicSettings:
        """Return how a table's topic is made, by the first pattern that fits its name."""
        found = (one for pattern, one in self.topics.items() if fnmatchcase(topic, pattern))
        return next(found, TopicSettings())

    @property
    def needs_registry(self) -> bool:
        """Whether the schemas of keys or values are in a schema registry."""
        return self.key_format in REGISTERED or self.value_format in REGISTERED
