"""Kafka's progress record, of a real bridge, against the database."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.events import progress_topic
from schemas.lsn import parse_lsn
from services.testbed.ports import free_port
from tests.promises.bridge.running import Bridge
from tests.promises.failover.check.examining import Examiner
from tests.promises.failover.servers import ask, slotfailover_process, tell
from tests.promises.failover.watch.watch_process import SETTINGS, Watching
from tests.providers.interface import Broker
from tests.providers.progress_records import altered, progress_record
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient

SLOT = "events"
FAR = 1 << 50


@pytest.fixture
def bridged(
    sound: Examiner, kafka: Broker, topic_prefix: str, tmp_path: Path
) -> Iterator[Examiner]:
    """The pair with a running bridge, and settings that name both."""
    trio = sound.trio
    bridge = Bridge(tmp_path, trio.primary.conninfo(trio.dbname), kafka, topic_prefix, slot=SLOT)
    bridge.start()
    try:
        there = f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{SLOT}'"
        eventually(lambda: ask(trio.primary, there), what="the bridge has made its slot")
        await_ready(trio.primary, trio.standby, SLOT)
        yield with_kafka(sound, bridge, tmp_path / "bridged.yaml")
    finally:
        bridge.end()
        free = f"SELECT NOT active FROM pg_replication_slots WHERE slot_name = '{SLOT}'"
        eventually(lambda: ask(trio.primary, free), what="the slot is released")
        tell(
            trio.primary,
            f"SELECT pg_drop_replication_slot('{SLOT}')",
            f"SELECT pg_replication_origin_drop('slotbridge_{SLOT}')",
        )
        tell(trio.primary, f'DROP PUBLICATION "{bridge.publication}"', dbname=trio.dbname)


def with_kafka(examiner: Examiner, bridge: Bridge, path: Path, **kafka: str) -> Examiner:
    """The same pair, with the bridge's source and Kafka in the settings."""
    document = yaml.safe_load(bridge.config.read_text())
    failover = yaml.safe_load(examiner.config.read_text())["failover"]
    settings = {
        "failover": failover,
        "source": document["source"],
        "kafka": {**document["kafka"], **kafka},
    }
    path.write_text(yaml.safe_dump(settings))
    return replace(examiner, config=path, process=True)


def changed(examiner: Examiner, **kafka: str) -> Examiner:
    document = yaml.safe_load(examiner.config.read_text())
    document["kafka"] |= kafka
    path = examiner.config.with_name("changed.yaml")
    path.write_text(yaml.safe_dump(document))
    return replace(examiner, config=path)


def said(examiner: Examiner, check: str, words: str) -> None:
    """Wait until a check says so: a busy Kafka may first give no answer in time."""

    def so() -> bool:
        return any(words in finding["what"] for finding in examiner.problems().get(check, []))

    eventually(so, what=words, interval_s=0.2)


def refused_as_ahead(examiner: Examiner) -> None:
    """A switchover refuses, in its first look in which Kafka answers in time."""
    command = ("switchover", "--to", "b", "--dry-run", "--config", examiner.config)

    def refuses() -> bool:
        ran = slotfailover_process(*command)
        return ran.code == 34 and f"{SLOT}: its consumer is ahead of b" in ran.err

    eventually(refuses, what="the switchover refuses", interval_s=0.2)


def test_the_position_in_kafka(bridged: Examiner, kafka: Broker, topic_prefix: str) -> None:
    bridged.expect()

    def told() -> bool:
        slots = {slot["slot"]: slot for slot in bridged.run("--json").json["slots"]}
        return {"Kafka", "bridge"} <= set(slots[SLOT]["consumers"])

    eventually(told, what="Kafka's record and the origin are known", interval_s=0.2)

    lost = changed(bridged, topic_prefix=f"{topic_prefix}x")
    said(lost, "kafka-record", "it lost committed records")
    lost.expect("kafka-record")

    other = f"{topic_prefix}y"
    record = progress_record(
        slot=SLOT,
        system_identifier="1",
        timeline=1,
        commit_lsn=FAR,
        end_lsn=FAR,
        seq=0,
        ts_ms=0,
    )
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 2})
    made = admin.create_topics([NewTopic(progress_topic(other), 1, 1)])
    made[progress_topic(other)].result(timeout=patient(30))
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 2})
    producer.produce(progress_topic(other), record.model_dump_json(), SLOT)
    assert producer.flush(patient(30)) == 0
    ahead = changed(bridged, topic_prefix=other)
    said(ahead, "kafka-record", "of another database")
    found = ahead.expect("kafka-record", "consumer-ahead")
    refused_as_ahead(ahead)
    assert found["consumer-ahead"][0]["evidence"].startswith("Kafka is at ")
    system = ask(bridged.trio.primary, "SELECT system_identifier::text FROM pg_control_system()")
    newer = altered(record, system_identifier=system, timeline=2)
    producer.produce(progress_topic(other), newer.model_dump_json(), SLOT)
    assert producer.flush(patient(30)) == 0
    del producer, admin  # ended before the broker is
    said(ahead, "primary-timeline", "older than timeline 2, which Kafka remembers")
    ahead.expect("primary-timeline", "consumer-ahead")

    away = changed(bridged, bootstrap_servers=f"127.0.0.1:{free_port()}")
    (finding,) = away.expect("kafka-record")["kafka-record"]
    assert finding["severity"] == "warning"
    assert "can't be read" in finding["what"]


@pytest.mark.long
def test_watch_judges_the_record_as_it_is_now(bridged: Examiner, tmp_path: Path) -> None:
    """Not as it was when it started: the origin goes on, and the record with it."""
    trio, document = bridged.trio, yaml.safe_load(bridged.config.read_text())
    document["failover"]["watch"] = {**SETTINGS, "repoint": False}
    config = tmp_path / "watch.yaml"
    config.write_text(yaml.safe_dump(document))
    watching = Watching(config)

    def kafka() -> dict[str, Any]:
        """Return how the record is judged, and where Kafka is, once the origin is there too."""
        report = watching.ask("v1/checks").json
        (found,) = (one for one in report["findings"] if one["check"] == "kafka-record")
        (slot,) = (one for one in report["slots"] if one["slot"] == SLOT)
        how = {name: found[name] for name in ("severity", "evidence")}
        return {**how, **slot["consumers"]}

    def reached(position: int) -> bool:
        return parse_lsn(kafka()["bridge"]) >= position

    try:
        watching.await_verdict("rest")
        for server in (trio.subscriber, trio.primary):  # the publication is of all tables
            tell(server, "CREATE TABLE written (id serial PRIMARY KEY)", dbname=trio.dbname)
        for _ in range(3):
            tell(trio.primary, "INSERT INTO written DEFAULT VALUES", dbname=trio.dbname)
            end = parse_lsn(ask(trio.primary, "SELECT pg_current_wal_lsn()::text"))
            eventually(partial(reached, end), what="the origin is there")
            watching.await_rounds(2)
            # A busy broker answers late, and the record is not judged in that round.
            judged = partial(is_judged, kafka)
            found = eventually(judged, what="Kafka's record is judged")
            assert found is not None
            assert found["severity"] == "ok", found
            assert parse_lsn(found["Kafka"]) >= end
    finally:
        watching.end()


def is_judged(kafka: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Return how the record is judged, or None in a round in which Kafka did not answer in time."""
    found = kafka()
    unread = found["severity"] == "warning" or "not judged" in found["evidence"]
    return None if unread else found
