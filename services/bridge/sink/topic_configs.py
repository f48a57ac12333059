"""The configuration of topics as the broker has it, and whether it meets the requirements."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec

from schemas.events import progress_topic
from schemas.settings import KafkaSettings
from services.bridge.sink.clocks import Clocks, check_clocks
from services.bridge.sink.offsets import in_parts
from services.bridge.sink.topic_differences import differences, grouped
from services.bridge.sink.topic_requirements import Topic, command, lacks, named, refuse_unfit
from services.kafka.records import REQUEST_TIMEOUT_S
from services.runtime.process import warn_once

logger = structlog.get_logger(__name__)
_JUST_MADE_S: Final = 2.0
_PAUSE_S: Final = 0.05


class Configs:
    """The configurations of topics, without those that the bridge may not read."""

    def __init__(self, admin: AdminClient, settings: KafkaSettings) -> None:
        self._admin = admin
        self._settings = settings
        self._servers = settings.bootstrap_servers
        self._prefix = settings.topic_prefix
        self._known: dict[str, dict[str, str]] = {}
        self._topics: list[Topic] = []

    @property
    def known(self) -> Mapping[str, Mapping[str, str]]:
        """Topic -> configuration, of the topics that were described."""
        return self._known

    def describe(self, names: Sequence[str]) -> None:
        """Ask for the configuration of topics; of those that were just made, until it is known."""
        until = time.monotonic() + _JUST_MADE_S
        while names:
            unknown: list[str] = []
            for some in in_parts(names):
                unknown += self._describe_some(some)
            if time.monotonic() > until:
                return
            if unknown:
                time.sleep(_PAUSE_S)
            names = unknown

    def _describe_some(self, names: Sequence[str]) -> Iterator[str]:
        """Yield the topics that the broker does not know, or does not know yet."""
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
        asked = self._admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S)
        for resource, future in asked.items():
            try:
                entries = future.result(REQUEST_TIMEOUT_S + 5)
            except TimeoutError:  # not known, as where the broker refuses to tell
                continue
            except KafkaException as error:
                if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    yield resource.name
            else:
                self._known[resource.name] = {key: one.value for key, one in entries.items()}

    def bytes_max(self) -> dict[str, int]:
        """Return topic -> max.message.bytes, where known."""
        key = "max.message.bytes"
        return {name: int(config[key]) for name, config in self._known.items() if key in config}

    def check(self, replicas: Iterable[tuple[str, int]]) -> None:
        """Raise SetupError, or warn, where topics are not as `topic_requirements` asks.

        `replicas`: every topic that this slot may have written to, and how many it has.
        """
        counts = dict(replicas)
        self.describe(sorted(counts))
        self._topics = [Topic(name, n, self._known.get(name)) for name, n in counts.items()]
        refuse_unfit(self._topics, self._prefix, self._servers)
        for lack, names in lacks(self._topics, self._prefix).items():
            remedy = command(self._servers, names[0], lack.config) if lack.config else ""
            warn_once(
                logger,
                "topics are configured differently from what the guarantee needs",
                lack=lack.what,
                topics=named(names),
                **({"remedy": remedy} if remedy else {}),
            )

    def compare(self, partitions: Mapping[str, int]) -> None:
        """Warn where topics differ from `kafka.topics`; call `check` first.

        `partitions`: topic of a table or outbox -> how many it has.
        """
        topics = ((one, partitions[one.name]) for one in self._topics if one.name in partitions)
        for (key, found, wanted), same in grouped(differences(self._settings, topics)).items():
            warn_once(
                logger,
                "topics differ from kafka.topics: the bridge never changes an existing topic",
                key=key,
                found=found,
                wanted=wanted,
                topics=named([one.topic for one in same]),
                remedy=same[0].change,
            )

    def check_clocks(self, server_ms: int) -> None:
        """Raise SetupError, or warn, where clocks differ (`clocks`). `server_ms`: PostgreSQL's."""
        now = Clocks(time.time_ns() // 1_000_000, server_ms, self._appended_ms())
        difference = check_clocks(now, self._topics, self._servers)
        if difference:
            logger.warning("clocks differ: the times in events are wrong", difference=difference)

    def _appended_ms(self) -> int | None:
        """Return the broker's clock at our last progress record, None if it does not stamp them."""
        name = progress_topic(self._prefix)
        config = self._known.get(name)
        if config is None or config.get("message.timestamp.type") != "LogAppendTime":
            return None
        where = TopicPartition(name, 0)
        asked = self._admin.list_offsets(
            {where: OffsetSpec.max_timestamp()},  # type: ignore[no-untyped-call]
            request_timeout=REQUEST_TIMEOUT_S,
        )
        with contextlib.suppress(KafkaException):
            appended_ms: int = asked[where].result().timestamp
            return appended_ms if appended_ms > 0 else None
        return None
