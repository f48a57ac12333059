"""Epochs into current-state tables: last change wins, once, whatever was there before."""

import base64
import json
import random

import pytest

from schemas.errors import BadInput, ExitCode, OperatorNeeded, SlotbridgeError
from schemas.events import UNAVAILABLE
from spark_consumers.failures import translated
from spark_consumers.iceberg import catalog
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.kills import kill
from tests.promises.tables.publisher import SourceTable

ITEMS = SourceTable("items", {"id": ("int4", -1), "name": ("text", -1), "body": ("text", -1)})
HISTORY = SourceTable("history", {"note": ("text", -1)}, key=(), identity="nothing")


def item(number: int, name: str | None = "a", body: str | None = "b") -> dict[str, object]:
    return {"id": number, "name": name, "body": body}


def rows(pipeline: Pipeline) -> list[tuple[object, ...]]:
    return [tuple(row) for row in pipeline.rows("items")]


def test_aborted_transactions_never_appear(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1))
    with publisher.transaction(commit=False) as t:
        t.insert(ITEMS, item(2))
        t.delete(ITEMS, item(1))
    with publisher.transaction() as t:
        t.insert(ITEMS, item(3, None))
    report = pipeline.apply()
    assert report.document()["events"] == 2
    assert rows(pipeline) == [(1, "a", "b"), (3, None, "b")]


def test_the_last_change_of_a_row_wins_within_and_across_batches(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        for number in range(1, 7):
            t.insert(ITEMS, item(number))
        t.update(ITEMS, item(1, "updated"))
        t.delete(ITEMS, item(2))
        t.delete(ITEMS, item(3))
        t.insert(ITEMS, item(3, "again"))
    pipeline.apply()
    assert [row[:2] for row in rows(pipeline)] == [
        (1, "updated"),
        (3, "again"),
        (4, "a"),
        (5, "a"),
        (6, "a"),
    ]
    with publisher.transaction() as t:
        t.delete(ITEMS, item(4))
        t.insert(ITEMS, item(4, "third"))
        t.change_key(ITEMS, item(5), item(50))
        t.update(ITEMS, item(50, "moved"))
        t.change_key(ITEMS, item(6), item(5, "taken"))
    report = pipeline.apply()
    assert (report.epoch, report.tables["public.items"].duplicates) == (2, 0)
    assert [row[:2] for row in rows(pipeline)] == [
        (1, "updated"),
        (3, "again"),
        (4, "third"),
        (5, "taken"),
        (50, "moved"),
    ]


@pytest.mark.long
def test_without_the_ledger_the_tables_tell_what_they_have(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS, HISTORY)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1))
        t.insert(ITEMS, item(2))
        t.insert(HISTORY, {"note": "x"})
        t.insert(HISTORY, {"note": "x"})
    pipeline.apply()
    with publisher.transaction() as t:
        t.delete(ITEMS, item(1))
        t.update(ITEMS, item(2, "new"))
        t.insert(HISTORY, {"note": "y"})
    pipeline.apply()
    before = (rows(pipeline), pipeline.rows("history"))
    pipeline.restart()
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('_epochs')} PURGE")
    with publisher.transaction() as t:
        t.insert(HISTORY, {"note": "z"})
    report = pipeline.apply()
    assert report.epoch == 3
    assert report.tables["public.history"].duplicates == 3
    assert rows(pipeline) == before[0] == [(2, "new", "b")]
    assert [row.note for row in pipeline.rows("history")] == ["x", "x", "y", "z"]
    found = catalog.properties(catalog.load(pipeline.spark, pipeline.identifier("items")))
    assert catalog.reached(found)[0] == 3, "it was read too: nothing told what it lacks"


@pytest.mark.long
@pytest.mark.parametrize("tables", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_epoch_that_some_tables_have_is_made_again_for_the_others(
    new_pipeline: NewPipeline, tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(offsets_per_trigger_max=4)
    publisher = pipeline.publisher
    publisher.announce(ITEMS, HISTORY)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1))
    pipeline.apply()
    with publisher.transaction() as t:
        t.update(ITEMS, item(1, "first"))
        t.insert(HISTORY, {"note": "first"})
    with publisher.transaction() as t:
        t.truncate(ITEMS)
        t.insert(ITEMS, item(2))
        t.insert(HISTORY, {"note": "second"})
    with monkeypatch.context() as patch:
        kill(patch, "tables", tables_max=tables)
        with pytest.raises(KeyboardInterrupt):
            pipeline.apply()
    done = [pipeline.identifier(name) for name in ("history", "items")[:tables]]
    with publisher.transaction() as t:
        t.insert(HISTORY, {"note": "third"})
    written = {name: pipeline.spark.table(f"{name}.snapshots").count() for name in done}
    pipeline.restart()
    report = pipeline.step()
    assert report is not None and report.epoch == 2
    assert {n: pipeline.spark.table(f"{n}.snapshots").count() for n in done} == written
    pipeline.apply()
    assert rows(pipeline) == [(2, "a", "b")]
    assert [row.note for row in pipeline.rows("history")] == ["first", "second", "third"]


def test_planted_duplicates_change_nothing_even_after_a_delete(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1))
        t.insert(ITEMS, item(2))
        t.update(ITEMS, item(2, "last"))
        t.delete(ITEMS, item(1))
        first = t.commit_lsn
    pipeline.apply()
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1), commit_lsn=first, seq=0)
        t.insert(ITEMS, item(2), commit_lsn=first, seq=1)
        t.insert(ITEMS, item(3))
        t.insert(ITEMS, item(3), seq=2)
    assert pipeline.apply().tables["public.items"].duplicates == 3
    assert [row[:2] for row in rows(pipeline)] == [(2, "last"), (3, "a")]


def test_a_truncate_takes_older_rows_of_all_partitions_with_it(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1), partition=0)
        t.insert(ITEMS, item(2), partition=1)
        t.insert(ITEMS, item(3), partition=2)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(4), partition=2)
        t.truncate(ITEMS)
        t.insert(ITEMS, item(5), partition=0)
        t.insert(ITEMS, item(6), partition=2)
    pipeline.apply()
    assert [row[0] for row in rows(pipeline)] == [5, 6]


@pytest.mark.long
def test_a_truncate_empties_what_earlier_batches_brought(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS, HISTORY)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1), partition=0)
        t.insert(ITEMS, item(2), partition=1)
        t.insert(HISTORY, {"note": "gone"})
    pipeline.apply()
    with publisher.transaction() as t:
        t.truncate(ITEMS)
        t.truncate(HISTORY)
        t.insert(HISTORY, {"note": "new"})
    pipeline.apply()
    assert rows(pipeline) == []
    assert [row.note for row in pipeline.rows("history")] == ["new"]


def test_an_unchanged_out_of_line_value_is_kept(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1, body="long"))
        t.insert(ITEMS, item(2, body="other"))
    pipeline.apply()
    with publisher.transaction() as t:
        t.update(ITEMS, item(1, "x", UNAVAILABLE))
        t.update(ITEMS, item(2, "y", None))
        t.update(ITEMS, item(2, "z", UNAVAILABLE))
        t.insert(ITEMS, item(3, "x", "inserted"))
        t.update(ITEMS, item(3, "y", UNAVAILABLE))
    pipeline.apply()
    assert rows(pipeline) == [(1, "x", "long"), (2, "z", None), (3, "y", "inserted")]


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        f'["{UNAVAILABLE}"]',
        base64.b64encode(UNAVAILABLE.encode()).decode(),
        f"not {UNAVAILABLE}",
        f'"{UNAVAILABLE}"',
    ],
)
def test_a_users_text_that_looks_like_the_placeholder_is_stored(
    pipeline: Pipeline, text: str
) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1, body="before"))
    pipeline.apply()
    with publisher.transaction() as t:
        t.update(ITEMS, item(1, "x", text))
    pipeline.apply()
    assert rows(pipeline) == [(1, "x", text)]


@pytest.mark.long
def test_a_changed_key_without_its_out_of_line_value_is_refused(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1, body="long"))
        t.change_key(ITEMS, item(1), item(2, body=UNAVAILABLE))
    with pytest.raises(SlotbridgeError) as raised:
        pipeline.apply()
    error = translated(raised.value, "apply")
    assert isinstance(error, BadInput)
    assert error.subject == "public.items"
    assert error.lsn == publisher.commit_lsn
    assert "body" in error.message


def test_a_value_that_does_not_fit_is_named_and_never_null(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, item(7), partition=2)
        t.insert(ITEMS, {"id": "secret", "name": "n", "body": "b"}, partition=2)
    with pytest.raises(SlotbridgeError) as raised:
        pipeline.apply()
    error = translated(raised.value, "apply")
    assert error.exit_code == ExitCode.RECORD_REFUSED
    assert error.subject == f"{publisher.prefix}.public.items, partition 2, offset 1"
    assert error.lsn == publisher.commit_lsn
    assert "secret" not in str(error)


OF_NO_TABLE = json.dumps({"op": "c", "source": {"commit_lsn": 1100, "seq": 0}, "after": {}})


@pytest.mark.long
@pytest.mark.parametrize(
    "value", ["no JSON", "{}", json.dumps({"op": "x", "source": {}}), OF_NO_TABLE]
)
def test_a_record_that_is_not_an_event_is_refused(pipeline: Pipeline, value: str) -> None:
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.raw(ITEMS, value, partition=1)
    with pytest.raises(BadInput, match="partition 1, offset 0"):
        pipeline.apply()


@pytest.mark.long
def test_an_update_of_a_table_without_a_key_is_refused(pipeline: Pipeline) -> None:
    full = SourceTable("full", {"a": ("int4", -1), "b": ("text", -1)}, key=(), identity="full")
    pipeline.publisher.announce(full)
    with pipeline.publisher.transaction() as t:
        t.insert(full, {"a": 1, "b": "x"})
    pipeline.apply()
    assert [tuple(row) for row in pipeline.rows("full")] == [(1, "x")]
    with pipeline.publisher.transaction() as t:
        t.delete(full, {"a": 1, "b": "x"})
    with pytest.raises(BadInput, match="has no key"):
        pipeline.apply()


@pytest.mark.long
def test_a_key_of_all_columns(pipeline: Pipeline) -> None:
    link = SourceTable(
        "link", {"a": ("int4", -1), "b": ("text", -1)}, key=("a", "b"), identity="full"
    )
    pipeline.publisher.announce(link)
    with pipeline.publisher.transaction() as t:
        t.insert(link, {"a": 1, "b": "x"})
        t.insert(link, {"a": 1, "b": "y"})
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.delete(link, {"a": 1, "b": "x"})
        t.update(link, {"a": 1, "b": "y"})
    pipeline.apply()
    assert [tuple(row) for row in pipeline.rows("link")] == [(1, "y")]


@pytest.mark.long
@pytest.mark.parametrize(
    "row",
    [{**item(1), "surprise": 1}, {"id": 1, "name": "n"}, {"id": 1, "name": "n", "bady": "b"}],
)
def test_an_event_whose_fields_are_not_the_tables_is_refused(
    pipeline: Pipeline, row: dict[str, object]
) -> None:
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, row, partition=1)
    with pytest.raises(SlotbridgeError) as raised:
        pipeline.apply()
    error = translated(raised.value, "apply")
    assert (error.exit_code, error.lsn) == (ExitCode.RECORD_REFUSED, pipeline.publisher.commit_lsn)
    assert error.subject.endswith(".public.items, partition 1, offset 0")


@pytest.mark.long
def test_two_source_tables_never_share_an_iceberg_table(pipeline: Pipeline) -> None:
    one = SourceTable("a__b", {"id": ("int4", -1)})
    two = SourceTable("b", {"id": ("int4", -1)}, schema="a")
    pipeline.publisher.announce(one)
    with pipeline.publisher.transaction() as t:
        t.insert(one, {"id": 1})
    pipeline.apply()
    pipeline.publisher.announce(two)
    with pipeline.publisher.transaction() as t:
        t.insert(two, {"id": 2})
    with pytest.raises(OperatorNeeded, match=r"belongs to public\.a__b, not to a\.b"):
        pipeline.apply()


def test_names_that_sql_would_misread(pipeline: Pipeline) -> None:
    odd = SourceTable(
        'We"ird; drop',
        {"Id": ("int4", -1), "id": ("int4", -1), "a.b": ("text", -1), "t`ick's": ("text", -1)},
        key=("Id", "a.b"),
    )
    row = {"Id": 1, "id": 2, "a.b": "k", "t`ick's": "v"}
    pipeline.publisher.announce(odd)
    with pipeline.publisher.transaction() as t:
        t.insert(odd, row)
        t.update(odd, {**row, "id": 3, "t`ick's": UNAVAILABLE})
    pipeline.apply()
    assert [tuple(row) for row in pipeline.rows("We_ird__drop", "Id")] == [(1, 3, "k", "v")]


@pytest.mark.parametrize(
    ("events_max", "large"), [(7, True), pytest.param(1000, False, marks=pytest.mark.long)]
)
def test_any_cut_leads_to_the_same_rows(
    new_pipeline: NewPipeline, events_max: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr("spark_consumers.iceberg.tables.COPIED_BYTES_MAX", 0)
    pipeline = new_pipeline(offsets_per_trigger_max=events_max * 10)
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    truth: dict[int, dict[str, object]] = {}
    for number in range(120):
        with publisher.transaction() as t:
            for _ in range(random.randint(1, 5)):
                key = random.randrange(30)
                if random.random() < 0.02:
                    t.truncate(ITEMS)
                    truth.clear()
                elif key not in truth:
                    truth[key] = item(key, str(number), "long")
                    t.insert(ITEMS, truth[key])
                elif random.random() < 0.3:
                    t.delete(ITEMS, truth.pop(key))
                else:
                    truth[key] |= {"name": str(number)}
                    t.update(ITEMS, {**truth[key], "body": UNAVAILABLE})
    pipeline.apply()
    assert rows(pipeline) == [tuple(row.values()) for _, row in sorted(truth.items())]


@pytest.mark.long
@pytest.mark.parametrize(
    "epoch_each",
    [pytest.param(True, marks=pytest.mark.long), False],
    ids=["an epoch each", "one epoch"],
)
def test_rows_of_a_snapshot_give_way_to_later_changes(pipeline: Pipeline, epoch_each: bool) -> None:
    """A chunk may show the next transaction, whose inserts come again: no key has two rows."""
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    read = {1: "changed", 2: "changed", 3: "read", 4: "read", 5: "inserted"}
    with publisher.transaction() as t:
        t.insert(ITEMS, item(1, "changed"))
        t.insert(ITEMS, item(2, "old"))
    pipeline.apply()
    with publisher.transaction() as t:
        for number, name in read.items():
            t.read(ITEMS, item(number, name))
    if epoch_each:
        pipeline.apply()
    with publisher.transaction() as t:
        t.insert(ITEMS, item(5, "inserted"))
        t.insert(ITEMS, item(6, "inserted"))
    pipeline.apply()
    assert [row[:2] for row in rows(pipeline)] == [*read.items(), (6, "inserted")]
    with publisher.transaction() as t:
        t.update(ITEMS, item(4, "again"))
        t.delete(ITEMS, item(2))
    pipeline.apply()
    with publisher.transaction() as t:
        t.insert(ITEMS, item(7, "appended"))
    pipeline.apply()
    assert [row[:2] for row in rows(pipeline)] == [
        *[(1, "changed"), (3, "read"), (4, "again")],
        *[(5, "inserted"), (6, "inserted"), (7, "appended")],
    ]
