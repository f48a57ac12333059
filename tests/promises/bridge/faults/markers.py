"""Cuts markers of a transaction off a dead broker's files, as if it had died a moment before."""

import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from schemas.settings import KafkaSettings
from services.kafka.records import TopicReader
from services.testbed.kafka import SETTINGS, KafkaBroker
from tests.providers.waiting import eventually, patient

HEADER = struct.Struct(">qiibihiqq")
"""baseOffset, batchLength, leader epoch, magic, crc, attributes, last delta, first and last time"""
BEFORE_LENGTH = 12
IS_CONTROL = 0x20
MARKERS_WAIT_S = patient(2)
"""How long Kafka may take to tell the partitions what it has decided."""

STATES: Final = "__transaction_state"
STATE_AT: Final = 16
"""Where the state is in a value of that topic (Kafka's TransactionLogValue.json)."""
PREPARED: Final = (2, 3)
"""Decided, but maybe not told to all partitions: a broker that starts tells them (again)."""


class Batch(NamedTuple):
    """Where a batch begins in its file, whether it is a marker, its time in ms, its offset."""

    at: int
    is_marker: bool
    time_ms: int
    offset: int


def last_batch(log: Path) -> Batch:
    """The last batch of a partition's file."""
    data = log.read_bytes()
    at, found = 0, Batch(0, False, 0, 0)
    while at + HEADER.size <= len(data):
        offset, length, _, _, _, attributes, _, _, time_ms = HEADER.unpack_from(data, at)
        if length <= 0:
            break
        found = Batch(at, bool(attributes & IS_CONTROL), time_ms, offset)
        at += BEFORE_LENGTH + length
    return found


def await_markers(broker: KafkaBroker, prefix: str) -> None:
    """Wait until no partition of the topics ends with an open transaction.

    Kafka answers a commit before it writes the markers. A transaction that a test leaves open
    never ends: the wait is over after MARKERS_WAIT_S.
    """
    until = time.monotonic() + MARKERS_WAIT_S
    while time.monotonic() < until and any(
        log.stat().st_size and not last_batch(log).is_marker
        for log in (broker.folder / "data").glob(f"*{prefix}*/*.log")
    ):
        time.sleep(0.05)


def is_telling(broker: KafkaBroker) -> bool:
    """Return whether the broker has yet to note of a decided transaction that it is complete."""
    states: dict[bytes | str | None, int] = {}
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers, topic_prefix=STATES)
    for partition in range(int(SETTINGS["transaction.state.log.num.partitions"])):
        with TopicReader(settings, STATES, partition, committed=False) as reader:
            for _, key, value in reader.between(*reader.bounds(), time.monotonic() + patient(30)):
                states[key] = value[STATE_AT] if value else 0
    return any(state in PREPARED for state in states.values())


def kill_before_markers(
    broker: KafkaBroker, prefix: str, since_ms: int, wanted: Callable[[str], bool]
) -> list[str]:
    """Kill the broker as if it had not yet told these partitions; their names without prefix."""
    await_markers(broker, prefix)
    eventually(lambda: not is_telling(broker), what="Kafka takes its transactions for complete")
    broker.kill()
    return forget_markers(broker, prefix, since_ms, wanted)


def forget_markers(
    broker: KafkaBroker,
    prefix: str,
    since_ms: int,
    wanted: Callable[[str], bool],
    seen: Mapping[str, int] | None = None,
) -> list[str]:
    """Cut the markers of the last transaction off, in partitions of `wanted` names.

    Of all topics whose name has `prefix` somewhere in it. `seen`: topic-partition -> the end that
    somebody has seen: a marker before it was there, so that its loss would be a loss of records.
    """
    data = broker.folder / "data"
    done = []
    for log in sorted(data.glob(f"*{prefix}*/*.log")):
        last = last_batch(log)
        name = log.parent.name.removeprefix(f"{prefix}.")
        if last.offset < (seen or {}).get(log.parent.name, 0):
            continue
        if last.is_marker and last.time_ms >= since_ms and wanted(name):
            with log.open("r+b") as file:
                file.truncate(last.at)
            for kept in (*log.parent.glob("*.snapshot"), *log.parent.glob("*index")):
                kept.unlink()
            done.append(name)
    for checkpoint in (*data.glob("*-offset-checkpoint"), data / ".kafka_cleanshutdown"):
        checkpoint.unlink(missing_ok=True)
    return done


def is_any(_name: str) -> bool:
    return True


def is_not_the_progress(name: str) -> bool:
    return not name.startswith("progress-")


def is_not_of_transactions(name: str) -> bool:
    return not name.startswith("transaction-")


def is_not_of_stagings(name: str) -> bool:
    return not name.startswith("prepared-")


def is_of_stagings(name: str) -> bool:
    return name.startswith("prepared-")
