"""The last records of the topics, read from the time on when the first change beyond was made."""

import time
from collections.abc import Iterable, Mapping
from typing import Final

from schemas.errors import ExitCode, OperatorNeeded, Retryable
from services.adoption.decoding import Decode
from services.adoption.last_records import OPERATION, DebeziumRecord, Tails, said
from services.bridge.sink.offsets import Partition, answers, ask_ends, in_parts
from services.bridge.sink.topics import Topics
from services.kafka.records import READ_DEADLINE_S

_READ_S: Final = 600.0
_LOOK_S: Final = 0.2
_LAST_RECORDS: Final = 20
"""How many of a partition's last records are looked at, however old they are."""


def table_partitions(topics: Topics, own: Iterable[str]) -> list[Partition]:
    """Return the partitions that Debezium may have written events to; `own`: the bridge's."""
    others = {*own}
    return [partition for partition in topics.written() if partition[0] not in others]


def ends_of(topics: Topics, partitions: list[Partition]) -> dict[Partition, int]:
    """Return where partitions end, open transactions included."""
    found: dict[Partition, int] = {}
    for some in in_parts(partitions):
        asked = ask_ends(topics.admin, some, committed=False)
        found |= {partition: end.offset for partition, end in answers(asked).items()}
    return found


def await_stable(topics: Topics, partitions: list[Partition]) -> None:
    """Wait until no transaction is open in `partitions`. Raise Retryable at the deadline."""
    until = time.monotonic() + READ_DEADLINE_S
    while open_there := [
        where for some in in_parts(partitions) for where in topics.unstable_of(some)
    ]:
        if time.monotonic() > until:
            raise Retryable(
                "another producer has an open transaction: Debezium's, or that of a killed run",
                operation=OPERATION,
                subject=f"{open_there[0][0]}[{open_there[0][1]}]",
                hint="run this without --dry-run, which ends it; or wait for its time-out",
                exit_code=ExitCode.KAFKA_UNREACHABLE,
            )
        time.sleep(_LOOK_S)


def read_tails(topics: Topics, ends: dict[Partition, int], since_ms: int, tails: Tails) -> Tails:
    """Read each partition up to its end from `ends`, from records of `since_ms` on, into `tails`.

    The last ones are looked at in any case: where Kafka Connect's clock is behind, those of that
    time seem to be older. Raise Retryable while another producer has a transaction open,
    OperatorNeeded for records that are not Debezium's, or where Kafka has removed some of them.
    """
    for (topic, partition), end in ends.items():
        with topics.reader(topic, partition) as reader:
            start = reader.first_since(since_ms)
            low = reader.bounds()[0]
            config = topics.config_of(topic)
            if low and start <= low and (low < end or may_be_removed(config, since_ms)):
                raise OperatorNeeded(
                    f"Kafka has removed records before offset {low}: nobody can tell which of "
                    "the changes that the slot decodes again the topic had",
                    operation=OPERATION,
                    subject=f"{topic}[{partition}]",
                    hint="let Debezium run until its slot is near the end of the WAL, stop it, "
                    "and run this again; or lengthen retention.ms",
                )
            looked = max(low, min(start, end - _LAST_RECORDS))
            for message in reader.messages(looked, end, time.monotonic() + _READ_S):
                key = message.key()
                record = DebeziumRecord(
                    topic,
                    partition,
                    message.offset() or 0,
                    message.timestamp()[1],
                    key.encode() if isinstance(key, str) else key,
                    message.value(),
                )
                if record.offset < start:
                    tails.look(record)
                else:
                    tails.take(record)
    return tails


def may_be_removed(config: Mapping[str, str] | None, since_ms: int) -> bool:
    """Tell whether retention may have removed a record of `since_ms`; `config`: the topic's."""
    if config is None or config.get("retention.bytes") != "-1":
        return True
    kept_ms = int(config.get("retention.ms", "-1"))
    return kept_ms < 0 or kept_ms < time.time_ns() // 1_000_000 - since_ms


def require_unchanged(topics: Topics, ends: dict[Partition, int]) -> None:
    """Raise Retryable where somebody has written to a partition since it was read."""
    for partition, now in ends_of(topics, [*ends]).items():
        if now != ends[partition]:
            raise Retryable(
                f"{now - ends[partition]} records were written since the topic was read: Debezium, "
                "or another program, is alive",
                operation=OPERATION,
                subject=f"{partition[0]}[{partition[1]}]",
                hint="stop it, and delete its connector; then run this again",
                exit_code=ExitCode.SLOT_IN_USE,
            )


def late_records(
    topics: Topics, ends: dict[Partition, int], prefix: str, decode: Decode
) -> list[str]:
    """Return where events of Debezium are behind `ends`: they came after the topics were read."""
    found = []
    for partition, now in ends_of(topics, [*ends]).items():
        with topics.reader(*partition) as reader:
            until = min(now, reader.stable_end())
            for message in reader.messages(ends[partition], until, time.monotonic() + _READ_S):
                try:
                    event = (
                        said(message.value() or b"", prefix, decode) if message.value() else None
                    )
                except ValueError:
                    continue
                if event is not None and not event.ours:
                    found.append(f"{partition[0]}[{partition[1]}]@{message.offset()}")
    return found
