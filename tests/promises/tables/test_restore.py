"""`slottables restore`: tables as of an LSN, in a PostgreSQL database, all of them or none."""

import psycopg
import pytest

from schemas.errors import OperatorNeeded, Retryable, SettingsError, SlotbridgeError
from schemas.lsn import format_lsn
from schemas.settings import SourceSettings
from schemas.tables import TableRule
from spark_consumers.iceberg import catalog, commits
from spark_consumers.operations import Operator
from spark_consumers.restore.restoration import Restoration, restore
from spark_consumers.verify.as_of import verify_as_of
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable
from tests.providers.interface import Provider

ITEMS = SourceTable("items", {"id": ("int4", -1), "n": ("int4", -1), "mood": ("public.mood", -1)})
RENAMED = SourceTable("items", {"id": ("int4", -1), "n": ("int4", -1), "kind": ("public.mood", -1)})
LOG = SourceTable("log", {"note": ("varchar", 9)}, key=(), identity="nothing", schema="Odd one")
PAST = SourceTable("past", {"id": ("int4", -1), "v": ("numeric", (6 << 16 | 2) + 4)})
EVENTS = SourceTable("events", {"id": ("int4", -1)})
RULES = {"public.past": {"kind": "history"}, "public.events": {"kind": "changelog"}}


@pytest.fixture
def filled(new_pipeline: NewPipeline) -> tuple[Pipeline, int]:
    """Tables of each kind with two epochs, and the LSN of the first; items changed in between."""
    pipeline = new_pipeline(rules=RULES)
    publisher = pipeline.publisher
    publisher.announce(ITEMS, LOG, PAST, EVENTS)
    with publisher.transaction() as t:
        for key in range(3):
            t.insert(ITEMS, {"id": key, "n": key, "mood": "sad"})
        t.insert(PAST, {"id": 1, "v": "1.50"})
        t.update(PAST, {"id": 1, "v": "2.50"})
        for _ in range(2):
            t.insert(LOG, {"note": "a\tb\\c"})
        t.insert(EVENTS, {"id": 1})
    pipeline.apply()
    first = publisher.commit_lsn
    publisher.reshape(RENAMED)
    with publisher.transaction() as t:
        t.update(RENAMED, {"id": 1, "n": 100, "kind": "happy"})
        t.delete(RENAMED, {"id": 2, "n": 2, "kind": "sad"})
        t.insert(LOG, {"note": "later"})
        t.update(PAST, {"id": 1, "v": "9.00"})
    pipeline.apply()
    return pipeline, first


def lists(connection: psycopg.Connection, query: bytes) -> list[tuple[object, ...]]:
    return connection.execute(query).fetchall()


def of_first_epoch(connection: psycopg.Connection) -> None:
    assert lists(connection, b"SELECT id, n, mood FROM items ORDER BY 1") == [
        (key, key, "sad") for key in range(3)
    ]
    assert lists(connection, b'SELECT note FROM "Odd one".log') == [("a\tb\\c",)] * 2
    assert lists(connection, b"SELECT id, v::text FROM past") == [(1, "2.50")]
    keys = (
        b"SELECT conrelid::regclass::text FROM pg_constraint"
        b" WHERE contype = 'p' AND connamespace = 'public'::regnamespace ORDER BY 1"
    )
    assert lists(connection, keys) == [("items",), ("past",)]


def test_all_tables_are_as_of_one_epoch_whatever_came_since(
    filled: tuple[Pipeline, int], pair: Provider, fresh_database: str
) -> None:
    pipeline, first = filled
    into = pair.primary.conninfo(fresh_database)
    steps: list[tuple[str, int, int]] = []

    def asked(lsn: int, *tables: str, dry_run: bool = False) -> Restoration:
        return restore(
            *(pipeline.spark, pipeline.settings, lsn, into),
            tables=tables,
            dry_run=dry_run,
            progress=lambda *step: steps.append(step),
        )

    # Kafka's events agree with the columns of that time, too.
    compared = verify_as_of(pipeline.spark, pipeline.settings, first)
    assert [c.line() for c in compared if not c.equal] == []
    with psycopg.connect(into, autocommit=True) as connection:
        planned = asked(first + 5, dry_run=True)
        assert not steps
        relations = b"SELECT relname FROM pg_class WHERE relname IN ('items', 'past', 'log')"
        assert not lists(connection, relations)
        assert planned.note == (
            f"no epoch is of {format_lsn(first + 5)}: these are of the last one before, "
            f"{format_lsn(first)}"
        )
        found = asked(first)
        assert not found.note
        assert [(t.table, t.rows, t.as_text) for t in found.tables] == [
            ("Odd one.log", 2, []),
            ("public.items", 3, ["mood"]),
            ("public.past", 1, []),
        ]
        assert found.tables[2].columns == {"id": "integer", "v": "numeric(6,2)"}
        assert ("public.items", 3, 3) in steps
        assert not any("may be missing" in line for line in found.lines())
        of_first_epoch(connection)
        with pytest.raises(SettingsError, match=r"already, with rows \(Odd one\.log, public\.item"):
            asked(first)
        connection.execute(
            'DROP TABLE items, "Odd one".log;'
            "TRUNCATE past; CREATE TYPE mood AS ENUM ('sad', 'happy');"
            "CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN UPDATE past SET v = 0; RETURN NULL; END';"
            "CREATE CONSTRAINT TRIGGER spoil AFTER INSERT ON past DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION spoil()"
        )
        with pytest.raises(SlotbridgeError, match=r"not those of the Iceberg .* 1 different"):
            asked(first)
        assert not lists(connection, b"SELECT FROM past")
        assert not lists(connection, b"SELECT FROM pg_class WHERE relname = 'items'")
        connection.execute("DROP TRIGGER spoil ON past")
        asked(first)
        of_first_epoch(connection)
        typed = b"SELECT DISTINCT pg_typeof(mood)::text FROM items"
        assert lists(connection, typed) == [("mood",)]
        connection.execute("TRUNCATE past")
        # A rebuild is beside the table, and a topic may lack what it needs.
        assert list(Operator(pipeline.spark, pipeline.settings).rebuild(["public.past"]))
        late = asked(first + 10**6, "public.past")
        assert "have not reached" in late.note
        assert lists(connection, b"SELECT id, v::text FROM past") == [(1, "9.00")]
        connection.execute("TRUNCATE past")
        table = catalog.load(pipeline.spark, pipeline.identifier("past"))
        catalog.set_property(table, catalog.SEEN_LSN, str(first + 1))
        within = asked(first, "public.past")
        assert "a snapshot brought rows later, which may be missing" in within.tables[0].line()


@pytest.mark.long
def test_a_rule_by_the_new_name_of_a_column_fits_what_was_there_before(
    new_pipeline: NewPipeline, pair: Provider, fresh_database: str
) -> None:
    """The rule follows the source's rename; nothing of the column is left out of the past."""
    made_by = {"include": ["id", "mood"], "partition": ["mood"], "sort": ["mood desc"]}
    now = {"include": ["id", "kind"], "partition": ["kind"], "sort": ["kind desc"]}
    pipeline = new_pipeline(rules={"public.items": made_by})
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    with publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "n": 1, "mood": "sad"})
    pipeline.apply()
    first = publisher.commit_lsn
    publisher.reshape(RENAMED)
    with publisher.transaction() as t:
        t.update(RENAMED, {"id": 1, "n": 1, "kind": "happy"})
    pipeline.restart()
    pipeline.set_tables(rules={"public.items": TableRule.model_validate(now)})
    pipeline.apply()
    assert [row.asDict() for row in pipeline.rows("items")] == [{"id": 1, "kind": "happy"}]
    pipeline.restart()
    with publisher.transaction() as t:
        t.insert(RENAMED, {"id": 2, "n": 2, "kind": "sad"})
    pipeline.apply()
    into = pair.primary.conninfo(fresh_database)
    with psycopg.connect(into, autocommit=True) as connection:
        restore(pipeline.spark, pipeline.settings, first, into)
        assert lists(connection, b"SELECT to_jsonb(t)::text FROM items t") == [
            ('{"id": 1, "mood": "sad"}',)
        ]
    for lsn in (first, publisher.commit_lsn):
        (compared,) = verify_as_of(pipeline.spark, pipeline.settings, lsn)
        assert compared.equal, compared.line()


@pytest.mark.long
def test_what_can_not_be_restored_is_named(
    filled: tuple[Pipeline, int], pair: Provider, fresh_database: str
) -> None:
    pipeline, first = filled
    into = pair.primary.conninfo(fresh_database)

    def refused(
        error: type[SlotbridgeError], match: str, *tables: str, lsn: int = first, to: str = into
    ) -> None:
        with pytest.raises(error, match=match):
            restore(pipeline.spark, pipeline.settings, lsn, to, tables=tables)

    refused(SettingsError, "the first is", lsn=first - 1)
    refused(SettingsError, r"does not have the table \(public\.no\)", "public.no")
    refused(SettingsError, r"a changelog holds events", "public.events")
    refused(SettingsError, "--into is not a connection string", to="nonsense")
    refused(Retryable, "the target does not answer", to="host=127.0.0.1 port=1 dbname=x")
    with psycopg.connect(into, autocommit=True) as connection:
        connection.execute("CREATE TABLE past (id bigint PRIMARY KEY, v numeric(6,2))")
        refused(SettingsError, r"column id with the type of the source \(public\.past\)")
        connection.execute("CREATE PUBLICATION p; DROP TABLE past")
        refused(SettingsError, "bridge's publication p: it is the source")
        connection.execute("DROP PUBLICATION p; CREATE PUBLICATION everything FOR ALL TABLES")
        refused(SettingsError, r"publication everything .* restored rows \(Odd one\.log\)")
        connection.execute("DROP PUBLICATION everything")
    assert isinstance(pipeline.settings.source, SourceSettings)
    table = catalog.load(pipeline.spark, pipeline.identifier("past"))
    commits.forget(table, catalog.own_tags(table)[:-1])
    catalog.expire(table, keep=1, older_than_ms=2**62)
    refused(OperatorNeeded, r"no longer has its snapshot .*public\.past", "public.past")
    with psycopg.connect(into) as connection:
        assert not lists(connection, b"SELECT FROM pg_class WHERE relname = 'items'")
