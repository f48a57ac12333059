"""The requirements on Kafka's topics: how new ones are made, what existing ones lack. Pure.

    topic                       asked                                  where it differs
    progress, schema, prepared, cleanup.policy=compact, or no bound    refused: a bridge that was
    snapshot, table_names       of age and size                        away loses its place
    transaction                 not compacted                          warning
                                kept as long as each table's topic     warning
                                that is not compacted
    every topic                 message.timestamp.type=LogAppendTime   warning; refused where clocks
                                                                       differ (`clocks`)
                                three replicas                         warning
                                min.insync.replicas >= 2 of three      warning
                                unclean.leader.election.enable=false   warning

What may not be read (DescribeConfigs) is told as not judged.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from schemas.errors import SetupError
from schemas.events import (
    own_topics,
    prepared_topic,
    progress_topic,
    schema_topic,
    snapshot_topic,
    table_names_topic,
    transaction_topic,
)

REPLICAS: Final = 3
BROKERS_DEFAULT: Final = -1
"""As kafka.replication_factor: what the broker's default.replication.factor says."""
_NAMED_MAX: Final = 5
_SHORTER: Final = (
    "transactions are kept for less time than events of tables: new readers of whole transactions "
    "can't begin with the first events"
)
_APPEND_TIME: Final = "LogAppendTime"


class Topic(NamedTuple):
    """A topic as it is; `config` is None where it may not be read."""

    name: str
    replicas: int
    config: Mapping[str, str] | None

    @property
    def stamped_by_clients(self) -> bool:
        """Whether records have the time of the bridge's clock."""
        return self.config is not None and self._kept("message.timestamp.type") != _APPEND_TIME

    @property
    def loses_old_records(self) -> bool:
        """Whether records are deleted for their age or for the topic's size."""
        return "delete" in self._kept("cleanup.policy", "delete") and not (
            self._kept("retention.ms") == self._kept("retention.bytes") == "-1"
        )

    @property
    def kept_ms(self) -> float:
        """How long records are kept at least, by their age; infinity where nothing limits that."""
        given = self._kept("retention.ms")
        if "delete" not in self._kept("cleanup.policy", "delete") or not given.isdigit():
            return math.inf
        return int(given)

    def _kept(self, key: str, default: str = "") -> str:
        return (self.config or {}).get(key, default)


class Lack(NamedTuple):
    """A defect of topics, and the configuration that mends it ("": configuration can't)."""

    what: str
    config: str


def replication_factor(wanted: int | None, brokers: int, of_others: Iterable[int]) -> int:
    """Return how many replicas a new topic gets: `wanted`, else three or what the brokers allow.

    `brokers`: how many answer now. One of them may just be down: a new topic then gets as many
    replicas as our others have.
    """
    if wanted is not None:
        return wanted
    return min(REPLICAS, max(brokers, *of_others, 1))


def new_config(
    replicas: int,
    *,
    compacted: bool,
    short_lived: bool,
    configured: Mapping[str, str | int | float | bool] | None = None,
) -> dict[str, str]:
    """Return the configuration of a new topic; `configured`: what settings say of it.

    `short_lived`: tombstones soon replace its records; the topic is read whole at a start.
    """
    config = {"message.timestamp.type": _APPEND_TIME}
    if replicas >= REPLICAS:
        config["min.insync.replicas"] = "2"
    if compacted:
        config["cleanup.policy"] = "compact"
    if short_lived:
        config |= {
            "segment.bytes": str(32 * 2**20),
            "max.compaction.lag.ms": "600000",
            "min.cleanable.dirty.ratio": "0.1",
            "delete.retention.ms": "3600000",
        }
    return config | {key: config_text(value) for key, value in (configured or {}).items()}


def config_text(value: str | int | float | bool) -> str:
    """Return a value of the settings as Kafka has it in a topic's configuration."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def refuse_unfit(topics: Iterable[Topic], prefix: str, servers: str) -> None:
    """Raise SetupError for a topic that forgets what the bridge must find again."""
    found_again = (progress_topic, schema_topic, prepared_topic, snapshot_topic, table_names_topic)
    kept = {topic_of(prefix) for topic_of in found_again}
    for topic in topics:
        if topic.name in kept and topic.config is not None and topic.loses_old_records:
            raise SetupError(
                f"cleanup.policy is {topic.config['cleanup.policy']}, retention.ms "
                f"{topic.config.get('retention.ms')}: Kafka deletes what the bridge must find "
                "again at a start",
                operation="check the topics",
                subject=f"topic {topic.name}",
                hint=command(servers, topic.name, "cleanup.policy=compact"),
            )


def lacks(topics: Iterable[Topic], prefix: str) -> dict[Lack, list[str]]:
    """Return what is worth a warning -> the names of the topics with that lack."""
    found: dict[Lack, list[str]] = defaultdict(list)
    topics = list(topics)
    for lack, name in _forgets_transactions(topics, prefix):
        found[lack].append(name)
    for topic in topics:
        for lack in _lacks(topic, transaction_topic(prefix)):
            found[lack].append(topic.name)
    return dict(found)


def _forgets_transactions(topics: Sequence[Topic], prefix: str) -> Iterable[tuple[Lack, str]]:
    """Yield the transaction topic where a topic of a table keeps its records for longer.

    A new reader of whole transactions (docs/guides/consumers.md) then finds events without their
    END. Of a compacted topic it can't have all events whatever is kept.
    """
    own = own_topics(prefix)
    kept = [
        topic.kept_ms
        for topic in topics
        if topic.name not in own
        and topic.config is not None
        and "compact" not in topic.config.get("cleanup.policy", "")
    ]
    longest = max(kept, default=0.0)
    for topic in topics:
        known = topic.name == transaction_topic(prefix) and topic.config is not None
        if known and topic.kept_ms < longest:
            wanted = -1 if longest == math.inf else int(longest)
            yield Lack(_SHORTER, f"retention.ms={wanted}"), topic.name


def _lacks(topic: Topic, transactions: str) -> Iterable[Lack]:
    """Yield what lets a topic lose records, and the configuration that prevents it."""
    if topic.replicas < REPLICAS:
        yield Lack(f"fewer than {REPLICAS} replicas: lost with their brokers' disks", "")
    config = topic.config
    if config is None:
        yield Lack("not judged: their configuration may not be read (DescribeConfigs)", "")
        return
    if topic.replicas >= REPLICAS and int(config.get("min.insync.replicas", "1")) < 2:
        yield Lack(
            "one replica in sync is enough for acks=all: lost with its disk",
            "min.insync.replicas=2",
        )
    if config.get("unclean.leader.election.enable") == "true":
        yield Lack(
            "a replica that lacks committed records may become the leader",
            "unclean.leader.election.enable=false",
        )
    if topic.stamped_by_clients:
        yield Lack(
            "records have the time of the bridge's clock, and are kept or refused by it",
            f"message.timestamp.type={_APPEND_TIME}",
        )
    if topic.name == transactions and "compact" in config.get("cleanup.policy", ""):
        yield Lack("BEGINs of transactions are compacted away", "cleanup.policy=delete")


def command(servers: str, topic: str, config: str) -> str:
    """Return the shell command that changes the configuration of a topic."""
    return (
        f"kafka-configs.sh --bootstrap-server {servers} --alter --entity-type topics "
        f"--entity-name {topic} --add-config {config}"
    )


def named(topics: list[str]) -> str:
    """Join the first _NAMED_MAX topic names, and say how many more there are."""
    more = len(topics) - _NAMED_MAX
    return ", ".join(topics[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
