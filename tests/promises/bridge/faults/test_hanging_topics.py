"""What hangs is ended in every topic that the slot writes, whatever settings call it.

tests/promises/bridge/faults/test_hanging.py tells how markers are lost.
"""

import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from schemas.events import SETTLED_KEY
from services.testbed.kafka import KafkaBroker
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.load import await_session
from tests.promises.bridge.faults.markers import is_any, kill_before_markers, last_batch
from tests.promises.bridge.faults.test_hanging import QUIET, tell
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.running import Bridge
from tests.providers.interface import Broker
from tests.providers.waiting import eventually, patient, patient_ms

TABLES = """
    CREATE TABLE plain (id int PRIMARY KEY);
    CREATE TABLE routed (id int PRIMARY KEY);
    CREATE TABLE box (id int, aggregatetype text, aggregateid text, type text, payload text)
"""


def insert(conninfo: str, numbers: range, kind: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for n in numbers:
            with connection.transaction():
                connection.execute("INSERT INTO plain VALUES (%s)", [n])
                connection.execute("INSERT INTO routed VALUES (%s)", [n])
                connection.execute(
                    "INSERT INTO box VALUES (%s, %s, %s, 'made', %s)", [n, kind, n, str(n)]
                )


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "outbox", "told"),
    [
        ("cdc-{prefix}-{schema}-{table}", "{prefix}.outbox.{type}", True),
        ("{prefix}-{table}", "messages-{type}", True),
        ("{prefix}-{table}", "messages-{type}", False),
    ],
)
def test_topics_of_any_name_lose_and_repeat_nothing(
    conninfo: str,
    own_kafka: KafkaBroker,
    new_bridge: NewBridge,
    topic_prefix: str,
    template: str,
    outbox: str,
    told: bool,
) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(TABLES)
    kind = f"k{topic_prefix}"
    shaping: dict[str, Any] = {
        "topic": template,
        "routes": [{"tables": r"public\.routed", "topic": "{table}-of-{prefix}"}],
        "outbox": {"table": "public.box", "topic": outbox},
    }
    bridge = new_bridge(conninfo, broker=own_kafka, shaping=shaping, **QUIET).start().streaming()
    insert(conninfo, range(20), kind)
    bridge.caught_up()
    bridge.kill()
    insert(conninfo, range(20, 60), kind)
    since_ms = time.time_ns() // 1_000_000  # what hangs is never older than two transactions
    bridge.start(SLOTBRIDGE_FAILPOINT="after kafka commit:1")
    bridge.exit_code()
    end_lsn = bridge.progress()[-1].position.end_lsn
    names = kill_before_markers(own_kafka, topic_prefix, since_ms, is_any)
    topics = {
        template.format(prefix=topic_prefix, schema="public", table="plain"),
        f"routed-of-{topic_prefix}",
        outbox.format(prefix=topic_prefix, type=kind),
    }
    cut = {name.rpartition("-")[0] for name in names}
    assert {name.removeprefix(f"{topic_prefix}.") for name in topics} <= cut, names
    if told:
        tell(conninfo, bridge, end_lsn)
    own_kafka.start()
    bridge.start()
    await_session(bridge, 3)
    bridge.caught_up()
    assert f"decision={'commit' if told else 'abort'}" in bridge.output
    assert_all_once(bridge, topics, 60)
    bridge.kill()  # a transaction that its next session aborts takes nothing along
    insert(conninfo, range(60, 70), kind)
    bridge.start(SLOTBRIDGE_FAILPOINT="before kafka commit:1")
    bridge.exit_code()
    bridge.start()
    await_session(bridge, 5)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_all_once(bridge, topics, 70)


def test_open_transaction_of_another_producer_is_left_alone(
    conninfo: str, kafka: Broker, new_bridge: NewBridge, topic_prefix: str
) -> None:
    """It hides what the bridge has committed behind it: nothing hangs, and nothing is ended."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(TABLES)
    kind = f"k{topic_prefix}"
    topic = f"messages-{kind}"
    outbox = {"table": "public.box", "topic": "messages-{type}"}
    bridge = new_bridge(conninfo, shaping={"outbox": outbox}).start().streaming()
    insert(conninfo, range(10), kind)
    bridge.caught_up()
    other = Producer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "transactional.id": kind,
            "transaction.timeout.ms": patient_ms(20_000),
        }
    )
    other.init_transactions(patient(30))
    other.begin_transaction()
    for partition in range(
        len(other.list_topics(topic, timeout=patient(30)).topics[topic].partitions)
    ):
        other.produce(topic, b"of another", b"key", partition=partition)
    assert other.flush(patient(30)) == 0
    insert(conninfo, range(10, 20), kind)
    bridge.caught_up()
    insert(conninfo, range(20, 30), kind)
    eventually(lambda: "another producer's open transaction" in bridge.output, what="it looks")
    bridge.caught_up()
    assert bridge.sessions == 1, bridge.output
    assert bridge.stop() == 0, bridge.output
    bridge.start()
    await_session(bridge, 2)
    assert "ending a transaction" not in bridge.output
    other.abort_transaction(patient(30))
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_all_once(bridge, {topic}, 30)
    found = read_committed(kafka.bootstrap_servers, [topic])
    assert SETTLED_KEY not in {record.key for record in found}


@pytest.mark.long
def test_hanging_transaction_behind_another_producers_is_ended_after_it(
    conninfo: str, own_kafka: KafkaBroker, new_bridge: NewBridge, topic_prefix: str
) -> None:
    """Until then nobody can tell that it hangs: it is named as not judged."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(TABLES)
    kind = f"k{topic_prefix}"
    topic = f"messages-{kind}"
    shaping = {"outbox": {"table": "public.box", "topic": "messages-{type}"}}
    bridge = new_bridge(conninfo, broker=own_kafka, shaping=shaping, **QUIET).start().streaming()
    insert(conninfo, range(10), kind)
    bridge.caught_up()
    bridge.kill()
    servers = {"bootstrap.servers": own_kafka.bootstrap_servers}
    other = Producer({**servers, "transactional.id": kind, "transaction.timeout.ms": 600_000})
    other.init_transactions(patient(30))
    other.begin_transaction()
    for partition in range(
        len(other.list_topics(topic, timeout=patient(30)).topics[topic].partitions)
    ):
        other.produce(topic, b"of another", b"key", partition=partition)
    assert other.flush(patient(30)) == 0
    insert(conninfo, range(10, 20), kind)
    bridge.start(SLOTBRIDGE_FAILPOINT="after kafka commit:1")
    bridge.exit_code()
    logs = [*(own_kafka.folder / "data").glob(f"{topic}-*/*.log")]
    eventually(lambda: all(is_told(log) for log in logs), what="markers are written")
    assert bridge.progress()  # what else was told is, too
    assert kill_before_markers(
        own_kafka, topic_prefix, 0, lambda name: name.startswith("messages-")
    )
    own_kafka.start()
    bridge.start()
    await_session(bridge, 3)
    assert "not judged: what other producers' open transactions hide" in bridge.output
    assert "ending it" not in bridge.output
    other.abort_transaction(patient(60))
    insert(conninfo, range(20, 30), kind)
    eventually(lambda: "decision=commit" in bridge.output, what="it is ended", timeout_s=60)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_all_once(bridge, {topic}, 30)


def is_told(log: Path) -> bool:
    """A partition's last batch is a marker, or the other producer's, who has not ended."""
    at, is_marker, *_ = last_batch(log)
    return is_marker or b"of another" in log.read_bytes()[at:]


def assert_all_once(bridge: Bridge, topics: set[str], count: int) -> None:
    """Each topic shows `count` records besides those that only end a transaction."""
    found = read_committed(bridge.kafka.bootstrap_servers, topics)
    shown = {name: [r for r in found if r.topic == name and r.value is not None] for name in topics}
    assert {name: len(records) for name, records in shown.items()} == dict.fromkeys(topics, count)
    for records in shown.values():
        assert len({record.value for record in records}) == count
