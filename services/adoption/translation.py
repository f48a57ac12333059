"""A Debezium connector's configuration as the bridge's settings, and what has no counterpart. Pure.

Keys that change what is published are translated, or refused by name. A key that is not known is
refused as well. Keys that are about speed, snapshots or time-outs are dropped.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from schemas.shaping import ShapingSettings
from services.adoption.connector import Connector, is_true
from services.adoption.converters import converted
from services.adoption.flat_transformation import unwrapped
from services.adoption.lists import shaping_of, split

CONNECTOR_CLASS: Final = "io.debezium.connector.postgresql.PostgresConnector"
_DEFAULT_NAMING: Final = "io.debezium.schema.SchemaTopicNamingStrategy"
_VALUES: Final[Mapping[str, tuple[str, str, Mapping[str, str]]]] = {
    "decimal.handling.mode": (
        *("decimal_handling", "precise"),
        {name: name for name in ("precise", "double", "string")},
    ),
    "time.precision.mode": (
        *("time_precision", "adaptive"),
        {
            name: name
            for name in (
                *("adaptive", "adaptive_time_microseconds", "microseconds"),
                *("nanoseconds", "isostring"),
            )
        },
    ),
    "interval.handling.mode": (
        *("interval_handling", "numeric"),
        {"numeric": "numeric", "string": "string"},
    ),
    "binary.handling.mode": (
        *("binary_handling", "bytes"),
        {
            "bytes": "base64",
            "base64": "base64",
            "base64-url-safe": "base64-url-safe",
            "hex": "hex",
        },
    ),
    "hstore.handling.mode": ("hstore_handling", "json", {"json": "json", "map": "map"}),
}
"""Debezium's key -> our key, Debezium's default, and our value for each of its values."""
_ONLY: Final[Mapping[str, tuple[str, ...]]] = {
    "connector.class": (CONNECTOR_CLASS,),
    "topic.delimiter": (".",),
    "topic.naming.strategy": (_DEFAULT_NAMING,),
    "topic.transaction": ("transaction",),
    "unavailable.value.placeholder": ("__debezium_unavailable_value",),
    "event.processing.failure.handling.mode": ("fail",),
    "event.converting.failure.handling.mode": ("warn", "fail"),
    "skip.messages.without.change": ("false",),
    "flush.lsn.source": ("true",),
    "tasks.max": ("1",),
    "tasks.max.enforce": ("true",),
    "lsn.flush.mode": ("connector", "connector_and_driver"),
}
"""Keys of which the bridge has only what these values say; an absent key has one of them."""
_NO_COUNTERPART: Final = (
    *("transforms", "predicates", "converters", "post.processors", "message.key.columns"),
    *("message.prefix.include.list", "message.prefix.exclude.list", "slot.stream.params"),
    *("column.propagate.source.type", "datatype.propagate.source.type"),
    *("sourceinfo.struct.maker", "transaction.metadata.factory"),
)
_REFUSED_START: Final = ("column.mask.", "column.truncate.")
_PARTITIONER: Final = re.compile(
    r"producer\.(override\.)?(partitioner\.(class|ignore\.keys)|interceptor\.classes)"
)
"""Where records go in a topic, or what becomes of them: the bridge's are where Java's default puts
those of their keys."""
_OF_NO_EFFECT: Final = re.compile(
    r"(name|database\.(hostname|port|user|password|dbname|tcpkeepalive|sslpassword|"
    r"initial\.statements|query\.timeout\.ms|sslfactory)|plugin\.name|slot\.(name|drop\.on\.stop|"
    r"failover|max\.retries|retry\.delay\.ms)|publication\.(name|autocreate\.mode)|"
    r"publish\.via\.partition\.root|replica\.identity\.autoset\.values|topic\.prefix|"
    r"snapshot\..*|incremental\.snapshot\..*|streaming\.delay\.ms|read\.only|"
    r"include\.unknown\.datatypes|schema\.(refresh\.mode|name\.adjustment\.mode)|"
    r"field\.name\.adjustment\.mode|"
    r"money\.fraction\.digits|xmin\.fetch\.interval\.ms|status\.update\.interval\.ms|"
    r"lsn\.flush\.timeout\..*|max\.(queue|batch)\..*|poll\..*|queue\..*|query\.fetch\.size|"
    r"retriable\..*|heartbeat\..*|topic\.heartbeat\.prefix|signal\..*|notification\..*|"
    r"topic\.creation\..*|topic\.cache\.size|errors\..*|guardrail\..*|statistics\..*|"
    r"custom\.metric\.tags|connection\.validation\.timeout\.ms|executor\.shutdown\.timeout\.ms|"
    r"offset\.mismatch\.strategy|offsets\.storage\.topic|exactly\.once\.support|"
    r"transaction\.boundary.*|producer\.override\..*|config\.(action\.reload|providers.*)|"
    r"(key|value|header)\.converter.*|column\.(include|exclude)\.list|"
    r"(table|schema)\.(include|exclude)\.list|tombstones\.on\.delete|skipped\.operations|"
    r"provide\.transaction\.metadata|database\.ssl.*)"
)
_JUDGED_BY_TOPICS: Final = "keys"
"""A key of `shaping` that is compared with the records themselves (`forms`)."""
_SSL: Final = {
    "database.sslmode": "sslmode",
    "database.sslcert": "sslcert",
    "database.sslkey": "sslkey",
    "database.sslrootcert": "sslrootcert",
}


class Translation(NamedTuple):
    """The settings as a document; what has no counterpart; what an operator should know."""

    settings: dict[str, Any]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


def translate(connector: Connector, *, ignored: Iterable[str] = ()) -> Translation:
    """Translate a connector; keys in `ignored` are not looked at, as an operator has asked."""
    given = {*ignored}
    own = {key: value for key, value in connector.own.items() if key not in given}
    worker = {key: value for key, value in connector.worker.items() if key not in given}
    notes = [*_notes(own, connector)]
    flat = unwrapped(own)
    if flat is not None:
        own = {key: value for key, value in own.items() if key not in flat.keys}
        notes.append("rows have __commit_lsn, __seq, __timeline besides (docs/guides/shaping.md)")
    refusals = [*_refusals(own), *_of_the_worker(worker), *(flat.refusals if flat else ())]
    tables, more = shaping_of(own)
    refusals += more
    bridge, more = _values(own)
    refusals += more
    formats = converted(connector, given)
    refusals += formats.refusals
    notes += formats.notes
    refusals += _of_adjusted_names(own, formats.kafka)
    tombstones = is_true(own.get("tombstones.on.delete", "true"))
    skipped = _skipped(own)
    if flat is not None:
        tables["flat"] = flat.flat
        tombstones = tombstones and flat.tombstones
        skipped = [*dict.fromkeys((*skipped, "t"))]  # the transformation drops a truncate
    shaping = {**tables, **({"skip": {"*.*": skipped}} if skipped else {})}
    settings: dict[str, Any] = {
        "source": {
            "conninfo": _conninfo(own),
            "slot": connector.slot,
            "publication": own.get("publication.name", "dbz_publication"),
        },
        "kafka": {
            "bootstrap_servers": connector.config.get("bootstrap.servers", "localhost:9092"),
            "topic_prefix": connector.prefix,
            **_topics(own),
            **formats.kafka,
        },
        "bridge": {
            **bridge,
            "tombstones": tombstones,
            "transaction_metadata": is_true(own.get("provide.transaction.metadata", "false")),
        },
        **({"registry": dict(formats.registry)} if formats.registry else {}),
        **({"shaping": shaping} if shaping else {}),
    }
    return Translation(settings, tuple(refusals), tuple(notes))


def _refusals(own: Mapping[str, str]) -> Iterator[str]:
    """Yield the connector's options that the bridge has no counterpart of."""
    if not own.get("topic.prefix"):
        yield "topic.prefix is missing"
    if own.get("plugin.name", "decoderbufs") != "pgoutput":
        yield "plugin.name is not pgoutput: the bridge reads nothing else"
    for key, values in _ONLY.items():
        value = own.get(key, values[0])
        if value not in values and value.lower() not in values:
            yield f"{key}={value}: the bridge has only {' or '.join(values)}"
    if "u" in _skipped(own):
        yield (
            "skipped.operations has u: Debezium publishes a changed key nevertheless, as a delete "
            "and an insert; the bridge does not"
        )
    for key, value in own.items():
        if not value or key in _ONLY or key in _VALUES:
            continue
        if (
            key in _NO_COUNTERPART
            or key.startswith(_REFUSED_START)
            or (_PARTITIONER.fullmatch(key) and value.lower() != "false")
        ):
            yield f"{key}={value} has no counterpart"
        elif not _OF_NO_EFFECT.fullmatch(key):
            yield f"{key}={value} is not known"


def _of_the_worker(worker: Mapping[str, str]) -> Iterator[str]:
    for key, value in worker.items():
        if _PARTITIONER.fullmatch(key) and value.lower() not in ("", "false"):
            yield f"{key}={value} of the worker has no counterpart"


def _notes(own: Mapping[str, str], connector: Connector) -> Iterator[str]:
    """Yield what an operator should know of the translated settings."""
    yield "source.conninfo names one host and no password: add the standbys, and a passfile"
    if own.get("heartbeat.interval.ms", "0") != "0" or own.get("heartbeat.action.query"):
        yield "the topic of Debezium's heartbeats is written no longer: the bridge has its own"
    if own.get("signal.data.collection"):
        yield "signals: set snapshot.mode and snapshot.signal_table (docs/guides/snapshots.md)"
    if own.get("signal.kafka.topic"):
        yield "signals: snapshot.signal_topic takes all records of its topic, also old ones"
    if not is_true(own.get("provide.transaction.metadata", "false")):
        yield "bridge.transaction_metadata is false as with Debezium; slottables needs true"
    if "d" in _skipped(own):
        yield "skipped.operations: of a changed key the bridge publishes the delete of the old one"
    if "money.fraction.digits" in own:
        yield "money has the digits of the database's lc_monetary, not of money.fraction.digits"
    if connector.driver_moves_slot:
        yield "lsn.flush.mode: the slot may be ahead of Debezium's offset, over WAL without events"


def _values(own: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the settings of values, and the options that have no counterpart."""
    found, refusals = {"structures": "json"}, []
    for key, (ours, default, values) in _VALUES.items():
        value = own.get(key, default)
        if value in values:
            found[ours] = values[value]
        else:
            refusals.append(f"{key}={value} has no counterpart")
    return found, refusals


def _of_adjusted_names(own: Mapping[str, str], formats: Mapping[str, str]) -> Iterator[str]:
    """Yield the adjustments of names that the bridge has not: it adjusts names in Avro alone."""
    parts = formats["key_format"], formats["value_format"]
    schemas = own.get("schema.name.adjustment.mode", "none")
    if "json_schema_envelope" in parts and schemas != "none":
        yield f"schema.name.adjustment.mode={schemas}: in schemas of JSON the bridge has none"
    elif "avro" in parts and schemas not in ("none", "avro"):
        yield f"schema.name.adjustment.mode={schemas}: in Avro the bridge has avro"
    columns = own.get("field.name.adjustment.mode", "none")
    if columns != "none" and not (columns == "avro" and {*parts} == {"avro"}):
        yield (
            f"field.name.adjustment.mode={columns}: the bridge adjusts names of columns as avro "
            "does, and where keys and values are Avro"
        )


def _skipped(own: Mapping[str, str]) -> list[str]:
    return [one for one in split(own.get("skipped.operations", "t")) if one not in ("none", "r")]


def _topics(own: Mapping[str, str]) -> dict[str, int]:
    """Return the connector's default number of partitions and replicas, where it gives them."""
    start = "topic.creation.default."
    names = {"partitions": "partitions", "replication.factor": "replication_factor"}
    return {
        ours: int(own[start + theirs])
        for theirs, ours in names.items()
        if own.get(start + theirs, "").lstrip("-").isdigit() and int(own[start + theirs]) > 0
    }


def _conninfo(own: Mapping[str, str]) -> str:
    """Return the connector's database as a connection string, without the password."""
    parts = {
        "host": own.get("database.hostname", "localhost"),
        "port": own.get("database.port", "5432"),
        "user": own.get("database.user", ""),
        "dbname": own.get("database.dbname", ""),
        **{ours: own.get(theirs, "") for theirs, ours in _SSL.items()},
    }
    return " ".join(f"{key}={_quoted(value)}" for key, value in parts.items() if value)


def _quoted(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._/:-]+", value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def differences(translated: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield each setting that differs from the connector's and would change the records.

    Where the database and the brokers are is the operator's; how topics are made is not compared.
    """
    free = {("source", "conninfo"), ("kafka", "bootstrap_servers"), ("kafka", "partitions")}
    free |= {("kafka", "replication_factor"), ("bridge", "transaction_metadata")}
    free |= {("registry", "url"), ("registry", "username")}
    if (given := settings.get("source", {}).get("origin", "any")) != "any":
        yield f"source.origin is {given!r}, Debezium has no such filter"
    if (given := settings.get("kafka", {}).get("cloudevents")) is not None:
        yield f"kafka.cloudevents is {given!r}, the connector's records are plain"
    for section, values in translated.items():
        for key, value in values.items():
            given = (settings.get(section) or {}).get(key)
            if (section, key) not in free and _plain(given) != _plain(value):
                yield f"{section}.{key} is {given!r}, the connector's is {value!r}"
    default = ShapingSettings().model_dump()
    handled = {*translated.get("shaping", {}), _JUDGED_BY_TOPICS}
    for key, given in settings.get("shaping", {}).items():
        if given != default[key] and key not in handled:
            yield f"shaping.{key} is {given!r}, the connector has none"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items() if one not in ((), [], None)}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
