"""Shaping through a running bridge: what is in Kafka, byte by byte, and what is not."""

import hmac
import json
import signal
from typing import Any

import psycopg
import pytest

from schemas.errors import ExitCode
from schemas.events import own_topics, table_names_topic
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import committed, read_committed
from tests.promises.bridge.running import Bridge
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

SALT = "a salt that only tests know"
SHAPING: dict[str, Any] = {
    "exclude": ["public.hidden", "nothing.*"],
    "columns": {"public.person": {"exclude": ["ssn"]}},
    "masks": {
        "public.person": {
            "email": {"hash": "sha256"},
            "phone": {"truncate": 3},
            "salary": {"text": "-"},
        },
    },
    "salt": SALT,
    "keys": {"public.visit": ["person"]},
    "skip": {"public.visit": ["u"], "public.person": ["t"]},
    "topic": "{prefix}.t.{table}",
    "routes": [{"tables": r"public\.part_\d", "topic": "{prefix}.parts"}],
}


def everything(bridge: Bridge, *, but: str = "") -> bytes:
    """All bytes of all topics of the prefix, but of one; the topics' names too."""
    found = b""
    for topic in bridge.topics():
        if topic.startswith(bridge.prefix) and topic != but:
            found += topic.encode() + b"\n"
            for _, key, value in committed(bridge.kafka.bootstrap_servers, topic):
                found += (key or b"") + (value or b"") + b"\n"
    return found


def values(bridge: Bridge, topic: str) -> list[dict[str, Any]]:
    return [json.loads(value) for _, value in bridge.records(topic) if value is not None]


def test_all_ways_of_shaping_work_together(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE hidden (id int PRIMARY KEY, what text)")
        connection.execute(
            "CREATE TABLE person (id int PRIMARY KEY, ssn text, email text, phone text, salary int)"
        )
        connection.execute("ALTER TABLE person REPLICA IDENTITY FULL")
        connection.execute("CREATE TABLE visit (person int, day date)")
        connection.execute("ALTER TABLE visit REPLICA IDENTITY FULL")
        for number in (1, 2):
            connection.execute(f"CREATE TABLE part_{number} (id int PRIMARY KEY)".encode())
        bridge = new_bridge(conninfo, shaping=SHAPING).start().streaming()
        with connection.transaction():
            connection.execute("INSERT INTO hidden VALUES (1, 'sesame')")
            connection.execute("INSERT INTO person VALUES (1, 'sesame', 'a@b', '0171 23', 77777)")
            connection.execute("UPDATE person SET ssn = 'sesame 2', salary = 88888")
            connection.execute("INSERT INTO visit VALUES (1, '2026-01-01')")
            connection.execute("UPDATE visit SET person = 2")
            connection.execute("DELETE FROM visit")
            connection.execute("INSERT INTO part_1 VALUES (1)")
            connection.execute("INSERT INTO part_2 VALUES (1)")
        connection.execute("INSERT INTO hidden VALUES (2, 'sesame')")
        connection.execute("TRUNCATE person, visit")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    assert "matches no published table" in bridge.output
    assert "exclude: nothing.*" in bridge.output
    own = own_topics(bridge.prefix)
    topics = {t for t in bridge.topics() if t.startswith(bridge.prefix) and t not in own}
    assert topics == {f"{bridge.prefix}.{name}" for name in ("t.person", "t.visit", "parts")}
    email = hmac.digest(SALT.encode(), b"a@b", "sha256").hex()
    persons = values(bridge, "t.person")
    row = {"id": 1, "email": email, "phone": "017", "salary": "-"}
    assert [(e["op"], e["before"], e["after"]) for e in persons] == [
        ("c", None, row),
        ("u", row, row),
    ]
    visits = [(key, value) for key, value in bridge.records("t.visit") if key is not None]
    keys = sorted(key or b"" for key, _ in visits)
    assert keys == [b'{"person":1}', b'{"person":2}', b'{"person":2}']
    assert [e["op"] for e in values(bridge, "t.visit")].count("t") == 2
    assert sorted(e["source"]["table"] for e in values(bridge, "parts")) == ["part_1", "part_2"]
    shapes = {e["table"]: [c["name"] for c in e["after"]] for e in values(bridge, "schema")}
    assert shapes["person"] == ["id", "email", "phone", "salary"]
    assert set(shapes) == {"person", "visit", "part_1", "part_2"}
    ends = [e for e in values(bridge, "transaction") if e["status"] == "END"]
    assert [e["event_count"] for e in ends] == [6, 1]
    assert {c["data_collection"]: c["event_count"] for c in ends[0]["data_collections"]} == {
        "public.person": 2,
        "public.visit": 2,
        "public.part_1": 1,
        "public.part_2": 1,
    }
    told = everything(bridge) + bridge.output.encode()
    for secret in (b"sesame", b"ssn", b"a@b", b"0171", b"77777", b"88888"):
        assert secret not in told, secret
    named = table_names_topic(bridge.prefix)  # it has the names alone, not for consumers
    assert b"hidden" not in everything(bridge, but=named) + bridge.output.encode()
    assert SALT.encode() not in told


def test_an_outbox(pair: Provider, fresh_database: str, new_bridge: NewBridge) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute(
            "CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(),"
            " aggregatetype text, aggregateid text, type text, payload jsonb)"
        )
        shaping = {"outbox": {"table": "public.outbox", "message_prefix": "outbox"}}
        bridge = new_bridge(conninfo, shaping=shaping).start().streaming()
        for number in range(20):
            with connection.transaction():
                connection.execute("INSERT INTO t VALUES (%s)", [number])
                connection.execute(
                    "INSERT INTO outbox (aggregatetype, aggregateid, type, payload)"
                    " VALUES (%s, %s, 'Made', %s)",
                    [("order", "user")[number % 2], str(number % 3), json.dumps({"n": number})],
                )
                connection.execute("DELETE FROM outbox")
                connection.execute(
                    "SELECT pg_logical_emit_message(true, 'outbox', jsonb_build_object("
                    "'aggregatetype', 'note', 'aggregateid', NULL,"
                    " 'payload', jsonb_build_object('n', %s::int))::text)",
                    [number],
                )
        topic = f"{bridge.prefix}.outbox.order"  # made with its first message
        eventually(
            lambda: topic in bridge.topics() and bridge.records("outbox.order"),
            what="a message is there",
        )
        bridge.kill()
        bridge.start().streaming().caught_up()
        connection.execute("TRUNCATE outbox")
        bridge.caught_up()
        assert bridge.running, bridge.output
        connection.execute("INSERT INTO outbox (aggregatetype, payload) VALUES ('order', '{}')")
        connection.execute("UPDATE outbox SET type = 'x'")
        assert bridge.exit_code() == ExitCode.RECORD_REFUSED, bridge.output
    assert "shaping.skip" in bridge.output
    assert f"{bridge.prefix}.public.outbox" not in bridge.topics()
    orders = [value for key, value in bridge.records("outbox.order") if key is not None]
    users = bridge.records("outbox.user")
    assert sorted(json.loads(v)["n"] for v in orders if v) == list(range(0, 20, 2))
    assert sorted(json.loads(v)["n"] for _, v in users if v) == list(range(1, 20, 2))
    notes = [json.loads(value)["n"] for _, value in bridge.records("outbox.note") if value]
    assert sorted(notes) == list(range(20))
    assert all(json.loads(v)["n"] % 3 == int(key or b"") for key, v in users if v)


@pytest.mark.long
def test_partitions_of_an_outbox(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    shaping = {"outbox": {"table": "public.outbox", "partition": "shard"}}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text DEFAULT 'order',"
            " aggregateid text DEFAULT '7', type text, payload text DEFAULT 'x', shard int)"
        )
        bridge = new_bridge(conninfo, shaping=shaping).start().streaming()
        connection.execute(
            "INSERT INTO outbox (id, shard) SELECT g, g % 2 FROM generate_series(1, 9) g"
        )
        bridge.caught_up()
        connection.execute("INSERT INTO outbox (id, shard) VALUES (10, 2)")
        assert bridge.exit_code() == ExitCode.RECORD_REFUSED, bridge.output
        assert "partition is not one of the topic's, 0 to 1" in bridge.output.splitlines()[-1]
        going_on = new_bridge(conninfo, shaping=shaping, on_refused="dead_letter")
        going_on.start().streaming()
        connection.execute("INSERT INTO outbox (id) VALUES (11)")
        going_on.caught_up()
        assert going_on.stop() == 0, going_on.output
    records = read_committed(bridge.kafka.bootstrap_servers, [f"{bridge.prefix}.outbox.order"])
    found = {int(record.headers["id"] or b""): record.partition for record in records}
    assert found.pop(11) in (0, 1)
    assert found == {number: number % 2 for number in range(1, 10)}
    assert len(records) == 10
    assert len(bridge.records("dead")) == 1


@pytest.mark.long
def test_changes_that_replication_brought_are_left_out(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with (
        psycopg.connect(conninfo, autocommit=True) as connection,
        psycopg.connect(conninfo, autocommit=True) as replica,
    ):
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        replica.execute("SELECT pg_replication_origin_create(%s)", [f"other_{topic_prefix}"])
        replica.execute("SELECT pg_replication_origin_session_setup(%s)", [f"other_{topic_prefix}"])
        bridge = new_bridge(conninfo, origin="none").start().streaming()
        for number in range(0, 20, 2):
            replica.execute("INSERT INTO t VALUES (%s)", [number])
            connection.execute("INSERT INTO t VALUES (%s)", [number + 1])
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        refused = new_bridge(conninfo, origin="any").start()
        assert refused.exit_code() == ExitCode.WITNESSES_DISAGREE, refused.output
        bridge = new_bridge(conninfo, origin="any", accept=[refused.token])
        bridge.start().streaming()
        replica.execute("INSERT INTO t VALUES (100)")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    assert sorted(e["after"]["id"] for e in bridge.events("t")) == [*range(1, 20, 2), 100]


@pytest.mark.long
def test_settings_changed_in_the_middle_of_a_large_transaction(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table in ("a", "b"):
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)".encode())
        bridge = new_bridge(conninfo, transaction_bytes_max=2**18)
        bridge.start(SLOTBRIDGE_FAILPOINT="between parts:3").streaming()
        with connection.transaction():
            for table in ("a", "b"):
                connection.execute(
                    f"INSERT INTO {table} SELECT g, repeat('x', 50)"
                    " FROM generate_series(1, 20000) g".encode()
                )
            connection.execute("UPDATE a SET id = id + 100000 WHERE id < 10")
        assert bridge.exit_code() == -signal.SIGKILL
        last = bridge.progress()[-1].position
        assert 0 < last.seq == sum(last.counts.values()) < 20000
        skipping = new_bridge(
            conninfo, shaping={"exclude": ["public.b"]}, transaction_bytes_max=2**18
        )
        skipping.start().streaming().caught_up()
        assert skipping.stop() == 0, skipping.output
    assert set(bridge.identities("a").values()) == {1}
    assert len(bridge.identities("a")) == 20018
    assert f"{bridge.prefix}.public.b" not in bridge.topics()
    (end,) = [e for e in values(bridge, "transaction") if e["status"] == "END"]
    assert end["event_count"] == 20018


@pytest.mark.long
def test_without_tombstones(pair: Provider, fresh_database: str, new_bridge: NewBridge) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo, tombstones=False).start().streaming()
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("UPDATE t SET id = 2")
        connection.execute("DELETE FROM t")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        assert None not in [value for _, value in bridge.records("public.t")]
        assert sorted(e["op"] for e in bridge.events("t")) == ["c", "c", "d", "d"]
        bridge = new_bridge(conninfo, tombstones=True).start().streaming()
        connection.execute("INSERT INTO t VALUES (3)")
        connection.execute("DELETE FROM t")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    gone = [key for key, value in bridge.records("public.t") if value is None]
    assert gone == [b'{"id":3}']


@pytest.mark.long
@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        ({"columns": {"a.t": {"exclude": ["id"]}}}, "would lose its key column id"),
    ],
)
def test_value_that_the_shaping_can_not_publish_stops_the_bridge(
    shaping: dict[str, Any],
    expected: str,
    pair: Provider,
    fresh_database: str,
    new_bridge: NewBridge,
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for schema in ("a", "b"):
            connection.execute(f"CREATE SCHEMA {schema}".encode())
            connection.execute(f"CREATE TABLE {schema}.t (id int PRIMARY KEY, v int)".encode())
        bridge = new_bridge(conninfo, shaping=shaping).start().streaming()
        connection.execute("INSERT INTO b.t VALUES (1)")
        connection.execute("INSERT INTO a.t VALUES (1)")
        code = bridge.exit_code()
    assert code in (ExitCode.RECORD_REFUSED, ExitCode.SETTINGS), bridge.output
    assert expected in bridge.output.splitlines()[-1]
    assert "at LSN" in bridge.output.splitlines()[-1]


@pytest.mark.long
@pytest.mark.since_18
def test_a_prepared_transaction_is_shaped_as_settings_are_at_its_commit(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """It is staged as the server sent it; what may leave is decided when it is published."""
    conninfo = pair.primary.conninfo(fresh_database)
    gid = f"shaped {fresh_database}"
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE hidden (id int PRIMARY KEY, what text)")
        connection.execute("CREATE TABLE person (id int PRIMARY KEY, email text)")
        bridge = new_bridge(conninfo, two_phase=True).start().streaming()
        for statement in (
            "BEGIN",
            "INSERT INTO hidden VALUES (1, 'not to be seen')",
            "INSERT INTO person VALUES (1, 'a@example.org')",
            f"PREPARE TRANSACTION '{gid}'",
        ):
            connection.execute(statement.encode())
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        masks = {"public.person": {"email": {"truncate": 1}}}
        shaping = {"exclude": ["public.hidden"], "masks": masks}
        shaped = new_bridge(conninfo, two_phase=True, shaping=shaping).start().streaming()
        connection.execute(f"COMMIT PREPARED '{gid}'".encode())
        shaped.caught_up()
    assert [event["after"] for event in shaped.events("person")] == [{"id": 1, "email": "a"}]
    assert f"{bridge.prefix}.public.hidden" not in bridge.topics()
