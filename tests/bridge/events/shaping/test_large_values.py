"""Large values without servers: what events have instead, and how they wait for a storage."""

import errno
import hashlib
import json
import os
import threading
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from structlog.testing import capture_logs

from schemas.acceptance import Acceptance, Kind, Token
from schemas.errors import ExitCode, Retryable, SettingsError, SetupError, SlotbridgeError
from schemas.large_values import (
    ClaimCheckSettings,
    Reference,
    reference_of,
    reference_text,
    sha256,
    truncated,
    truncation_of,
)
from schemas.shaping import ShapingSettings
from services.bridge.events.rows import Table
from services.bridge.events.shaping.large_values import limits
from services.bridge.events.shaping.tables import Shaping, TableShaping
from services.bridge.events.transaction_texts import Counter
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.messages import UNCHANGED, Relation, RelationColumn
from services.bridge.progress.errors import OtherStorage
from services.bridge.sink import claim_checks
from services.bridge.sink.claim_checks import ClaimChecks, open_claim_checks
from services.bridge.sink.storage_folder import Folder, MountedAnew
from services.bridge.sink.storage_identity import MARKER, judge_storage, unreachable
from services.waiter import Waiter
from tests.providers.waiting import eventually, patient, patient_ms

TEXT, BYTEA, JSONB, INTEGER, TEXTS = 25, 17, 3802, 23, 1009
THERE = "file:///there"
ID, OTHER = "8a4c7d52-3f0e-4b76-9a41-0d5ce2b81f93", "e1907b3c-62d8-4f25-8c1a-b7f40396ad5e"
"""Names of tests: each worker of pytest must find the same."""
SETTINGS = ClaimCheckSettings(
    uri="file:///nowhere", deadline_ms=patient_ms(340), memory_bytes_max=2**20
)


class Stored:
    """A storage in memory; `error`: what it raises instead, `gate`: what it waits for."""

    checked_every_s = 0.0

    def __init__(self) -> None:
        self.id: str | None = ID
        self.began = ""
        self.objects: dict[str, bytes] = {}
        self.error: SlotbridgeError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def uri(self, name: str) -> str:
        return f"{THERE}/{name}"

    def identify(self) -> str | None:
        return self.id

    def claim(self, id_: str) -> None:
        self.id = self.id or id_

    def has_objects(self) -> bool:
        return bool(self.objects)

    def begin(self, id_: str) -> None:
        self.began = id_

    def require_same(self) -> None:
        if self.began and self.id != self.began:
            raise OtherStorage(self.uri(MARKER), self.began, self.id)

    def refresh(self) -> None:
        self.require_same()

    def put(self, name: str, data: bytes) -> None:
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.objects[name] = data

    def remove_partial(self) -> None:
        """Nothing is written in parts."""

    def close(self) -> None:
        self.gate.set()


def relation(*types: int, key: bool = True) -> Relation:
    columns = [RelationColumn(f"c{n}", kind, -1, n == 0 and key) for n, kind in enumerate(types)]
    return Relation(7, "public", "t", "f", tuple(columns))


def planned(rules: dict[str, Any], described: Relation) -> TableShaping:
    return Shaping(ShapingSettings.model_validate({"large_values": rules}), "p").plan(described)


def row(rule: dict[str, int], kind: int, value: bytes, store: Stored) -> Any:
    """The published form of one value."""

    def deposit(data: bytes) -> Reference:
        store.put(sha256(data), data)
        return Reference(store.uri(sha256(data)), len(data), sha256(data))

    plan = planned({"public.t": {"c1": rule}}, relation(INTEGER, kind))
    encoders = Encoders()
    object.__setattr__(plan, "limits", limits(plan, encoders, deposit))
    table = Table(plan, Counter("public.t", '"public.t"'), encoders)
    return json.loads(table.row([b"1", value]))["c1"]


looks = st.sampled_from(
    [
        reference_text(Reference("s3://x/y", 3, "0" * 64)).decode(),
        ' { "__slotbridge_claim_check" : 1}',
        truncated(b"ab", b"abc").decode(),
        truncated(b"", b"").decode(),
        "",
    ]
)
texts = st.builds(
    lambda a, look, b: a + look + b,
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    looks,
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
)


@given(texts, st.integers(0, 30))
def test_a_claimed_text_is_found_by_its_reference_and_no_other_text_looks_like_one(
    text: str, bytes_max: int
) -> None:
    store, data = Stored(), text.encode()
    published = row({"claim_check_bytes": bytes_max}, TEXT, data, store).encode()
    found = reference_of(published, prefix=THERE)
    if found is None:
        assert published == data and len(data) <= bytes_max
        return
    assert store.objects == {found.sha256: data}
    assert (found.uri, found.size_bytes) == (store.uri(found.sha256), len(data))
    assert found.sha256 == hashlib.sha256(data).hexdigest()


@given(texts, st.integers(0, 30))
def test_a_cut_text_ends_at_a_character_and_no_whole_text_looks_cut(
    text: str, bytes_max: int
) -> None:
    data = text.encode()
    published = row({"truncate_bytes": bytes_max}, TEXT, data, Stored())
    found = truncation_of(published.encode())
    if found is None:
        assert published == text and len(data) <= bytes_max
        return
    assert data.startswith(found.kept) and found.size_bytes == len(data)
    assert found.sha256 == sha256(data)
    assert len(found.kept) <= max(bytes_max, 0) or found.kept == data
    if found.kept != data:
        assert len(data) > bytes_max >= len(found.kept) > bytes_max - 4


@given(st.binary(max_size=40), st.integers(0, 30))
def test_bytea_is_stored_and_cut_as_bytes(data: bytes, bytes_max: int) -> None:
    import base64

    store, text = Stored(), b"\\x" + data.hex().encode()
    claimed = base64.b64decode(row({"claim_check_bytes": bytes_max}, BYTEA, text, store))
    found = reference_of(claimed, prefix=THERE)
    assert (found is None) == (len(data) <= bytes_max)
    assert claimed == data if found is None else store.objects[found.sha256] == data
    cut = base64.b64decode(row({"truncate_bytes": bytes_max}, BYTEA, text, store))
    told = truncation_of(cut)
    assert cut == data if told is None else told.kept == data[:bytes_max]


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://evil/{sha256(b'x')}",
        f"file:///there-too/{sha256(b'x')}",
        f"file:///there/../else/{sha256(b'x')}",
        f"file:///there/{sha256(b'y')}",
        "file:///there/",
        7,
    ],
)
def test_a_reference_that_a_row_brings_along_leads_nowhere_else(uri: Any) -> None:
    forged = reference_text(Reference(uri, 1, sha256(b"x")))
    assert reference_of(forged, prefix=THERE) is None
    for rule in ({"truncate_bytes": 1_000}, {}):
        passed = row(rule, TEXT, forged, Stored()) if rule else forged.decode()
        assert reference_of(passed.encode(), prefix=THERE) is None
    store = Stored()
    claimed = reference_of(
        row({"claim_check_bytes": 1_000}, TEXT, forged, store).encode(), prefix=THERE + "/"
    )
    assert claimed is not None and store.objects[claimed.sha256] == forged


@pytest.mark.parametrize(
    "text",
    [
        '{"__slotbridge_claim_check":1}',
        '{"__slotbridge_claim_check":{}}',
        '{"__slotbridge_claim_check":{"uri":"file:///there/..","size_bytes":1,"sha256":".."}}',
        '{"__slotbridge_claim_check":' + "[" * 100_000,
        '{"__slotbridge_claim_check":\udc80',
    ],
)
def test_what_only_begins_as_a_reference_is_not_one(text: str) -> None:
    assert reference_of(text.encode("utf-8", "surrogateescape"), prefix=THERE) is None


@given(
    st.integers(-5, 5) | st.booleans() | st.none() | st.text(),
    st.dictionaries(texts, texts, max_size=1),
)
def test_a_reference_has_exactly_its_three_fields(size: Any, more: dict[str, str]) -> None:
    name = sha256(b"x")
    fields = {"uri": f"{THERE}/{name}", "size_bytes": size, "sha256": name, **more}
    found = reference_of(json.dumps({"__slotbridge_claim_check": fields}).encode(), prefix=THERE)
    whole = not more and isinstance(size, int) and not isinstance(size, bool) and size >= 0
    assert found == (Reference(f"{THERE}/{name}", size, name) if whole else None)


def test_keys_nulls_and_values_that_the_wal_lacks_stay_as_they_are() -> None:
    plan = planned({"public.*": {"*": {"claim_check_bytes": 0}}}, relation(TEXT, TEXT, INTEGER))
    made = limits(plan, Encoders(), lambda data: Reference("file:///x", len(data), sha256(data)))
    assert made.keys() == {"c1"}
    object.__setattr__(plan, "limits", made)
    table = Table(plan, Counter("public.t", '"public.t"'), Encoders())
    assert json.loads(table.row([b"key", None, b"5"])) == {"c0": "key", "c1": None, "c2": 5}
    assert '"__debezium_unavailable_value"' in table.row([b"key", UNCHANGED, b"5"])


@pytest.mark.parametrize(
    ("rule", "kind", "key", "words"),
    [
        ({"truncate_bytes": 9}, JSONB, False, "jsonb that is cut"),
        ({"claim_check_bytes": 9}, INTEGER, False, "its type is none of"),
        ({"claim_check_bytes": 9}, TEXTS, False, "its type is none of"),
        ({"claim_check_bytes": 9}, TEXT, True, "part of the key"),
    ],
)
def test_a_column_that_can_not_have_them_is_refused_by_its_name_alone(
    rule: dict[str, int], kind: int, key: bool, words: str
) -> None:
    described = relation(kind, TEXT, key=key)
    named = planned({"public.t": {"c0": rule}}, described)
    with pytest.raises(SettingsError, match=words):
        limits(named, Encoders(), lambda _: Reference("", 0, ""))
    everywhere = planned({"*.*": {"*": rule}}, described)
    assert limits(everywhere, Encoders(), lambda _: Reference("", 0, "")).keys() == {"c1"}


def test_settings_that_can_not_work_are_refused() -> None:
    kinds: list[dict[str, int]] = [{}, {"truncate_bytes": 1, "claim_check_bytes": 1}]
    for both in kinds:
        with pytest.raises(ValidationError, match="exactly one"):
            ShapingSettings.model_validate({"large_values": {"a.b": {"c": both}}})
    claims = {"large_values": {"a.b": {"c": {"claim_check_bytes": 1}}}}
    with pytest.raises(SettingsError, match=r"claim_check"):
        open_claim_checks(None, ShapingSettings.model_validate(claims), ExitStack())
    assert open_claim_checks(SETTINGS, ShapingSettings(), ExitStack()) is None
    for uri in ("http://x/y", "s3:/x", "file://host/x", "s3://Bucket"):
        with pytest.raises(ValidationError, match="uri"):
            ClaimCheckSettings(uri=uri)


def test_values_wait_for_the_storage_up_to_a_bound_and_are_stored_once() -> None:
    store, waited = Stored(), threading.Event()
    store.gate.clear()
    long = SETTINGS.model_copy(update={"deadline_ms": 600_000})
    checks = ClaimChecks(long, store, Waiter(waited.set))
    large = [bytes([n]) * (SETTINGS.memory_bytes_max // 2) for n in range(3)]
    checks.deposit(large[0])
    checks.deposit(large[0])
    checks.deposit(large[1])
    assert not waited.is_set()
    third = threading.Thread(target=lambda: checks.deposit(large[2]))
    third.start()
    eventually(waited.is_set, what="the third value waits for room")
    assert third.is_alive()
    store.gate.set()
    third.join(timeout=patient(60))
    checks.require_stored()
    assert store.objects == {sha256(one): one for one in large}
    store.objects.clear()
    checks.deposit(large[0])
    checks.require_stored()
    assert not store.objects, "what was stored a moment ago is not stored again"
    checks.close()


def test_a_storage_that_comes_back_is_waited_for_and_one_that_does_not_ends_the_session() -> None:
    store, down = Stored(), unreachable("s3://x", "down", OSError())
    store.error = down
    patient = ClaimChecks(SETTINGS.model_copy(update={"deadline_ms": 60_000}), store)
    patient.deposit(b"one")
    back = threading.Timer(0.2, lambda: setattr(store, "error", None))
    back.start()
    patient.require_stored()
    assert store.objects
    patient.close()
    store.error = down
    checks = ClaimChecks(SETTINGS, store)
    checks.deposit(b"two")
    with pytest.raises(Retryable) as raised:
        checks.require_stored()
    assert raised.value.exit_code == ExitCode.STORAGE_UNREACHABLE
    with pytest.raises(Retryable):
        checks.deposit(b"three")
    checks.close()


def test_what_waits_gives_up_when_the_session_ends() -> None:
    store = Stored()
    store.gate.clear()
    checks = ClaimChecks(SETTINGS, store)
    checks.deposit(b"one")
    found: list[BaseException] = []

    def wait() -> None:
        try:
            checks.require_stored()
        except Retryable as error:
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    checks.cancel()
    waiting.join(timeout=patient(60))
    assert found
    checks.close()


def test_a_folder_is_written_whole_or_says_why_not(tmp_path: Path) -> None:
    folder = Folder(tmp_path.as_uri())
    name = sha256(b"content")
    folder.put(name, b"content")
    folder.put(name, b"content")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert folder.uri(name) == (tmp_path / name).as_uri()
    with pytest.raises(SetupError) as raised:
        Folder((tmp_path / "missing").as_uri()).put(name, b"content")
    assert raised.value.exit_code == ExitCode.SERVER_SETTING
    assert "mount or make the folder" in str(raised.value)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o640), (0o000, 0o640), (0o077, 0o600)])
def test_a_file_is_for_its_owner_and_group_alone(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        Folder(tmp_path.as_uri()).put(sha256(b"secret"), b"secret")
    finally:
        os.umask(before)
    assert (tmp_path / sha256(b"secret")).stat().st_mode & 0o777 == mode


def test_a_start_removes_what_killed_bridges_left_and_nothing_else(tmp_path: Path) -> None:
    stale = f".{sha256(b'x')}.{'0' * 16}"
    fresh = f".{sha256(b'x')}.{'1' * 16}"
    others = [sha256(b"y"), ".nfs0001", f".{sha256(b'x')}", f".{sha256(b'x')}.{'0' * 16}.more"]
    for name in (stale, fresh, *others):
        (tmp_path / name).write_bytes(b"part")
        if name != fresh:
            os.utime(tmp_path / name, (1_000_000_000, 1_000_000_000))
    claims = {"*.*": {"*": {"claim_check_bytes": 1}}}
    with ExitStack() as resources:
        checks = open_claim_checks(
            ClaimCheckSettings(uri=tmp_path.as_uri()),
            ShapingSettings.model_validate({"large_values": claims}),
            resources,
        )
        assert checks is not None
        checks.confirm("", Acceptance(), first=True)
        eventually(lambda: not (tmp_path / stale).exists(), what="the stale file is removed")
    assert {path.name for path in tmp_path.iterdir()} == {fresh, *others, sha256(b""), MARKER}


def test_a_storage_that_was_replaced_takes_nothing_and_hides_nothing_that_is_known() -> None:
    store = Stored()
    checks = ClaimChecks(SETTINGS, store)
    assert checks.confirm(ID, Acceptance(), first=False) == ID
    checks.deposit(b"one")
    checks.require_stored()
    store.id = OTHER
    checks.deposit(b"one")  # it was stored a moment ago, elsewhere
    with pytest.raises(OtherStorage) as raised:
        checks.require_stored()
    assert raised.value.exit_code == ExitCode.WITNESSES_DISAGREE
    checks.close()


def test_a_bucket_is_asked_at_intervals_and_only_by_those_who_refer_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Stored()
    asked: list[int] = []
    store.checked_every_s = 30.0
    require_same = store.require_same

    def counted() -> None:
        asked.append(1)
        require_same()

    monkeypatch.setattr(store, "require_same", counted)
    checks = ClaimChecks(SETTINGS, store)
    checks.confirm(ID, Acceptance(), first=False)
    asked.clear()
    for number in range(20):
        checks.deposit(bytes([number]))
        checks.require_stored()
    assert not asked
    checks._checked -= 31.0
    checks.require_stored()
    checks.require_stored()
    assert len(asked) == 1
    checks.close()


@pytest.mark.parametrize(
    ("noted", "first", "marker", "objects", "accepted", "goes_on"),
    [
        ("", True, None, False, "", True),  # the first start
        ("", False, None, False, "", True),  # no large value until now
        (ID, False, ID, False, "", True),
        (ID, False, None, True, "", False),
        (ID, False, OTHER, True, "", False),
        (ID, False, OTHER, True, OTHER, False),
        (ID, False, OTHER, True, ID, True),
        (ID, False, None, False, ID, True),
        (None, False, None, False, "", False),  # the id could not be read
        (None, False, None, False, "unknown", True),
        (None, False, None, True, "", True),
        (None, False, OTHER, False, "", True),
    ],
)
def test_which_storage_a_start_accepts(
    tmp_path: Path,
    noted: str | None,
    first: bool,
    marker: str | None,
    objects: bool,
    accepted: str,
    goes_on: bool,
) -> None:
    folder = Folder(tmp_path.as_uri())
    if marker is not None:
        folder.claim(marker)
    if objects:
        folder.put(sha256(b"1"), b"1")
    if noted is None:  # each start has stored this, where nothing was mounted
        folder.put(sha256(b""), b"")
    before = set(tmp_path.iterdir())
    token = Token(Kind.OTHER_STORAGE, folder.uri(MARKER), accepted)
    if not goes_on:
        with pytest.raises(OtherStorage) as raised:
            judge_storage(folder, noted, Acceptance([token]), first=first)
        told = str(raised.value)
        assert raised.value.token == token._replace(bound=noted or "unknown")
        assert "no progress record in Kafka notes an id" in told or noted
        assert "events are to refer to a new claim_check.uri from now on" in told
        assert set(tmp_path.iterdir()) == before, "the next start judges the same"
        return
    found = judge_storage(folder, noted, Acceptance([token]), first=first)
    assert found == folder.identify()
    assert marker in (None, found)
    folder.claim(str(uuid.uuid4()))
    assert folder.identify() == found, "the first id stays"


def denied(*_: object) -> None:
    raise SetupError("denied", exit_code=ExitCode.PRIVILEGE_MISSING)


def test_a_role_that_may_not_read_the_id_is_told_that_nothing_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with s3:PutObject alone, at a first start and at later ones; never past a noted id."""
    store = Stored()
    monkeypatch.setattr(store, "identify", denied)
    monkeypatch.setattr(store, "has_objects", lambda: None)
    for claim in (store.claim, denied):  # a bucket looks once more where it has an object
        monkeypatch.setattr(store, "claim", claim)
        with capture_logs() as logs:
            assert judge_storage(store, None, Acceptance(), first=False) is None
        assert {log["event"].partition(":")[0] for log in logs} == {"not judged"}
        assert "s3:GetObject" in logs[-1]["hint"]
    with pytest.raises(SetupError):
        judge_storage(store, ID, Acceptance(), first=False)


def test_a_bridge_that_waits_for_another_one_is_told_of_wrong_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looks twice a second, and stores and tells something only where the answer changes."""
    monkeypatch.setattr(claim_checks, "_LOOKED", {})
    store, marker = Stored(), sha256(b"")
    store.id = None

    def look() -> list[str]:
        with capture_logs() as logs:
            ClaimChecks(SETTINGS, store).look()
        return [log["event"].partition(":")[0] for log in logs]

    not_judged = ["not judged before the slot is taken"]
    assert (look(), look(), store.objects) == (not_judged, [], {}), "it may not be mounted yet"
    store.id = ID
    assert (look(), store.objects.pop(marker)) == ([], b"")
    assert (look(), store.objects) == ([], {})
    with monkeypatch.context() as role:  # without s3:ListBucket, and the id is not there
        role.setattr(store, "identify", denied)
        assert (look(), store.objects.pop(marker)) == (not_judged, b"")
        assert (look(), store.objects) == ([], {})
    look()
    with monkeypatch.context() as revoked:
        revoked.setattr(store, "identify", denied)
        revoked.setattr(store, "put", denied)
        for _ in range(2):
            with pytest.raises(SetupError):
                look()
    assert look() == []
    store.error = SetupError("read-only", exit_code=ExitCode.PRIVILEGE_MISSING)
    claim_checks._LOOKED.clear()
    with pytest.raises(SetupError):
        look()


def test_a_folder_that_changes_beneath_its_path_takes_nothing(tmp_path: Path) -> None:
    there, away = tmp_path / "there", tmp_path / "away"
    there.mkdir()
    folder = Folder(there.as_uri())
    folder.claim(ID)
    folder.begin(ID)
    folder.put(sha256(b"1"), b"1")
    there.rename(away)
    with pytest.raises(SetupError, match="mount or make the folder"):
        folder.require_same()
    there.mkdir()
    for ask in (folder.require_same, folder.refresh, lambda: folder.put(sha256(b"2"), b"2")):
        with pytest.raises(OtherStorage):
            ask()
    assert not [*there.iterdir()]
    (there / MARKER).write_text(f"{ID}\n")  # a copy, as of a volume that was restored
    with pytest.raises(MountedAnew):
        folder.put(sha256(b"2"), b"2")
    (there / MARKER).write_text("nothing")
    with pytest.raises(SetupError, match="has no id"):
        folder.require_same()
    (there / MARKER).unlink()
    there.rmdir()
    away.rename(there)
    folder.put(sha256(b"2"), b"2")
    assert {path.name for path in there.iterdir()} == {MARKER, sha256(b"1"), sha256(b"2")}


def test_of_two_bridges_on_a_folder_without_hard_links_none_replaces_the_others_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path.as_uri())

    def link(*_: Any, **__: Any) -> None:
        if not other_claims:
            other_claims.append(1)
            Folder(tmp_path.as_uri()).claim(OTHER)
        raise OSError(errno.EPERM, "no hard links here")

    other_claims: list[int] = []
    monkeypatch.setattr(os, "link", link)
    folder.claim(ID)
    assert folder.identify() == OTHER
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]
    (tmp_path / MARKER).write_bytes(b"")  # the other has only taken the name
    folder.claim(ID)
    with pytest.raises(Retryable, match="another bridge"):
        folder.identify()
