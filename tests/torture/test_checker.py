"""The checker finds what is planted, each kind as itself, and nothing where nothing is."""

import json
from collections.abc import Hashable
from dataclasses import replace

import pytest

from tests.promises.bridge.reading import Record
from tests.torture import checker
from tests.torture.checker import KafkaTransactionOf, Repair, Truth, check
from tests.torture.kafka_log import Batch, PartitionLog

BOUNDARIES = "p.transaction"


def event(commit_lsn: int, seq: int, table: str, tid: str, op: str = "c") -> bytes:
    source = {"commit_lsn": commit_lsn, "seq": seq, "table": table}
    after = {"id": seq, "tid": tid} if op != "t" else None
    return json.dumps({"op": op, "after": after, "source": source}).encode()


def end(commit_lsn: int, **counts: int) -> bytes:
    collections = [
        {"data_collection": f"public.{table}", "event_count": n} for table, n in counts.items()
    ]
    value = {"status": "END", "id": f"1:{commit_lsn}", "commit_lsn": commit_lsn}
    return json.dumps(value | {"data_collections": collections}).encode()


def topic(name: str, *values: tuple[int, bytes], partition: int = 0) -> list[Record]:
    return [Record(f"p.{name}", partition, offset, b"k", value, {}) for offset, value in values]


def good() -> tuple[list[Record], Truth]:
    """Two transactions; markers are at offset 3 of item, 1 of ledger and of the boundaries."""
    records = [
        *topic("item", (0, event(10, 0, "item", "a")), (1, event(10, 1, "item", "a"))),
        *topic("item", (3, event(20, 0, "item", "b"))),
        *topic("scratch", (0, event(20, 1, "scratch", "b", "t"))),
        *topic("scratch", (0, event(20, 1, "scratch", "b", "t")), partition=1),
        *topic("ledger", (0, event(10, 2, "ledger", "a")), (2, event(20, 2, "ledger", "b"))),
        *topic("transaction", (0, end(10, item=2, ledger=1))),
        *topic("transaction", (2, end(20, item=1, scratch=1, ledger=1))),
    ]
    ledger = {"a": {"item": 2, "ledger": 1}, "b": {"item": 1, "scratch": 1, "ledger": 1}}
    outcomes = {"a": "acknowledged", "b": "unknown", "c": "refused", "d": "rolled back"}
    return records, Truth(ledger, outcomes)


def kinds(
    records: list[Record], truth: Truth, kafka_transaction_of: KafkaTransactionOf | None = None
) -> set[str]:
    by_gaps = kafka_transaction_of or markers_in_gaps(records)
    return {finding.kind for finding in check(records, BOUNDARIES, truth, by_gaps)}


def markers_in_gaps(records: list[Record]) -> KafkaTransactionOf:
    """One producer alone: each offset without a record is a marker of its own."""
    offsets = {(record.topic, record.partition, record.offset) for record in records}

    def gaps_before(topic: str, partition: int, offset: int) -> int:
        return sum((topic, partition, n) not in offsets for n in range(offset))

    return gaps_before


def test_complete_topics_have_no_finding() -> None:
    assert kinds(*good()) == set()


def test_a_lost_transaction() -> None:
    records, truth = good()
    left = [r for r in records if b'"commit_lsn": 20' not in (r.value or b"")]
    assert kinds(left, truth) == {"lost"}


def test_a_lost_event() -> None:
    records, truth = good()
    assert kinds(records[1:], truth) == {"torn"}


def test_a_repeated_event() -> None:
    records, truth = good()
    again = replace_offset(records[2], 4)
    assert kinds([*records, again], truth) == {"duplicated"}


def test_a_repeated_transaction() -> None:
    records, truth = good()
    again = [
        *topic("item", (5, event(30, 0, "item", "b"))),
        *topic("scratch", (1, event(30, 1, "scratch", "b", "t"))),
        *topic("scratch", (1, event(30, 1, "scratch", "b", "t")), partition=1),
        *topic("ledger", (4, event(30, 2, "ledger", "b"))),
        *topic("transaction", (4, end(30, item=1, scratch=1, ledger=1))),
    ]
    assert kinds(records + again, truth) == {"duplicated"}


def test_an_order_that_is_not_the_commits() -> None:
    records, truth = good()
    swapped = [records[2], *records[:2], *records[3:]]
    swapped[0] = swapped[0]._replace(key=b"another")
    assert kinds(swapped, truth) == {"disordered"}
    turned = [*records[:-2], records[-1], records[-2]]
    assert kinds(turned, truth) == {"disordered"}


def test_a_transaction_in_two_kafka_transactions() -> None:
    records, truth = good()
    records[1] = replace_offset(records[1], 2)
    assert kinds(records, truth) == {"torn"}


def test_a_transaction_larger_than_a_kafka_transaction_may_be_divided() -> None:
    count = checker.PARTED_EVENTS_MIN
    content = [(2 * n, event(10, n, "item", "a")) for n in range(count)]
    records = [
        *topic("item", *content),
        *topic("ledger", (0, event(10, count, "ledger", "a"))),
        *topic("transaction", (0, end(10, item=count, ledger=1))),
    ]
    truth = Truth({"a": {"item": count, "ledger": 1}}, {})
    assert kinds(records, truth) == {"torn"}
    assert kinds(records, replace(truth, parted={10})) == set()


def test_a_small_transaction_must_not_be_divided() -> None:
    records, truth = good()
    assert kinds(records, replace(truth, parted={10})) == {"torn"}


def test_a_transaction_with_large_rows_may_be_divided() -> None:
    made = "made_7"
    records = [
        *topic(made, (0, event(10, 0, made, "a")), (2, event(10, 1, made, "a"))),
        *topic("ledger", (0, event(10, 2, "ledger", "a"))),
        *topic("transaction", (0, end(10, ledger=1, **{made: 2}))),
    ]
    truth = Truth({"a": {made: 2, "ledger": 1}}, {})
    assert kinds(records, truth) == {"torn"}
    assert kinds(records, replace(truth, parted={10})) == set()
    assert kinds(records, replace(truth, parted={10}, undivided=True)) == {"torn"}


def test_begin_and_end_in_two_kafka_transactions() -> None:
    """Also where no partition of a table has two of its events."""
    records, truth = good()
    begin = json.dumps({"status": "BEGIN", "id": "1:20", "commit_lsn": 20}).encode()
    within = [*records[:-1], *topic("transaction", (2, begin), (3, end_of_b()))]
    assert kinds(within, truth) == set()
    apart = [*records[:-1], *topic("transaction", (2, begin), (4, end_of_b()))]
    assert kinds(apart, truth) == {"torn"}


def test_a_marker_of_the_other_producer_is_not_a_border() -> None:
    """Two producers in turns: the other one's COMMIT may be written between BEGIN and END."""
    records, truth = good()
    begin = json.dumps({"status": "BEGIN", "id": "1:20", "commit_lsn": 20}).encode()
    within = [*records[:-1], *topic("transaction", (2, begin), (4, end_of_b()))]
    batches = [Batch(0, 0, 7, False), Batch(1, 1, 7, True), Batch(2, 2, 8, False)]
    batches += [Batch(3, 3, 7, True), Batch(4, 4, 8, False), Batch(5, 5, 8, True)]
    by_gaps = markers_in_gaps(within)

    def judged_with(log: PartitionLog) -> set[str]:
        def kafka_transaction_of(name: str, partition: int, offset: int) -> Hashable:
            if name == BOUNDARIES:
                return log.transaction_at(offset)
            return by_gaps(name, partition, offset)

        return kinds(within, truth, kafka_transaction_of)

    assert judged_with(PartitionLog(iter(batches))) == set()
    ended_between = [*batches[:3], Batch(3, 3, 8, True), *batches[4:]]
    assert judged_with(PartitionLog(iter(ended_between))) == {"torn"}


def end_of_b() -> bytes:
    return end(20, item=1, scratch=1, ledger=1)


def test_a_truncate_that_one_partition_lacks() -> None:
    records, truth = good()
    left = [r for r in records if (r.topic, r.partition) != ("p.scratch", 1)]
    assert kinds(left, truth) == {"torn"}


def transfer(lsn: int, *balances: int) -> list[Record]:
    found = []
    for number, balance in enumerate(balances):
        after = {"id": number, "balance": balance, "tid": f"t{lsn}"}
        source = {"commit_lsn": lsn, "seq": number, "table": "account"}
        op = "u" if lsn > 1 else "c"
        value = json.dumps({"op": op, "after": after, "source": source}).encode()
        found += topic("account", (3 * lsn + number, value))
    found += topic("ledger", (2 * lsn, event(lsn, 2, "ledger", f"t{lsn}")))
    return found + topic("transaction", (2 * lsn, end(lsn, account=2, ledger=1)))


def test_a_balance_that_no_transfer_makes() -> None:
    truth = Truth({f"t{n}": {"account": 2, "ledger": 1} for n in (1, 2, 3)}, {})
    right = [*transfer(1, 0, 0), *transfer(2, 10, -10), *transfer(3, 0, 0)]
    assert kinds(right, truth) == set()
    for wrong in (transfer(3, 20, -30), transfer(3, 20, 0), transfer(3, 10, -10)):
        assert kinds([*right[:-4], *wrong], truth) == {"wrong"}


@pytest.mark.parametrize(("column", "found"), [("r1", set()), ("r0", {"wrong"})])
def test_a_row_under_the_name_that_its_column_had_before(column: str, found: set[str]) -> None:
    source = {"commit_lsn": 10, "seq": 0, "table": "renamed"}
    after = {"id": 1, "tid": "a", column: "r1"}
    value = json.dumps({"op": "c", "after": after, "source": source}).encode()
    records = [
        *topic("renamed", (0, value)),
        *topic("ledger", (0, event(10, 1, "ledger", "a"))),
        *topic("transaction", (0, end(10, renamed=1, ledger=1))),
    ]
    assert kinds(records, Truth({"a": {"renamed": 1, "ledger": 1}}, {})) == found


def test_checker_finds_a_published_rollback() -> None:
    records, truth = good()
    records[0] = records[0]._replace(value=event(10, 0, "item", "never"))
    assert kinds(records, truth) == {"phantom"}


@pytest.mark.parametrize(
    ("ledger", "outcome", "kind"),
    [
        ({"b": {"item": 1, "scratch": 1, "ledger": 1}}, {}, "phantom"),
        ({}, {"x": "acknowledged"}, "missing"),
        ({}, {"a": "refused"}, "resurrected"),
        ({}, {"a": "rolled back"}, "resurrected"),
    ],
)
def test_the_database_and_the_clients(
    ledger: dict[str, dict[str, int]], outcome: dict[str, str], kind: str
) -> None:
    records, truth = good()
    assert kind in kinds(records, Truth(ledger or truth.ledger, {**truth.outcomes, **outcome}))


def replace_offset(record: Record, offset: int) -> Record:
    return record._replace(offset=offset)


def repaired(*rows: tuple[str, str]) -> list[Record]:
    """(table, tid): what a repair at 25 has created."""
    found = []
    for seq, (table, tid) in enumerate(rows):
        value = json.loads(event(25, seq, table, tid))
        value["source"]["snapshot"] = "repair"
        found += topic(table, (10 + seq, json.dumps(value).encode()))
    boundary = json.loads(end(25)) | {"id": "0:25"}
    return [*found, *topic("transaction", (10, json.dumps(boundary).encode()))]


def test_repaired_rows_are_in_kafka_once() -> None:
    records, truth = good()
    truth = replace(truth, repairs=[Repair(21, 26, 25)])
    left = [r for r in records if b'"commit_lsn": 20' not in (r.value or b"")]
    rows = [("item", "b"), ("ledger", "b"), ("scratch", "b")]
    assert kinds([*left, *repaired(*rows)], truth) == set()
    assert kinds([*left, *repaired(rows[0])], truth) == {"lost"}
    assert kinds([*records, *repaired(*rows)], truth) == {"duplicated"}


def test_a_part_ends_before_a_repair_alone() -> None:
    """With an END that counts what Kafka has of it."""
    records, truth = good()
    part = [r for r in records if r.value != end_of_b() and b'"ledger"' not in (r.value or b"")]
    part += [r for r in records if r.topic == "p.ledger"][:1]
    ended = [*part, *topic("transaction", (2, end(20, item=1, scratch=1)))]
    repair = repaired(("ledger", "b"))
    within = replace(truth, repairs=[Repair(15, 26, 25)])
    assert kinds([*ended, *repair], within) == set()
    assert kinds([*part, *repair], within) == {"torn"}
    assert kinds([*ended, *repair], replace(truth, repairs=[Repair(21, 26, 25)])) == {"torn"}
