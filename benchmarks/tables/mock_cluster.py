"""librdkafka's mock cluster: brokers of this process, which count the requests that they get.

It speaks Kafka's protocol on loopback, keeps what is produced in memory, and makes topics of any
number of partitions at once. The functions are those of librdkafka's rdkafka_mock.h.
"""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import confluent_kafka

_PRODUCER: Final = 0
API_NAMES: Final = {
    0: "Produce",
    1: "Fetch",
    2: "ListOffsets",
    3: "Metadata",
    10: "FindCoordinator",
    18: "ApiVersions",
    22: "InitProducerId",
    75: "DescribeTopicPartitions",
}
"""Kafka's number of a request -> its name."""


def _library() -> Any:
    """Return the librdkafka that confluent-kafka has loaded."""
    beside = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    found = ctypes.CDLL(str(next(beside.glob("librdkafka*"))))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures = {
        "conf_new": (pointer, ()),
        "new": (pointer, (ctypes.c_int, pointer, ctypes.c_char_p, size)),
        "destroy": (None, (pointer,)),
        "mock_cluster_new": (pointer, (pointer, ctypes.c_int)),
        "mock_cluster_destroy": (None, (pointer,)),
        "mock_cluster_bootstraps": (ctypes.c_char_p, (pointer,)),
        "mock_topic_create": (
            *(ctypes.c_int, (pointer, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)),
        ),
        "mock_set_controller_id": (None, (pointer, ctypes.c_int32)),
        "mock_start_request_tracking": (None, (pointer,)),
        "mock_clear_requests": (None, (pointer,)),
        "mock_get_requests": (ctypes.POINTER(pointer), (pointer, ctypes.POINTER(size))),
        "mock_request_api_key": (ctypes.c_int16, (pointer,)),
        "mock_request_destroy_array": (None, (ctypes.POINTER(pointer), size)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(found, f"rd_kafka_{name}")
        function.restype, function.argtypes = result, list(arguments)
    return found


class MockCluster:
    """A cluster of one broker."""

    def __init__(self, library: Any, cluster: int) -> None:
        self._library = library
        self._cluster = cluster

    @property
    def bootstrap_servers(self) -> str:
        """Where it listens."""
        found: bytes = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster)
        return found.decode()

    def create(self, topic: str, partitions: int) -> None:
        """Create a topic."""
        error = self._library.rd_kafka_mock_topic_create(
            self._cluster, topic.encode(), partitions, 1
        )
        if error:
            raise RuntimeError(f"librdkafka's error {error}: topic {topic}")

    def forget(self) -> None:
        """Begin to count requests anew."""
        self._library.rd_kafka_mock_clear_requests(self._cluster)

    def requests(self) -> Counter[str]:
        """Count the requests since `forget`, by Kafka's name of each."""
        count = ctypes.c_size_t()
        found = self._library.rd_kafka_mock_get_requests(self._cluster, ctypes.byref(count))
        keys = [self._library.rd_kafka_mock_request_api_key(found[n]) for n in range(count.value)]
        self._library.rd_kafka_mock_request_destroy_array(found, count)
        return Counter(API_NAMES.get(key, str(key)) for key in keys)


@contextlib.contextmanager
def mock_cluster() -> Iterator[MockCluster]:
    """Start a mock cluster, and end it."""
    library = _library()
    error = ctypes.create_string_buffer(512)
    handle = library.rd_kafka_new(_PRODUCER, library.rd_kafka_conf_new(), error, len(error))
    if not handle:
        raise RuntimeError(error.value.decode())
    cluster = library.rd_kafka_mock_cluster_new(handle, 1)
    library.rd_kafka_mock_set_controller_id(cluster, 1)  # else DescribeTopics waits for one
    library.rd_kafka_mock_start_request_tracking(cluster)
    try:
        yield MockCluster(library, cluster)
    finally:
        library.rd_kafka_mock_cluster_destroy(cluster)
        library.rd_kafka_destroy(handle)
