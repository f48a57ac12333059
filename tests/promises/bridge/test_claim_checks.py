"""Large values through a running bridge: stored in S3 or a folder before Kafka refers to them."""

import base64
import contextlib
import hashlib
import json
import resource
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import structlog
from botocore.awsrequest import AWSResponse
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.serialization import MessageField

from schemas.acceptance import Acceptance
from schemas.errors import ExitCode, Retryable
from schemas.large_values import ClaimCheckSettings, Reference, reference_of, sha256, truncation_of
from schemas.recovery import RecoveryRecord
from services.bridge import failpoints
from services.bridge.progress.errors import OtherStorage
from services.bridge.sink.object_storage import Bucket
from services.bridge.sink.storage_identity import MARKER, judge_storage
from tests.marks import long_but
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import committed
from tests.promises.bridge.recover_process import drop_slot, recover
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_schema_registry import PARTS, READERS
from tests.promises.tables.object_storage import KEY, REGION, SECRET, ObjectStorage, object_storage
from tests.providers.interface import Provider
from tests.providers.proxy import Proxy
from tests.providers.registry import registry
from tests.providers.standstill import Standstill
from tests.providers.tokens import token_of
from tests.providers.waiting import eventually, patient, patient_ms

LARGE = 1_000
STOOD_STILL_S = patient(0.5)
"""Whoever stands still for so long may lose a session by its time-out, whatever he does."""
CLAIMS = {"large_values": {"*.*": {"*": {"claim_check_bytes": LARGE}}}}
Run = Callable[..., None]


@pytest.fixture(scope="module")
def storage(servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    with object_storage(tmp_path_factory.mktemp("s3") / "moto.log") as found:
        yield found


def section(found: ObjectStorage, prefix: str, **more: Any) -> dict[str, Any]:
    """The settings of a bridge's storage."""
    return {
        "uri": f"s3://{found.bucket}/{prefix}",
        "endpoint_url": found.endpoint,
        "region": REGION,
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        **more,
    }


@pytest.fixture
def settings(storage: ObjectStorage, topic_prefix: str) -> ClaimCheckSettings:
    """A bridge's settings of a bucket, under a prefix of its own."""
    return ClaimCheckSettings.model_validate(section(storage, topic_prefix))


@pytest.fixture
def source(pair: Provider, fresh_database: str) -> Iterator[tuple[str, Run]]:
    """A database with a table, and what runs statements in it, each a transaction."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:

        def run(*statements: str) -> None:
            for statement in statements:
                connection.execute(statement.encode())

        run(
            "CREATE TABLE doc (id text PRIMARY KEY, body text, photo bytea, facts jsonb, n int)",
            "ALTER TABLE doc REPLICA IDENTITY FULL",
        )
        yield conninfo, run


def stored(found: ObjectStorage, reference: Reference) -> bytes:
    """The object of a reference, which must be what it says."""
    parts = urlsplit(reference.uri)
    answer = found.client().get_object(Bucket=parts.netloc, Key=parts.path.lstrip("/"))
    data: bytes = answer["Body"].read()
    assert len(data) == reference.size_bytes
    assert hashlib.sha256(data).hexdigest() == reference.sha256
    assert reference.uri.endswith(f"/{reference.sha256}")
    return data


def whole(found: ObjectStorage, prefix: str, value: str | None) -> str | None:
    """The text that a column had."""
    reference = (
        None
        if value is None
        else reference_of(value.encode(), prefix=section(found, prefix)["uri"])
    )
    return value if reference is None else stored(found, reference).decode()


def test_rows_of_a_snapshot_and_changes_refer_to_what_is_stored(
    source: tuple[str, Run], new_bridge: NewBridge, storage: ObjectStorage, topic_prefix: str
) -> None:
    conninfo, run = source
    key = "k" * (LARGE + 1)
    run(
        f"INSERT INTO doc VALUES ('{key}', repeat('ä', 600), decode(repeat('00ff', 800), 'hex'),"
        " jsonb_build_object('a', repeat('x', 2000)), 1)"
    )
    bridge = new_bridge(
        conninfo,
        shaping=CLAIMS,
        snapshot={"mode": "initial"},
        claim_check=section(storage, topic_prefix),
    )
    bridge.start().streaming()
    eventually(
        lambda: (
            f"{topic_prefix}.public.doc" in bridge.topics()
            and any(e["op"] == "r" for e in bridge.events("doc"))
        ),
        what="the row of the snapshot",
    )
    run(
        "INSERT INTO doc VALUES ('small', 'body', '\\x00ff', '{}', 2)",
        "INSERT INTO doc VALUES ('odd', '{\"__slotbridge_claim_check\": 1}', NULL, NULL, 3)",
        "UPDATE doc SET body = repeat('b', 3000) WHERE n = 1",
        "DELETE FROM doc WHERE n = 1",
    )
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    events = list(bridge.events("doc"))
    of_key = [e for e in events if (e["after"] or e["before"])["id"] == key]
    assert [e["op"] for e in of_key] == ["r", "u", "d"], "large keys stay whole"
    first, uri = of_key[0]["after"], section(storage, topic_prefix)["uri"]
    assert whole(storage, topic_prefix, first["body"]) == "ä" * 600
    photo = reference_of(base64.b64decode(first["photo"]), prefix=uri)
    assert photo is not None and stored(storage, photo) == b"\0\xff" * 800
    facts = reference_of(first["facts"].encode(), prefix=uri)
    assert facts is not None and json.loads(stored(storage, facts)) == {"a": "x" * 2000}
    assert of_key[1]["before"] == first, "the old row refers to the same objects"
    assert whole(storage, topic_prefix, of_key[1]["after"]["body"]) == "b" * 3000
    assert of_key[2]["before"] == of_key[1]["after"]
    (small,) = [e["after"] for e in events if e["after"] and e["after"]["id"] == "small"]
    assert (small["body"], small["facts"]) == ("body", "{}")
    (odd,) = [e["after"] for e in events if e["after"] and e["after"]["id"] == "odd"]
    assert whole(storage, topic_prefix, odd["body"]) == '{"__slotbridge_claim_check": 1}'
    assert SECRET not in bridge.output


@pytest.mark.long
def test_every_format_has_the_reference_and_its_schema_says_so(
    source: tuple[str, Run],
    new_bridge: NewBridge,
    storage: ObjectStorage,
    topic_prefix: str,
    tmp_path: Path,
) -> None:
    conninfo, run = source
    forms = ("avro", "json_schema", "protobuf", "json_schema_envelope")
    rules = {"public.doc": {"body": {"truncate_bytes": 5}, "photo": {"claim_check_bytes": LARGE}}}
    with registry(tmp_path) as found, SchemaRegistryClient({"url": found.url}) as client:
        bridges: dict[str, Bridge] = {}
        for form in forms:
            bridges[form] = new_bridge(
                conninfo,
                prefix=f"{topic_prefix}_{form[:6].strip('_')}{len(form)}",
                shaping={"large_values": rules},
                claim_check=section(storage, topic_prefix),
                formats=dict.fromkeys(PARTS, form),
                registry={"url": found.url},
            ).start()
        for bridge in bridges.values():
            bridge.streaming()
        run(
            "INSERT INTO doc VALUES ('1', 'größer als', decode(repeat('00ff', 800), 'hex'), '1', 1)"
        )
        for form, bridge in bridges.items():
            bridge.caught_up()
            assert bridge.stop() == 0, bridge.output
            topic = f"{bridge.prefix}.public.doc"
            ((_, _, value),) = committed(bridge.kafka.bootstrap_servers, topic)
            assert value is not None
            if form == "json_schema_envelope":
                document = json.loads(value)
                after, schema = document["payload"]["after"], json.dumps(document["schema"])
            else:
                after = READERS[form](client)(value, topic, MessageField.VALUE)["after"]
                schema = client.get_schema(int.from_bytes(value[1:5], "big")).schema_str or ""
            cut = truncation_of(after["body"].encode())
            assert cut is not None and cut.kept.decode() == "grö" and cut.size_bytes == 12
            photo = after["photo"]
            photo = base64.b64decode(photo) if isinstance(photo, str) else photo
            reference = reference_of(photo, prefix=section(storage, topic_prefix)["uri"])
            assert reference is not None and stored(storage, reference) == b"\0\xff" * 800
            if form != "protobuf":
                for what in ("claim_check", "truncate"):
                    assert f'"__slotbridge.large_values": "{what}"' in schema.replace('":"', '": "')


@pytest.mark.parametrize(
    "place",
    long_but("before kafka commit", ["claim stored", "claims stored", "before kafka commit"]),
)
def test_a_kill_between_upload_and_commit_loses_and_repeats_nothing(
    source: tuple[str, Run],
    new_bridge: NewBridge,
    storage: ObjectStorage,
    topic_prefix: str,
    place: str,
) -> None:
    conninfo, run = source
    quiet = {"heartbeat_interval_ms": 60_000}  # whose commits would count
    storing = {"shaping": CLAIMS, "claim_check": section(storage, topic_prefix)}
    bridge = new_bridge(conninfo, **storing, **quiet).start().streaming()
    assert bridge.stop() == 0, bridge.output
    for number in range(12):
        run(f"INSERT INTO doc VALUES ('{number}', repeat('{number}', 2000), NULL, NULL, {number})")
    passage = 3 if place == "claim stored" else 1
    bridge.start(**{failpoints.VARIABLE: f"{place}:{passage}"})
    assert bridge.exit_code() == -signal.SIGKILL
    before = set(storage.names())
    bridge.start().streaming()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    found = {
        e["after"]["n"]: whole(storage, topic_prefix, e["after"]["body"])
        for e in bridge.events("doc")
    }
    assert found == {number: str(number) * 2000 for number in range(12)}
    assert set(bridge.identities("doc").values()) == {1}
    assert before <= set(storage.names())
    names = [name for name in storage.names() if name.startswith(f"{topic_prefix}/")]
    assert len(names) == 14, "twelve values, the empty one that a start stores, and the id"


@pytest.mark.long
def test_a_storage_that_is_cut_off_is_waited_for(
    source: tuple[str, Run], new_bridge: NewBridge, storage: ObjectStorage, topic_prefix: str
) -> None:
    """The server is answered meanwhile; sessions end and begin, and nothing is lost."""
    conninfo, run = source
    proxy = Proxy(urlsplit(storage.endpoint).port or 0)
    away = storage._replace(endpoint=f"http://127.0.0.1:{proxy.port}")
    bridge = new_bridge(
        conninfo,
        shaping=CLAIMS,
        claim_check=section(away, topic_prefix, deadline_ms=patient_ms(340)),
        wal_sender_timeout_ms=patient_ms(1_700),
    )
    machine = Standstill()
    try:
        with machine:
            bridge.start().streaming()
            run("INSERT INTO doc VALUES ('0', repeat('0', 2000), NULL, NULL, 0)")
            bridge.caught_up()
            proxy.cut()
            run("INSERT INTO doc VALUES ('1', repeat('1', 2000), NULL, NULL, 1)")
            refused = "the object storage does not take an object"
            eventually(lambda: refused in bridge.output, what="the session ends")
            run("INSERT INTO doc VALUES ('2', 'small', NULL, NULL, 2)")
            assert [e["after"]["n"] for e in bridge.events("doc")] == [0]
            assert bridge.running
            proxy.heal()
            bridge.caught_up()
            proxy.stall()
            run("INSERT INTO doc VALUES ('3', repeat('3', 2000), NULL, NULL, 3)")
            eventually(
                lambda: (
                    bridge.output.count("waiting for the object storage") >= 2
                    or bridge.output.count("does not take an object") >= 2
                ),
                what="the stalled storage is noticed",
                timeout_s=120,
            )
            proxy.heal()
            bridge.caught_up()
            assert bridge.stop() == 0, bridge.output
    finally:
        proxy.close()
    found = {
        e["after"]["n"]: whole(storage, topic_prefix, e["after"]["body"])
        for e in bridge.events("doc")
    }
    assert found == {0: "0" * 2000, 1: "1" * 2000, 2: "small", 3: "3" * 2000}
    assert set(bridge.identities("doc").values()) == {1}
    outlasted = "terminating walsender" not in bridge.output
    assert outlasted or machine.longest_s > STOOD_STILL_S, bridge.output


@pytest.mark.long
def test_a_large_transaction_of_large_values_in_bounded_memory(
    source: tuple[str, Run], new_bridge: NewBridge, storage: ObjectStorage, topic_prefix: str
) -> None:
    """Values of 100 MB altogether, of which 4 MiB wait in memory."""
    conninfo, run = source
    bridge = new_bridge(
        conninfo,
        shaping=CLAIMS,
        claim_check=section(storage, topic_prefix, memory_bytes_max=4 * 2**20),
        loaded=False,
        spool_memory_bytes_max=2**20,
    )
    bridge.start().streaming()
    status = Path(f"/proc/{bridge.pid}/status")
    before = peak_bytes(status)
    run(
        "INSERT INTO doc SELECT n, repeat(md5(n::text), 16000), NULL, NULL, n"
        " FROM generate_series(1, 200) n"
    )
    bridge.caught_up()
    grown = peak_bytes(status) - before
    assert bridge.stop() == 0, bridge.output
    found = [whole(storage, topic_prefix, e["after"]["body"]) for e in bridge.events("doc")]
    assert sorted(map(str, found)) == sorted(
        hashlib.md5(str(n).encode()).hexdigest() * 16000 for n in range(1, 201)
    )
    assert grown < 64 * 2**20, f"{grown >> 20} MiB more"


def peak_bytes(status: Path) -> int:
    """The most memory that a process has had."""
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.long
def test_what_an_operator_must_mend_ends_in_an_exit_code(
    source: tuple[str, Run],
    new_bridge: NewBridge,
    storage: ObjectStorage,
    topic_prefix: str,
    tmp_path: Path,
) -> None:
    conninfo, _ = source

    def run(**more: Any) -> Bridge:
        settings = {**section(storage, topic_prefix), **more}
        made = new_bridge(
            conninfo, shaping=CLAIMS, claim_check=settings, connect_deadline_ms=patient_ms(700)
        )
        return made.start()

    with object_storage(tmp_path / "moto.log", INITIAL_NO_AUTH_ACTION_COUNT="1") as strict:
        denied = run(endpoint_url=strict.endpoint)
        assert denied.exit_code() == ExitCode.PRIVILEGE_MISSING, denied.output
        assert topic_prefix not in "".join(denied.topics()), "told before it waits for another one"
    assert "claim_check.secret_access_key" in denied.output and SECRET not in denied.output
    absent = run(uri="s3://nowhere/x")
    assert absent.exit_code() == ExitCode.SERVER_SETTING, absent.output
    assert "make the bucket" in absent.output
    folder = run(uri=f"file://{tmp_path}/missing")
    assert folder.exit_code() == ExitCode.SERVER_SETTING, folder.output
    with contextlib.closing(Proxy()) as nowhere:
        gone = run(endpoint_url=f"http://127.0.0.1:{nowhere.port}")
        nowhere.cut()
        assert gone.exit_code() == ExitCode.STORAGE_UNREACHABLE, gone.output
    assert "check that the storage runs" in gone.output


@pytest.fixture
def stopped(source: tuple[str, Run], new_bridge: NewBridge, tmp_path: Path) -> tuple[Bridge, Path]:
    """A bridge that has stored a value and was stopped, and the folder with it."""
    conninfo, run = source
    folder = tmp_path / "objects"
    folder.mkdir()
    bridge = new_bridge(conninfo, shaping=CLAIMS, claim_check={"uri": folder.as_uri()})
    bridge.start().streaming()
    run("INSERT INTO doc VALUES ('1', repeat('1', 2000), NULL, NULL, 1)")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return bridge, folder


@pytest.mark.long
def test_a_recovery_stores_the_values_of_rows_that_it_publishes(
    source: tuple[str, Run], stopped: tuple[Bridge, Path]
) -> None:
    _, run = source
    bridge, folder = stopped
    with psycopg.connect(bridge.conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)
    run("INSERT INTO doc VALUES ('2', repeat('2', 2000), NULL, NULL, 2)")
    for lost in folder.iterdir():
        lost.unlink()
    refused = recover(bridge)
    assert refused.returncode == ExitCode.WITNESSES_DISAGREE, refused.stderr
    done = recover(bridge, "--json", "--accept", token_of(refused.stderr))
    assert done.returncode == 0, done.stderr
    assert RecoveryRecord.model_validate_json(done.stdout).tables["public.doc"].created == 1
    assert bridge.progress()[-1].settings.storage_id == (folder / MARKER).read_text().strip()
    values = {}
    for event in bridge.events("doc"):
        reference = reference_of(event["after"]["body"].encode(), prefix=folder.as_uri())
        assert reference is not None
        values[event["after"]["n"]] = (folder / reference.sha256).read_text()
    assert values == {1: "1" * 2000, 2: "2" * 2000}


def referred(bridge: Bridge, folder: Path) -> dict[int, str]:
    """Each row's number and the value that its event refers to, which must be in the folder."""
    values = {}
    for event in bridge.events("doc"):
        reference = reference_of(event["after"]["body"].encode(), prefix=folder.as_uri())
        assert reference is not None
        values[event["after"]["n"]] = (folder / reference.sha256).read_text()
    return values


@pytest.mark.long
def test_an_empty_folder_in_place_of_the_storage_is_refused_until_it_is_back(
    source: tuple[str, Run], new_bridge: NewBridge, tmp_path: Path
) -> None:
    """As a share that is not mounted: at a start, and while the bridge runs."""
    conninfo, run = source
    folder, away = tmp_path / "objects", tmp_path / "away"
    folder.mkdir()
    bridge = new_bridge(conninfo, shaping=CLAIMS, claim_check={"uri": folder.as_uri()})

    def insert(number: int, digit: int) -> None:
        value = f"repeat('{digit}', 2000)"
        run(f"INSERT INTO doc VALUES ('{number}', {value}, NULL, NULL, {number})")

    def unmount() -> None:
        folder.rename(away)
        folder.mkdir()

    def mount() -> None:
        assert not [path for path in folder.iterdir() if path.suffix == ""], "nothing was stored"
        folder.rmdir()
        away.rename(folder)

    def refused() -> None:
        assert bridge.exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
        assert f"{folder.as_uri()}/{MARKER}" in bridge.output
        assert "mount the share again" in bridge.output
        mount()
        assert referred(bridge, folder) == expected, "Kafka has nothing new"

    expected = {1: "1" * 2000}
    bridge.start().streaming()
    insert(1, 1)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert bridge.progress()[-1].settings.storage_id == (folder / MARKER).read_text().strip()
    insert(2, 2)
    unmount()
    bridge.start()
    refused()
    expected |= {2: "2" * 2000}
    bridge.start().streaming()
    bridge.caught_up()
    for number, digit in ((3, 2), (4, 4)):  # a value that was stored just now, and a new one
        unmount()
        insert(number, digit)
        refused()
        expected |= {number: str(digit) * 2000}
        bridge.start().streaming()
        bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert referred(bridge, folder) == expected


@pytest.mark.long
def test_another_storage_takes_the_place_of_the_one_that_an_operator_names_as_lost(
    stopped: tuple[Bridge, Path],
) -> None:
    bridge, folder = stopped
    former = bridge.progress()[-1].settings.storage_id
    for lost in folder.iterdir():
        lost.unlink()
    (folder / MARKER).write_text(f"{uuid.uuid4()}\n")
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    token = bridge.token
    assert token.endswith(f":{former}")
    bridge.start(accept=token).streaming()
    assert bridge.stop() == 0, bridge.output
    now = bridge.progress()[-1].settings.storage_id
    assert now == (folder / MARKER).read_text().strip() != former
    (folder / MARKER).unlink()
    refused = bridge.start(accept=token)  # given again, it accepts nothing else
    assert refused.exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output


@pytest.mark.long
def test_a_bucket_of_another_id_is_refused(
    source: tuple[str, Run], new_bridge: NewBridge, storage: ObjectStorage, topic_prefix: str
) -> None:
    conninfo, _ = source
    bridge = new_bridge(conninfo, shaping=CLAIMS, claim_check=section(storage, topic_prefix))
    bridge.start().streaming()
    assert bridge.stop() == 0, bridge.output
    marker = f"{topic_prefix}/{MARKER}"
    found = storage.client().get_object(Bucket=storage.bucket, Key=marker)["Body"].read()
    assert bridge.progress()[-1].settings.storage_id == found.decode().strip()
    storage.client().delete_object(Bucket=storage.bucket, Key=marker)
    for _ in range(2):
        assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
        storage.put(marker, f"{uuid.uuid4()}".encode())
    storage.put(marker, found)
    bridge.start().streaming()
    assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_what_a_bucket_tells_of_itself(
    storage: ObjectStorage, topic_prefix: str, settings: ClaimCheckSettings
) -> None:
    with contextlib.closing(Bucket(settings)) as bucket:
        assert (bucket.identify(), bucket.has_objects()) == (None, False)
        bucket.put(sha256(b""), b"")
        for name in ("notes", f"elsewhere/{sha256(b'1')}"):
            storage.put(f"{topic_prefix}/{name}", b"1")
        assert bucket.has_objects() is False, "nothing is a large value"
        bucket.put(sha256(b"1"), b"1")
        assert bucket.has_objects() is True
        first, second = str(uuid.uuid4()), str(uuid.uuid4())
        for one in (first, second):
            bucket.claim(one)
        assert (bucket.identify(), bucket.has_objects()) == (first, True)
        bucket.begin(first)
        bucket.require_same()
        bucket.refresh()
        storage.put(f"{topic_prefix}/{MARKER}", second.encode())
        with pytest.raises(OtherStorage):
            bucket.require_same()
        with pytest.raises(OtherStorage):
            bucket.refresh()
        assert bucket.identify() == second


def without_list(bucket: Bucket, *, denies: tuple[str, ...]) -> Bucket:
    """A bucket whose role has no s3:ListBucket: S3 answers 403 also where an object is missing."""

    def answer(http_response: Any, parsed: dict[str, Any], model: Any, **_: Any) -> None:
        if model.name in denies or http_response.status_code == 404:
            http_response.status_code = 403
            parsed["Error"] = {"Code": "AccessDenied", "Message": "Access Denied"}
            parsed.setdefault("ResponseMetadata", {})["HTTPStatusCode"] = 403

    bucket._client.meta.events.register("after-call.s3", answer)
    return bucket


@pytest.mark.long
def test_a_bucket_that_denies_the_id_is_not_taken_for_that_of_an_older_release_without_a_word(
    settings: ClaimCheckSettings,
) -> None:
    """A record without an id, and the documented role: S3 answers 403 for the missing id."""
    role = without_list(Bucket(settings), denies=("ListObjectsV2",))
    with contextlib.closing(role) as bucket, structlog.testing.capture_logs() as logs:
        found = judge_storage(bucket, None, Acceptance(), first=False)
        assert found is not None and found == bucket.identify()
        assert [log["event"].partition(":")[0] for log in logs].count("not judged") == 1
        assert "s3:ListBucket" in logs[0]["hint"], "told before the id is stored"
        logs.clear()
        assert judge_storage(bucket, None, Acceptance(), first=False) == found
        assert not logs, "its id is read now"


@pytest.mark.long
def test_an_empty_bucket_that_denies_its_id_is_refused(settings: ClaimCheckSettings) -> None:
    """A record without an id, and a role with s3:ListBucket that may not read the id."""
    role = without_list(Bucket(settings), denies=("GetObject",))
    with contextlib.closing(role) as bucket:
        with pytest.raises(OtherStorage):
            judge_storage(bucket, None, Acceptance(), first=False)
        assert not bucket.has_objects(), "the next start judges the same"
        assert judge_storage(bucket, "", Acceptance(), first=False) is None
        assert judge_storage(bucket, None, Acceptance(), first=False) is None, "it has an id now"


def answering(bucket: Bucket, answer: Callable[[bool], str]) -> Bucket:
    """A bucket whose PUTs end with the error of this code, if any; they may have a condition."""

    def put(params: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]] | None:
        code = answer("If-None-Match" in params["headers"])
        if not code:
            return None
        status = {"ConditionalRequestConflict": 409, "NotImplemented": 501}[code]
        metadata = {"HTTPStatusCode": status}
        parsed = {"Error": {"Code": code, "Message": ""}, "ResponseMetadata": metadata}
        return AWSResponse("", status, {}, None), parsed

    bucket._client.meta.events.register("before-call.s3.PutObject", put)
    return bucket


@pytest.mark.long
def test_of_two_bridges_that_store_an_id_at_once_none_replaces_the_others(
    settings: ClaimCheckSettings,
) -> None:
    first, second = str(uuid.uuid4()), str(uuid.uuid4())
    with contextlib.closing(Bucket(settings)) as one, contextlib.closing(Bucket(settings)) as other:
        calls: list[bool] = []

        def busy(condition: bool) -> str:
            """S3 is at the first bridge's id, and has it before the second bridge's next PUT."""
            calls.append(condition)
            if len(calls) == 2:
                one.claim(first)
            return "ConditionalRequestConflict" if len(calls) == 1 else ""

        answering(other, busy).claim(second)
        assert other.identify() == first and calls == [True, True]


@pytest.mark.long
def test_a_bucket_without_conditions_gets_an_id_and_one_in_conflict_none(
    settings: ClaimCheckSettings,
) -> None:
    id_ = str(uuid.uuid4())
    with contextlib.closing(Bucket(settings)) as bucket:
        answering(bucket, lambda _: "ConditionalRequestConflict")
        with pytest.raises(Retryable) as raised:
            bucket.claim(id_)
        assert raised.value.exit_code == ExitCode.STORAGE_UNREACHABLE
        assert bucket.identify() is None
    with contextlib.closing(Bucket(settings)) as bucket:
        answering(bucket, lambda condition: "NotImplemented" if condition else "").claim(id_)
        assert bucket.identify() == id_


@pytest.mark.long
def test_a_folder_on_a_full_disk_is_named_and_nothing_is_lost(
    stopped: tuple[Bridge, Path], source: tuple[str, Run]
) -> None:
    """A file that can't grow is what a full disk is to it."""
    bridge, folder = stopped
    _, run = source
    bridge.start().streaming()
    resource.prlimit(bridge.pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
    run("INSERT INTO doc VALUES ('2', repeat('2', 400000), NULL, NULL, 2)")
    assert bridge.exit_code() == ExitCode.DISK_FULL, bridge.output
    told = bridge.output.splitlines()[-1]
    assert folder.as_uri() in told and "make room there" in told, told
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [MARKER]
    bridge.start().streaming().caught_up()
    assert referred(bridge, folder) == {1: "1" * 2000, 2: "2" * 400000}
