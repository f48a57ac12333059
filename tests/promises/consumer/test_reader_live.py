"""The reader against a real broker: large transactions, lost ENDs, patience, an upper bound."""

import json
import threading
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.errors import BadInput, OperatorNeeded, Retryable, SlotbridgeError
from schemas.events import progress_topic, table_topic, transaction_topic
from slotbridge.consumer import Position, Transaction, Transactions
from tests.promises.tables.publisher import Publisher, SourceTable, envelope
from tests.providers.interface import Broker
from tests.providers.progress_records import progress_record
from tests.providers.waiting import eventually, patient

LARGE = 50_000
PATIENCE_S = round(patient(1.4))
DAY_S = 86_400
A = SourceTable("a", {"id": ("integer", -1)})
LOG = SourceTable("log", {"id": ("integer", -1)}, key=())


@pytest.fixture
def publisher(kafka: Broker, topic_prefix: str) -> Publisher:
    made = Publisher(kafka.bootstrap_servers, topic_prefix)
    made.announce(A, LOG)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    progress = NewTopic(progress_topic(topic_prefix), num_partitions=1)
    for future in admin.create_topics([progress]).values():
        future.result(patient(30))
    return made


@pytest.fixture
def beginning(kafka: Broker, topic_prefix: str) -> Iterator[Transactions]:
    with Transactions(kafka.bootstrap_servers, topic_prefix) as made:
        yield made


def insert(publisher: Publisher, *ids: int) -> int:
    """A transaction with these rows of A; returns where it commits."""
    with publisher.transaction() as transaction:
        for number in ids:
            transaction.insert(A, {"id": number})
    return publisher.commit_lsn


def tell_progress(kafka: Broker, publisher: Publisher, end_lsn: int) -> None:
    """A progress record, as the bridge writes it also while nothing is committed."""
    record = progress_record(
        slot="s", system_identifier="1", timeline=1, commit_lsn=0, end_lsn=end_lsn, seq=0, ts_ms=1
    )
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    producer.produce(progress_topic(publisher.prefix), record.model_dump_json(), "s")
    assert producer.flush(patient(30)) == 0


def forget(kafka: Broker, topic: str, before: int = -1) -> None:
    """Delete the records of a topic's first partition, as retention does."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(topic, 0, before)]).values():
        future.result(patient(30))


def ids(found: Transaction | None) -> list[int]:
    assert found is not None
    return [event.value["after"]["id"] for event in found.events]


@pytest.mark.long
def test_a_transaction_of_50000_rows_in_one_partition_comes_whole(
    publisher: Publisher, beginning: Transactions
) -> None:
    insert(publisher, 1)
    with publisher.transaction() as transaction:
        for number in range(LARGE):
            transaction.insert(LOG, {"id": number}, partition=0)
    insert(publisher, 2)
    assert ids(beginning.read(patient(60))) == [1]
    assert ids(beginning.read(patient(60))) == [*range(LARGE)]
    assert ids(beginning.read(patient(60))) == [2]


@pytest.mark.long
def test_a_large_transaction_over_several_partitions_comes_whole(
    publisher: Publisher, beginning: Transactions
) -> None:
    """Its partitions are also far ahead of a table of the transaction before, which is hidden."""
    insert(publisher, 1)
    assert ids(beginning.read(patient(60))) == [1]
    with publisher.transaction() as transaction:
        transaction.insert(A, {"id": 2}, partition=0)
        transaction.counts["public.a"] += 1
        show = publisher.hidden(A, {"id": 3})
    with publisher.transaction() as transaction:
        for number in range(LARGE):
            transaction.insert(A, {"id": number}, partition=number % 2 * 2)
    threading.Timer(2.0, show).start()
    assert ids(beginning.read(patient(60))) == [2, 3]
    assert ids(beginning.read(patient(60))) == [*range(LARGE)]


@pytest.mark.long
def test_what_waits_behind_a_transaction_is_bounded(
    publisher: Publisher, beginning: Transactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotbridge.consumer.transactions._HELD_MAX", 100)
    with publisher.transaction() as transaction:
        transaction.insert(LOG, {"id": 1}, partition=0)
    assert ids(beginning.read(patient(60))) == [1]
    with publisher.transaction() as transaction:
        transaction.counts["public.a"] += 1
        show = publisher.hidden(A, {"id": 2})
    for number in range(30):
        with publisher.transaction() as transaction:
            for n in range(200):
                transaction.insert(LOG, {"id": 200 * number + n}, partition=0)
    place = table_topic(publisher.prefix, "public", "log"), 0

    def held() -> int:
        assert beginning.read(2) is None
        return len(beginning._assembly._held.get(place, ()))

    eventually(lambda: held() > 100, what="the partition of another table is read")
    assert held() < 1500, "the partition of another table is held back"
    show()
    assert ids(beginning.read(patient(60))) == [2]
    for number in range(30):
        assert ids(beginning.read(patient(60))) == [*range(200 * number, 200 * number + 200)]


@pytest.mark.long
def test_events_whose_end_retention_has_removed_are_not_left_out_in_silence(
    kafka: Broker, publisher: Publisher, beginning: Transactions
) -> None:
    """The transaction topic has lost its beginning, and the table's topic has not."""
    lost = insert(publisher, 1)
    forget(kafka, transaction_topic(publisher.prefix))
    first = insert(publisher, 2)
    with pytest.raises(OperatorNeeded, match=r"not its END.*retention") as raised:
        beginning.read(patient(60))
    assert raised.value.lsn == lost and f"{publisher.prefix}.public.a[" in raised.value.subject
    with pytest.raises(OperatorNeeded, match="not its END"):
        beginning.read(1)
    after = Transactions(
        kafka.bootstrap_servers, publisher.prefix, position=Position.after(first - 1)
    )
    with after as transactions:
        assert ids(transactions.read(patient(60))) == [2], "the caller has what was before"


@pytest.mark.long
def test_events_without_any_end_are_told_once_patience_ends(
    kafka: Broker, publisher: Publisher
) -> None:
    insert(publisher, 1)
    lost = publisher.commit_lsn
    insert(publisher, 2)
    forget(kafka, transaction_topic(publisher.prefix))
    position = Position(-1, {(table_topic(publisher.prefix, "public", "a"), 0): 0})
    fresh = Transactions(
        kafka.bootstrap_servers, publisher.prefix, position=position, patience_s=PATIENCE_S
    )
    with fresh as transactions, pytest.raises(OperatorNeeded, match="not its END") as raised:
        transactions.read(patient(60))
    assert raised.value.lsn == lost


@pytest.mark.long
def test_an_idle_source_is_not_an_error(publisher: Publisher, kafka: Broker) -> None:
    with Transactions(
        kafka.bootstrap_servers, publisher.prefix, patience_s=PATIENCE_S
    ) as transactions:
        assert transactions.read(1.2 * PATIENCE_S) is None
        insert(publisher, 1)
        assert ids(transactions.read(patient(60))) == [1]
        assert transactions.read(1.2 * PATIENCE_S) is None


@pytest.mark.long
def test_patience_counts_from_the_last_progress(publisher: Publisher, kafka: Broker) -> None:
    """Ten events that come one after the other take longer than the patience."""
    insert(publisher, 0)
    with Transactions(
        kafka.bootstrap_servers, publisher.prefix, patience_s=PATIENCE_S
    ) as transactions:
        assert ids(transactions.read(patient(60))) == [0]
        with publisher.transaction() as transaction:
            transaction.counts["public.a"] = 10
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        late = threading.Thread(target=send_slowly, args=[producer, publisher])
        late.start()
        assert ids(transactions.read(patient(60))) == [*range(10)]
        late.join()
        with publisher.transaction() as transaction:
            transaction.counts["public.a"] = 1
        assert transactions.read(0.2) is None, "the time-out is heard while an event is missing"
        with pytest.raises(
            Retryable, match=rf"all events of public\.a, and nothing of that for {PATIENCE_S} s"
        ):
            transactions.read(patient(60))


def send_slowly(producer: Producer, publisher: Publisher) -> None:
    """Ten events of the last transaction, one after the other in more than PATIENCE_S."""
    from tests.promises.tables.publisher import envelope

    for number in range(10):
        time.sleep(PATIENCE_S / 8)
        event = envelope(
            *(publisher.prefix, A, "c", None, {"id": number}, publisher.commit_lsn, number)
        )
        topic = table_topic(publisher.prefix, "public", "a")
        producer.produce(topic, event.model_dump_json(by_alias=True), "{}")
        producer.flush(patient(30))


@pytest.mark.long
def test_a_reader_ends_at_an_upper_bound(publisher: Publisher, kafka: Broker) -> None:
    first, second = insert(publisher, 1), insert(publisher, 2)
    third = insert(publisher, 3)
    for until, wanted in ((second, [1, 2]), (third - 1, [1, 2]), (first - 1, [])):
        with Transactions(kafka.bootstrap_servers, publisher.prefix, until=until) as bounded:
            assert [ids(found)[0] for found in bounded] == wanted
            assert bounded.done and bounded.read(0) is None


@pytest.mark.long
def test_an_upper_bound_ends_without_a_later_transaction(
    publisher: Publisher, kafka: Broker
) -> None:
    """Kafka's record of progress tells that none will come."""
    last = insert(publisher, 1)
    tell_progress(kafka, publisher, last)
    with Transactions(kafka.bootstrap_servers, publisher.prefix, until=last + 50) as bounded:
        assert ids(bounded.read(patient(60))) == [1]
        assert bounded.read(2) is None and not bounded.done
        tell_progress(kafka, publisher, last + 60)
        assert bounded.read(patient(60)) is None and bounded.done
        again = Transactions(
            kafka.bootstrap_servers, publisher.prefix, position=bounded.position, until=last + 50
        )
    with again as bounded:
        assert [*bounded] == []


@pytest.mark.long
def test_values_of_a_schema_registry_are_refused_by_name(
    kafka: Broker, publisher: Publisher
) -> None:
    for number, (key, value, part) in enumerate(
        ((b"{}", b"\0\0\0\0\7x", "value"), (b"\0\0\0\0\7k", None, "key"))
    ):
        with publisher.transaction() as transaction:
            transaction.insert(A, {"id": number}, partition=0)
        topic = table_topic(publisher.prefix, "public", "a")
        if value is None:
            event = envelope(*(publisher.prefix, A, "c", None, {"id": 1}, publisher.commit_lsn, 1))
            value = event.model_dump_json(by_alias=True).encode()
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        producer.produce(topic, value, key, 0)
        assert producer.flush(patient(30)) == 0
        with (
            Transactions(kafka.bootstrap_servers, publisher.prefix) as transactions,
            pytest.raises(BadInput, match=f"{part} begins with the magic byte") as raised,
        ):
            while transactions.read(patient(60)) is not None:
                pass
        assert f"{topic}[0]@" in raised.value.subject
        assert f"kafka.{part}_format: json" in raised.value.hint
        forget(kafka, topic)
        forget(kafka, transaction_topic(publisher.prefix))


@pytest.mark.long
def test_what_ends_a_read_ends_the_reader(
    kafka: Broker, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that came with it may be lost to it: another one reads them."""
    for number in (1, 2):
        with publisher.transaction() as transaction:
            transaction.insert(A, {"id": number}, partition=1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Transactions(kafka.bootstrap_servers, publisher.prefix) as transactions:
        with monkeypatch.context() as patched:
            patched.setattr(transactions._assembly, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                transactions.read(60)
        for ask in (lambda: transactions.read(60), lambda: transactions.position):
            with pytest.raises(OperatorNeeded, match="ended by KeyboardInterrupt"):
                ask()
    topic = table_topic(publisher.prefix, "public", "a")
    event = envelope(*(publisher.prefix, A, "c", None, {"id": 7}, publisher.commit_lsn, 9))
    document = json.loads(event.model_dump_json(by_alias=True))
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    values = {b"[" * 200_000: "not one of the bridge", b"[]": "not one of the bridge"}
    for name, value in (
        *(("seq", value) for value in ("x", None, 1.5, -1, True)),
        *(("commit_lsn", value) for value in (-1, 2**64, 2**200, 1.5, None)),
    ):
        wrong = {**document, "source": {**document["source"], name: value}}
        values[json.dumps(wrong).encode()] = "not one of the bridge"
    values[json.dumps(document).encode()] = "more events of public.a"
    for text, message in values.items():
        producer.produce(topic, text, b"{}", 0)
        assert producer.flush(patient(30)) == 0
        with Transactions(kafka.bootstrap_servers, publisher.prefix) as transactions:
            with pytest.raises(SlotbridgeError, match=message) as raised:
                while transactions.read(60) is not None:
                    pass
            assert f"{topic}[0]@" in str(raised.value.subject)
            with pytest.raises(SlotbridgeError, match=message):
                transactions.read(60)
        forget(kafka, topic)


def test_transactions_that_never_happened_are_refused(kafka: Broker, publisher: Publisher) -> None:
    """Also where no position goes back, and by a reader that has passed them."""
    lost = insert(publisher, 1)
    with Transactions(kafka.bootstrap_servers, publisher.prefix) as transactions:
        assert ids(transactions.read(patient(60))) == [1]
        assert transactions.read(1) is None
        stored = transactions.position
    publisher.diverge(lost - 10)
    insert(publisher, 2)
    for position in (None, stored, Position.after(lost - 1)):
        reader = Transactions(kafka.bootstrap_servers, publisher.prefix, position=position)
        with reader as transactions, pytest.raises(OperatorNeeded, match="lost at a failover"):
            while transactions.read(patient(60)) is not None:
                pass
    reader = Transactions(kafka.bootstrap_servers, publisher.prefix, position=Position.after(lost))
    with reader as transactions:
        assert ids(transactions.read(patient(60))) == [2]


def test_an_idle_position_outlives_retention(kafka: Broker, publisher: Publisher) -> None:
    """Records that end Kafka's transactions are passed, too: nothing unread was removed."""
    insert(publisher, 1)
    with Transactions(kafka.bootstrap_servers, publisher.prefix) as transactions:
        assert ids(transactions.read(patient(60))) == [1]

        def passed() -> bool:
            assert transactions.read(1) is None
            read = transactions.position.offsets
            ends = {place: (transactions._partitions.bounds(place) or (0, -1))[1] for place in read}
            return read == ends

        eventually(passed, what="what ends Kafka's transaction is passed")
        stored = Position.parse(transactions.position.text())
    publisher.forget(A)
    forget(kafka, transaction_topic(publisher.prefix))
    insert(publisher, 2)
    reader = Transactions(kafka.bootstrap_servers, publisher.prefix, position=stored)
    with reader as transactions:
        assert ids(transactions.read(patient(60))) == [2]


@pytest.mark.long
def test_stop_ends_a_read_that_waits_for_events(publisher: Publisher, kafka: Broker) -> None:
    with publisher.transaction() as transaction:
        transaction.counts["public.a"] = 1
    with Transactions(kafka.bootstrap_servers, publisher.prefix, patience_s=DAY_S) as transactions:
        threading.Timer(1.0, transactions.stop).start()
        assert transactions.read(DAY_S) is None
