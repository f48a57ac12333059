"""Settings and partitions that place rows elsewhere than before: told at a start."""

from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from hypothesis import given
from hypothesis import strategies as st

from schemas.kafka import KafkaSettings
from schemas.naming import Naming
from schemas.settings import BridgeSettings
from schemas.shaping import ShapingSettings
from services.bridge.pgoutput.messages import Relation
from services.bridge.recovery.placement import (
    changed,
    placement_of,
    spreads_keyless,
    with_keyless_spread,
)
from services.bridge.session.start_checks import gathered
from services.bridge.sink.partition_ends import grown
from services.bridge.snapshot.tables import PLACE, TableShape
from tests.promises.bridge.conftest import NewBridge
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient

SALT = "a salt of the test"
ELSEWHERE = "rows may go to other partitions or topics than before"
MORE = "topics have more partitions than before"


def placement(shaping: dict[str, Any], kafka: dict[str, Any] | None = None, **bridge: Any) -> Any:
    of_kafka = {"bootstrap_servers": "b", "topic_prefix": "bank", **(kafka or {})}
    return placement_of(
        ShapingSettings(**shaping), BridgeSettings(**bridge), KafkaSettings(**of_kafka)
    )


def by(*columns: str, **shaping: Any) -> Any:
    return placement({"partition_by": {"*.*": columns or "row"}, **shaping})


def masked(**mask: Any) -> dict[str, Any]:
    return {"*.*": {"v": mask}}


HASHED: dict[str, Any] = {"masks": {"*.*": {"email": {"hash": "sha256"}}}, "salt": SALT}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (placement({}), placement({"keys": {"public.t": ["v"]}}), ["shaping.keys"]),
        (placement({}), placement(HASHED), ["shaping.masks of keys"]),
        (
            placement(HASHED),
            placement({**HASHED, "salt": "another salt of it"}),
            ["shaping.masks of keys"],
        ),
        (placement({}), placement({"masks": {"*.*": {"v": {"text": "-"}}}}), []),
        (placement({}), placement({"salt": SALT}), []),
        (placement({}), placement({"topic": "{prefix}.{table}"}), ["shaping.topic and routes"]),
        (
            placement({"outbox": {"message_prefix": "o"}}),
            placement({"outbox": {"message_prefix": "o", "partition": "p"}}),
            ["shaping.outbox"],
        ),
        (
            placement({"outbox": {"message_prefix": "o"}}),
            placement({"outbox": {"message_prefix": "o", "headers": {"a": "b"}}}),
            [],
        ),
        (
            placement({}),
            placement({}, decimal_handling="double"),
            ["the forms of values in keys"],
        ),
        (
            placement({}),
            placement({}, {"value_format": "json_schema_envelope"}),
            ["the forms of values in keys"],
        ),
        (placement({}), placement({"exclude": ["*.x"], "skip": {"*.*": ["t"]}}), []),
        ({}, placement({"keys": {"public.t": ["v"]}}), []),
        ({}, by("v"), ["shaping.partition_by"]),
        (
            by("v", masks=masked(truncate=4)),
            by("v", masks=masked(truncate=6)),
            ["shaping.masks of partition_by"],
        ),
        (by("w", masks=masked(truncate=4)), by("w", masks=masked(truncate=6)), []),
        (by(), by(masks=masked(text="-")), ["shaping.masks of partition_by"]),
        (
            by("v", masks={"*.*": {"v": {"truncate": 1}, "*": {"truncate": 2}}}),
            by("v", masks={"*.*": {"*": {"truncate": 2}, "v": {"truncate": 1}}}),
            ["shaping.masks of partition_by"],
        ),
        (
            by(),
            by(columns={"*.t": {"exclude": ["v"]}}),
            ["shaping.columns of partition_by: row"],
        ),
        (by("w"), by("w", columns={"*.t": {"exclude": ["v"]}}), []),
        (
            placement({"partition_by": {"*.t": ["v"], "public.*": ["w"]}}),
            placement({"partition_by": {"public.*": ["w"], "*.t": ["v"]}}),
            ["shaping.partition_by"],
        ),
        (
            placement({"keys": {"*.t": ["v"], "public.*": ["w"]}}),
            placement({"keys": {"public.*": ["w"], "*.t": ["v"]}}),
            ["shaping.keys"],
        ),
    ],
)
def test_settings_that_place_rows_are_told_from_others(
    one: dict[str, str], other: dict[str, str], expected: list[str]
) -> None:
    assert changed(one, other) == expected
    assert SALT not in str(one) + str(other)


counts = st.dictionaries(st.sampled_from("abc"), st.integers(1, 4))


@given(counts, counts)
def test_partitions_that_were_added_are_told(then: dict[str, int], now: dict[str, int]) -> None:
    found = grown(then, now)
    assert found.keys() == {t for t in then.keys() & now.keys() if now[t] > then[t]}
    assert all(found[topic] == (then[topic], now[topic]) for topic in found)


@pytest.mark.long
def test_a_start_tells_once_what_places_rows_elsewhere(
    pair: Provider, fresh_database: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
        connection.execute("ALTER TABLE t REPLICA IDENTITY FULL")
        bridge = new_bridge(conninfo).start().streaming()
        connection.execute("INSERT INTO t SELECT g, g FROM generate_series(1, 20) g")
        topic = f"{bridge.prefix}.public.t"

        def noted() -> bool:
            connection.execute("UPDATE t SET v = v")
            bridge.caught_up()
            return any(record.kafka.partitions.get(topic) == 2 for record in bridge.progress())

        eventually(noted, what="a record notes the topic's partitions")
        bridge.kill()
        bridge.start().streaming().caught_up()
        assert bridge.stop() == 0, bridge.output
        for said in (ELSEWHERE, MORE, "does not tell how rows were placed"):
            assert said not in bridge.output
        record = bridge.progress()[-1]
        assert record.settings.placement
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_partitions([NewPartitions(topic, 5)])[topic].result(patient(60))
        keyed = new_bridge(conninfo, shaping={"keys": {"public.t": ["v"]}}).start().streaming()
        for number in range(21, 41):
            connection.execute("INSERT INTO t VALUES (%s, 1)", [number])
        keyed.caught_up()
        assert keyed.stop() == 0, keyed.output
        assert ELSEWHERE in keyed.output
        assert "shaping.keys" in keyed.output
        assert MORE in keyed.output
        assert f"{topic}: 2, now 5" in keyed.output
        again = new_bridge(conninfo, shaping={"keys": {"public.t": ["v"]}}).start().streaming()
        again.caught_up()
        assert again.stop() == 0, again.output
    for said in (ELSEWHERE, MORE):
        assert said not in again.output


def test_tables_without_a_key_in_several_partitions_are_told() -> None:
    naming = Naming("bank", ShapingSettings(partition_by={"*.r": "row"}, keys={"*.k": ("v",)}))
    shapes = [
        TableShape(Relation(7, "public", name, "f", ()), False, "", key)
        for name, key in (("a", ()), ("b", ()), ("r", ()), ("k", ()), ("p", (PLACE,)))
    ]
    counts = {f"bank.public.{name}": 2 for name in "arkp"} | {"bank.public.b": 1}
    assert [*gathered(shapes, naming, lambda name: counts[name])] == ["public.a"]
    assert spreads_keyless(None) and spreads_keyless({}) and not spreads_keyless(by())
    adopted = with_keyless_spread(placement({}))
    assert spreads_keyless(adopted) and changed(adopted, placement({})) == []
