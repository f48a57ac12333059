"""The compiled way of rows and transactions gives what the plain one gives, however it is cut."""

import ctypes
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.events import MARKER_PREFIX
from schemas.kafka import Format, KafkaSettings
from schemas.shaping import FIELDS, FlatSettings, ShapingSettings
from services.bridge import compiled
from services.bridge.compiled import new_messages
from services.bridge.events.description import Described
from services.bridge.events.envelope import Envelope
from services.bridge.events.event import Event, Stamp
from services.bridge.events.formats.table_format import Formats, encoders_for
from services.bridge.events.row_encoders import Column, Frame, writer
from services.bridge.events.shaping.tables import Shaping
from services.bridge.events.values import datetimes, plain
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    RelationColumn,
    Row,
    Truncate,
    Update,
)
from services.bridge.progress.ledger import Position
from services.bridge.sink.dead_letters import Origins
from services.bridge.source.replication_connection import _gather as plain_gather
from services.bridge.transactions.assembler import Assembler, EventBatch
from services.bridge.transactions.pipeline import Pipeline
from services.bridge.transactions.spool import Spool
from services.waiter import Waiter
from tests.promises.bridge.compiled_row import encoded
from tests.promises.bridge.conftest import COMPILED
from tests.promises.bridge.known_registry import KnownRegistry
from tests.promises.bridge.wire import encode

pytestmark = COMPILED
ROOT = Path(__file__).parents[3]
NOW_US = 1_700_000_000_000_000
TABLES = (
    Relation(
        7,
        "public",
        "account",
        "d",
        (RelationColumn("id", 23, -1, True), RelationColumn("größe", 25, -1, False)),
    ),
    Relation(8, "public", "history", "n", (RelationColumn("delta", 23, -1, False),)),
)


@contextmanager
def without_compiled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "engine", None)
        yield


@dataclass
class Source:
    """A WAL's messages, and where its transactions commit."""

    messages: list[tuple[int, bytes]]
    commits: list[Position]


@st.composite
def changes(draw: st.DrawFn) -> AnyMessage:
    account, history = TABLES
    number = str(draw(st.integers(-5, 99))).encode()
    note = draw(st.sampled_from([b"x", b'"\\\n', "größe".encode(), None, b"y" * 300]))
    row: Row = [number, note]
    other: Row = [draw(st.sampled_from([number, b"1"])), b"old"]
    kinds: list[AnyMessage] = [
        *[Insert(account, row)] * 6,
        *[Update(account, None, None, row)] * 3,
        Update(account, None, None, [number, UNCHANGED]),
        Update(account, "O", other, row),
        Update(account, "O", other, [number, UNCHANGED]),
        Update(account, "K", [b"5", None], row),
        Delete(account, "K", [number, None]),
        *[Insert(history, [number])] * 3,
        Insert(history, [None]),
        Truncate((account, history), cascade=False, restart_identity=True),
        Message(True, 5, MARKER_PREFIX, b"text"),
        account,
    ]
    return draw(st.sampled_from(kinds))


@st.composite
def sources(draw: st.DrawFn) -> Source:
    """First enough rows that writers are made, then any transactions."""
    lsn, messages, commits = 1_000, [], []
    rows: list[AnyMessage] = [Insert(TABLES[0], [b"1", b"x"])]
    rows += [Update(TABLES[0], None, None, [b"1", b"x"])]
    rows += [Update(TABLES[0], "O", [b"1", b"x"], [b"1", b"x"]), Insert(TABLES[1], [b"1"])]
    bodies: list[list[AnyMessage]] = [[*TABLES, *rows * 20]]
    bodies += draw(st.lists(st.lists(changes(), max_size=6), max_size=8))
    for xid, body in enumerate(bodies, 500):
        commit_lsn = lsn + 100 * len(body) + 10
        for message in [
            Begin(commit_lsn, NOW_US, xid),
            *body,
            Commit(commit_lsn, commit_lsn + 48, NOW_US),
        ]:
            messages.append((lsn, encode(message)))
            lsn += 100
        lsn = commit_lsn + 60
        commits.append(Position(commit_lsn, commit_lsn + 48, 0))
    return Source(messages, commits)


FORMATS: tuple[Format, ...] = ("json", "avro", "protobuf")
FLAT = ShapingSettings(flat=FlatSettings(tables=("*.account",), fields=FIELDS))


def batches(
    folder: Path,
    source: Source,
    cuts: list[int],
    start: Position,
    bytes_max: int,
    shaping: ShapingSettings,
    form: Format,
) -> list[EventBatch]:
    """What comes out when the messages come in batches that end at `cuts`."""
    shaped = Shaping(shaping, "bank")
    kafka = KafkaSettings(
        bootstrap_servers="k:9092", topic_prefix="bank", key_format=form, value_format=form
    )
    encoders = encoders_for(kafka)()
    formats = Formats(kafka, shaped.naming, encoders, KnownRegistry(258))

    def describe(relation: Relation, _stamp: Stamp, _seq: int) -> Described:
        plan = shaped.plan(relation)
        return Described(plan, form=formats.of(plan))

    made: list[EventBatch] = []
    spool = Spool(folder / "x.spool", memory_bytes_max=10**6, bytes_max=10**9)
    envelope = Envelope(
        *("bank", "db", 3, describe),
        tombstones=True,
        transaction_metadata=True,
        encoders=encoders,
        flat=shaping.flat,
    )
    pipeline = Pipeline(
        spool,
        Assembler(envelope, start, bytes_max, {} if start.seq else None),
        emit=made.append,
        waiter=Waiter(),
        prepared_topic="prepared",
        slot="s",
    )
    bounds = [0, *sorted(cut % len(source.messages) for cut in cuts), len(source.messages)]
    for since, until in pairwise(bounds):
        messages = new_messages()
        for message in source.messages[since:until]:
            messages.append(message)
        pipeline.take_all(messages, NOW_US)
    spool.close()
    return made


def records(made: list[EventBatch]) -> list[tuple[Event, int, int, int | None]]:
    """Every event with its transaction, however they were put into batches."""
    found = []
    for batch in made:
        origins = Origins(batch)
        found += [(event, *origins.of(index)) for index, event in enumerate(batch.events)]
    return found


@given(
    sources(),
    st.lists(st.integers(0, 10_000), max_size=5),
    st.integers(0, 8),
    st.integers(0, 3),
    st.sampled_from([600, 3_000, 10**9]),
    st.sampled_from([ShapingSettings(), FLAT]),
    st.sampled_from(FORMATS),
)
def test_however_it_is_cut_the_events_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    source: Source,
    cuts: list[int],
    begun: int,
    seq: int,
    bytes_max: int,
    shaping: ShapingSettings,
    form: Format,
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    commit = source.commits[begun % len(source.commits)]
    before = source.commits[begun % len(source.commits) - 1].end_lsn if begun else 500
    start = Position(commit.commit_lsn, before, seq) if seq else commit._replace(seq=0)
    start = start if begun else Position(0, 100, 0)
    made = batches(folder, source, cuts, start, bytes_max, shaping, form)
    with without_compiled():
        plainly_made = batches(folder, source, [], start, bytes_max, shaping, form)
    assert records(made) == records(plainly_made)
    for batch in made:
        for event in batch.events:
            if event.headers is None:
                assert hash(event) == hash(Event(*event)), "a tuple keeps its hash from 3.14 on"
    if plainly_made:
        assert made[-1].position == plainly_made[-1].position
    assert sum(batch.dropped for batch in made) == sum(p.dropped for p in plainly_made)


KINDS = {
    "string": plain.string,
    "integer": plain.integer,
    "boolean": plain.boolean,
    "floating": plain.floating,
    "instant": datetimes.instant,
    "timestamp": datetimes.timestamp_us,
    "date": datetimes.date_days,
}
UNUSUAL = [
    *(b"", b"-", b"--1", b"-1", b"1x", b"t", b"f", b"true", b"NaN", b"Infinity", b"-Infinity"),
    *(b"1.5", b".5", b"5.", b"1e5", b"1e+300", b"1e-07", b"1e", b"1e999", b"-0", b"1_0"),
    *(b"infinity", b"-infinity", b"2024-02-29", b"0001-01-01", b"10000-01-01", b"0044-03-15 BC"),
    *(b"2024-02-29 10:20:30", b"2024-02-29 10:20:30.5", b"2024-02-29 10:20:30.123456"),
    *(b"2024-02-29 10:20:30.1234567", b"2024-02-29 10:20:30.", b"2024-02-29 10:20:30.123456+00"),
    *(b"1886-03-22 14:19:51.168+00 BC", b"2024-02-29 10:20:30.123+00"),
    *(b"2024-02-29 10:20:30.123456+02", b"2024-02-29T10:20:30.123456+00"),
    *(b"0044-03-15 10:20:30 BC", b"2024-02-29 10:20:30+00", b"20240-02-9 10:20:30.123456+00"),
    *(b"\xff", b"\xc3", "größe 😀".encode(), b"\x01\x1f\x7f\t\r\n\f\b", b'a"b\\c/', b"x" * 5000),
]
values = st.sampled_from(UNUSUAL) | st.binary(max_size=40)
values |= st.text(st.characters(codec="utf-8"), max_size=60).map(str.encode)
values |= st.datetimes().map(lambda at: at.isoformat(" ").encode())
values |= st.dates().map(lambda day: day.isoformat().encode())
values |= st.floats(allow_nan=False).map(lambda number: repr(number).encode())
values |= st.integers().map(lambda number: str(number).encode())


def written(kind: str, value: bytes) -> Event | None:
    column = Column(0, '"c":', KINDS[kind], '"?"', key=True)
    opening, names = '{"op":"c","before":null,"after":{', '"schema":"s","table":"t",'
    frame = Frame("c", opening, names, metadata=True)
    write = writer(Event, "topic", "s.t", [column], 1, frame)
    return encoded(write, b"I\0\0\0\7N\0\1t" + len(value).to_bytes(4) + value)


@given(st.sampled_from(sorted(KINDS)), values)
def test_compiled_forms_equal_those_of_the_encoders(kind: str, value: bytes) -> None:
    """What the compiled way has no form for, it asks the encoder for."""
    found = written(kind, value)
    try:
        expected = KINDS[kind](value)
    except ValueError:
        assert found is None
    else:
        assert found is not None and found.key == f'{{"c":{expected}}}'.encode()
        assert found.value is not None and f'"after":{{"c":{expected}}},'.encode() in found.value


def test_a_large_row_leaves_no_large_buffer_and_the_next_is_right() -> None:
    for size in (5_000_000, 10, 1_000_000, 0):
        found = written("string", b"x" * size)
        assert found is not None and found.key == b'{"c":"' + b"x" * size + b'"}'


@given(
    st.lists(st.binary(max_size=9), max_size=9),
    st.sampled_from([(0, b""), (-1, b""), (18, b"k" * 18)]),
)
def test_messages_are_gathered_up_to_a_keepalive(
    payloads: list[bytes], last: tuple[int, bytes]
) -> None:
    assert compiled.engine is not None
    frames = [b"w" + (n << 60 | n).to_bytes(8) + b"\0" * 16 + p for n, p in enumerate(payloads)]
    answers = [*((len(frame), frame) for frame in frames), last]
    plain: list[tuple[int, bytes]] = []
    told = iter(answers)
    expected = plain_gather(lambda _async: next(told), plain)
    get_copy_data, connection = libpq_that_answers(answers)
    messages = compiled.engine.messages.Messages()
    address = ctypes.cast(get_copy_data, ctypes.c_void_p).value
    assert compiled.engine.messages.gather(address, connection, messages) == expected
    assert [messages[index] for index in range(len(messages))] == plain
    with pytest.raises(IndexError):
        messages[len(plain)]


def libpq_that_answers(answers: list[tuple[int, bytes]]) -> tuple[Any, int]:
    """A PQgetCopyData that gives `answers`, one after another, of a connection at 4711."""
    told = iter(answers)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p

    def get_copy_data(connection: int, buffer: Any, nonblocking: int) -> int:
        assert (connection, nonblocking) == (4711, 1)
        length, data = next(told)
        if length > 0:
            buffer[0] = libc.malloc(ctypes.c_size_t(length))
            ctypes.memmove(buffer[0], data, length)
        return length

    buffer = ctypes.POINTER(ctypes.c_void_p)
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, buffer, ctypes.c_int)
    return kind(get_copy_data), 4711


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary()), max_size=600))
def test_messages_are_kept_as_in_a_list(expected: list[tuple[int, bytes]]) -> None:
    messages = new_messages()
    assert compiled.engine is not None and isinstance(messages, compiled.engine.messages.Messages)
    for message in expected:
        messages.append(message)
    assert len(messages) == len(expected)
    assert [messages[index] for index in range(len(messages))] == expected


def test_stale_compiled_module_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.engine is not None and compiled._modules() == compiled.engine
    monkeypatch.setattr(compiled.engine.rows, "DIGEST", "of other sources")
    assert compiled._modules() is None


def test_switched_off_nothing_compiled_is_loaded() -> None:
    code = "from services.bridge import compiled; print(compiled.engine)"
    environment = {"SLOTBRIDGE_COMPILED": "0", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.stdout == "None\n", done.stderr


@pytest.mark.long
def test_a_wheel_has_what_was_compiled(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*build, "--wheel-dir", str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    built = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert len(built) == len(list((ROOT / "services/bridge/compiled").glob("*.pyx")))
