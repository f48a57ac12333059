"""A producer does not go on before its last transaction is told everywhere. No broker."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from schemas.errors import ExitCode, OperatorNeeded, Retryable
from services.bridge.sink import markers
from services.bridge.sink.markers import MarkerCheck, TransactionHangs
from services.bridge.sink.offsets import ASKED_AT_ONCE, Asked, Partition
from services.bridge.sink.partition_ends import Tails
from services.waiter import Waiter


class Cluster:
    """Answers from `ends` and `stable`: offsets below 0 are those of a leader that is silent."""

    def __init__(self) -> None:
        self.waiter = Waiter()
        self.ends: dict[Partition, int] = {}
        self.stable: dict[Partition, int] = {}
        self.epochs: dict[Partition, int] = {}
        self.count = 2
        self.asked_at_once = 0

    def partitions(self, _topic: str) -> int:
        return self.count

    def learn_leaders(self) -> None:
        pass

    def ask_ends(self, places: Iterable[Partition], *, committed: bool) -> Asked:
        found, places = self.stable if committed else self.ends, [*places]
        self.asked_at_once = max(self.asked_at_once, len(places))
        future: Future[Any] = Future()
        future.set_result(
            {
                TopicPartition(*place): SimpleNamespace(
                    offset=found.get(place, 0), leader_epoch=self.epochs.get(place)
                )
                for place in places
            }
        )
        return dict.fromkeys(places, future)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markers, "PATIENCE_S", 0.05)
    monkeypatch.setattr(markers, "REQUEST_TIMEOUT_S", 0.05)


def checked(cluster: Cluster, look: Callable[[], None] = lambda: None) -> MarkerCheck:
    return MarkerCheck(cluster, look, Tails("s", "p", lambda _then: {}).judge)


def hangs() -> None:
    raise Retryable("hangs", exit_code=ExitCode.KAFKA_UNREACHABLE)


def test_markers_are_checked_before_their_producer_writes_again() -> None:
    cluster = Cluster()
    check = checked(cluster, hangs)
    check.require_delivered()
    cluster.ends[("t", 1)] = 7
    cluster.stable[("t", 1)] = 3
    check.flushed({"t"})
    check.require_delivered()  # the other producer's turn
    check.flushed({"u"})
    with pytest.raises(Retryable, match="hangs"):
        check.require_delivered()
    check.close()


@pytest.mark.parametrize("hanging", ["t", "u"])
def test_a_stop_checks_the_markers_of_the_last_transaction_too(hanging: str) -> None:
    cluster = Cluster()
    check = checked(cluster, hangs)
    check.require_all_delivered()
    cluster.ends = {("t", 1): 7, ("u", 0): 4}
    cluster.stable = {("t", 1): 8, ("u", 0): 5}
    check.flushed({"t"})
    check.flushed({"u"})
    check.require_all_delivered()
    cluster.stable[hanging, 1 if hanging == "t" else 0] = 2
    check.flushed({"t"})
    check.flushed({"u"})
    with pytest.raises(Retryable, match="hangs"):
        check.require_all_delivered()
    check.close()


def test_at_a_stop_a_silent_leader_counts_as_a_hanging_transaction() -> None:
    cluster = Cluster()
    check = checked(cluster, hangs)
    cluster.ends = {("t", 1): 7}
    cluster.stable = {("t", 1): -1}
    check.flushed({"t"})
    with pytest.raises(TransactionHangs, match="not judged"):
        check.require_all_delivered()
    check.close()


def test_a_marker_that_is_on_its_way_is_waited_for() -> None:
    cluster = Cluster()

    def arrive() -> None:
        cluster.stable[("t", 1)] = 8

    cluster.waiter.work = arrive
    check = checked(cluster, hangs)
    cluster.ends[("t", 1)] = 7
    for topic in ("t", "u"):
        check.flushed({topic})
    check.require_delivered()
    check.close()


def test_open_transaction_of_another_producer_is_asked_for_once() -> None:
    cluster, looks = Cluster(), []
    check = checked(cluster, lambda: looks.append(1))
    cluster.ends[("t", 1)] = 7
    cluster.stable[("t", 1)] = 3
    for _ in range(5):
        check.flushed({"t"})
        check.require_delivered()
    assert len(looks) == 1
    cluster.stable[("t", 1)] = 5
    for _ in range(2):
        check.flushed({"t"})
        check.require_delivered()
    assert len(looks) == 2
    check.close()


def test_hidden_end_of_an_earlier_session_is_judged_once_it_shows() -> None:
    cluster, looks = Cluster(), []
    check = checked(cluster, lambda: looks.append(1))
    cluster.ends[("t", 1)] = 7
    cluster.stable[("t", 1)] = 3
    check.hide({("t", 1): 3})
    for _ in range(2):
        check.require_delivered()
    assert not looks
    cluster.stable[("t", 1)] = 5  # as it ended, behind it something is open: whose?
    for _ in range(2):
        check.require_delivered()
    assert len(looks) == 1
    cluster.stable[("t", 1)] = 8
    check.require_delivered()
    cluster.stable[("t", 1)] = 7
    check.require_delivered()
    assert len(looks) == 1 and not check._others, "all was told"
    check.hide({("t", 1): 3})
    broken = checked(cluster, hangs)
    broken.hide({("t", 1): 3})
    cluster.stable[("t", 1)] = 5
    with pytest.raises(Retryable, match="hangs"):
        broken.require_delivered()
    for one in (check, broken):
        one.close()


def test_a_leader_that_does_not_answer_is_not_evidence() -> None:
    cluster = Cluster()
    check = checked(cluster)
    cluster.stable[("t", 0)] = cluster.ends[("t", 0)] = -1001
    for _ in range(2):
        check.flushed({"t"})
    with pytest.raises(Retryable, match="does not answer"):
        check.require_delivered()
    check.close()


def test_acknowledged_records_that_a_partition_lacks_now_are_lost() -> None:
    """As after an unclean election: nothing is open there, and nobody hides anything."""
    cluster = Cluster()
    check = checked(cluster)
    cluster.ends[("t", 1)] = cluster.stable[("t", 1)] = 1000
    check.flushed({"t"})
    cluster.ends[("t", 1)] = cluster.stable[("t", 1)] = 998
    check.flushed({"t"})
    with pytest.raises(OperatorNeeded, match=r"t\[1\] ends at 998, not 1000"):
        check.require_delivered()
    check.close()


def test_many_partitions_are_asked_some_at_a_time() -> None:
    cluster = Cluster()
    cluster.count = 2 * ASKED_AT_ONCE + 1
    check = checked(cluster)
    cluster.ends[("t", cluster.count - 1)] = cluster.stable[("t", cluster.count - 1)] = 5
    for _ in range(2):
        check.flushed({"t"})
        check.require_delivered()
    assert check._asking is not None
    check._asking.result()
    assert len(check.ends()) == cluster.count
    assert cluster.asked_at_once == ASKED_AT_ONCE
    check.close()
