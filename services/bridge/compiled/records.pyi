"""Records out, many for one step of the interpreter; records.pyx has it."""

from confluent_kafka import Producer

from services.bridge.events.event import Event

def murmur2(text: bytes, /) -> int:
    """As services.bridge.sink.batch_produce.murmur2."""

class Records:
    """Straight into one producer; it lives as long as this."""

    def __init__(
        self,
        producer: Producer,
        handle: int,
        topic_new: int,
        topic_destroy: int,
        produce: int,
        produce_arguments: int,
        error_destroy: int,
    ) -> None:
        """Addresses: `handle` of its rd_kafka_t, the others of librdkafka's functions."""

    def send(
        self,
        events: list[Event],
        index: int,
        end: int,
        ready: dict[str, int],
        touched: set[str],
        /,
    ) -> int:
        """As services.bridge.sink.batch_produce.Send has it."""
