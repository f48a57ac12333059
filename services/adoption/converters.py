"""The converters of a connector as the bridge's formats and registry, and what can't be read. Pure.

    JsonConverter                     json, with schemas.enable (the default) json_schema_envelope
    Confluent's AvroConverter         avro, with its registry and the naming of its subjects
    Apicurio's AvroConverter          avro, where its records are those of Confluent's
    ProtobufConverter, JsonSchema…    refused: nothing here reads their records

Keys with schemas are written as Kafka Connect writes them (`kafka.key_bytes`), as their bytes
choose the partitions. Source: JsonConverterConfig, AvroConverterConfig,
AbstractKafkaSchemaSerDeConfig; Apicurio's SerdeConfig.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from services.adoption.connector import JSON_CONVERTER, Connector, is_true

CONFLUENT: Final = "io.confluent.connect.avro.AvroConverter"
APICURIO: Final = "io.apicurio.registry.utils.converter.AvroConverter"
_PARTS: Final = ("key", "value")
_ENVELOPE: Final = "json_schema_envelope"
_CHANGE: Final = (
    "let Debezium write to another prefix with JsonConverter or an AvroConverter first, or begin "
    "anew with another prefix and a snapshot"
)
_UNREAD: Final = {
    "io.confluent.connect.protobuf.ProtobufConverter": "Protobuf",
    "io.confluent.connect.json.JsonSchemaConverter": "JSON Schema with a registry",
    "io.apicurio.registry.utils.converter.ProtobufConverter": "Protobuf",
    "io.apicurio.registry.utils.converter.ExtJsonConverter": "JSON with the id of its schema",
}
_JSON_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "schemas.enable": ("true", "false"),
    "schemas.cache.size": (),
    "decimal.format": ("base64",),
    "replace.null.with.default": ("true", "false"),
}
"""Options of JsonConverter and what the bridge has of their values, (): any."""
_STRATEGIES: Final = {
    "io.confluent.kafka.serializers.subject.TopicNameStrategy": "topic",
    "io.confluent.kafka.serializers.subject.RecordNameStrategy": "record",
    "io.confluent.kafka.serializers.subject.TopicRecordNameStrategy": "topic_record",
}
_TOPIC_STRATEGY, *_ = _STRATEGIES
_CONFLUENT_ONLY: Final = {
    "use.latest.version": "false",
    "basic.auth.credentials.source": "user_info",
    "schema.registry.basic.auth.credentials.source": "user_info",
}
"""Options of Confluent's converter of which the bridge has one value, in lower case."""
_CONFLUENT_ANY: Final = re.compile(
    r"schema\.registry\.url|(schema\.registry\.)?basic\.auth\.user\.info|"
    r"schema\.registry\.ssl\.truststore\..*|"
    r"(key|value)\.subject\.name\.strategy|auto\.register\.schemas|normalize\.schemas|"
    r"latest\.compatibility\.strict|id\.compatibility\.strict|max\.schemas\.per\.subject|"
    r"schemas\.cache\.(config|size)|latest\.cache\..*|latest\.cache\.size|"
    r"(enhanced\.avro\.schema|connect\.meta)\.(support|data)|generalized\.sum\.type\.support|"
    r"ignore\.default\.for\.nullables|discard\.type\.doc\.default|allow\.optional\.map\.keys|"
    r"flatten\.(singleton\.)?unions|scrub\.invalid\.names|avro\.(reflection|remove)\..*|"
    r"schema\.format|schema\.registry\.(request|connection|retries|retry).*|"
    r"http\.(connect|read)\.timeout\.ms|max\.retries|retries\..*|replace\.null\.with\.default"
)
_APICURIO: Final = "apicurio.registry."
_APICURIO_ONLY: Final = {
    "as-confluent": "true",
    "headers.enabled": "false",
    "use-id": "contentid",
    "find-latest": "false",
    "avro.encoding": "binary",
    "artifact.group-id": "default",
    "artifact-resolver-strategy": "io.apicurio.registry.serde.strategy.topicidstrategy",
}
"""Options of Apicurio's converter of which the bridge has one value, in lower case."""
_APICURIO_SAID: Final = ("use-id", "headers.enabled")
"""Options whose defaults differ by release, or are not what the bridge has."""
_APICURIO_ANY: Final = re.compile(
    r"url|auto-register(\.if-exists)?|check-period-ms|retry-(count|backoff-ms)|fault-tolerant-.*|"
    r"auth\.username|auth\.password|dereference-schema|use-cached-on-error|id-handler|"
    r"avro-datum-provider|converter\..*|(serializer|deserializer)\..*|avro\..*"
)
_APICURIO_API: Final = re.compile(r"/apis/(registry/v\d|ccompat/v\d)/?$|/?$")


class Converted(NamedTuple):
    """Settings of `kafka` and `registry`, what has no counterpart, and what one should know."""

    kafka: Mapping[str, str]
    registry: Mapping[str, str]
    refusals: list[str]
    notes: list[str]


class _Registry(NamedTuple):
    """A registry as a converter names it."""

    url: str
    username: str
    naming: str


def converted(connector: Connector, ignored: Collection[str]) -> Converted:
    """Translate a connector's converters; options in `ignored` are not looked at."""
    kafka: dict[str, str] = {}
    refusals: list[str] = []
    registries: list[_Registry] = []
    for part in _PARTS:
        options = {
            key.removeprefix("."): value
            for key, value in connector.converter(part).items()
            if not key or f"{part}.converter{key}" not in ignored
        }
        name = options.pop("", "")
        start = f"{part}.converter."
        if name == CONFLUENT:
            registries.append(_of_confluent(options, part))
            found = [*_confluent_refusals(options, part)]
        elif name == APICURIO:
            registries.append(_of_apicurio(options))
            skipped = {key.removeprefix(start + _APICURIO) for key in ignored}
            found = [*_apicurio_refusals(options, skipped)]
        elif name == JSON_CONVERTER:
            found = [*_json_refusals(options)]
        else:
            found = []
            refusals.append(_unread(part, name))
        refusals += [start + one for one in found]
        schemas = is_true(options.get("schemas.enable", "true"))
        json = _ENVELOPE if schemas else "json"
        kafka[f"{part}_format"] = "avro" if name in (CONFLUENT, APICURIO) else json
    if kafka["key_format"] != "json":
        kafka["key_bytes"] = "connect"
    refusals += _of_registries(registries)
    one = registries[0] if registries else None
    return Converted(kafka, {} if one is None else _settings(one), refusals, [*_notes(one)])


def _unread(part: str, name: str) -> str:
    """Return why the records of a converter can't be read."""
    if not name:
        return f"{part}.converter is not said: give the worker's properties"
    kind = _UNREAD.get(name)
    if kind is None:
        return f"{part}.converter={name}: only topics of JsonConverter and AvroConverter are read"
    return f"{part}.converter={name}: records in {kind} are not read; {_CHANGE}"


def _json_refusals(options: Mapping[str, str]) -> Iterator[str]:
    for key, value in options.items():
        values = _JSON_OPTIONS.get(key)
        if values is None or (values and value.lower() not in values):
            yield f"{key}={value} has no counterpart"


def _confluent_refusals(options: Mapping[str, str], part: str) -> Iterator[str]:
    """Yield the options of a Confluent converter that the bridge has no counterpart of."""
    if not options.get("schema.registry.url"):
        yield "schema.registry.url is missing"
    strategy = options.get(f"{part}.subject.name.strategy", _TOPIC_STRATEGY)
    if strategy not in _STRATEGIES:
        yield f"{part}.subject.name.strategy={strategy} has no counterpart"
    for key, value in options.items():
        only = _CONFLUENT_ONLY.get(key)
        if only is not None and value.lower() != only:
            yield f"{key}={value}: the bridge has only {only}"
        elif only is None and not _CONFLUENT_ANY.fullmatch(key):
            yield f"{key}={value} has no counterpart"


def _apicurio_refusals(options: Mapping[str, str], skipped: Collection[str]) -> Iterator[str]:
    """Yield the options of an Apicurio converter that the bridge has no counterpart of."""
    if not options.get(f"{_APICURIO}url"):
        yield f"{_APICURIO}url is missing"
    for option in _APICURIO_SAID:
        if _APICURIO + option not in options and option not in skipped:
            yield (
                f"{_APICURIO}{option} is not said: the bridge has only {_APICURIO_ONLY[option]}; "
                "add it where that is your release's default"
            )
    for key, value in options.items():
        option = key.removeprefix(_APICURIO)
        only = _APICURIO_ONLY.get(option)
        if only is not None and value.lower() != only:
            yield f"{key}={value}: the bridge has only {only}"
        elif only is None and not (key.startswith(_APICURIO) and _APICURIO_ANY.fullmatch(option)):
            yield f"{key}={value} has no counterpart"


def _of_confluent(options: Mapping[str, str], part: str) -> _Registry:
    """Return the registry of a Confluent converter: URL, user, naming of subjects."""
    user = options.get("basic.auth.user.info") or options.get(
        "schema.registry.basic.auth.user.info", ""
    )
    url, *_ = options.get("schema.registry.url", "").split(",")
    strategy = options.get(f"{part}.subject.name.strategy", _TOPIC_STRATEGY)
    return _Registry(
        url.strip().rstrip("/"), user.partition(":")[0], _STRATEGIES.get(strategy, "topic")
    )


def _of_apicurio(options: Mapping[str, str]) -> _Registry:
    """Return the registry with the URL of its Confluent API."""
    url = options.get(f"{_APICURIO}url", "").strip()
    if url:
        url = _APICURIO_API.sub("", url, count=1) + "/apis/ccompat/v7"
    return _Registry(url, options.get(f"{_APICURIO}auth.username", ""), "topic")


def _of_registries(registries: list[_Registry]) -> Iterator[str]:
    """Yield why the registries of key and value can't be one of the bridge's."""
    for one in registries[1:]:
        if one != registries[0]:
            yield (
                "key.converter and value.converter differ in their registry, its user or their "
                "subject.name.strategy: the bridge has one of each"
            )
    for one in registries[:1]:
        if one.url and not re.fullmatch(r"https?://[^\s@,]+", one.url):
            yield "the registry's URL contains a user or a password, or is not one of http"


def _settings(registry: _Registry) -> Mapping[str, str]:
    return {
        "url": registry.url,
        **({"username": registry.username} if registry.username else {}),
        "subject_naming": registry.naming,
    }


def _notes(registry: _Registry | None) -> Iterator[str]:
    """Yield what an operator must add to the registry's settings."""
    if registry is None:
        return
    yield "registry: the bridge registers its schemas itself, whatever auto-register says"
    if registry.username:
        yield "registry: its password is SLOTBRIDGE_REGISTRY__PASSWORD"
    if registry.url.startswith("https:"):
        yield "registry: add ca_file where a private authority has signed its certificate"
