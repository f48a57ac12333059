"""A table that is refused is parked: the others go on, and it comes back to them."""

import urllib.request
from collections.abc import Callable

import pytest
import structlog

from schemas.errors import OperatorNeeded, Retryable, SettingsError
from schemas.tables import TableRule
from services.testbed.ports import free_port
from spark_consumers.epochs.ledger import EpochRecord, Ledger
from spark_consumers.epochs.parking import require_none_parked
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.table_note import Parked
from spark_consumers.operations import Operator
from spark_consumers.restore.restoration import restore
from spark_consumers.status import read_run_status
from spark_consumers.verify.as_of import verify_as_of
from tests.marks import long_but
from tests.promises.tables.conftest import NewPipeline, Pipeline, mark_incomplete
from tests.promises.tables.kills import SEAMS, Seam, kill
from tests.promises.tables.publisher import SourceTable, Transaction
from tests.promises.tables.test_job import Running
from tests.providers.waiting import eventually

GOOD = SourceTable("good", {"id": ("int4", -1), "v": ("text", -1)})
BAD = SourceTable("bad", {"id": ("int4", -1), "v": ("text", -1)})
CHANGED = SourceTable("bad", {"id": ("int4", -1), "v": ("int4", -1)})
NAME = "public.bad"


def both(pipeline: Pipeline, *numbers: int) -> None:
    """Transactions that change both tables."""
    for number in numbers:
        with pipeline.publisher.transaction() as t:
            t.insert(GOOD, {"id": number, "v": str(number)})
            t.insert(BAD, {"id": number, "v": str(number)})


def ids(pipeline: Pipeline, table: str) -> list[int]:
    return [row.id for row in pipeline.rows(table, "id")]


def record(pipeline: Pipeline) -> EpochRecord:
    found = Ledger(pipeline.kafka.topic_prefix, pipeline.tables).last(pipeline.spark)
    assert found is not None
    return found


def noted(pipeline: Pipeline, table: str = "bad") -> Parked | None:
    """Why a table is parked, as a reader of the Iceberg table sees it."""
    return pipeline.note(table).parked


def incomplete(pipeline: Pipeline, table: str = "bad") -> str:
    """Why a table is incomplete, as a reader of the Iceberg table sees it; "" if it is not."""
    found = pipeline.note(table).incomplete
    return found.why if found else ""


def changed(pipeline: Pipeline, **tables: object) -> None:
    """The pipeline with other settings, restarted."""
    pipeline.restart()
    pipeline.set_tables(**tables)


def lost(pipeline: Pipeline, there: int, gone: int) -> int:
    """Park the table by a transaction of whose two events Kafka has lost one; its LSN."""
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": gone, "v": "v"})
        t.insert(BAD, {"id": there, "v": "v"})
        t.counts[NAME] += 1
    assert "Kafka lacks 1 events" in pipeline.apply().refused[NAME]
    return pipeline.publisher.commit_lsn


def found_again(pipeline: Pipeline, commit_lsn: int, number: int) -> None:
    """The lost event is published after all."""
    with pipeline.publisher.transaction() as t:
        t.insert(BAD, {"id": number, "v": "v"}, commit_lsn=commit_lsn, seq=1_000)


def rebuild(pipeline: Pipeline, *, anew: bool = False) -> None:
    assert list(Operator(pipeline.spark, pipeline.settings).rebuild([NAME])) == [(NAME, anew)]


@pytest.fixture
def pipeline(new_pipeline: NewPipeline) -> Pipeline:
    """With the setting's default; both tables have row 1."""
    made = new_pipeline(parks=True)
    made.publisher.announce(GOOD, BAD)
    both(made, 1)
    made.apply()
    return made


def bad_value(t: Transaction) -> None:
    t.insert(BAD, {"id": 2**40, "v": "secret"})


def no_event(t: Transaction) -> None:
    t.raw(BAD, "no JSON")


def dead_letter(t: Transaction) -> None:
    t.refuse(NAME, t.seq)


REFUSALS: dict[str, tuple[Callable[[Transaction], None], dict[str, object], str]] = {
    "value": (bad_value, {"on_bad_event": "quarantine"}, "column id has a value"),
    "record": (no_event, {"on_bad_event": "quarantine"}, "is not an event of a table"),
    "dead letter": (dead_letter, {"on_bad_event": "quarantine"}, "Kafka has refused an event"),
}


@pytest.mark.parametrize("why", long_but("value", REFUSALS))
@pytest.mark.parametrize("restart", long_but(True, [False, True]))
def test_the_others_go_on_and_a_parked_table_comes_back_with_all_that_it_lacks(
    pipeline: Pipeline, why: str, *, restart: bool
) -> None:
    refuse, remedy, reason = REFUSALS[why]
    first = pipeline.publisher.commit_lsn
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 2, "v": "2"})
        refuse(t)
    refused_at = pipeline.publisher.commit_lsn
    report = pipeline.apply()
    assert reason in report.refused[NAME]
    assert "secret" not in report.refused[NAME]
    assert list(report.tables) == ["public.good"]
    if restart:
        pipeline.restart()
    both(pipeline, 3, 4)
    assert not pipeline.apply().refused, "it is refused once"
    assert (ids(pipeline, "good"), ids(pipeline, "bad")) == ([1, 2, 3, 4], [1])
    epoch = record(pipeline)
    assert list(epoch.tables) == ["public.good"]
    assert epoch.parked[NAME].events == 3
    note = noted(pipeline)
    assert note is not None
    assert (note.commit_lsn, note.at_lsn) == (first, refused_at)
    tag = catalog.tag_name(epoch.commit_lsn)
    operator = Operator(pipeline.spark, pipeline.settings)
    assert list(operator.tag(epoch.commit_lsn)) == [(pipeline.identifier("good"), tag)]
    compared = verify_as_of(pipeline.spark, pipeline.settings, epoch.commit_lsn)
    assert {found.table: found.equal for found in compared} == {NAME: False, "public.good": True}
    named = [NAME, "public.none"]
    unjudged = verify_as_of(pipeline.spark, pipeline.settings, epoch.commit_lsn, tables=named)
    assert [found.table for found in unjudged] == named
    assert reason in unjudged[0].not_judged
    assert "there is no Iceberg table" in unjudged[1].not_judged
    with pytest.raises(OperatorNeeded, match=r"is parked.*as of"):
        restore(pipeline.spark, pipeline.settings, epoch.commit_lsn, "", dry_run=True)
    rebuild(pipeline)
    changed(pipeline, **remedy)
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 5, "v": "5"})
    pipeline.apply()
    assert (ids(pipeline, "good"), ids(pipeline, "bad")) == ([1, 2, 3, 4, 5], [1, 3, 4])
    assert noted(pipeline) is None
    assert "1 of its events" in incomplete(pipeline)
    assert incomplete(pipeline, "good") == ""
    assert sorted(record(pipeline).tables) == [NAME, "public.good"]
    both(pipeline, 6)
    pipeline.apply()
    assert ids(pipeline, "bad") == [1, 3, 4, 6]


@pytest.mark.long
def test_a_table_that_is_refused_again_stays_parked(pipeline: Pipeline) -> None:
    with pipeline.publisher.transaction() as t:
        bad_value(t)
    pipeline.apply()
    before = noted(pipeline)
    both(pipeline, 2)
    pipeline.apply()
    rebuild(pipeline)
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 3, "v": "3"})
    pipeline.apply()  # it is seen after this one
    both(pipeline, 4)
    again = pipeline.apply()
    assert "column id" in again.refused[NAME]
    both(pipeline, 5)
    assert not pipeline.apply().refused
    assert (ids(pipeline, "good"), ids(pipeline, "bad")) == ([1, 2, 3, 4, 5], [1])
    after = noted(pipeline)
    assert before and after
    assert after.at_ms != before.at_ms
    assert after.commit_lsn == before.commit_lsn
    assert record(pipeline).parked[NAME].events == 4
    changed(pipeline, on_bad_event="quarantine")
    rebuild(pipeline)
    both(pipeline, 6)
    pipeline.apply()
    assert ids(pipeline, "bad") == [1, 2, 4, 5, 6]


@pytest.mark.long
def test_a_change_of_shape_that_is_not_followed_parks_the_table(pipeline: Pipeline) -> None:
    pipeline.publisher.reshape(CHANGED)
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 2, "v": "2"})
        t.insert(CHANGED, {"id": 2, "v": 7})
    assert "column v was string and is int" in pipeline.apply().refused[NAME]
    with pipeline.publisher.transaction() as t:
        t.update(CHANGED, {"id": 1, "v": 8})
    pipeline.apply()
    changed(pipeline, on_changed_type="new_column")
    rebuild(pipeline)
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 3, "v": "3"})
    pipeline.apply()
    found = [(row.id, row.v, row.v__old1) for row in pipeline.rows("bad", "id")]
    assert found == [(1, 8, "1"), (2, 7, None)]
    assert ids(pipeline, "good") == [1, 2, 3]


@pytest.mark.long
def test_a_table_whose_rule_was_changed_is_parked(pipeline: Pipeline) -> None:
    changed(pipeline, rules={NAME: TableRule(kind="history")})
    both(pipeline, 2)
    assert "its rule says" in pipeline.apply().refused[NAME]
    assert (ids(pipeline, "good"), ids(pipeline, "bad")) == ([1, 2], [1])
    rebuild(pipeline)
    changed(pipeline, rules={})
    both(pipeline, 3)
    pipeline.apply()
    assert ids(pipeline, "bad") == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("has_rows", [False, True])
def test_the_remedy_of_a_table_without_a_key_that_is_updated(
    pipeline: Pipeline, *, has_rows: bool
) -> None:
    """Followed step by step, it brings the table back, also one that never was in an epoch."""
    full = SourceTable("full", {"a": ("int4", -1), "b": ("text", -1)}, key=(), identity="full")
    name, row = "public.full", {"a": 1, "b": "x"}
    pipeline.publisher.announce(full)
    with pipeline.publisher.transaction() as t:
        t.insert(full, row)
    if has_rows:
        pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.delete(full, row)
    assert f"{name} has no key, and rows of it are updated" in pipeline.apply().refused[name]
    remedy = record(pipeline).parked[name].parked.remedy
    steps = [f"{{{name}: {{kind: changelog}}}}", "stop", "drop", "start"]
    places = [remedy.index(step) for step in steps]
    assert places == sorted(places)
    with pytest.raises(OperatorNeeded) as raised:
        require_none_parked(record(pipeline).parked)
    assert raised.value.hint == remedy
    changed(pipeline, rules={name: TableRule(kind="changelog")})
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('full')}")
    both(pipeline, 2)
    assert not pipeline.apply().refused
    assert not record(pipeline).parked
    assert [row._op for row in pipeline.spark.table(pipeline.identifier("full")).collect()] == [
        *("c", "d")
    ]


@pytest.mark.long
@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("how", long_but("rebuild", ["rebuild", "drop"]))
def test_a_table_whose_events_kafka_has_lost_returns_without_them_and_says_so(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, how: str, *, found: bool
) -> None:
    """Unless they have come after all; what is lost later parks the table again."""
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.5)
    lost_at = lost(pipeline, 2, 3)
    both(pipeline, 4)
    pipeline.apply()
    assert record(pipeline).parked[NAME].parked.missing == 1
    if found:
        found_again(pipeline, lost_at, 3)
    if how == "rebuild":
        rebuild(pipeline)
    else:
        pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('bad')} PURGE")
    pipeline.restart()
    both(pipeline, 5)
    assert not pipeline.apply().refused
    assert ids(pipeline, "bad") == ([1, 2, 3, 4, 5] if found else [1, 2, 4, 5])
    assert incomplete(pipeline) == ("" if found else "Kafka lacks 1 of its events")
    lost(pipeline, 6, 7)
    assert noted(pipeline)


@pytest.mark.long
def test_a_table_is_not_parked_for_events_that_a_hanging_transaction_may_still_bring(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.5)
    monkeypatch.setattr("spark_consumers.epochs.event_reader.VISIBLE_DEADLINE_S", 0.0)
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 2, "v": "2"})
        t.insert(BAD, {"id": 2, "v": "2"})
        shown = pipeline.publisher.hidden(BAD, {"id": 3, "v": "3"})
        t.counts[NAME] += 1
    with pytest.raises(Retryable, match=r"does not show 1 events of public\.bad yet"):
        pipeline.apply()
    assert noted(pipeline) is None
    shown()
    monkeypatch.undo()
    pipeline.restart()
    assert not pipeline.apply().refused
    assert ids(pipeline, "bad") == [1, 2, 3]


@pytest.mark.long
def test_a_table_that_never_was_made_is_parked_and_made_by_a_later_start(
    pipeline: Pipeline,
) -> None:
    other = SourceTable("other", {"id": ("int4", -1), "v": ("int4", -1)})
    pipeline.publisher.announce(other)
    changed(pipeline, rules={"public.other": TableRule(exclude=("id",))})
    with pipeline.publisher.transaction() as t:
        t.insert(other, {"id": 1, "v": 1})
        t.insert(GOOD, {"id": 2, "v": "2"})
    assert "public.other" in pipeline.apply().refused
    both(pipeline, 3)
    assert not pipeline.apply().refused, "once a start"
    assert record(pipeline).parked["public.other"].place is None
    operator = Operator(pipeline.spark, pipeline.settings)
    with pytest.raises(SettingsError, match=r"no Iceberg table of public\.other"):
        list(operator.rebuild(["public.other"]))
    changed(pipeline, rules={})
    both(pipeline, 4)
    pipeline.apply()
    assert ids(pipeline, "other") == [1]


@pytest.mark.long
@pytest.mark.parametrize("has", long_but("all", SEAMS))
@pytest.mark.parametrize("returning", long_but(False, [False, True]))
def test_a_kill_while_a_table_is_parked_or_returns_changes_nothing(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, has: Seam, *, returning: bool
) -> None:
    def killed() -> None:
        with monkeypatch.context() as patch:
            kill(patch, has)
            with pytest.raises(KeyboardInterrupt):
                pipeline.apply()
        pipeline.restart()

    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 2, "v": "2"})
        bad_value(t)
    if not returning:
        killed()
    both(pipeline, 3)
    pipeline.apply()
    assert (ids(pipeline, "good"), ids(pipeline, "bad")) == ([1, 2, 3], [1])
    assert record(pipeline).parked[NAME].events == 2
    changed(pipeline, on_bad_event="quarantine")
    rebuild(pipeline)
    both(pipeline, 4)
    if returning:
        killed()
    if not (returning and has == "all"):  # else the epoch is there
        pipeline.apply()
    assert (ids(pipeline, "good"), ids(pipeline, "bad")) == ([1, 2, 3, 4], [1, 3, 4])
    assert not record(pipeline).parked


@pytest.mark.long
def test_a_parked_table_returns_though_nothing_comes(pipeline: Pipeline) -> None:
    with pipeline.publisher.transaction() as t:
        bad_value(t)
    pipeline.apply()
    changed(pipeline, on_bad_event="quarantine")
    rebuild(pipeline)
    pipeline.stream(once=True)
    assert ids(pipeline, "bad") == [1], "it needs no transaction"
    assert noted(pipeline) is None
    both(pipeline, 2)
    pipeline.apply()
    assert ids(pipeline, "bad") == [1, 2]
    assert noted(pipeline) is None
    assert not record(pipeline).parked


@pytest.mark.long
def test_a_table_that_the_settings_left_out_returns_uncounted_and_says_so(
    pipeline: Pipeline,
) -> None:
    changed(pipeline, tables=["public.good"])
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 2, "v": "2"})
        t.insert(BAD, {"id": 2, "v": "2"})
        t.counts[NAME] += 1  # Kafka has lost the other one
    pipeline.apply()
    changed(pipeline, tables=[])
    both(pipeline, 3)
    with structlog.testing.capture_logs() as told:
        assert not pipeline.apply().refused
    lines = [line for line in told if "a table is incomplete" in line["event"]]
    assert [line["table"] for line in lines] == [NAME]
    assert ids(pipeline, "bad") == [1, 2, 3]
    assert "nobody has counted" in incomplete(pipeline)
    assert incomplete(pipeline, "good") == ""


@pytest.mark.long
def test_dead_letters_of_a_parked_table_are_known_when_it_returns(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.5)
    pipeline = new_pipeline(parks=True, on_bad_event="quarantine")
    pipeline.publisher.announce(GOOD, BAD)
    both(pipeline, 1)
    pipeline.apply()
    lost(pipeline, 2, 3)
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 4, "v": "4"})
        dead_letter(t)
    pipeline.apply()
    rebuild(pipeline)
    both(pipeline, 5)
    pipeline.apply()  # the request is seen after this one, without a restart
    both(pipeline, 6)
    assert not pipeline.apply().refused
    assert ids(pipeline, "bad") == [1, 2, 5, 6]
    assert noted(pipeline) is None


@pytest.mark.long
def test_a_table_goes_on_without_dead_letters_that_an_operator_knows_of(
    pipeline: Pipeline,
) -> None:
    """Those of which the last epoch before the command knows, and no later ones."""

    def letter(number: int) -> None:
        with pipeline.publisher.transaction() as t:
            t.insert(GOOD, {"id": number, "v": "v"})
            dead_letter(t)

    letter(2)
    assert NAME in pipeline.apply().refused
    note = noted(pipeline)
    assert note is not None
    assert f"slottables rebuild --table {NAME}" in note.remedy
    rebuild(pipeline)
    pipeline.runner.look_for_requests()
    letter(3)
    assert NAME in pipeline.apply().refused, "nobody knew of this one"
    assert record(pipeline).parked[NAME].parked.at_lsn == pipeline.publisher.commit_lsn
    assert (ids(pipeline, "bad"), incomplete(pipeline)) == ([1], "")
    rebuild(pipeline)
    pipeline.restart()
    both(pipeline, 4)
    report = pipeline.apply()
    assert (report.refused, report.dead_letters) == ({}, 2)
    assert ids(pipeline, "bad") == [1, 4]
    assert noted(pipeline) is None
    assert incomplete(pipeline) == "Kafka has refused 2 of its events"
    letter(5)
    assert NAME in pipeline.apply().refused


@pytest.mark.long
@pytest.mark.parametrize("of_kafka", long_but(False, [False, True]))
def test_a_rebuild_ends_the_flag_of_what_kafka_has_and_no_other(
    pipeline: Pipeline, *, of_kafka: bool
) -> None:
    mark_incomplete(pipeline, "bad", of_kafka=of_kafka)
    rebuild(pipeline, anew=True)
    pipeline.restart()
    while pipeline.runner.works_alone:
        pipeline.step()
    assert bool(incomplete(pipeline)) == of_kafka
    assert pipeline.note("bad").state == "following"


@pytest.mark.long
def test_a_rebuild_is_incomplete_where_an_event_is_still_bad(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(parks=True, on_bad_event="quarantine")
    pipeline.publisher.announce(GOOD, BAD)
    both(pipeline, 1)
    with pipeline.publisher.transaction() as t:
        bad_value(t)
    pipeline.apply()
    rebuild(pipeline, anew=True)
    pipeline.restart()
    while pipeline.runner.works_alone:
        pipeline.step()
    assert incomplete(pipeline) == "1 of its events are in _quarantine"
    assert ids(pipeline, "bad") == [1]


@pytest.mark.long
def test_a_dropped_table_that_is_refused_when_it_is_filled_returns_with_all_rows(
    pipeline: Pipeline,
) -> None:
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('bad')} PURGE")
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        bad_value(t)
    assert "column id" in pipeline.apply().refused[NAME]
    both(pipeline, 2)
    pipeline.apply()
    changed(pipeline, on_bad_event="quarantine")
    rebuild(pipeline)
    both(pipeline, 3)
    pipeline.apply()
    assert ids(pipeline, "bad") == [1, 2, 3]


def parked_with_sums(new_pipeline: NewPipeline) -> Pipeline:
    """A parked table with the row 1, and its sums by `v`, which are parked with it."""
    sums = {"totals": {"source": NAME, "group_by": ["v"], "sums": {"total": "id"}}}
    pipeline = new_pipeline(parks=True, sums=sums)
    pipeline.publisher.announce(GOOD, BAD)
    both(pipeline, 1)
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        bad_value(t)
    pipeline.apply()
    return pipeline


@pytest.mark.long
def test_sums_stay_and_return_with_their_parked_source(new_pipeline: NewPipeline) -> None:
    pipeline = parked_with_sums(new_pipeline)
    both(pipeline, 2)
    pipeline.apply()
    note = noted(pipeline, "totals")
    assert note is not None
    assert NAME in note.reason
    assert list(record(pipeline).tables) == ["public.good"]
    changed(pipeline, on_bad_event="quarantine")
    rebuild(pipeline)
    both(pipeline, 3)
    pipeline.apply()
    rows = pipeline.spark.table(pipeline.identifier("totals")).collect()
    assert sorted((row.v, row.total) for row in rows) == [("1", 1), ("2", 2), ("3", 3)]
    assert noted(pipeline, "totals") is None


@pytest.mark.long
def test_sums_that_the_settings_leave_out_while_they_are_parked_are_parked_no_more(
    new_pipeline: NewPipeline,
) -> None:
    pipeline = parked_with_sums(new_pipeline)
    assert [*record(pipeline).parked] == [NAME, "sums of totals"]
    changed(pipeline, on_bad_event="quarantine", sums={})
    rebuild(pipeline)
    both(pipeline, 2)
    pipeline.apply()
    assert record(pipeline).parked == {}
    assert ids(pipeline, "bad") == [1, 2]


@pytest.mark.long
def test_a_run_tells_of_parked_tables_and_does_not_end_as_if_all_were_well(
    new_pipeline: NewPipeline,
) -> None:
    port = free_port()
    pipeline = new_pipeline(parks=True, http_port=port)
    pipeline.publisher.announce(GOOD, BAD)
    both(pipeline, 1)
    with pipeline.publisher.transaction() as t:
        bad_value(t)
    with Running(pipeline) as running:
        what = "the table is parked"
        eventually(lambda: running.failure or any(r.refused for r in running.reports), what=what)
        both(pipeline, 2)
        eventually(lambda: running.failure or ids(pipeline, "good") == [1, 2], what="it goes on")
        running.sound()
        status = read_run_status(pipeline.tables)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
            assert answer.read().decode().startswith("ok: parked: public.bad (has ")
    running.sound()
    assert "column id has a value" in status.parked[NAME]["reason"]
    changed(pipeline, http_port=None)
    with pytest.raises(OperatorNeeded, match=r"the table is parked.*slottables rebuild --table"):
        pipeline.stream(once=True)


@pytest.mark.long
def test_a_table_whose_key_has_changed_returns_with_rows_behind_a_truncate(
    pipeline: Pipeline,
) -> None:
    """Its Iceberg table is dropped; events by the former key would leave stale rows."""
    both(pipeline, 2, 3)
    other = SourceTable("bad", BAD.columns, key=("v",))
    with pipeline.publisher.transaction() as t:
        t.update(BAD, {"id": 2, "v": "changed"})
    pipeline.publisher.reshape(other)
    with pipeline.publisher.transaction() as t:
        t.insert(other, {"id": 4, "v": "4"})
    assert "the key was id and is v" in pipeline.apply().refused[NAME]
    assert ids(pipeline, "good") == [1, 2, 3]
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('bad')} PURGE")
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 5, "v": "5"})
    assert "the key was id and is v" in pipeline.apply().refused[NAME], "a fill has stale rows"
    with pipeline.publisher.transaction() as t:
        t.truncate(other)
        for number, text in enumerate(("1", "changed", "3", "4"), 1):
            t.insert(other, {"id": number, "v": text})
    with pipeline.publisher.transaction() as t:
        t.update(other, {"id": 44, "v": "4"})
    pipeline.apply()
    rebuild(pipeline)
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 6, "v": "6"})
    assert pipeline.apply().refused == {}
    assert [(row.id, row.v) for row in pipeline.rows("bad", "id")] == [
        *((1, "1"), (2, "changed"), (3, "3"), (44, "4"))
    ]
