"""A table that is made anew beside the stream: in parts, killed anywhere, seen by readers."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import structlog
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from schemas.errors import SettingsError
from spark_consumers.audit.cut import Cuts
from spark_consumers.epochs import epoch_runner, publication, rebuilds, stage
from spark_consumers.epochs.ledger import EpochRecord, Ledger
from spark_consumers.epochs.publication import TableCommit
from spark_consumers.iceberg import catalog, commits, staging
from spark_consumers.iceberg.table_note import TableNote
from spark_consumers.operations import Operator
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.kills import kill
from tests.promises.tables.lagging_broker import lag
from tests.promises.tables.publisher import SourceTable, Transaction
from tests.promises.tables.test_job import Running
from tests.providers.waiting import eventually, patient

ITEMS = SourceTable("items", {"id": ("int4", -1), "g": ("int4", -1), "v": ("text", -1)})
LOG = SourceTable("log", {"n": ("int4", -1)}, key=(), identity="nothing")
NAME = "public.items"
PART = 12


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_consumers.epochs.rebuilds.PART_EVENTS", PART)


def change(t: Transaction, chance: random.Random, there: set[int]) -> None:
    """Some changes of items; `there`: the keys that are there."""
    for _ in range(4):
        key = chance.randrange(12)
        row = {"id": key, "g": key % 3, "v": str(chance.randrange(1000))}
        if key in there and chance.random() < 0.3:
            there.discard(key)
            t.delete(ITEMS, row)
        elif key in there:
            t.update(ITEMS, row)
        else:
            there.add(key)
            t.insert(ITEMS, row)


def load(pipeline: Pipeline, transactions: int = 8, *, truncate: bool = True) -> set[int]:
    """Changes in one epoch, and then small ones; the keys that are there."""
    chance, there = random.Random(7), set[int]()
    pipeline.publisher.announce(ITEMS, LOG)
    for number in range(transactions):
        with pipeline.publisher.transaction() as t:
            if truncate and number == transactions // 2:
                there.clear()
                t.truncate(ITEMS)
            change(t, chance, there)
            t.insert(LOG, {"n": number})
    pipeline.apply()
    small_epochs(pipeline)
    return there


def small_epochs(pipeline: Pipeline) -> None:
    """Restart with a limit below which a rebuild reads all that is left."""
    pipeline.restart()
    found = pipeline.tables.model_copy(update={"offsets_per_trigger_max": PART})
    pipeline.settings = pipeline.settings.model_copy(update={"tables": found})


def whole(pipeline: Pipeline, table: str = "items") -> list[tuple[Any, ...]]:
    """All of a table, our own columns too."""
    return sorted(map(tuple, pipeline.spark.table(pipeline.identifier(table)).collect()), key=repr)


def damage(pipeline: Pipeline) -> list[tuple[Any, ...]]:
    """Take rows away; the table as it was."""
    before = whole(pipeline)
    pipeline.spark.sql(f"DELETE FROM {pipeline.identifier('items')} WHERE g = 1")
    assert whole(pipeline) != before
    return before


def ask(pipeline: Pipeline) -> None:
    assert list(Operator(pipeline.spark, pipeline.settings).rebuild([NAME])) == [(NAME, True)]
    pipeline.runner.look_for_requests()


def tell(pipeline: Pipeline, number: int) -> None:
    with pipeline.publisher.transaction() as t:
        t.insert(LOG, {"n": number})


def asked(pipeline: Pipeline) -> bool:
    return pipeline.note("items").rebuild is not None


def begun(pipeline: Pipeline) -> bool:
    """Whether a part of the rebuild is done."""
    rebuild = pipeline.note("items").rebuild
    return rebuild is not None and rebuild.offsets is not None


def record(pipeline: Pipeline) -> EpochRecord:
    found = Ledger(pipeline.kafka.topic_prefix, pipeline.tables).last(pipeline.spark)
    assert found is not None
    return found


def delete_topic(pipeline: Pipeline, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": pipeline.kafka.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(patient(30))
    eventually(
        lambda: topic not in admin.list_topics(timeout=patient(20)).topics, what="it is gone"
    )


def require_done(pipeline: Pipeline, *, quarantined: bool = False) -> None:
    """Nothing of the rebuild is left, and the record has the table as readers have it."""
    table = catalog.load(pipeline.spark, pipeline.identifier("items"))
    note = pipeline.note("items")
    assert (note.state, note.incomplete is not None) == ("following", quarantined)
    assert [n for n in catalog.ref_names(table) if n.startswith("slotbridge_")] == []
    last = record(pipeline)
    assert last.tables[NAME].snapshot == catalog.snapshot_id(table)
    tagged = [catalog.ref_snapshot(table, tag) for tag in catalog.own_tags(table)]
    assert catalog.snapshot_id(table) in tagged


def finish(pipeline: Pipeline, *, most: int = 40) -> int:
    """Step without transactions until nothing is left to do; how many steps it took."""
    for number in range(most):
        if not pipeline.runner.works_alone:
            return number
        pipeline.step()
    raise AssertionError("the rebuild does not end")


@pytest.mark.parametrize(
    ("kind", "large"),
    [
        ("current", False),
        pytest.param("current", True, marks=pytest.mark.long),
        pytest.param("history", False, marks=pytest.mark.long),
        pytest.param("changelog", False, marks=pytest.mark.long),
    ],
)
def test_the_others_go_on_and_readers_have_the_old_table_until_it_is_whole(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, kind: str, *, large: bool
) -> None:
    if large:
        monkeypatch.setattr("spark_consumers.iceberg.tables.COPIED_BYTES_MAX", 0)
    pipeline = new_pipeline(rules={NAME: {"kind": kind}}, key_index=large)
    load(pipeline)
    before = damage(pipeline)
    damaged = whole(pipeline)
    ask(pipeline)
    told = [len(whole(pipeline, "log"))]
    for number in range(100, 140):
        tell(pipeline, number)
        pipeline.apply()
        told.append(len(whole(pipeline, "log")))
        if not asked(pipeline):
            break
        assert whole(pipeline) == damaged
        assert 0 < pipeline.runner.rebuilds.progress(pipeline.runner.states)[NAME] <= 1
    assert len(told) > 3, "it was in several parts"
    assert told == list(range(told[0], told[0] + len(told))), "each transaction was there at once"
    assert whole(pipeline) == before
    require_done(pipeline)
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 99, "g": 9, "v": "later"})
    pipeline.apply()
    assert len(whole(pipeline)) == len(before) + 1


@pytest.mark.long
def test_an_audit_takes_the_rebuilt_rows_where_two_epochs_have_one_lsn(pipeline: Pipeline) -> None:
    load(pipeline, 1, truncate=False)
    before, lsn = record(pipeline), pipeline.publisher.commit_lsn
    ask(pipeline)
    finish(pipeline)
    rebuilt = record(pipeline)
    assert (rebuilt.epoch, rebuilt.commit_lsn) == (before.epoch + 1, lsn)
    pipeline.publisher.progress(lsn + 100)
    tell(pipeline, 1)
    pipeline.apply()
    stop = threading.Event()
    with contextlib.closing(Cuts(pipeline.spark, pipeline.settings, lambda _: True, stop)) as cuts:
        assert cuts.epoch_before(lsn + 1, 1) == rebuilt


@pytest.mark.long
def test_changes_that_come_meanwhile_are_in_the_old_table_and_in_the_new_one(
    pipeline: Pipeline,
) -> None:
    there = load(pipeline, 5)
    chance = random.Random(3)
    damage(pipeline)
    ask(pipeline)
    for _ in range(40):
        with pipeline.publisher.transaction() as t:
            change(t, chance, there)
        pipeline.apply()
        if not asked(pipeline):
            break
    assert {row.id for row in pipeline.rows("items")} == there
    require_done(pipeline)
    seen = whole(pipeline)
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('items')} PURGE")
    pipeline.restart()
    tell(pipeline, 1)
    pipeline.apply()
    assert whole(pipeline) == seen, "it is as one that was made in one epoch"


class KilledError(Exception):
    """What nothing of ours catches."""


def killed_before(function: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    def killed(*given: Any, **named: Any) -> Any:
        if when():
            raise KilledError
        return function(*given, **named)

    return killed


def killed_after(function: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    def killed(*given: Any, **named: Any) -> Any:
        dies = when()
        found = function(*given, **named)
        if dies:
            raise KilledError
        return found

    return killed


PLACES: dict[str, tuple[object, str]] = {
    "begin": (staging, "begin_side"),
    "part": (rebuilds, "write_table"),
    "part done": (staging.Staging, "extend"),
    "adopt": (staging.Staging, "adopt"),
    "seal": (epoch_runner.EpochRunner, "_seal"),
    "record": (Ledger, "prepare"),
    "publish": (epoch_runner, "publish"),
    "written": (stage.Stage, "write"),
}


def killed_amid(_function: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    """Publish as a catalog does that commits table by table, all but the record."""

    def killed(_spark: SparkSession, tables: Sequence[TableCommit], *record: Any) -> bool:
        assert publication.each_alone(tables)
        if when():
            raise KilledError
        return publication.one_by_one([], *record)

    return killed


CASES = [
    *product(PLACES, (killed_before, killed_after), (True, False)),
    *product(["publish"], (killed_amid,), (True, False)),
]
"""Where it is killed, before or after that is done, and whether no transaction waits."""
PARTS = ("begin", "part", "part done")
"""These are of the rebuild alone; at the others it is killed when they make it the table."""


@pytest.mark.long
@pytest.mark.parametrize("kills", [1, len(CASES)], ids=["some", "all"])
def test_a_kill_anywhere_leaves_the_old_table_or_the_new_one(
    new_pipeline: NewPipeline, kills: int
) -> None:
    """One rebuild after the other, each killed at another place, and begun again."""
    pipeline = new_pipeline(
        sums={"groups": {"source": NAME, "group_by": ["g"], "sums": {"ids": "id"}}},
    )
    load(pipeline, 4)
    for number, (place, killed, idle) in enumerate(random.sample(CASES, kills)):
        case = place, killed.__name__, idle
        before = damage(pipeline)
        damaged, sums = whole(pipeline), whole(pipeline, "groups")
        ask(pipeline)
        owner, name = PLACES[place]

        def when(part: bool = place in PARTS) -> bool:
            return part or bool(pipeline.runner.rebuilds.ready)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, killed(getattr(owner, name), when))
            with pytest.raises(KilledError):
                for step in range(40):
                    if not idle:
                        tell(pipeline, step)
                    pipeline.step()
        pipeline.restart()
        assert whole(pipeline) in (damaged, before), case
        if not idle:
            tell(pipeline, number)
            pipeline.apply()
        finish(pipeline)
        assert whole(pipeline) == before, case
        assert whole(pipeline, "groups") == sums, case
        require_done(pipeline)
        with pipeline.publisher.transaction() as t:
            t.update(ITEMS, {"id": before[0][0], "g": 1, "v": str(number)})
        pipeline.apply()
        rows = [row.g for row in pipeline.rows("items")]
        groups = {row[0]: row[-1] for row in whole(pipeline, "groups")}
        assert groups == {g: rows.count(g) for g in set(rows)}, case


@pytest.mark.long
def test_a_restart_goes_on_where_the_rebuild_was(pipeline: Pipeline) -> None:
    load(pipeline, 7)
    before = damage(pipeline)
    kept = pipeline.spark.sparkContext._jsc.getPersistentRDDs().size()
    ask(pipeline)
    pipeline.step()
    pipeline.step()
    note = pipeline.note("items")
    assert begun(pipeline)
    pipeline.restart()
    with structlog.testing.capture_logs() as told:
        pipeline.step()
    events = [line["event"] for line in told]
    assert "a rebuild goes on" in events
    assert "a rebuild begins" not in events
    assert pipeline.note("items") != note
    # Another request than the note's: what there is of the former rebuild does not count.
    place = pipeline.identifier("items")
    commits.change_note(pipeline.spark, place, None, lambda note: note.ask("another", 0))
    pipeline.restart()
    with structlog.testing.capture_logs() as told:
        finish(pipeline)
    assert "a rebuild begins" in [line["event"] for line in told]
    assert whole(pipeline) == before
    require_done(pipeline)
    assert pipeline.spark.sparkContext._jsc.getPersistentRDDs().size() == kept


@pytest.mark.long
def test_a_second_rebuild_is_refused_until_the_first_is_done(pipeline: Pipeline) -> None:
    load(pipeline)
    before = damage(pipeline)
    ask(pipeline)
    pipeline.step()
    operator = Operator(pipeline.spark, pipeline.settings)
    with pytest.raises(SettingsError, match=r"public\.items is being rebuilt already"):
        list(operator.rebuild([NAME]))
    finish(pipeline)
    ask(pipeline)
    finish(pipeline)
    assert whole(pipeline) == before


@pytest.mark.long
def test_a_transaction_larger_than_a_part_is_not_split(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        for number in range(10 * PART):
            t.insert(ITEMS, {"id": number, "g": number % 3, "v": "v"})
    for number in range(6):
        with pipeline.publisher.transaction() as t:
            for key in range(number, 10 * PART, 20):
                t.update(ITEMS, {"id": key, "g": key % 3, "v": str(number)})
    pipeline.apply()
    small_epochs(pipeline)
    before = damage(pipeline)
    ask(pipeline)
    finish(pipeline)
    assert whole(pipeline) == before


@pytest.mark.long
def test_events_that_were_published_again_later_are_not_left_out(pipeline: Pipeline) -> None:
    """They stand in a partition behind those of later transactions."""
    load(pipeline, 6, truncate=False)
    early = pipeline.publisher.commit_lsn
    load_more = {"id": 500, "g": 1, "v": "lost and found"}
    chance, there = random.Random(1), set[int]()
    for number in range(12):
        with pipeline.publisher.transaction() as t:
            if number == 9:
                t.insert(ITEMS, load_more, commit_lsn=early, seq=1000)
            t.insert(ITEMS, {"id": 1000 + number, "g": 1, "v": str(chance.randrange(9))})
            there.add(1000 + number)
    pipeline.apply()
    lost = {row.id for row in pipeline.rows("items")}
    damage(pipeline)
    ask(pipeline)
    with structlog.testing.capture_logs() as told:
        finish(pipeline)
    assert "the topic is not in order: the rebuild begins anew" in [x["event"] for x in told]
    assert {row.id for row in pipeline.rows("items")} == lost | {500}
    require_done(pipeline)


@pytest.mark.long
def test_events_before_those_that_were_published_again_are_not_left_out(
    pipeline: Pipeline,
) -> None:
    """A part ends between both, by what another partition tells."""

    def item(key: int) -> dict[str, Any]:
        return {"id": key, "g": 1, "v": "v"}

    pipeline.publisher.announce(ITEMS, LOG)
    with pipeline.publisher.transaction() as t:
        for key in (1, 2):
            t.insert(ITEMS, item(key), partition=1)
    early = pipeline.publisher.commit_lsn
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, item(700), partition=0)
        t.insert(ITEMS, item(500), partition=0, commit_lsn=early, seq=1000)
        for key in range(10, 20):
            t.insert(ITEMS, item(key), partition=1)
    with pipeline.publisher.transaction() as t:
        for key in range(20, 60):
            t.insert(ITEMS, item(key), partition=key % 2)
    pipeline.apply()
    before = whole(pipeline)
    small_epochs(pipeline)
    ask(pipeline)
    finish(pipeline)
    assert whole(pipeline) == before
    require_done(pipeline)


@pytest.mark.long
def test_a_rebuild_waits_for_an_epoch_that_is_to_be_made_again(pipeline: Pipeline) -> None:
    """Without its transactions it is told that Kafka has lost them, also beside a rebuild."""
    load(pipeline, 4)
    before = damage(pipeline)
    tell(pipeline, 50)
    with pytest.MonkeyPatch.context() as patch:
        kill(patch, "tables", KilledError)
        with pytest.raises(KilledError):
            for _ in range(40):
                pipeline.step()
    pipeline.restart()
    ask(pipeline)
    assert pipeline.runner.redoes
    assert not pipeline.runner.works_alone
    pipeline.apply()
    assert pipeline.runner.works_alone
    finish(pipeline)
    assert whole(pipeline) == before


def set_aside_bad_events(pipeline: Pipeline) -> None:
    """Restart so."""
    changed = pipeline.tables.model_copy(update={"on_bad_event": "quarantine"})
    pipeline.settings = pipeline.settings.model_copy(update={"tables": changed})
    pipeline.restart()


def park(pipeline: Pipeline) -> None:
    """The table is refused because of an event that the quarantine takes from now on."""
    with pipeline.publisher.transaction() as t:
        t.raw(ITEMS, "no JSON")
        t.insert(LOG, {"n": 1})
    assert NAME in pipeline.apply().refused
    distrust(pipeline)
    set_aside_bad_events(pipeline)


def distrust(pipeline: Pipeline) -> None:
    """Let the parked table's rows be such as those of a table that was rolled back."""

    def change_of(note: TableNote) -> TableNote:
        assert note.parked
        return note.park(replace(note.parked, anew=True))

    commits.change_note(pipeline.spark, pipeline.identifier("items"), None, change_of)


@pytest.mark.long
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_parked_table_that_has_nothing_yet(new_pipeline: NewPipeline, epochs: int) -> None:
    pipeline = new_pipeline(parks=True)
    pipeline.publisher.announce(ITEMS, LOG)
    for number in range(epochs):
        tell(pipeline, number)
        pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.raw(ITEMS, "no JSON")
        t.insert(ITEMS, {"id": 1, "g": 1, "v": "v"})
        t.insert(LOG, {"n": 9})
    assert NAME in pipeline.apply().refused
    distrust(pipeline)
    set_aside_bad_events(pipeline)
    ask(pipeline)
    finish(pipeline)
    assert {row.id for row in pipeline.rows("items")} == {1}
    assert not record(pipeline).parked
    require_done(pipeline, quarantined=True)


@pytest.mark.long
def test_a_rebuild_begins_anew_with_a_topic_that_was_made_anew(pipeline: Pipeline) -> None:
    """The new one is longer than where the rebuild is in the former one."""
    load(pipeline, 8)
    ask(pipeline)
    pipeline.step()
    assert asked(pipeline)
    delete_topic(pipeline, f"{pipeline.kafka.topic_prefix}.{NAME}")
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        for key in range(200):
            t.insert(ITEMS, {"id": 1000 + key, "g": 1, "v": "v"})
    with structlog.testing.capture_logs() as told:
        pipeline.runner.step()
    assert "a rebuild begins" in [line["event"] for line in told]


@pytest.mark.long
def test_a_parked_table_stays_parked_until_its_rebuild_is_done(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(parks=True)
    load(pipeline)
    before = whole(pipeline)
    park(pipeline)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 77, "g": 7, "v": "while it was parked"})
    pipeline.apply()
    ask(pipeline)
    steps = 0
    while asked(pipeline):
        assert pipeline.note("items").parked
        assert whole(pipeline) == before
        tell(pipeline, steps)
        pipeline.apply()
        assert len(whole(pipeline, "log")) == 8 + 2 + steps
        steps += 1
        assert steps < 40
    assert steps > 2
    assert not record(pipeline).parked
    assert {row.id for row in pipeline.rows("items")} == {row[0] for row in before} | {77}
    require_done(pipeline, quarantined=True)


@pytest.mark.long
def test_a_parked_table_never_returns_without_the_rebuild_that_was_asked_for(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch that was to make the rebuild the table changes the shape: it begins anew."""
    monkeypatch.setattr("spark_consumers.epochs.rebuilds.PART_EVENTS", 1000)
    pipeline = new_pipeline(parks=True)
    load(pipeline, 3)
    before = damage(pipeline)
    damaged = whole(pipeline)
    park(pipeline)
    ask(pipeline)
    wider = SourceTable("items", {**ITEMS.columns, "w": ("int4", -1)}, missing={"w": 7})
    pipeline.publisher.reshape(wider)
    with pipeline.publisher.transaction() as t:
        t.insert(wider, {"id": 99, "g": 1, "v": "new", "w": 5})
        t.insert(LOG, {"n": 2})
    with structlog.testing.capture_logs() as told:
        report = pipeline.step()
    assert report
    assert "a part of a rebuild is done" in [line["event"] for line in told]
    assert not report.refused
    assert NAME in record(pipeline).parked
    assert pipeline.note("items").parked
    assert [row[:3] for row in whole(pipeline)] == [row[:3] for row in damaged]
    pipeline.apply()
    finish(pipeline)
    found = {row.id: row.w for row in pipeline.rows("items")}
    assert found == {row[0]: 7 for row in before} | {99: 5}
    assert not record(pipeline).parked
    require_done(pipeline, quarantined=True)


@pytest.mark.long
@pytest.mark.parametrize("gone", ["its beginning", "the topic"])
def test_a_rebuild_that_kafka_can_not_fill_ends_and_leaves_the_table(
    new_pipeline: NewPipeline, gone: str
) -> None:
    pipeline = new_pipeline(parks=True)
    load(pipeline)
    before = whole(pipeline)
    if gone == "the topic":
        delete_topic(pipeline, f"{pipeline.kafka.topic_prefix}.{NAME}")
        pipeline.publisher.announce(ITEMS)
    else:
        pipeline.publisher.forget(ITEMS)
    pipeline.restart()
    ask(pipeline)
    tell(pipeline, 1)
    assert "no longer has the first events" in pipeline.apply().refused[NAME]
    assert not asked(pipeline)
    operator = Operator(pipeline.spark, pipeline.settings)
    assert list(operator.rebuild([NAME])) == [(NAME, False)], "from its rows, which are right"
    pipeline.restart()
    assert whole(pipeline) == before
    if gone == "the topic":
        return  # the stream can't go on with it either
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 99, "g": 9, "v": "later"})
    pipeline.apply()
    assert len(whole(pipeline)) == len(before) + 1
    require_done(pipeline)


@pytest.mark.long
@pytest.mark.parametrize("shown", [(), (0,)], ids=["no topic", "fewer partitions"])
def test_partitions_that_a_broker_does_not_show_yet_are_asked_for_again(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, shown: tuple[int, ...]
) -> None:
    """At the beginning of the rebuild, and again before each of its parts."""
    pipeline = new_pipeline(parks=True)
    load(pipeline, 5)
    before = damage(pipeline)
    ask(pipeline)
    stale = lag(monkeypatch, f"{pipeline.kafka.topic_prefix}.{NAME}")
    steps = 0
    with structlog.testing.capture_logs() as told:
        while pipeline.runner.works_alone:
            stale[:] = [shown]
            assert pipeline.step() is None or not asked(pipeline)
            assert not stale
            assert not pipeline.runner.parking.tables
            steps += 1
    assert steps > 2
    assert [line["event"] for line in told].count("a rebuild begins") == 1
    assert whole(pipeline) == before
    require_done(pipeline)


@pytest.mark.long
def test_a_rebuild_whose_topic_is_gone_is_refused(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of it: the brokers are asked until the deadline."""
    pipeline = new_pipeline(parks=True)
    load(pipeline, 5)
    before = whole(pipeline)
    ask(pipeline)
    pipeline.step()
    assert begun(pipeline)
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.1)
    delete_topic(pipeline, f"{pipeline.kafka.topic_prefix}.{NAME}")
    report = pipeline.step()
    assert report
    assert "no longer has the first events" in report.refused[NAME]
    assert not asked(pipeline)
    assert whole(pipeline) == before


@pytest.mark.long
def test_a_rebuild_of_a_table_without_events_needs_no_topic(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(parks=True)
    pipeline.publisher.announce(ITEMS, LOG)
    tell(pipeline, 1)
    tell(pipeline, 2)
    pipeline.apply()
    tell(pipeline, 3)
    pipeline.apply()
    pipeline.restart()
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.1)
    delete_topic(pipeline, f"{pipeline.kafka.topic_prefix}.{NAME}")
    ask(pipeline)
    finish(pipeline)
    assert not pipeline.runner.parking.tables
    assert not asked(pipeline)
    assert pipeline.rows("items") == []


@pytest.mark.long
@pytest.mark.parametrize("how", ["rebuild", "drop"])
@pytest.mark.parametrize("kind", ["current", "history"])
def test_rows_of_a_former_source_table_do_not_come_again(
    new_pipeline: NewPipeline, how: str, kind: str
) -> None:
    pipeline = new_pipeline(rules={NAME: {"kind": kind}})
    first = SourceTable("items", ITEMS.columns, oid=1)
    second = SourceTable("items", {**ITEMS.columns, "w": ("int4", -1)}, oid=2)
    pipeline.publisher.announce(first, LOG)
    for number in range(4):
        with pipeline.publisher.transaction() as t:
            for key in range(number, 12, 4):
                t.insert(first, {"id": key, "g": 1, "v": "former"})
    pipeline.apply()
    pipeline.publisher.reshape(second)
    with pipeline.publisher.transaction() as t:
        t.insert(second, {"id": 1, "g": 1, "v": "new", "w": 1})
        t.insert(second, {"id": 2, "g": 2, "v": "new", "w": 2})
    pipeline.apply()
    for number in range(3):
        with pipeline.publisher.transaction() as t:
            t.insert(second, {"id": 20 + number, "g": 1, "v": "new", "w": 2})
    third = SourceTable("items", second.columns, oid=3)
    pipeline.publisher.reshape(third)
    for number in range(1, 4):
        with pipeline.publisher.transaction() as t:
            t.insert(third, {"id": number, "g": number, "v": "newest", "w": 2})
    pipeline.apply()

    def holding() -> list[tuple[int, str]]:
        frame = pipeline.spark.table(pipeline.identifier("items"))
        if kind == "history":
            frame = frame.where("_valid_to IS NULL")
        return sorted((row.id, row.v) for row in frame.collect())

    assert holding() == [(number, "newest") for number in range(1, 4)]

    def rows() -> list[dict[str, Any]]:
        found = pipeline.spark.table(pipeline.identifier("items")).collect()
        return sorted(
            (row.asDict() for row in found), key=lambda row: (row["_commit_lsn"], row["id"])
        )

    before = rows()
    small_epochs(pipeline)
    if how == "rebuild":
        ask(pipeline)
        finish(pipeline)
    else:
        pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('items')} PURGE")
        pipeline.restart()
        tell(pipeline, 1)
        pipeline.apply()
    assert rows() == before


@pytest.mark.long
def test_a_column_that_comes_meanwhile(pipeline: Pipeline) -> None:
    load(pipeline)
    before = damage(pipeline)
    ask(pipeline)
    pipeline.step()
    wider = SourceTable("items", {**ITEMS.columns, "w": ("int4", -1)}, missing={"w": 7})
    pipeline.publisher.reshape(wider)
    with pipeline.publisher.transaction() as t:
        t.insert(wider, {"id": 99, "g": 1, "v": "new", "w": 5})
    pipeline.apply()
    finish(pipeline)
    found = {row.id: row.w for row in pipeline.rows("items")}
    assert found == {row[0]: 7 for row in before} | {99: 5}
    require_done(pipeline)


@pytest.mark.long
def test_a_rebuild_says_which_columns_it_empties_before_it_does(pipeline: Pipeline) -> None:
    """Columns that the source has dropped, whose values only the old rows have."""
    wider = SourceTable("items", {**ITEMS.columns, "w": ("int4", -1)})
    pipeline.publisher.announce(wider)
    with pipeline.publisher.transaction() as t:
        t.insert(wider, {"id": 1, "g": 1, "v": "v", "w": 5})
    pipeline.apply()
    pipeline.publisher.reshape(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 2, "g": 1, "v": "v"})
    pipeline.apply()
    assert [(row.id, row.w) for row in pipeline.rows("items")] == [(1, 5), (2, None)]
    with structlog.testing.capture_logs() as told:
        ask(pipeline)
    assert (NAME, ["w"]) in emptied(told)
    with structlog.testing.capture_logs() as told:
        finish(pipeline)
    assert (NAME, ["w"]) in emptied(told)
    assert [(row.id, row.w) for row in pipeline.rows("items")] == [(1, None), (2, None)]


def emptied(told: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The tables and columns of which log lines say that a rebuild empties them."""
    what = "a rebuild empties columns that the source has no more"
    return [(line["table"], line["columns"]) for line in told if line["event"] == what]


@pytest.mark.long
def test_a_reader_in_a_loop_sees_the_old_table_or_the_new_one(
    pipeline: Pipeline, warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` has nothing else to do, then it is stopped in the middle and started again."""
    monkeypatch.setattr("spark_consumers.epochs.stream._LOOK_EVERY_S", 0.2)
    load(pipeline, 12)
    before = {row.id for row in pipeline.rows("items")}
    damage(pipeline)
    damaged = {row.id for row in pipeline.rows("items")}
    pipeline.restart()
    seen: list[set[int]] = []
    ended = threading.Event()
    from pyiceberg.catalog.sql import SqlCatalog

    iceberg = SqlCatalog(
        "slotbridge", uri=f"sqlite:///{warehouse / 'catalog.db'}", init_catalog_tables="false"
    )

    def read() -> None:
        while not ended.is_set():
            found = iceberg.load_table((pipeline.kafka.topic_prefix, "items")).scan().to_arrow()
            seen.append(set(found["id"].to_pylist()))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with Running(pipeline) as running:
            eventually(lambda: running.failure or seen, what="it reads")
            assert list(Operator(pipeline.spark, pipeline.settings).rebuild([NAME]))
            part = "a part is done"
            eventually(lambda: running.failure or begun(pipeline), what=part)
        running.sound()
        with Running(pipeline) as running:
            done = "the rebuild is done"
            eventually(lambda: running.failure or not asked(pipeline), what=done, timeout_s=120)
            eventually(lambda: running.failure or seen[-1] == before, what="the reader has it")
        running.sound()
    finally:
        ended.set()
        reader.join(timeout=patient(60))
        iceberg.engine.dispose()
    assert {frozenset(found) for found in seen} == {frozenset(damaged), frozenset(before)}
    require_done(pipeline)


@pytest.mark.long
def test_once_brings_a_rebuild_to_its_end(pipeline: Pipeline) -> None:
    load(pipeline)
    before = damage(pipeline)
    assert list(Operator(pipeline.spark, pipeline.settings).rebuild([NAME]))
    pipeline.stream(once=True)
    assert whole(pipeline) == before
    require_done(pipeline)
