"""What the bridge asks of Kafka at its start, on a real broker: topics, replicas, clocks."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import patient

DAYS_8_S = 8 * 86_400
STAMPS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec + SKEW;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
int cnd_timedwait(cnd_t *restrict changed, mtx_t *restrict lock,
                  const struct timespec *restrict until) {
    int (*wait)(cnd_t *, mtx_t *, const struct timespec *) = dlsym(RTLD_NEXT, "cnd_timedwait");
    struct timespec at = *until;
    at.tv_sec -= SKEW;
    return wait(changed, lock, &at);
}
"""
"""What librdkafka stamps records with, and waits by."""
CLOCK = """
import time
true_time, true_time_ns = time.time, time.time_ns
time.time = lambda: true_time() + {skew}
time.time_ns = lambda: true_time_ns() + {skew} * 1_000_000_000
"""


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    found = pair.primary.conninfo(fresh_database)
    with psycopg.connect(found, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
    return found


def make_topic(kafka: Broker, name: str, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    settings = {key.replace("_", "."): value for key, value in config.items()}
    topic = NewTopic(name, num_partitions=1, replication_factor=1, config=settings)
    admin.create_topics([topic])[name].result(patient(60))


def config(kafka: Broker, topic: str) -> dict[str, str]:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    found = admin.describe_configs([resource])[resource].result(patient(60))
    return {name: entry.value for name, entry in found.items()}


def skewed(folder: Path, seconds: int) -> dict[str, str]:
    """The environment of a process whose wall clock is wrong by `seconds`."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(STAMPS)
    flags = ["-shared", "-fPIC", f"-DSKEW=({seconds})", "-o", str(library)]
    subprocess.run(["cc", *flags, source, "-ldl"], check=True, timeout=patient(60))
    (folder / "sitecustomize.py").write_text(CLOCK.format(skew=seconds))
    return {"LD_PRELOAD": str(library), "PYTHONPATH": str(folder)}


def insert(bridge: Bridge, number: int) -> None:
    with psycopg.connect(bridge.conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (%s)", [number])


def append_times_s(kafka: Broker, topic: str, partitions: int) -> list[float]:
    options = {"bootstrap.servers": kafka.bootstrap_servers, "group.id": topic}
    consumer = Consumer(options | {"auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, n, 0) for n in range(partitions)])
    found = consumer.consume(1, timeout=patient(60))
    consumer.close()
    return [message.timestamp()[1] / 1000 for message in found]


@pytest.mark.long
def test_a_bridge_whose_clock_is_days_behind_writes_records_of_the_brokers_time(
    conninfo: str, kafka: Broker, new_bridge: NewBridge, tmp_path: Path
) -> None:
    """Else Kafka deletes them the next time it looks for records older than its retention."""
    bridge = new_bridge(conninfo).start(**skewed(tmp_path, -DAYS_8_S)).streaming()
    insert(bridge, 1)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert "clocks differ" in bridge.output
    behind = re.search(r"(\d+) s behind", bridge.output)
    assert behind is not None and abs(int(behind[1]) - DAYS_8_S) < 86_400
    topic = f"{bridge.prefix}.public.t"
    assert config(kafka, topic)["message.timestamp.type"] == "LogAppendTime"
    (appended_s,) = append_times_s(kafka, topic, 2)
    assert abs(time.time() - appended_s) < 86_400


@pytest.mark.long
@pytest.mark.parametrize("skew_s", [-DAYS_8_S, 7200])
def test_where_clients_stamp_records_a_wrong_clock_is_refused(
    conninfo: str, kafka: Broker, new_bridge: NewBridge, tmp_path: Path, skew_s: int
) -> None:
    bridge = new_bridge(conninfo)
    make_topic(kafka, f"{bridge.prefix}.public.t", message_timestamp_type="CreateTime")
    bridge.start(**skewed(tmp_path, skew_s))
    assert bridge.exit_code() == ExitCode.SERVER_SETTING, bridge.output
    last = bridge.output.splitlines()[-1]
    assert "compare clocks" in last and "message.timestamp.type=LogAppendTime" in last


@pytest.mark.long
def test_a_record_whose_time_kafka_refuses_is_an_operators_matter(
    conninfo: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo)
    topic = f"{bridge.prefix}.public.t"
    strict = {"message_timestamp_type": "CreateTime", "message_timestamp_before_max_ms": "0"}
    make_topic(kafka, topic, **strict)
    bridge.start().streaming()
    insert(bridge, 1)
    assert bridge.exit_code() == ExitCode.SERVER_SETTING, bridge.output
    assert "clock" in bridge.output.splitlines()[-1]


def test_a_progress_topic_that_forgets_is_refused(
    conninfo: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo)
    make_topic(kafka, f"{bridge.prefix}.progress", cleanup_policy="delete", retention_ms="1000")
    assert bridge.start().exit_code() == ExitCode.SERVER_SETTING, bridge.output
    last = bridge.output.splitlines()[-1]
    assert f"--entity-name {bridge.prefix}.progress --add-config cleanup.policy=compact" in last


@pytest.mark.long
def test_more_replicas_than_brokers_is_a_wrong_setting(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """No retry brings them."""
    bridge = new_bridge(conninfo, replication_factor=3)
    assert bridge.start().exit_code() == ExitCode.SETTINGS, bridge.output
    assert "kafka.replication_factor" in bridge.output.splitlines()[-1]


@pytest.mark.long
def test_a_single_broker_is_warned_of(conninfo: str, new_bridge: NewBridge) -> None:
    bridge = new_bridge(conninfo).start().streaming()
    assert bridge.stop() == 0
    assert "fewer than 3 replicas" in bridge.output
    other = new_bridge(conninfo, replication_factor=-1).start().streaming()
    assert other.stop() == 0
