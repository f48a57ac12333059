"""What a repair finds: the differences between the rows of topics and tables, by a model."""

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import OperatorNeeded, SettingsError
from schemas.events import PLACEHOLDER_VALUES_HEADER, UNAVAILABLE
from schemas.shaping import ShapingSettings
from services.bridge.events.event import Stamp
from services.bridge.events.rows import Table
from services.bridge.events.shaping.outbox import Headers
from services.bridge.events.shaping.tables import Shaping
from services.bridge.events.transaction_texts import Counter, TransactionTexts
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.messages import Relation, RelationColumn, Row
from services.bridge.repair.comparison import UNKNOWN, Difference, difference, same_row
from services.bridge.repair.fold import Fold, event_of
from services.bridge.repair.plain_event import PlainEvents
from services.bridge.repair.row_store import FoldedRow, RowStore
from services.bridge.repair.scope import scope_of
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.tables import KeyColumn, TableShape
from services.waiter import Waiter

Keys = st.binary(min_size=1, max_size=2)
Rows = st.dictionaries(Keys, st.sampled_from([b'{"a":1}', b'{"a":2,"b":null}', b'{"a":2}']))
Partition = st.integers(0, 1)


def differences(told: Mapping[bytes, bytes], there: Mapping[bytes, bytes]) -> list[Difference]:
    """Of all keys, in their order."""
    found = [difference(k, told.get(k), there.get(k)) for k in sorted({*told, *there})]
    return [one for one in found if one is not None]


@given(told=st.dictionaries(Keys, st.sampled_from([UNKNOWN, b'{"a":1}', b'{"a":2}'])), there=Rows)
def test_differences_make_the_first_rows_equal_to_the_second(
    told: Mapping[bytes, bytes], there: Mapping[bytes, bytes]
) -> None:
    rows = dict(told)
    keys = []
    for found in differences(told, there):
        keys.append(found.key)
        match found:
            case Difference("c", key, None, after) if after:
                assert key not in rows
                rows[key] = after
            case Difference("u", key, before, after) if after:
                assert rows[key] == (before or UNKNOWN) and not same_row(rows[key], after)
                rows[key] = after
            case Difference("d", key, before, None):
                assert rows.pop(key) == (before or UNKNOWN)
            case _:
                pytest.fail(str(found))
    assert keys == sorted(set(keys))
    assert rows.keys() == there.keys()
    assert all(same_row(rows[key], there[key]) for key in rows)


ODD_TEXTS = st.lists(
    st.sampled_from(
        [
            *(
                '},"source":{"version":"',
                '"',
                "\\",
                "}",
                '{"op":"c","before":null,"after":{',
                "ä\n",
            ),
            *(UNAVAILABLE, ',"transaction":null,"ts_ms":1,"ts_us":1,"ts_ns":1}', "x"),
        ]
    ),
    max_size=4,
).map("".join)


@given(
    texts=st.lists(st.none() | ODD_TEXTS, min_size=2, max_size=2),
    op=st.sampled_from("crud"),
    with_before=st.booleans(),
    metadata=st.booleans(),
)
def test_the_row_of_a_plain_event_is_what_json_reads(
    texts: list[str | None], op: str, with_before: bool, metadata: bool
) -> None:
    columns = (("id", 23), ("source", 25), ('odd "name', 25))
    relation = Relation(
        *(7, "public", "t", "d"), tuple(RelationColumn(n, o, -1, n == "id") for n, o in columns)
    )
    plan = Shaping(ShapingSettings(), "bank").plan(relation)
    table = Table(plan, Counter("public.t", '"public.t"'), Encoders())
    row: Row = [b"5", *(None if text is None else text.encode() for text in texts)]
    of_transaction = TransactionTexts("bank", "base", 3, metadata=metadata)
    of_transaction.begin(Stamp(8, 1_000, 77, 900, 78))
    before = table.row(row) if with_before else "null"
    after = "null" if op == "d" else table.row(row)
    value = table.value(before, after, op, 950, 4, of_transaction, 1)
    events = PlainEvents("public", "t", [UNAVAILABLE])
    found = events.read(value)
    if with_before or op == "d" or UNAVAILABLE in value.decode():
        assert found is None
        return
    assert found == (after.encode(), (1_000, 4))
    assert json.loads(found.row) == json.loads(value)["after"]
    for other in (value[:-1], value + b" ", value.replace(b'"seq":4', b'"seq":4.0'), b"{}"):
        assert events.read(other) is None
    assert PlainEvents("public", "other", []).read(value) is None


def test_placeholders_of_all_forms_are_looked_for() -> None:
    """What can't be told by its text leaves every event to the reader of JSON."""
    ending = (
        '},"source":{"version":"1","connector":"postgresql","name":"p","ts_ms":1,"ts_us":1,'
        '"ts_ns":1,"snapshot":"true","db":"d","txId":0,"xmin":null,"commit_lsn":5,"timeline":1,'
        r'"sequence":"[\"1\",\"2\"]","schema":"public","table":"t","lsn":5,"seq":0},'
        '"transaction":null,"ts_ms":1,"ts_us":1,"ts_ns":1}'
    )

    def read(placeholder: object, value: object) -> bool:
        row = json.dumps({"a": value}, separators=(",", ":"))
        event = f'{{"op":"c","before":null,"after":{row[:-1]}{ending}'
        found = PlainEvents("public", "t", [placeholder]).read(event.encode())
        assert found is None or found.row == row.encode()
        return found is not None

    for one in (UNAVAILABLE, [UNAVAILABLE], {"x": [UNAVAILABLE]}, "X19kZWJ6", {"X19": 1}):
        assert not read(one, one)
        assert read(one, "__debezium")
    assert not read(0, "whatever")


def test_a_message_of_an_outbox_and_an_unknown_operation_are_not_folded() -> None:
    source = '"source":{"schema":"public","table":"t","lsn":7}'
    assert event_of(f'{{"op":"c",{source}}}', None, "t[0]@5")["op"] == "c"
    of_outbox: Headers = [("commit_lsn", b"7"), ("seq", b"0")]
    for op, headers in (("c", of_outbox), ("x", None)):
        with pytest.raises(OperatorNeeded, match="not an event") as raised:
            event_of(f'{{"op":"{op}",{source}}}', headers, "t[0]@5")
        assert raised.value.subject == "t[0]@5"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b'{"a":1}', b'{"a":1}', True),
        (b'{"a":1,"b":null}', b'{"a":1}', True),
        (b'{"a":1, "b":2}', b'{"b":2,"a":1}', True),
        (b'{"a":1e400}', b'{"a":1e401}', False),
        (b'{"a":12345678901234567890}', b'{"a":12345678901234567891}', False),
        (b'{"a":"1"}', b'{"a":1}', False),
        (b'{"a":true}', b'{"a":1}', False),
        (b'{"a":[true]}', b'{"a":[1]}', False),
        (b'{"a":1,"gone":2}', b'{"a":1}', True),
        (b'{"a":1}', b'{"a":1,"new":2}', False),
        (b'{"a":1}', b'{"a":1,"new":null}', True),
        (UNKNOWN, b"{}", False),
    ],
)
def test_rows_are_the_same_by_their_values(one: bytes, other: bytes, same: bool) -> None:
    assert same_row(one, other) is same


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("put"), Partition, Keys, st.one_of(st.none(), st.just(b'{"a":1}'))),
            st.tuples(st.just("erase"), Partition, Keys, st.none()),
            st.tuples(st.just("empty"), Partition, st.just(b""), st.none()),
        ),
        max_size=12,
    ),
    there=Rows,
    whole=st.booleans(),
)
def test_a_store_folds_partitions_and_keeps_the_differences(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, bytes, bytes | None]],
    there: Mapping[bytes, bytes],
    whole: bool,
) -> None:
    """Partitions are read one after the other; positions tell what was last across them."""
    store = RowStore(tmp_path_factory.mktemp("rows") / "rows")
    model: dict[bytes, tuple[int, int, bytes | None]] = {}
    for partition in (0, 1):
        for number, (kind, where, key, row) in enumerate(steps):
            if where != partition:
                continue
            if kind == "empty":
                store.empty(partition)
                for name, (place, position, _) in list(model.items()):
                    if place == partition:
                        model[name] = (place, position, None)
                continue
            if kind == "erase":
                store.erase(partition, key)
                if key in model and model[key][0] == partition:
                    model[key] = (partition, model[key][1], None)
                continue
            store.take_folded(partition, [FoldedRow(key, row, (number, 0))])
            known = model.get(key)
            if known is None or known[0] == partition or number >= known[1]:
                model[key] = (partition, number, row)
    assert store.take_rows(there.items()) == 0
    assert store.take_rows(list(there.items())[:1]) == min(1, len(there))
    told = {key: row for key, (_, _, row) in model.items() if row is not None} if whole else {}
    wanted = differences(told, there)
    assert sum(store.compare(Waiter(), whole=whole).values()) == len(wanted)
    assert list(store.differences()) == wanted
    store.close()


def test_a_tombstone_erases_what_its_own_partition_told_alone(tmp_path: Path) -> None:
    """Compaction, or the end of a batch, leaves the tombstone of an older delete by itself."""
    store, name = RowStore(tmp_path / "rows"), ("public", "t")
    fold = Fold(cast(Topics, None), store, {}, shared=False)
    tombstone, events = Message(key=b"k"), PlainEvents(*name, [])

    def take(partition: int, *messages: Message) -> bytes | None:
        for message in messages:
            fold._take(partition, message, name, "t", events)
        fold._flush(partition)
        told = store.folded(b"k")
        return told and told.row

    def event(op: str, lsn: int) -> Message:
        source = {"schema": "public", "table": "t", "lsn": lsn, "commit_lsn": lsn}
        value = json.dumps({"op": op, "after": {"a": 1} if op == "c" else None, "source": source})
        return Message(key=b"k", value=value.encode())

    assert take(0, event("c", 200)) == b'{"a":1}'
    assert take(1, tombstone) == b'{"a":1}'
    assert take(1, event("d", 100)) == b'{"a":1}'
    assert take(1, tombstone) == b'{"a":1}'
    assert take(1, event("c", 50), tombstone) == b'{"a":1}'
    assert take(0, tombstone) is None
    assert take(0, event("c", 300), tombstone) is None
    store.close()


def test_a_value_that_is_the_placeholders_text_is_told_by_the_header(tmp_path: Path) -> None:
    """Without the header the text is of a value that the WAL lacked: the one of before counts."""
    store, name = RowStore(tmp_path / "rows"), ("public", "t")
    placeholders = {"raw": "WA=="}
    fold = Fold(cast(Topics, None), store, placeholders, shared=False)

    def told(row: dict[str, str], header: bytes | None) -> object:
        source = {"schema": "public", "table": "t", "lsn": 7, "commit_lsn": 7}
        value = json.dumps({"op": "u", "after": row, "source": source}).encode()
        headers: Headers = [] if header is None else [(PLACEHOLDER_VALUES_HEADER, header)]
        message = Message(key=b"k", value=value, headers=headers)
        fold._take(0, message, name, "t", PlainEvents(*name, placeholders.values()))
        fold._flush(0)
        known = store.folded(b"k")
        assert known is not None
        return json.loads(known.row) if known.row else known.row

    mine, like = {"a": UNAVAILABLE, "raw": "WA=="}, {"a": "x", "raw": "eA=="}
    assert told(mine, None) == UNKNOWN
    assert told(mine, b'["a"]') == UNKNOWN
    assert told(mine, b'["a","raw"]') == mine
    assert told(mine, None) == mine
    assert told(like, None) == like
    assert told(mine, b'["raw"]') == {"a": "x", "raw": "WA=="}
    for wrong in (b"[", b'"a"', b"[1]"):
        with pytest.raises(OperatorNeeded, match="not an event"):
            told(mine, wrong)
    store.close()


def test_a_row_store_is_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("of a run that was killed")
    store = RowStore(path)
    store.take_folded(0, [FoldedRow(b"k", b'{"a":1}', (1, 0))])
    told = store.folded(b"k")
    assert told is not None and json.loads(told.row or b"") == {"a": 1}
    store.close()
    assert not path.exists()
    with pytest.raises(sqlite3.ProgrammingError):
        store.folded(b"k")


def test_an_outbox_is_left_out_and_named() -> None:
    columns = ("id", "aggregatetype", "aggregateid", "type", "payload")
    relation = [RelationColumn(name, 25, -1, name == "id") for name in columns]
    key = (KeyColumn("id", "text"),)
    shapes = [
        TableShape(Relation(number, "public", name, "d", tuple(relation)), False, "", key)
        for number, name in enumerate(("a", "outbox"))
    ]
    settings = ShapingSettings.model_validate({"outbox": {"table": "public.outbox"}})
    for without in ((), ("public.outbox",)):
        found = scope_of(shapes, Shaping(settings, "p"), without)
        assert [shape.name for shape in found.compared] == ["public.a"]
        assert found.left_out == {"public.outbox": "is an outbox: its messages are not rows"}


def test_a_table_that_other_columns_than_the_key_place_is_not_compared() -> None:
    """A repair would put its rows where their keys belong."""
    columns = tuple(RelationColumn(name, 25, -1, name == "id") for name in ("id", "tenant"))
    shapes = [
        TableShape(Relation(1, "public", "a", "f", columns), False, "", (KeyColumn("id", "text"),))
    ]
    settings = ShapingSettings.model_validate({"partition_by": {"public.a": ["tenant"]}})
    with pytest.raises(SettingsError, match=r"shaping\.partition_by"):
        scope_of(shapes, Shaping(settings, "p"), ())
    assert scope_of(shapes, Shaping(settings, "p"), ("public.a",)).compared == []
