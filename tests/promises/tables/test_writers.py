"""Two writers of one namespace: one is paused anywhere, the other goes on, and it resumes."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from schemas.errors import Retryable
from spark_consumers.epochs import epoch_runner, incomplete_tables, publication, table_writer
from spark_consumers.epochs.ledger import Ledger
from spark_consumers.epochs.parking import Parking
from spark_consumers.epochs.publication import TableCommit
from spark_consumers.epochs.stage import Stage
from spark_consumers.failures import translated
from spark_consumers.iceberg import catalog, commits, delete_insert, staging
from spark_consumers.iceberg.staging import Adopted, Base, Staging
from spark_consumers.iceberg.table_note import FOLLOWING
from spark_consumers.iceberg.tables import sealed_of
from spark_consumers.operations import Operator
from spark_consumers.session import catalog_options
from tests.marks import long_but
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.kills import PUBLISH
from tests.promises.tables.publisher import SourceTable
from tests.providers.waiting import eventually

ITEMS = SourceTable("items", {"id": ("int4", -1), "b": ("int4", -1)})
LOG = SourceTable("log", {"b": ("int4", -1)}, key=(), identity="nothing")
PAST = SourceTable("past", {"id": ("int4", -1), "b": ("int4", -1)})
SEAMS = [
    (Stage, "write", 2),
    (Staging, "begin", 2),
    (Staging, "adopt", 1),
    (Ledger, "prepare", 2),
    (epoch_runner, "publish", 2),
]
"""Where the first writer is paused, and for how many epochs of the other one."""


def publish(pipeline: Pipeline, number: int) -> None:
    """A transaction of new rows in all tables."""
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": number, "b": 1})
        t.insert(LOG, {"b": number})
        t.insert(PAST, {"id": number, "b": 1})


def another(pipeline: Pipeline) -> Pipeline:
    """Another writer of the same tables."""
    session = pipeline.spark.newSession()
    for option, value in catalog_options(pipeline.tables).items():
        session.conf.set(option, value)
    return Pipeline(session, pipeline.settings, pipeline.publisher)


def require_once(pipeline: Pipeline, numbers: range) -> None:
    """Every row is in every table once."""
    assert Counter(row.id for row in pipeline.rows("items")) == Counter(numbers)
    assert Counter(row.b for row in pipeline.rows("log")) == Counter(numbers)
    assert Counter(row.id for row in pipeline.rows("past")) == Counter(numbers)
    sums = pipeline.spark.table(pipeline.identifier("total")).collect()
    assert [tuple(row) for row in sums] == [(1, sum(numbers), len(numbers))]


@pytest.mark.parametrize(("place", "name", "epochs"), long_but(SEAMS[-1], SEAMS))
def test_a_writer_that_was_paused_and_overtaken_writes_nothing(
    new_pipeline: NewPipeline,
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    epochs: int,
) -> None:
    pipeline = new_pipeline(
        rules={"public.past": {"kind": "history"}},
        sums={"total": {"source": "public.items", "group_by": ["b"], "sums": {"of_id": "id"}}},
    )
    pipeline.publisher.announce(ITEMS, LOG, PAST)
    publish(pipeline, 0)
    pipeline.apply()
    publish(pipeline, 1)
    original = getattr(place, name)

    def paused(*given: Any, **more: Any) -> Any:
        """Meanwhile another writer brings what there is."""
        monkeypatch.setattr(place, name, original)
        second = another(pipeline)
        second.apply()
        if epochs == 2:
            publish(pipeline, 2)
            second.apply()
        second.restart()
        return original(*given, **more)

    monkeypatch.setattr(place, name, paused)
    with pytest.raises((PySparkException, Retryable, Exception)) as raised:
        pipeline.apply()  # as often as it takes: Kafka may not have told the end of it yet
    error = translated(raised.value, "apply an epoch")
    assert isinstance(error, Retryable), raised.value
    assert "at the same time" in str(error) or "another program has changed" in str(error)
    require_once(pipeline, range(1 + epochs))
    pipeline.restart()
    publish(pipeline, 1 + epochs)
    pipeline.apply()
    require_once(pipeline, range(2 + epochs))


@pytest.mark.long
def test_an_overtaken_writer_parks_nothing_and_a_note_of_an_earlier_epoch_is_not_believed(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(parks=True)
    pipeline.publisher.announce(ITEMS, LOG)

    def both(number: int) -> None:
        with pipeline.publisher.transaction() as t:
            t.insert(ITEMS, {"id": number, "b": 1})
            t.insert(LOG, {"b": number})

    both(0)
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "b": 1})
        t.refuse("public.log", t.seq)
    original, parked = incomplete_tables.refused_by_kafka, []

    def paused(*given: Any, **more: Any) -> Any:
        """Meanwhile another writer parks the table, and brings it back without its dead letter."""
        monkeypatch.setattr(incomplete_tables, "refused_by_kafka", original)
        second = another(pipeline)
        second.apply()
        parked.append(pipeline.note("log"))
        assert list(Operator(second.spark, second.settings).rebuild(["public.log"]))
        second.runner.look_for_requests()
        both(2)
        second.apply()
        assert pipeline.note("log").parked is None
        second.restart()
        return original(*given, **more)

    monkeypatch.setattr(incomplete_tables, "refused_by_kafka", paused)
    with pytest.raises(Retryable, match="another program has changed the table"):
        pipeline.apply()
    assert pipeline.note("log").parked is None
    pipeline.restart()
    commits.change_note(pipeline.spark, pipeline.identifier("log"), None, lambda _note: parked[0])
    pipeline.restart()
    assert not pipeline.runner.parking.tables
    both(3)
    pipeline.apply()
    assert [row.b for row in pipeline.rows("log")] == [0, 2, 3]
    assert pipeline.note("log").state == "following"


@pytest.mark.usefixtures("by_spark")  # its seams are those of branches
@pytest.mark.long
@pytest.mark.parametrize(("place", "name"), [(Staging, "adopt"), (epoch_runner, "publish")])
def test_an_overtaken_writer_sets_back_no_bound_of_a_snapshot(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, place: object, name: str
) -> None:
    """Else an insert of a row that the snapshot has shown is appended once more."""
    pipeline = new_pipeline()
    pipeline.publisher.announce(ITEMS)

    def read(number: int) -> None:
        with pipeline.publisher.transaction() as t:
            t.read(ITEMS, {"id": number, "b": 1})

    def bound() -> str | None:
        table = catalog.load(pipeline.spark, pipeline.identifier("items"))
        return catalog.properties(table).get(catalog.SEEN_LSN)

    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 0, "b": 1})
    pipeline.apply()
    read(1)
    original, left = getattr(place, name), []

    def paused(*given: Any) -> Any:
        """Meanwhile another writer brings more rows of the snapshot."""
        assert bound() is None, "it comes with the rows"
        monkeypatch.setattr(place, name, original)
        second = another(pipeline)
        for number in (2, 3):
            read(number)
        second.apply()
        second.restart()
        left.append(bound())
        return original(*given)

    monkeypatch.setattr(place, name, paused)
    with pytest.raises(Retryable, match="another program has changed the table"):
        pipeline.apply()
    assert left == [bound()] != [None]
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 3, "b": 1})
    pipeline.apply()
    assert [row.id for row in pipeline.rows("items")] == [0, 1, 2, 3]


@pytest.mark.long
def test_an_overtaken_writer_ends_no_rebuild_of_the_other_one(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(parks=True, on_bad_event="quarantine")
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 0, "b": 1})
        t.raw(ITEMS, "no JSON")
    pipeline.apply()
    pipeline.restart()
    pipeline.set_tables(on_bad_event="park")  # this writer refuses the rebuild
    operator = Operator(pipeline.spark, pipeline.settings)
    assert list(operator.rebuild(["public.items"]))
    original = Parking._park

    def paused(*given: Any) -> None:
        """Meanwhile another writer has rebuilt the table, and is to rebuild it once more."""
        monkeypatch.setattr(Parking, "_park", original)
        second = another(pipeline)
        second.set_tables(on_bad_event="quarantine")
        while second.runner.works_alone:
            second.step()
        second.restart()
        assert list(operator.rebuild(["public.items"]))
        original(*given)

    monkeypatch.setattr(Parking, "_park", paused)
    with pytest.raises(Retryable, match="another program has changed the table"):
        pipeline.step()
    assert pipeline.note("items").state == "rebuilding"


def to_be_rebuilt(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table without a key that lacks a row, and is to be rebuilt in parts."""
    monkeypatch.setattr("spark_consumers.epochs.rebuilds.PART_EVENTS", 4)
    pipeline.publisher.announce(LOG)
    for number in range(0, 14, 2):
        with pipeline.publisher.transaction() as t:
            t.insert(LOG, {"b": number})
            t.insert(LOG, {"b": number + 1})
    pipeline.apply()
    pipeline.restart()
    pipeline.set_tables(offsets_per_trigger_max=4)
    pipeline.spark.sql(f"DELETE FROM {pipeline.identifier('log')} WHERE b = 1")
    assert list(Operator(pipeline.spark, pipeline.settings).rebuild(["public.log"]))


def finish_rebuild(pipeline: Pipeline) -> int:
    """Rebuild the table, and begin again where it must be; how often that was."""
    again = 0
    for _ in range(40):
        if not pipeline.runner.works_alone:
            break
        try:
            pipeline.step()
        except Retryable as error:
            assert "another program has changed the table" in str(error)
            again += 1
            pipeline.restart()
    assert Counter(row.b for row in pipeline.rows("log")) == Counter(range(14))
    table = catalog.load(pipeline.spark, pipeline.identifier("log"))
    assert pipeline.note("log") == FOLLOWING
    assert [name for name in catalog.ref_names(table) if name.startswith("slotbridge_")] == []
    return again


@pytest.mark.long
def test_an_overtaken_writer_brings_no_part_of_a_rebuild_twice(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paused between two parts, the second of which another writer brings."""
    to_be_rebuilt(pipeline, monkeypatch)
    pipeline.step()
    second = another(pipeline)
    second.step()
    second.restart()
    assert finish_rebuild(pipeline) == 1


@pytest.mark.long
def test_a_part_is_not_put_on_the_table_where_another_writer_has_removed_its_branch(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writer is killed before it writes. Spark makes the branch anew, of the table."""
    to_be_rebuilt(pipeline, monkeypatch)
    pipeline.step()
    place = "spark_consumers.epochs.rebuilds.write_table"

    def killed(*_given: Any) -> None:
        raise KeyboardInterrupt

    def paused(*given: Any) -> Any:
        monkeypatch.setattr(place, killed)
        second = another(pipeline)
        with pytest.raises(KeyboardInterrupt):
            second.step()
        second.restart()
        monkeypatch.setattr(place, table_writer.write_table)
        return table_writer.write_table(*given)

    monkeypatch.setattr(place, paused)
    assert finish_rebuild(pipeline) == 1


@pytest.mark.long
def test_an_overtaken_writer_begins_no_rebuild_that_is_done(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_be_rebuilt(pipeline, monkeypatch)
    begin_side = staging.begin_side

    def paused(*given: Any) -> None:
        monkeypatch.setattr(staging, "begin_side", begin_side)
        second = another(pipeline)
        finish_rebuild(second)
        second.restart()
        begin_side(*given)

    monkeypatch.setattr(staging, "begin_side", paused)
    assert finish_rebuild(pipeline) == 1


def one_by_one(_spark: SparkSession, tables: Sequence[TableCommit], *record: Any) -> bool:
    """Publish as with a catalog that commits one table after the other."""
    return publication.one_by_one(tables, *record)


def take_two(writer: Pipeline) -> None:
    """Let a writer take in two transactions, and bring no epoch."""

    def taken() -> bool:
        topic, offset = writer.runner.topic, writer.runner.offset
        start, end = topic.require(offset), topic.stable()
        if start < end:
            writer.runner.take(topic.between(writer.spark, start, end), end)
        return writer.runner.waiting()[1] >= 200

    eventually(taken, what="both transactions are taken")


def shorter_epochs(pipeline: Pipeline) -> Pipeline:
    """Another writer, which has taken both transactions in, and whose epochs have one of them."""
    second = another(pipeline)
    second.set_tables(offsets_per_trigger_max=1)
    take_two(second)
    return second


def overtaken(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, paused: Callable[..., bool]
) -> None:
    """Let an epoch of two transactions be overtaken in `paused`; the next start goes on."""
    take_two(pipeline)
    monkeypatch.setattr(PUBLISH, paused)
    with pytest.raises(Retryable, match="another program has changed the table"):
        pipeline.runner.step()
    pipeline.restart()
    pipeline.apply()


@pytest.mark.long
def test_what_an_overtaken_writer_has_committed_alone_is_not_brought_again(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are committed one by one: the other writer's epoch has its number, and ends before."""
    monkeypatch.setattr(PUBLISH, one_by_one)
    pipeline.publisher.announce(ITEMS, LOG)
    for tables in ([ITEMS, LOG], [ITEMS], [LOG]):
        with pipeline.publisher.transaction() as t:
            for table in tables:
                t.insert(table, {"id": t.commit_lsn, "b": 1} if table is ITEMS else {"b": t.seq})
        if LOG in tables and ITEMS in tables:
            pipeline.apply()

    def paused(*given: Any) -> bool:
        monkeypatch.setattr(PUBLISH, one_by_one)
        second = shorter_epochs(pipeline)
        assert second.runner.step()
        second.restart()
        return one_by_one(*given)

    overtaken(pipeline, monkeypatch, paused)
    assert len(pipeline.rows("items")) == 2
    assert len(pipeline.rows("log")) == 2
    table = catalog.load(pipeline.spark, pipeline.identifier("log"))
    assert pipeline.runner.record.tables["public.log"].snapshot == catalog.snapshot_id(table)


@pytest.mark.long
def test_sums_get_an_epoch_though_another_one_has_given_them_its_number(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are committed one by one. The writer of the epoch that ends before is killed, and the
    other one overtaken, each when some tables have its epoch; neither has recorded it."""
    pipeline = new_pipeline(
        sums={"total": {"source": "public.items", "group_by": ["b"], "sums": {"of_id": "id"}}},
    )
    pipeline.publisher.announce(ITEMS, LOG)
    for number, tables in enumerate(([ITEMS, LOG], [ITEMS], [ITEMS, LOG]), 1):
        with pipeline.publisher.transaction() as t:
            for table in tables:
                t.insert(table, {"id": number, "b": 1} if table is ITEMS else {"b": number})
        if number == 1:
            pipeline.apply()

    def killed(_spark: SparkSession, tables: Sequence[TableCommit], *_record: Any) -> bool:
        assert publication.each_alone(tables)
        raise KeyboardInterrupt

    def paused(*given: Any) -> bool:
        monkeypatch.setattr(PUBLISH, killed)
        second = shorter_epochs(pipeline)
        with pytest.raises(KeyboardInterrupt):
            second.runner.step()
        second.restart()
        monkeypatch.setattr(PUBLISH, one_by_one)
        return one_by_one(*given)

    overtaken(pipeline, monkeypatch, paused)
    assert [row.id for row in pipeline.rows("items")] == [1, 2, 3]
    assert [row.b for row in pipeline.rows("log")] == [1, 3]
    sums = pipeline.spark.table(pipeline.identifier("total")).collect()
    assert [tuple(row) for row in sums] == [(1, 6, 3)]


@pytest.mark.usefixtures("by_spark")  # its seams are those of branches
@pytest.mark.long
def test_a_branch_that_another_writer_has_removed_is_not_taken_for_an_epoch_of_nothing(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.publisher.announce(LOG)
    for number in range(2):
        with pipeline.publisher.transaction() as t:
            t.insert(LOG, {"b": number})
        if number == 0:
            pipeline.apply()
    adopt = Staging.adopt

    def after_a_start(staging: Staging, base: Base, *given: Any) -> Adopted:
        monkeypatch.setattr(Staging, "adopt", adopt)
        known = pipeline.runner.states["public.log"].sealed
        Staging(pipeline.spark).begin(base.identifier, known)
        return adopt(staging, base, *given)

    monkeypatch.setattr(Staging, "adopt", after_a_start)
    with pytest.raises(Retryable, match="another program has changed the table"):
        pipeline.apply()
    pipeline.apply()
    assert [row.b for row in pipeline.rows("log")] == [0, 1]


@pytest.mark.usefixtures("by_spark")  # its seams are those of branches
@pytest.mark.long
@pytest.mark.parametrize("place", ["insert", "written", "written first"])
@pytest.mark.usefixtures("any_table_is_large")
def test_what_is_written_is_not_adopted_by_halves_where_another_writer_has_removed_the_branch(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Between its two commits, Spark makes the branch anew; after them, it is as if none was."""
    pipeline.publisher.announce(ITEMS)
    last = 1 if place == "written first" else 3
    for number in range(1, last):
        with pipeline.publisher.transaction() as t:
            t.insert(ITEMS, {"id": number, "b": number})
        pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.update(ITEMS, {"id": 1, "b": 9})
    owner: Any = delete_insert if place == "insert" else Staging
    name = "insert" if place == "insert" else "written"
    original = getattr(owner, name)

    def after_a_start(*given: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        known = sealed_of(pipeline.runner.states.get("public.items"))
        Staging(pipeline.spark).begin(pipeline.identifier("items"), known)
        return original(*given)

    monkeypatch.setattr(owner, name, after_a_start)
    refused = 0
    while pipeline.runner.record.commit_lsn < pipeline.publisher.commit_lsn:
        try:
            pipeline.step()
        except Retryable as error:
            assert "another program has changed the table" in str(error)
            refused += 1
            pipeline.restart()
    expected = [(1, 9)] if place == "written first" else [(1, 9), (2, 2)]
    assert [tuple(row) for row in pipeline.rows("items")] == expected
    assert refused == 1


@pytest.mark.long
def test_a_table_that_an_epoch_brings_nothing_is_not_touched(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.publisher.announce(ITEMS, LOG)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "b": 1})
        t.insert(LOG, {"b": 1})
    pipeline.apply()
    idle = catalog.load(pipeline.spark, pipeline.identifier("log")).operations().current()
    for number in (2, 3):
        pipeline.restart()
        with pipeline.publisher.transaction() as t:
            t.insert(ITEMS, {"id": number, "b": 1})
        assert pipeline.apply().epoch == number
    state = pipeline.runner.states["public.log"]
    assert (state.epoch, state.sealed[0]) == (3, 1)
    table = catalog.load(pipeline.spark, pipeline.identifier("log"))
    assert table.operations().current().metadataFileLocation() == idle.metadataFileLocation()
    record = pipeline.runner.record
    assert record.tables["public.log"].snapshot == catalog.snapshot_id(table)
    tags = dict(Operator(pipeline.spark, pipeline.settings).tag(record.commit_lsn))
    assert len(tags) == 2
    for name, tag in tags.items():
        rows = pipeline.spark.sql(f"SELECT * FROM {name} VERSION AS OF '{tag}'")
        assert rows.count() == pipeline.spark.table(name).count()
    pipeline.restart()
    assert pipeline.step() is None
    pipeline.restart()
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('_epochs')} PURGE")
    with pipeline.publisher.transaction() as t:
        t.insert(LOG, {"b": 2})
    pipeline.apply()
    assert sorted(row.b for row in pipeline.rows("log")) == [1, 2]
    assert [row.id for row in pipeline.rows("items")] == [1, 2, 3]
