"""Offsets of topics, as Kafka answers while it is about to have them."""

import threading

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.settings import KafkaSettings
from spark_consumers.kafka.reader import TopicOffsets
from tests.providers.interface import Broker
from tests.providers.waiting import patient


@pytest.mark.long
def test_a_refusal_that_passes_is_outlasted(kafka: Broker, topic_prefix: str) -> None:
    """No broker knows the topic when its offsets are asked for; it is made a moment later."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    name = f"{topic_prefix}.late"

    def make() -> None:
        admin.create_topics([NewTopic(name, 1, 1)])[name].result(patient(60))

    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix)
    making = threading.Timer(1.0, make)
    making.start()
    try:
        assert TopicOffsets(settings).first({name: (0,)}) == {name: {0: 0}}
    finally:
        making.join()
