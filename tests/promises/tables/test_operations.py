"""What an operator does to tables: make anew, maintain, read from elsewhere."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException

from schemas.errors import OperatorNeeded, Retryable, SettingsError
from spark_consumers.epochs import job
from spark_consumers.iceberg import catalog, commits
from spark_consumers.iceberg.holds import held
from spark_consumers.iceberg.maintenance import maintain
from spark_consumers.operations import Operator
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.kills import SEAMS, Seam, kill
from tests.promises.tables.publisher import SourceTable

ACCOUNTS = SourceTable("accounts", {"id": ("int4", -1), "b": ("int4", -1), "v": ("int4", -1)})
TABLES = ("accounts", "moves")
MOVES = SourceTable("moves", {"b": ("int4", -1), "v": ("int4", -1)}, key=(), identity="nothing")


def load(pipeline: Pipeline) -> dict[int, dict[str, int]]:
    """Some epochs of changes; what the accounts are."""
    truth: dict[int, dict[str, int]] = {}
    for _ in range(4):
        with pipeline.publisher.transaction() as t:
            for _ in range(8):
                key = random.randrange(12)
                row = {"id": key, "b": random.randrange(3), "v": random.randrange(100)}
                t.insert(MOVES, {"b": row["b"], "v": row["v"]})
                if key in truth and random.random() < 0.3:
                    t.delete(ACCOUNTS, truth.pop(key))
                elif key in truth:
                    t.update(ACCOUNTS, row)
                    truth[key] = row
                else:
                    t.insert(ACCOUNTS, row)
                    truth[key] = row
        pipeline.apply()
    return truth


def accounts(pipeline: Pipeline) -> list[tuple[object, ...]]:
    return [tuple(row) for row in pipeline.rows("accounts", "id")]


@pytest.mark.long
def test_sums_are_kept_by_changes_with_what_is_gone_taken_off(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(
        sums={
            "balances": {"source": "public.accounts", "group_by": ["b"], "sums": {"total": "v"}},
            "moved": {"source": "public.moves", "group_by": ["b"], "sums": {"total": "v"}},
        }
    )
    pipeline.publisher.announce(ACCOUNTS, MOVES)
    truth = load(pipeline)
    truth |= {98: {"id": 98, "b": 2, "v": 3}, 99: {"id": 99, "b": 1, "v": 5}}
    with pipeline.publisher.transaction() as t:
        t.insert(ACCOUNTS, truth[98])
        t.insert(MOVES, {"b": 2, "v": 3})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("spark_consumers.iceberg.sums.add", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline.apply()
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(ACCOUNTS, truth[99])
    pipeline.apply()
    expected: Counter[int] = Counter()
    counts = Counter(row["b"] for row in truth.values())
    for row in truth.values():
        expected[row["b"]] += row["v"]
    found = [tuple(r) for r in pipeline.spark.table(pipeline.identifier("balances")).collect()]
    assert sorted(found) == [(b, expected[b], n) for b, n in sorted(counts.items())]
    moved = pipeline.spark.table(pipeline.identifier("moved")).agg({"total": "sum"}).first()
    moves = pipeline.spark.table(pipeline.identifier("moves")).agg({"v": "sum"}).first()
    assert moved and moves and moved[0] == moves[0]
    with pipeline.publisher.transaction() as t:
        t.truncate(ACCOUNTS)
        t.insert(ACCOUNTS, {"id": 1, "b": 7, "v": 70})
    pipeline.apply()
    assert pipeline.spark.table(pipeline.identifier("balances")).collect() == [(7, 70, 1)]


@pytest.mark.long
def test_a_table_is_made_anew_from_kafka_while_the_old_one_is_there(
    new_pipeline: NewPipeline,
) -> None:
    pipeline = new_pipeline(rules={"public.moves": {"kind": "changelog"}})
    pipeline.publisher.announce(ACCOUNTS, MOVES)
    truth = load(pipeline)
    moves = len(pipeline.rows("moves"))
    for name in ("accounts", "moves"):
        pipeline.spark.sql(f"DELETE FROM {pipeline.identifier(name)} WHERE b = 1")
    assert list(
        Operator(pipeline.spark, pipeline.settings).rebuild(["public.accounts", "public.moves"])
    )
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(ACCOUNTS, {"id": 50, "b": 1, "v": 1})
    before = pipeline.spark.table(pipeline.identifier("accounts"))
    assert before.where("b = 1").count() == 0
    pipeline.apply()
    while pipeline.runner.works_alone:
        pipeline.step()
    expected = [*(tuple(row.values()) for _, row in sorted(truth.items())), (50, 1, 1)]
    assert accounts(pipeline) == expected
    assert len(pipeline.rows("moves")) == moves
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('accounts')} PURGE")
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(MOVES, {"b": 1, "v": 1})
    pipeline.apply()
    assert accounts(pipeline) == expected
    assert len(pipeline.rows("moves")) == moves + 1


@pytest.mark.long
def test_an_idle_table_is_made_anew_without_a_restart(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ACCOUNTS, MOVES)
    truth = load(pipeline)
    expected = [tuple(row.values()) for _, row in sorted(truth.items())]
    pipeline.spark.sql(f"DELETE FROM {pipeline.identifier('accounts')} WHERE true")
    assert list(Operator(pipeline.spark, pipeline.settings).rebuild(["public.accounts"]))
    for number in range(2):  # after the first, it is seen; with the second, it is done
        with pipeline.publisher.transaction() as t:
            t.insert(MOVES, {"b": 1, "v": number})
        pipeline.apply()
    assert accounts(pipeline) == expected


@pytest.mark.long
def test_nothing_is_asked_of_tables_where_one_name_is_refused(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ACCOUNTS, MOVES)
    with pipeline.publisher.transaction() as t:
        t.insert(ACCOUNTS, {"id": 1, "b": 1, "v": 1})
        t.insert(MOVES, {"b": 1, "v": 1})
    pipeline.apply()
    operator, asked = Operator(pipeline.spark, pipeline.settings), ["public.accounts"]

    def marked() -> list[str]:
        return [f"public.{name}" for name in TABLES if pipeline.note(name).rebuild]

    with pytest.raises(SettingsError, match=r"no Iceberg table of public\.nowhere"):
        list(operator.rebuild([*asked, "public.nowhere"]))
    assert marked() == []
    assert list(operator.rebuild(asked)) == [(name, True) for name in asked]
    with pytest.raises(SettingsError, match=r"public\.moves is not being rebuilt"):
        list(operator.cancel_rebuild([*asked, "public.moves"]))
    assert marked() == asked


@pytest.mark.long
def test_a_rebuild_that_run_can_not_bring_is_refused(new_pipeline: NewPipeline) -> None:
    moved = {"source": "public.moves", "group_by": ["b"], "sums": {"total": "v"}}
    pipeline = new_pipeline(sums={"moved": moved})
    pipeline.publisher.announce(ACCOUNTS, MOVES)
    with pipeline.publisher.transaction() as t:
        t.insert(ACCOUNTS, {"id": 1, "b": 1, "v": 1})
        t.insert(MOVES, {"b": 1, "v": 1})
    pipeline.apply()
    pipeline.set_tables(tables=("public.moves",))
    operator = Operator(pipeline.spark, pipeline.settings)
    for name, problem in {
        "sums of moved": "is a table of sums",
        "public.accounts": "does not follow",
        "moved": r"tables: public\.moves$",
    }.items():
        with pytest.raises(SettingsError, match=problem):
            list(operator.rebuild(["public.moves", name]))
    found = Operator(pipeline.spark, pipeline.settings)._tables.states(pipeline.spark)
    assert not [name for name, state in found.items() if state.note.rebuild]


def test_maintenance_leaves_rows_and_tags_and_few_files(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_consumers.iceberg.tables.COPIED_BYTES_MAX", 0)
    pipeline = new_pipeline(epochs_kept=2, compact_files_min=2)
    pipeline.set_tables(orphans_older_ms=0)
    pipeline.publisher.announce(ACCOUNTS, MOVES)
    load(pipeline)
    before = accounts(pipeline)
    tag = catalog.tag_name(pipeline.publisher.commit_lsn)
    state = pipeline.runner.states["public.accounts"]
    operator = Operator(pipeline.spark, pipeline.settings)
    done = {found.table: found for found in operator.maintain()}["public.accounts"]
    files = pipeline.spark.table(f"{state.identifier}.files").select("content", "record_count")
    assert done.files_after <= 2 < done.files_before, files.collect()
    assert accounts(pipeline) == before
    tagged = pipeline.spark.sql(f"SELECT * FROM {state.identifier} VERSION AS OF '{tag}'")
    assert tagged.count() == len(before)
    table = catalog.load(pipeline.spark, state.identifier)
    assert len(catalog.own_tags(table)) == 4
    compacted = catalog.snapshot_id(table)
    assert compacted is not None
    changed = {"id": before[0][0], "b": 1, "v": -1}
    with pipeline.publisher.transaction() as t:
        t.update(ACCOUNTS, changed)
    pipeline.apply()
    assert accounts(pipeline) == [tuple(changed.values()), *before[1:]]
    for _ in operator.maintain():  # a reader may still have the snapshot of the compaction
        pass
    assert catalog.as_of(pipeline.spark, state.identifier, compacted).count() == len(before)


def test_old_epochs_go_and_what_is_read_or_tagged_stays(new_pipeline: NewPipeline) -> None:
    ages = ("epochs_kept_all_ms", "epochs_kept_minutely_ms", "epochs_kept_hourly_ms")
    pipeline = new_pipeline(**dict.fromkeys(ages, 0))
    pipeline.publisher.announce(ACCOUNTS, MOVES)
    lsns = []
    for number in range(4):
        with pipeline.publisher.transaction() as t:
            t.insert(ACCOUNTS, {"id": number, "b": 0, "v": 0})
            if number == 0:
                t.insert(MOVES, {"b": 0, "v": 0})
        pipeline.apply()
        lsns.append(pipeline.publisher.commit_lsn)
    spark, operator = pipeline.spark, Operator(pipeline.spark, pipeline.settings)
    name = pipeline.identifier("accounts")
    tags = [catalog.tag_name(lsn) for lsn in lsns]

    def snapshots() -> set[int]:
        found = catalog.metadata(catalog.load(spark, name))["snapshots"]
        return {snapshot["snapshot-id"] for snapshot in found}

    table = catalog.load(spark, name)
    first, second, _, last = (catalog.ref_snapshot(table, tag) or 0 for tag in tags)
    table.manageSnapshots().createTag("mine", first).commit()
    table = catalog.load(spark, pipeline.identifier("_epochs"))
    table.updateProperties().set("history.expire.max-snapshot-age-ms", "1").commit()
    table, tries = catalog.load(spark, name), []

    def tag_too_late(manage: Any) -> None:
        tries.append(manage.createTag("beside", first))
        if len(tries) < 3:
            catalog.set_property(catalog.load(spark, name), "another", f"writer {len(tries)}")

    commits.change_refs(table, tag_too_late)
    assert len(tries) == 3
    commits.forget(table, ["beside", "gone before"])
    with held(spark, {name: second}):
        assert len(list(operator.maintain())) == 2
        assert snapshots() == {first, second, last}
    list(operator.maintain())
    assert snapshots() == {first, last}
    (epoch,) = operator.epochs()
    assert epoch["tag"] == tags[3]
    # The last epoch brought nothing to this table: an older tag keeps what it has of it.
    moves = catalog.load(spark, pipeline.identifier("moves"))
    assert catalog.own_tags(moves) == [tags[0]]
    assert [t for t, _ in operator.tag(lsns[3])] == [pipeline.identifier(n) for n in TABLES]
    with pipeline.publisher.transaction() as t:
        t.insert(MOVES, {"b": 0, "v": 1})
    pipeline.apply()
    assert [e["epoch"] for e in operator.epochs()] == [4, 5]


@pytest.mark.long
def test_a_snapshot_stays_for_the_readers_that_it_had_until_it_was_replaced(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tag names that of a compaction, which may be current for hours."""
    pipeline = new_pipeline(compact_files_min=2)
    pipeline.publisher.announce(ACCOUNTS)
    for number in range(2):
        with pipeline.publisher.transaction() as t:
            t.insert(ACCOUNTS, {"id": number, "b": 1, "v": number})
        pipeline.apply()
    state, spark = pipeline.runner.states["public.accounts"], pipeline.spark
    maintain(spark, pipeline.tables, state, orphans=False)
    compacted = catalog.snapshot_id(catalog.load(spark, state.identifier))
    assert compacted is not None
    with pipeline.publisher.transaction() as t:
        t.update(ACCOUNTS, {"id": 0, "b": 2, "v": 0})
    pipeline.apply()
    log = catalog.metadata(catalog.load(spark, state.identifier))["snapshot-log"]
    replaced_ms = log[-1]["timestamp-ms"]
    settings = pipeline.tables.model_copy(update={"compact_files_min": 1000})
    for late_ms, there in ((-1, True), (1, False)):
        now_s = (replaced_ms + settings.epochs_kept_all_ms + late_ms) / 1000
        clock = SimpleNamespace(time=lambda now_s=now_s: now_s)
        monkeypatch.setattr("spark_consumers.iceberg.maintenance.time", clock)
        maintain(spark, settings, state, orphans=False)
        table = catalog.load(spark, state.identifier)
        assert (table.snapshot(compacted) is not None) is there
        if there:
            assert catalog.as_of(spark, state.identifier, compacted).count() == 2


def files(pipeline: Pipeline, table: str) -> dict[str, int]:
    """Data file -> its size."""
    frame = pipeline.spark.table(f"{pipeline.identifier(table)}.data_files")
    return {row.file_path: row.file_size_in_bytes for row in frame.collect()}


@pytest.mark.long
@pytest.mark.parametrize(("deleted", "kept"), [(5, True), (500, False)])
def test_a_file_is_written_anew_only_when_much_of_it_is_deleted(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, deleted: int, kept: bool
) -> None:
    monkeypatch.setattr("spark_consumers.iceberg.tables.COPIED_BYTES_MAX", 0)
    pipeline = new_pipeline(compact_files_min=2)
    pipeline.publisher.announce(ACCOUNTS)
    with pipeline.publisher.transaction() as t:
        for number in range(1000):
            t.insert(ACCOUNTS, {"id": number, "b": 1, "v": random.randrange(2**30)})
    pipeline.apply()
    first = files(pipeline, "accounts")
    for part in range(2):
        with pipeline.publisher.transaction() as t:
            for number in range(part * deleted // 2, (part + 1) * deleted // 2):
                t.update(ACCOUNTS, {"id": number, "b": 2, "v": number})
        pipeline.apply()
    before = accounts(pipeline)
    monkeypatch.setattr("spark_consumers.iceberg.maintenance._TARGET_BYTES", max(first.values()))
    maintain(
        pipeline.spark, pipeline.tables, pipeline.runner.states["public.accounts"], orphans=False
    )
    assert bool(set(first) & set(files(pipeline, "accounts"))) is kept
    assert accounts(pipeline) == before
    with pipeline.publisher.transaction() as t:
        t.delete(ACCOUNTS, {"id": 0, "b": 2, "v": 0})
    pipeline.apply()
    assert accounts(pipeline) == before[1:]


@pytest.mark.long
@pytest.mark.parametrize("has", SEAMS)
def test_a_kill_and_then_maintenance_bring_no_row_twice(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, has: Seam
) -> None:
    pipeline = new_pipeline(epochs_kept=2, compact_files_min=2)
    pipeline.publisher.announce(MOVES)
    for number in range(2):
        with pipeline.publisher.transaction() as t:
            t.insert(MOVES, {"b": 1, "v": number})
        pipeline.apply()

    with pipeline.publisher.transaction() as t:
        t.insert(MOVES, {"b": 1, "v": 7})
    with monkeypatch.context() as patch:
        kill(patch, has)
        with pytest.raises(KeyboardInterrupt):
            pipeline.apply()
    operator = Operator(pipeline.spark, pipeline.settings)
    for done in operator.maintain():
        assert done.files_after <= done.files_before
    pipeline.restart()
    redone = pipeline.publisher.commit_lsn
    with pipeline.publisher.transaction() as t:
        t.insert(MOVES, {"b": 1, "v": 8})
    pipeline.apply()
    assert sorted(row.v for row in pipeline.rows("moves")) == [0, 1, 7, 8]
    for _ in operator.maintain():
        pass
    assert [name for name, _ in operator.tag(redone)] == [pipeline.identifier("moves")]


@pytest.mark.long
def test_a_table_that_can_not_be_maintained_keeps_nothing_else_from_it(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(compact_files_min=2)
    pipeline.publisher.announce(ACCOUNTS, MOVES)
    for key in range(2):
        with pipeline.publisher.transaction() as t:
            t.insert(ACCOUNTS, {"id": key, "b": 0, "v": 0})
            t.insert(MOVES, {"b": 0, "v": key})
        pipeline.apply()
    done: list[str] = []

    def compact(spark: object, table: Any, settings: object) -> None:
        name = str(table.name()).rpartition(".")[2]
        done.append(name)
        if name == "accounts":
            raise PySparkException("CommitFailedException: the metadata has changed")

    monkeypatch.setattr("spark_consumers.iceberg.maintenance._compact", compact)
    maintained = Operator(pipeline.spark, pipeline.settings).maintain()
    assert next(maintained).table == "public.moves"
    with pytest.raises(Retryable, match=r"another writer .* \(public\.accounts\)"):
        next(maintained)
    pipeline.runner.maintain()
    assert sorted(done) == ["accounts", "accounts", "moves", "moves"]
    with pipeline.publisher.transaction() as t:
        t.insert(MOVES, {"b": 9, "v": 9})
    pipeline.apply()
    assert pipeline.rows("moves", "b")[-1].v == 9


@pytest.mark.long
@pytest.mark.parametrize(
    "bridge", [{"transaction_metadata": False}, {"decimal_handling": "precise"}]
)
def test_topics_that_tables_can_not_be_made_of_are_refused(
    pipeline: Pipeline, bridge: dict[str, object]
) -> None:
    changed = pipeline.settings.bridge.model_copy(update=bridge)
    with pytest.raises(SettingsError, match=r"transaction|decimal_handling is precise"):
        job.require_readable(pipeline.settings.model_copy(update={"bridge": changed}))


@pytest.mark.long
def test_topics_that_have_lost_their_beginning_are_refused(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ACCOUNTS)
    with pipeline.publisher.transaction() as t:
        t.insert(ACCOUNTS, {"id": 1, "b": 1, "v": 1}, partition=0)
    pipeline.publisher.forget(ACCOUNTS)
    with pytest.raises(OperatorNeeded, match="no longer has the first events of the table"):
        pipeline.apply()


@pytest.mark.long
def test_topics_of_a_divergence_are_refused(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ACCOUNTS)
    pipeline.publisher.diverge(0x500)
    with pipeline.publisher.transaction() as t:
        t.insert(ACCOUNTS, {"id": 1, "b": 1, "v": 1})
    with pytest.raises(OperatorNeeded, match="3 transactions of timeline 1 that the database lost"):
        pipeline.apply()


@pytest.mark.long
def test_a_table_that_was_not_followed_gets_what_it_lacks(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(tables=("public.moves",))
    pipeline.publisher.announce(ACCOUNTS, MOVES)
    with pipeline.publisher.transaction() as t:
        t.insert(ACCOUNTS, {"id": 1, "b": 1, "v": 1})
        t.insert(MOVES, {"b": 1, "v": 1})
    pipeline.apply()
    pipeline.restart()
    both = new_pipeline()
    both.publisher.commit_lsn = pipeline.publisher.commit_lsn
    with both.publisher.transaction() as t:
        t.insert(MOVES, {"b": 1, "v": 2})
    both.apply()
    assert accounts(both) == [(1, 1, 1)]
    assert sorted(row.v for row in both.rows("moves")) == [1, 2]
