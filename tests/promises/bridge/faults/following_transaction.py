"""What the bridge's other producer does after a transaction that hangs, done in its place."""

from confluent_kafka import Producer

from schemas.events import progress_topic
from schemas.progress import ProgressRecord
from tests.promises.bridge.running import Bridge
from tests.providers.progress_records import altered
from tests.providers.waiting import patient


def begin_following(bridge: Bridge, record: ProgressRecord) -> Producer:
    """Begin a transaction after that of `record`, as the other producer."""
    producer = Producer(
        {
            "bootstrap.servers": bridge.kafka.bootstrap_servers,
            "transactional.id": transactional_id(bridge, 1 - record.kafka.producer),
        }
    )
    producer.init_transactions(patient(30))
    producer.begin_transaction()
    return producer


def commit_following(bridge: Bridge, record: ProgressRecord) -> ProgressRecord:
    """Commit one without events, and return its record."""
    following = altered(record, producer=1 - record.kafka.producer, ends={})
    producer = begin_following(bridge, record)
    value = following.model_dump_json().encode()
    producer.produce(progress_topic(bridge.prefix), value, bridge.slot.encode(), 0)
    producer.commit_transaction(patient(30))
    return following


def transactional_id(bridge: Bridge, turn: int) -> str:
    """Of one of the bridge's two producers."""
    return f"slotbridge.{bridge.prefix}.{bridge.slot}" + ("", "~2")[turn]
