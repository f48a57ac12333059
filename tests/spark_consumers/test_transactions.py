"""The transaction topic while transactions come steadily: an epoch begins all the same."""

import threading
import time
from collections.abc import Iterator

import pytest

from schemas.settings import KafkaSettings
from spark_consumers.kafka.reader import Topics
from spark_consumers.kafka.transactions import TransactionLog
from tests.providers.interface import Broker
from tests.providers.waiting import eventually
from tests.spark_consumers.publisher import Publisher, SourceTable

ITEMS = SourceTable("items", {"id": ("int4", -1)})
READ_MAX_S = 2.0
"""A read of what is there takes milliseconds; a backlog is read for up to one second."""


class SteadyLoad:
    """Transactions of one row, one after the other, in a thread."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.transactions = 0

    def __enter__(self) -> "SteadyLoad":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            with self._publisher.transaction() as t:
                t.insert(ITEMS, {"id": self.transactions})
            self.transactions += 1


@pytest.fixture
def publisher(kafka: Broker, topic_prefix: str) -> Publisher:
    found = Publisher(kafka.bootstrap_servers, topic_prefix)
    found.announce(ITEMS)
    return found


@pytest.fixture
def transactions(kafka: Broker, topic_prefix: str) -> Iterator[TransactionLog]:
    given = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix)
    log = TransactionLog(given, Topics(given), lambda _: True, None, -1)
    yield log
    log.close()


def test_a_read_ends_while_transactions_come_steadily(
    publisher: Publisher, transactions: TransactionLog
) -> None:
    with SteadyLoad(publisher) as load:
        eventually(transactions.read, what="the first transaction is read")
        for _ in range(5):
            sent = load.transactions
            started = time.monotonic()
            assert transactions.read()
            assert time.monotonic() - started < READ_MAX_S, load.transactions
            eventually(lambda: load.transactions > sent + 20, what="more transactions")  # noqa: B023


def test_reads_take_every_transaction_once_in_order(
    publisher: Publisher, transactions: TransactionLog
) -> None:
    found = 0
    with SteadyLoad(publisher) as load:
        while load.transactions < 300:
            if transactions.read():
                cut = transactions.cut(50)
                assert cut is not None
                assert cut.transactions == cut.counts.total()
                found += cut.transactions
                transactions.done(cut)
    rest = transactions.upto(publisher.commit_lsn, 30.0)
    assert found + rest.transactions == load.transactions
