"""A Debezium connector's configuration as the bridge's settings, and what has no counterpart. Pure.

Keys that change what is published are translated, or refused by name. A key that is not known is
refused as well. Keys that are about speed, snapshots or time-outs are dropped.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from schemas.shaping import ShapingSettings

CONNECTOR_CLASS: Final = "io.debezium.connector.postgresql.PostgresConnector"
JSON_CONVERTER: Final = "org.apache.kafka.connect.json.JsonConverter"
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
    "field.name.adjustment.mode": ("none",),
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
_OF_NO_EFFECT: Final = re.compile(
    r"(name|database\.(hostname|port|user|password|dbname|tcpkeepalive|sslpassword|"
    r"initial\.statements|query\.timeout\.ms|sslfactory)|plugin\.name|slot\.(name|drop\.on\.stop|"
    r"failover|max\.retries|retry\.delay\.ms)|publication\.(name|autocreate\.mode)|"
    r"publish\.via\.partition\.root|replica\.identity\.autoset\.values|topic\.prefix|"
    r"snapshot\..*|incremental\.snapshot\..*|streaming\.delay\.ms|read\.only|"
    r"include\.unknown\.datatypes|schema\.(refresh\.mode|name\.adjustment\.mode)|"
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
_SSL: Final = {
    "database.sslmode": "sslmode",
    "database.sslcert": "sslcert",
    "database.sslkey": "sslkey",
    "database.sslrootcert": "sslrootcert",
}
_LITERAL: Final = re.compile(r"(?:\\.|\.\*|[A-Za-z0-9_$.-])*")


class Connector(NamedTuple):
    """A connector as it is configured, its worker's properties below its own."""

    name: str
    config: Mapping[str, str]

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
        """The id of its producer where Connect is exactly-once, "" where it is not.

        Source: Connect, Worker.taskTransactionalId.
        """
        supports = self.config.get("exactly.once.source.support") == "enabled"
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


class Translation(NamedTuple):
    """The settings as a document; what has no counterpart; what an operator should know."""

    settings: dict[str, Any]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


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
    return Connector(name, {**(worker or {}), **text})


def translate(
    connector: Connector, worker: Mapping[str, str], *, ignored: Iterable[str] = ()
) -> Translation:
    """Translate a connector; keys in `ignored` are not looked at, as an operator has asked."""
    own = {
        key: value
        for key, value in connector.config.items()
        if key not in {*ignored} and (key not in worker or worker[key] != value)
    }
    refusals = [*_refusals(own)]
    notes = [*_notes(own, connector)]
    tables, more = _tables(own)
    refusals += more
    bridge, more = _values(own)
    refusals += more
    formats, more = _formats(connector.config)
    refusals += more
    skipped = _skipped(own)
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
            **formats,
        },
        "bridge": {
            **bridge,
            "tombstones": own.get("tombstones.on.delete", "true") == "true",
            "transaction_metadata": own.get("provide.transaction.metadata", "false") == "true",
        },
        **({"shaping": shaping} if shaping else {}),
    }
    return Translation(settings, tuple(refusals), tuple(notes))


def _refusals(own: Mapping[str, str]) -> Iterator[str]:
    if not own.get("topic.prefix"):
        yield "topic.prefix is missing"
    if own.get("plugin.name", "decoderbufs") != "pgoutput":
        yield "plugin.name is not pgoutput: the bridge reads nothing else"
    for key, values in _ONLY.items():
        if own.get(key, values[0]) not in values:
            yield f"{key}={own[key]}: the bridge has only {' or '.join(values)}"
    for key, value in own.items():
        if not value or key in _ONLY or key in _VALUES:
            continue
        if key in _NO_COUNTERPART or key.startswith(_REFUSED_START):
            yield f"{key}={value} has no counterpart"
        elif not _OF_NO_EFFECT.fullmatch(key):
            yield f"{key}={value} is not known"


def _notes(own: Mapping[str, str], connector: Connector) -> Iterator[str]:
    yield "source.conninfo names one host and no password: add the standbys, and a passfile"
    if own.get("heartbeat.interval.ms", "0") != "0" or own.get("heartbeat.action.query"):
        yield "the topic of Debezium's heartbeats is written no longer: the bridge has its own"
    if own.get("signal.data.collection"):
        yield "signals: set snapshot.mode and snapshot.signal_table (docs/SNAPSHOTS.md)"
    if own.get("provide.transaction.metadata", "false") != "true":
        yield "bridge.transaction_metadata is false as with Debezium; slottables needs true"
    if "money.fraction.digits" in own:
        yield "money has the digits of the database's lc_monetary, not of money.fraction.digits"
    if connector.driver_moves_slot:
        yield "lsn.flush.mode: the slot may be ahead of Debezium's offset, over WAL without events"


def _values(own: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    found, refusals = {"structures": "json"}, []
    for key, (ours, default, values) in _VALUES.items():
        value = own.get(key, default)
        if value in values:
            found[ours] = values[value]
        else:
            refusals.append(f"{key}={value} has no counterpart")
    return found, refusals


def _formats(config: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    found, refusals = {}, []
    for part in ("key", "value"):
        name = config.get(f"{part}.converter", JSON_CONVERTER)
        if name != JSON_CONVERTER:
            refusals.append(f"{part}.converter={name}: only topics of JsonConverter are read")
        schemas = config.get(f"{part}.converter.schemas.enable", "true") == "true"
        found[f"{part}_format"] = "json_schema_envelope" if schemas else "json"
    return found, refusals


def _skipped(own: Mapping[str, str]) -> list[str]:
    value = own.get("skipped.operations", "t")
    return [one.strip() for one in value.split(",") if one.strip() not in ("none", "", "r")]


def _topics(own: Mapping[str, str]) -> dict[str, int]:
    start = "topic.creation.default."
    names = {"partitions": "partitions", "replication.factor": "replication_factor"}
    return {
        ours: int(own[start + theirs])
        for theirs, ours in names.items()
        if own.get(start + theirs, "").lstrip("-").isdigit() and int(own[start + theirs]) > 0
    }


def _tables(own: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Translate lists of regular expressions that say no more than `*` can."""
    found: dict[str, Any] = {}
    refusals = []
    for which in ("include", "exclude"):
        patterns: list[str] = []
        for kind, rest in (("schema", ".*"), ("table", "")):
            for one in _split(own.get(f"{kind}.{which}.list", "")):
                pattern = _pattern(one)
                if pattern is None or (not rest and "." not in pattern):
                    refusals.append(f"{kind}.{which}.list: {one} is more than * can say")
                else:
                    patterns.append(pattern + (".*" if rest else ""))
        if own.get(f"schema.{which}.list") and own.get(f"table.{which}.list"):
            refusals.append(f"schema.{which}.list together with table.{which}.list")
        if patterns:
            found[which] = patterns
    for which in ("include", "exclude"):
        columns: dict[str, dict[str, list[str]]] = {}
        for one in _split(own.get(f"column.{which}.list", "")):
            pattern = _pattern(one)
            table, _, column = (pattern or "").rpartition(".")
            if not table or "." not in table:
                refusals.append(f"column.{which}.list: {one} is more than * can say")
            else:
                columns.setdefault(table, {}).setdefault(which, []).append(column)
        if columns:
            found["columns"] = columns
    return found, refusals


def _split(value: str) -> list[str]:
    return [one.strip() for one in value.split(",") if one.strip()]


def _pattern(expression: str) -> str | None:
    """Return the pattern with `*` of a regular expression, None where it says more."""
    if not _LITERAL.fullmatch(expression) or re.search(r"\\[A-Za-z0-9]", expression):
        return None
    return re.sub(r"\\(.)", r"\1", expression.replace(".*", "*"))


def _conninfo(own: Mapping[str, str]) -> str:
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


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def differences(translated: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield each setting that is another than the connector's, and would change what is told.

    Where the database and the brokers are is the operator's; how topics are made is not compared.
    """
    free = {("source", "conninfo"), ("kafka", "bootstrap_servers"), ("kafka", "partitions")}
    free |= {("kafka", "replication_factor"), ("bridge", "transaction_metadata")}
    for section, values in translated.items():
        for key, value in values.items():
            given = settings.get(section, {}).get(key)
            if (section, key) not in free and _plain(given) != _plain(value):
                yield f"{section}.{key} is {given!r}, the connector's is {value!r}"
    default = ShapingSettings().model_dump()
    for key, given in settings.get("shaping", {}).items():
        if given != default[key] and key not in translated.get("shaping", {}):
            yield f"shaping.{key} is {given!r}, the connector has none"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items() if one not in ((), [], None)}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
