"""A row that is much larger than a record may be: in a snapshot, in the stream, in few copies."""

import base64
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode
from schemas.events import DeadLetter
from schemas.large_values import reference_of
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import INITIAL, done, told
from tests.promises.bridge.test_dead_letters import noise
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient

MIB: Final = 2**20
COPIES_MAX: Final = 14
"""How many bytes more may be resident for each byte of the value, which is two of its text."""
LARGE: Final = "INSERT INTO photo VALUES (%s, decode(repeat('00ff', %s), 'hex'))"


def resident_mib(bridge: Bridge, what: str) -> int:
    """VmRSS, or VmHWM: the most since `forget_peak`."""
    status = Path(f"/proc/{bridge.pid}/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) // 1024


def forget_peak(bridge: Bridge) -> int:
    """Let VmHWM begin anew (proc(5), clear_refs); return what is resident now."""
    Path(f"/proc/{bridge.pid}/clear_refs").write_text("5", encoding="ascii")
    return resident_mib(bridge, "VmRSS")


def dead(bridge: Bridge) -> list[DeadLetter]:
    return [DeadLetter.model_validate_json(v) for _, v in bridge.records("dead") if v is not None]


@pytest.fixture
def connection(pair: Provider, fresh_database: str) -> Any:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as opened:
        opened.execute("CREATE TABLE photo (id int PRIMARY KEY, body bytea)")
        yield opened


def read_and_stream(bridge: Bridge, connection: psycopg.Connection[Any], size: int) -> list[int]:
    """A large row between small ones, by a snapshot and by the stream; what each takes, in MiB."""
    insert_three(connection, 1, size)
    bridge.start().streaming()
    idle = forget_peak(bridge)
    done(bridge)
    taken = [resident_mib(bridge, "VmHWM") - idle]
    idle = forget_peak(bridge)
    insert_three(connection, 4, size)
    bridge.caught_up()
    taken.append(resident_mib(bridge, "VmHWM") - idle)
    assert bridge.sessions == 1, bridge.output
    assert bridge.stop() == 0, bridge.output
    return taken


def insert_three(connection: psycopg.Connection[Any], first: int, size: int) -> None:
    with connection.transaction():
        for number, bytes_each in enumerate((10, size, 10)):
            connection.execute(LARGE, [first + number, bytes_each // 2])


@pytest.mark.long
@pytest.mark.parametrize("size_mib", [20, pytest.param(100, marks=pytest.mark.long)])
def test_a_row_too_large_for_kafka_is_a_dead_letter(
    size_mib: int, connection: psycopg.Connection[Any], new_bridge: NewBridge
) -> None:
    bridge = new_bridge(
        connection.info.dsn, snapshot=INITIAL, on_refused="dead_letter", loaded=False
    )
    taken = read_and_stream(bridge, connection, size_mib * MIB)
    assert sorted(event["after"]["id"] for event in bridge.events("photo")) == [1, 3, 4, 6]
    letters = dead(bridge)
    assert [(one.table, one.seq) for one in letters] == [("public.photo", 1)] * 2
    for letter, id_ in zip(letters, (2, 5), strict=True):
        assert letter.key is not None and letter.key.text == f'{{"id":{id_}}}'
        assert letter.value is not None and letter.value.truncated
        assert letter.value.bytes > size_mib * MIB * 4 // 3
    assert max(taken) < COPIES_MAX * size_mib, taken


@pytest.mark.long
@pytest.mark.parametrize("size_mib", [20, 100])
def test_a_row_with_a_large_value_refers_to_where_it_is_stored(
    size_mib: int, connection: psycopg.Connection[Any], new_bridge: NewBridge, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    bridge = new_bridge(
        connection.info.dsn,
        snapshot=INITIAL,
        shaping={"large_values": {"*.*": {"*": {"claim_check_bytes": MIB}}}},
        claim_check={"uri": store.as_uri()},
        loaded=False,
    )
    taken = read_and_stream(bridge, connection, size_mib * MIB)
    events = sorted((event["after"] for event in bridge.events("photo")), key=itemgetter("id"))
    assert [row["id"] for row in events] == [1, 2, 3, 4, 5, 6]
    for row in (events[1], events[4]):
        found = reference_of(base64.b64decode(row["body"]), prefix=store.as_uri())
        assert found is not None and found.size_bytes == size_mib * MIB
        assert (store / found.sha256).stat().st_size == size_mib * MIB
    assert max(taken) < COPIES_MAX * size_mib, taken


@pytest.mark.long
def test_a_row_of_a_snapshot_that_kafka_refuses_is_named(
    connection: psycopg.Connection[Any], new_bridge: NewBridge
) -> None:
    """By its place and its bytes, with the remedies; the process ends and does not try again."""
    insert_three(connection, 1, 2 * MIB)
    bridge = new_bridge(connection.info.dsn, snapshot=INITIAL).start()
    assert bridge.exit_code() == ExitCode.RECORD_REFUSED, bridge.output
    said = bridge.output.splitlines()[-1]
    for part in (f"topic {bridge.prefix}.public.photo", "table public.photo", "seq 1", "dead"):
        assert part in said, said


@pytest.mark.long
@pytest.mark.parametrize("policy", ["stop", "dead_letter"])
def test_a_row_of_a_snapshot_that_the_broker_refuses(
    policy: str, connection: psycopg.Connection[Any], kafka: Broker, new_bridge: NewBridge
) -> None:
    """It is read at another place at each attempt, and other transactions pass meanwhile."""
    connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    sizes = {1: 10, 2: 40_000, 3: 10, 4: 50_000, 5: 10}
    for id_, size in sizes.items():
        connection.execute("INSERT INTO t VALUES (%s, %s)", [id_, noise(size)])
    bridge = new_bridge(
        connection.info.dsn, snapshot={**INITIAL, "chunk_rows_max": 3}, on_refused=policy
    )
    topic = NewTopic(f"{bridge.prefix}.public.t", 1, 1, config={"max.message.bytes": "20000"})
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([topic])[topic.topic].result(patient(60))
    bridge.start()
    if policy == "stop":
        assert bridge.exit_code() == ExitCode.RECORD_REFUSED, bridge.output
        said = bridge.output.splitlines()[-1]
        for part in (f"topic {topic.topic}", "table public.t", "max.message.bytes"):
            assert part in said, said
        return
    bridge.streaming()

    def all_read() -> bool:
        assert bridge.running, bridge.output
        there = f"{bridge.prefix}.snapshot" in bridge.topics()
        return there and any(one.table == "t" and one.done for one in told(bridge))

    eventually(all_read, what="Kafka has all rows", timeout_s=120)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert sorted(event["after"]["id"] for event in bridge.events("t")) == [1, 3, 5]
    keys = [letter.key and letter.key.text for letter in dead(bridge)]
    assert keys == ['{"id":2}', '{"id":4}']
    assert "full batches again" in bridge.output


@pytest.mark.long
def test_a_row_without_a_key_that_the_broker_refuses_is_named(
    connection: psycopg.Connection[Any], kafka: Broker, new_bridge: NewBridge
) -> None:
    """Nothing tells it from another row when it is read again."""
    connection.execute("CREATE TABLE log (v text)")
    connection.execute("INSERT INTO log VALUES (%s)", [noise(40_000)])
    bridge = new_bridge(connection.info.dsn, snapshot=INITIAL, on_refused="dead_letter")
    topic = NewTopic(f"{bridge.prefix}.public.log", 1, 1, config={"max.message.bytes": "20000"})
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([topic])[topic.topic].result(patient(60))
    bridge.start()
    assert bridge.exit_code() == ExitCode.RECORD_REFUSED, bridge.output
    assert "table public.log" in bridge.output.splitlines()[-1]
