"""`slotbridge adopt` and `release` with a real Debezium, killed under load."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode
from schemas.events import snapshot_topic
from schemas.recovery import RecoveryRecord
from schemas.snapshot import SnapshotProgress
from services.adoption.failpoints import OF_A_RELEASE, OF_AN_ADOPTION
from services.adoption.offsets import offset_key, read_map, write_map
from services.bridge.failpoints import VARIABLE
from services.bridge.snapshot.progress import progress_event
from services.bridge.source.witness import ORIGIN_PREFIX
from services.testbed.java import SHORT_LIVED
from services.testbed.processes import Processes
from services.testbed.users import server_user
from tests.promises.adoption.ground import PROGRAM, Taken, connectors, kill_at_random, run
from tests.promises.bridge.reading import committed
from tests.providers.debezium import Debezium
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient

KILLED = -9


@pytest.fixture(scope="module")
def killed(
    pair: Provider, kafka: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Taken]]:
    """Four connectors of a Kafka Connect that was killed; their loads go on. The last: flat."""
    folder = tmp_path_factory.mktemp("adoption")
    folder.chmod(0o755)
    rng = random.Random(7)
    with (
        Processes(folder, server_user()) as processes,
        connectors(pair.primary, kafka, folder / "c", processes, rng, 4, flat=1) as (
            debezium,
            taken,
        ),
    ):
        kill_at_random(debezium, taken, rng, 7)
        for one in taken:
            one.translate()
        yield taken


def test_killed_at_each_step_and_given_back(killed: list[Taken], tmp_path: Path) -> None:
    one, *_ = killed
    assert one.load is not None
    one.load.go()
    for step in OF_AN_ADOPTION:
        done = one.adopt(**{VARIABLE: f"{step}:1"})
        assert done.returncode == KILLED, (step, done.returncode, done.stderr)
    again = one.adopt()
    assert again.returncode == ExitCode.WITNESSES_DISAGREE, again.stderr
    assert "it is adopted already" in again.stderr
    bridge = one.new_bridge().streaming()
    one.load.more(30)
    eventually(lambda: _origin_lsn(one), what="the bridge has moved its origin")
    bridge.kill()  # the slot is behind what it has published
    assert _failover(one)
    _snapshot_is_unfinished(one)
    offsets = one.worker / "offsets"
    owner = offsets.stat().st_uid
    for step in OF_A_RELEASE:
        done = one.release(**{VARIABLE: f"{step}:1"})
        assert done.returncode == KILLED, (step, done.returncode, done.stderr)
    assert one.release().returncode == 0
    assert offsets.stat().st_uid == owner
    tmp_path.chmod(0o755)
    with Processes(tmp_path, server_user()) as processes:
        debezium = Debezium(
            one.worker,
            [one.connector],
            bootstrap_servers=one.broker.bootstrap_servers,
            processes=processes,
            jvm_options=SHORT_LIVED,
        )
        debezium.start(timeout_s=patient(100))
        one.load.more(30)
        debezium.kill()
    again = one.adopt()
    assert again.returncode == 0, again.stderr
    one.new_bridge().streaming()
    one.load.more(30)
    found = one.compared()
    assert (found.lost, found.twice, found.wrong) == (0, 0, 0), found.faults
    assert found.ours > 0 and found.theirs > 0
    settings = yaml.safe_load(one.config.read_text())
    del settings["shaping"]["skip"]  # tables whose truncates are not published can't be compared
    one.config.write_text(yaml.safe_dump(settings))
    recovered = run(
        *("recover", "--config", str(one.config), "--yes", "--json", "--force"),
        *("--without", "public.log"),
    )
    assert recovered.returncode == 0, recovered.stderr
    tables = RecoveryRecord.model_validate_json(recovered.stdout).tables
    assert {name: (t.created, t.updated, t.deleted) for name, t in tables.items()} == dict.fromkeys(
        (f"public.{table}" for table in ("batch", "counters", "last", "moved")), (0, 0, 0)
    )


def _snapshot_is_unfinished(one: Taken) -> None:
    """Require that nothing is given back while Kafka lacks rows of a snapshot."""
    topic = snapshot_topic(one.prefix)
    admin = AdminClient({"bootstrap.servers": one.broker.bootstrap_servers})
    made = NewTopic(topic, 1, 1, config={"cleanup.policy": "compact"})
    admin.create_topics([made])[topic].result(patient(30))
    told = SnapshotProgress.model_validate(
        {
            "slot": one.connector.slot,
            "schema": "public",
            "table": "log",
            "oid": 1,
            "key": ["id"],
            "last": ["1"],
            "rows": 1,
            "chunks": 1,
            "done": False,
            "waiting": 1,
            "timeline": 1,
            "commit_lsn": 1,
            "seq": 0,
            "seen_lsn": 1,
            "ts_ms": 0,
        }
    )
    producer = Producer({"bootstrap.servers": one.broker.bootstrap_servers})
    for done in (False, True):
        now = told.model_copy(update={"done": done})
        event = progress_event(one.prefix, now)
        producer.produce(topic, event.value, event.key)
        assert producer.flush(patient(30)) == 0
        if not done:
            refused = one.release()
            assert refused.returncode == ExitCode.WITNESSES_DISAGREE, refused.stderr
            assert "has not read all rows of public.log" in refused.stderr


@pytest.mark.long
def test_adopt_refuses_before_it_changes_anything(killed: list[Taken]) -> None:
    _, one, *_ = killed
    assert one.load is not None
    one.load.stop()
    plan = json.loads(one.adopt("--dry-run").stdout)
    assert plan["dry_run"] and not plan["failover"]

    taken = psycopg.connect(one.conninfo, autocommit=True)
    row = taken.execute("SELECT confirmed_flush_lsn::text FROM pg_replication_slots").fetchone()
    assert row is not None

    _refused(one, ExitCode.SETTINGS, "transforms=x has no counterpart", transforms="x")
    _refused(one, ExitCode.SETTINGS, "bridge.tombstones", **{"tombstones.on.delete": "false"})
    offsets = one.worker / "offsets"
    was = offsets.read_bytes() if offsets.exists() else b""
    key = offset_key(one.connector.name, one.prefix)
    snapshot = b'{"lsn":1,"snapshot":"INITIAL","last_snapshot_record":false}'
    offsets.write_bytes(write_map({**read_map(was), key: snapshot}))
    _refused(one, ExitCode.WITNESSES_DISAGREE, "the initial snapshot of Debezium is not finished")
    offsets.write_bytes(write_map({**read_map(was), key: b'{"lsn":1,"lsn_commit":1}'}))
    _refused(one, ExitCode.WITNESSES_DISAGREE, "the slot is confirmed up to")
    offsets.write_bytes(write_map({**read_map(was), key: b'{"lsn":1'}))
    _refused(one, ExitCode.WITNESSES_DISAGREE, "can't be read")
    offsets.write_bytes(b"text")
    _refused(one, ExitCode.WITNESSES_DISAGREE, "not a standalone worker's offset file")
    offsets.unlink()
    _refused(one, ExitCode.WITNESSES_DISAGREE, "no offset", **{"snapshot.mode": "initial"})

    producer = Producer({"bootstrap.servers": one.broker.bootstrap_servers})
    producer.produce(f"{one.prefix}.transaction", b'{"status":"BEGIN","id":"7:8"}')
    assert producer.flush(patient(30)) == 0
    offsets.write_bytes(was or write_map({}))
    _refused(one, ExitCode.WITNESSES_DISAGREE, "Debezium's transaction metadata")
    for _ in range(20):
        producer.produce(f"{one.prefix}.transaction", b'{"status":"END","commit_lsn":8}')
    assert producer.flush(patient(30)) == 0

    # as if Debezium had said that it has all, and lost the last transactions
    taken.execute("INSERT INTO last VALUES (1, 1)")
    now = taken.execute("SELECT (pg_current_wal_lsn() - '0/0')::bigint").fetchone()
    assert now is not None
    all_of_it = b'{"lsn":%d,"lsn_commit":%d}' % (now[0], now[0])
    offsets.write_bytes(write_map({**read_map(was), key: all_of_it}))
    topic = f"{one.prefix}.public.last"
    if _has_gone_on(one):
        _refused(one, ExitCode.WITNESSES_DISAGREE, topic)
    taken.close()
    offsets.write_bytes(was or write_map({}))


@pytest.mark.long
def test_adopt_continues_topics_of_flat_rows(killed: list[Taken]) -> None:
    *_, one = killed
    assert one.load is not None
    one.load.go()
    done = one.adopt()
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["left_out"].values()) > 0
    one.new_bridge().streaming()
    one.load.more(30)
    found = one.compared()
    assert (found.lost, found.twice, found.wrong) == (0, 0, 0), found.faults
    assert found.ours > 0 and found.theirs > 0


def _stopped_at(one: Taken, step: str) -> subprocess.Popen[str]:
    """Start `adopt`, and wait until it has stopped at a step."""
    adopting = subprocess.Popen(
        [PROGRAM, "adopt", *one.arguments(), "--config", str(one.config), "--yes"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, VARIABLE: f"{step}:1:stop"},
    )

    def stopped() -> bool:
        state = Path(f"/proc/{adopting.pid}/stat").read_text(encoding="utf-8")
        assert adopting.poll() is None, adopting.communicate()
        return state.rpartition(")")[2].split()[0] == "T"

    eventually(stopped, what=f"it stops at {step}", timeout_s=60)
    return adopting


def _send_late(one: Taken) -> None:
    """Send what a frozen Debezium might: an event that the topic has already."""
    topic = f"{one.prefix}.public.counters"
    found = [
        (key, value)
        for _, key, value in committed(one.broker.bootstrap_servers, topic)
        if value is not None
    ]
    producer = Producer({"bootstrap.servers": one.broker.bootstrap_servers})
    producer.produce(topic, found[-1][1], found[-1][0])
    assert producer.flush(patient(30)) == 0


@pytest.mark.long
def test_adopt_names_the_records_of_a_running_debezium(killed: list[Taken]) -> None:
    """Before the events are sent: refused; afterwards: named."""
    _, _, one, _ = killed
    assert one.load is not None
    one.load.pause()
    adopting = _stopped_at(one, "adopt planned")
    _send_late(one)
    adopting.send_signal(signal.SIGCONT)
    said, _ = adopting.communicate(timeout=patient(300))
    assert adopting.returncode == ExitCode.SLOT_IN_USE, said
    assert "1 records were written since the topic was read" in said
    adopting = _stopped_at(one, "adopt failover")
    _send_late(one)
    adopting.send_signal(signal.SIGCONT)
    said, _ = adopting.communicate(timeout=patient(300))
    assert adopting.returncode == ExitCode.CHECK_FAILED, said
    assert f"{one.prefix}.public.counters[" in said and "which are there twice" in said


def _refused(one: Taken, code: int, reason: str, **config: str) -> None:
    """Require that it is refused with the connector's configuration changed so."""
    file = one.connector_file()
    document = json.loads(file.read_text())
    document["config"] |= config
    changed = file.with_suffix(".changed.json")
    changed.write_text(json.dumps(document))
    worker = ["--worker", str(one.worker / "worker.properties")]
    done = run(
        *("adopt", "--from-debezium", str(changed), *worker, "--config", str(one.config), "--yes")
    )
    assert done.returncode == code, done.stderr
    assert reason in done.stderr, done.stderr


def _has_gone_on(one: Taken) -> bool:
    return bool(json.loads(one.adopt("--dry-run", "--publish-lacking").stdout)["lacking"])


def _origin_lsn(one: Taken) -> str | None:
    with psycopg.connect(one.conninfo, autocommit=True) as connection:
        row = connection.execute(
            "SELECT pg_replication_origin_progress(%s, false)::text",
            [ORIGIN_PREFIX + one.connector.slot],
        ).fetchone()
    return row[0] if row is not None else None


def _failover(one: Taken) -> bool:
    with psycopg.connect(one.conninfo, autocommit=True) as connection:

        def turned_on() -> bool:
            row = connection.execute(
                "SELECT failover FROM pg_replication_slots WHERE slot_name = %s",
                [one.connector.slot],
            ).fetchone()
            return row is not None and bool(row[0])

        eventually(turned_on, what="the slot is a failover slot")
    return True
