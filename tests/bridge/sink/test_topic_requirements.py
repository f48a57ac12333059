"""What is asked of Kafka's topics and of clocks, and what is said where it is not so. Pure."""

import pytest

from schemas.errors import SetupError
from services.bridge.sink.clocks import Clocks, check_clocks
from services.bridge.sink.topic_requirements import (
    Topic,
    lacks,
    named,
    new_config,
    refuse_unfit,
    replication_factor,
)

GOOD = {
    "message.timestamp.type": "LogAppendTime",
    "min.insync.replicas": "2",
    "cleanup.policy": "compact",
    "unclean.leader.election.enable": "false",
}
NOW = 1_800_000_000_000
HOUR_MS = 3_600_000


def whats(topic: Topic) -> str:
    return "; ".join(lack.what for lack in lacks([topic], "p"))


def test_three_replicas_where_there_are_three_brokers() -> None:
    assert replication_factor(None, 3, ()) == 3
    assert replication_factor(None, 7, (1,)) == 3
    assert replication_factor(None, 1, (0, 0)) == 1
    assert replication_factor(None, 2, (3, 0)) == 3, "one of three is down"
    assert replication_factor(1, 3, (3,)) == 1
    assert replication_factor(-1, 3, ()) == -1
    assert new_config(3, compacted=True, short_lived=False) == {
        "message.timestamp.type": "LogAppendTime",
        "min.insync.replicas": "2",
        "cleanup.policy": "compact",
    }
    assert "min.insync.replicas" not in new_config(2, compacted=False, short_lived=False)
    assert "min.insync.replicas" not in new_config(-1, compacted=False, short_lived=True)


def test_a_topic_as_asked_lacks_nothing() -> None:
    assert not lacks([Topic("p.progress", 3, GOOD), Topic("p.t", 3, GOOD)], "p")


@pytest.mark.parametrize(
    ("name", "replicas", "change", "said"),
    [
        ("p.t", 2, {}, "fewer than 3 replicas"),
        ("p.t", 3, {"min.insync.replicas": "1"}, "one replica in sync"),
        ("p.t", 3, {"unclean.leader.election.enable": "true"}, "lacks committed records"),
        ("p.t", 3, {"message.timestamp.type": "CreateTime"}, "the bridge's clock"),
        ("p.transaction", 3, {}, "BEGINs"),
    ],
)
def test_each_missing_requirement_of_a_topic_is_named(
    name: str, replicas: int, change: dict[str, str], said: str
) -> None:
    topic = Topic(name, replicas, GOOD | change)
    assert said in whats(topic)
    assert len(lacks([topic], "p")) == 1


@pytest.mark.parametrize(
    ("transactions", "table", "wanted"),
    [
        ({"retention.ms": "1000"}, {"retention.ms": "2000"}, "retention.ms=2000"),
        ({"retention.ms": "1000"}, {"retention.ms": "-1"}, "retention.ms=-1"),
        ({"retention.ms": "1000"}, {"retention.ms": "1000"}, ""),
        ({"retention.ms": "2000"}, {"retention.ms": "1000"}, ""),
        ({"retention.ms": "-1"}, {"retention.ms": "-1"}, ""),
        ({"retention.ms": "1000"}, {"cleanup.policy": "compact", "retention.ms": "-1"}, ""),
    ],
)
def test_a_transaction_topic_that_forgets_sooner_than_a_tables_is_told(
    transactions: dict[str, str], table: dict[str, str], wanted: str
) -> None:
    plain = GOOD | {"cleanup.policy": "delete"}
    topics = [Topic("p.transaction", 3, plain | transactions), Topic("p.t", 3, plain | table)]
    found = lacks([*topics, Topic("p.dead", 3, plain | {"retention.ms": "-1"})], "p")
    told = {lack.config: names for lack, names in found.items()}
    assert told == ({wanted: ["p.transaction"]} if wanted else {})
    assert not lacks([topics[0]._replace(config=None)], "p").keys() & found.keys()


def test_unreadable_settings_are_not_judged() -> None:
    topic = Topic("p.progress", 3, None)
    assert "not judged" in whats(topic)
    refuse_unfit([topic], "p", "b:9092")


@pytest.mark.parametrize("name", ["p.progress", "p.schema", "p.prepared"])
@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_a_topic_that_forgets_is_refused_with_the_command(name: str, policy: str) -> None:
    bounded = GOOD | {"cleanup.policy": policy, "retention.ms": "1000", "retention.bytes": "-1"}
    with pytest.raises(SetupError) as caught:
        refuse_unfit([Topic(name, 3, bounded)], "p", "b:9092")
    assert (
        f"kafka-configs.sh --bootstrap-server b:9092 --alter --entity-type topics "
        f"--entity-name {name} --add-config cleanup.policy=compact"
    ) in str(caught.value)
    refuse_unfit([Topic(name, 3, bounded | {"retention.ms": "-1"})], "p", "b:9092")
    refuse_unfit([Topic("p.public.t", 3, bounded)], "p", "b:9092")


def test_clocks_that_differ_by_hours_are_told() -> None:
    ours, theirs = Topic("p.t", 3, GOOD), Topic("p.old", 3, {})
    assert check_clocks(Clocks(NOW, NOW + 5000, NOW - 9 * HOUR_MS), [ours, theirs], "b") == ""
    behind = Clocks(NOW, NOW + 2 * HOUR_MS, None)
    assert "7200 s behind that of PostgreSQL" in check_clocks(behind, [ours], "b")
    kafka = Clocks(NOW, NOW, NOW + 2 * HOUR_MS)
    assert "7200 s behind that of Kafka" in check_clocks(kafka, [ours], "b")
    ahead = Clocks(NOW, NOW - 2 * HOUR_MS, NOW - 2 * HOUR_MS)
    assert "7200 s ahead of that of PostgreSQL" in check_clocks(ahead, [ours], "b")
    for clocks in (behind, kafka, ahead):
        with pytest.raises(SetupError, match=r"entity-name p\.old .*LogAppendTime"):
            check_clocks(clocks, [ours, theirs], "b")
    slightly = Clocks(NOW, NOW + 120_000, None)
    assert "120 s behind" in check_clocks(slightly, [theirs], "b")


def test_many_topics_are_named_in_part() -> None:
    assert named(["a", "b"]) == "a, b"
    assert named(list("abcdefgh")) == "a, b, c, d, e and 3 more"
