"""Settings against the tables: refused before the first change, with table, column and remedy."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from schemas.errors import ExitCode, SettingsError
from schemas.shaping import ShapingSettings
from services.bridge.cli.app import app
from services.bridge.events.leaf_identities import hidden_by, hiding, leaf_identities
from services.bridge.events.sent_relations import SentRelations
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.messages import (
    Delete,
    Insert,
    Relation,
    RelationColumn,
    Row,
    Update,
)
from services.bridge.recovery.fit import require_fitting, unfit
from services.postgres.partitions import Partition
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_partition_by import BY_TENANT, by_tenant, partitions_of
from tests.promises.bridge.test_placement import placement
from tests.promises.bridge.test_preflight import Examined
from tests.providers.interface import Provider

NAMES = ("id", "tenant", "note")
KEYED: dict[str, Any] = {"keys": {"public.t": ["tenant"]}}


def relation(identity: str = "f", keys: tuple[str, ...] = NAMES) -> Relation:
    columns = (RelationColumn(name, 25, -1, name in keys) for name in NAMES)
    return Relation(7, "public", "t", identity, tuple(columns))


def partition(name: str, identity: str, *columns: str) -> Partition:
    return Partition(8, "public", name, identity, frozenset(columns))


def sent(*relations: Relation) -> SentRelations:
    """Return relations as described, each alone, before a change of it."""
    found = SentRelations()
    for one in relations:
        found.take(one)
        found.settle([one.oid])
    return found


def errors(
    settings: dict[str, Any], table: Relation, *partitions: Partition
) -> list[SettingsError]:
    shaping = Shaping(ShapingSettings.model_validate(settings), "bank")
    return [*unfit(shaping, [table], {table.oid: partitions})]


WHOLE, BY_KEY = partition("t1", "f", *NAMES), partition("t2", "d", "id")


@pytest.mark.parametrize(
    ("settings", "table", "partitions", "said", "hint"),
    [
        (BY_TENANT, relation(), (), "", ""),
        (BY_TENANT, relation(), (WHOLE,), "", ""),
        ({"partition_by": {"public.t": "row"}}, relation(), (BY_KEY,), "", ""),
        ({"partition_by": {"public.t": ["id"]}}, relation(), (BY_KEY,), "", ""),
        (
            *({"partition_by": {"*.*": ["tenants"]}}, relation(), ()),
            *("public.t has no published column tenants", "did you mean tenant?"),
        ),
        (
            *({"partition_by": {"*.*": ["zzz"]}}, relation(), ()),
            *("public.t has no published column zzz", "the publication's column list"),
        ),
        (
            *(BY_TENANT | {"columns": {"*.*": {"exclude": ["ten*"]}}}, relation(), ()),
            *("public.t does not publish column tenant", "correct shaping.columns"),
        ),
        (
            *(BY_TENANT, relation("d", ("id",)), ()),
            *("does not tell the old value of tenant", "ALTER TABLE public.t REPLICA IDENTITY"),
        ),
        (
            *(BY_TENANT, relation(), (WHOLE, BY_KEY)),
            *("in its partition public.t2", "ALTER TABLE public.t2 REPLICA IDENTITY FULL"),
        ),
        (BY_TENANT | {"skip": {"*.*": ["u", "d"]}}, relation(), (BY_KEY,), "", ""),
        (BY_TENANT | {"exclude": ["public.t"]}, relation("d", ("id",)), (), "", ""),
        (
            *(KEYED, relation(), (BY_KEY,)),
            *("key column tenant, in its partition public.t2", "ALTER TABLE public.t2 REPLICA"),
        ),
        (
            *({"filters": {"*.*": "tenant == 'a'"}}, relation(), (WHOLE, BY_KEY)),
            *("in its partition public.t2", "ALTER TABLE public.t2 REPLICA IDENTITY FULL"),
        ),
    ],
)
def test_new_settings_that_do_not_fit_are_refused_and_known_ones_told(
    settings: dict[str, Any],
    table: Relation,
    partitions: tuple[Partition, ...],
    said: str,
    hint: str,
) -> None:
    found = errors(settings, table, *partitions)
    assert [said in error.message for error in found] == ([True] if said else [])
    assert [hint in error.hint for error in found] == ([True] if said else [])
    assert all(error.subject.startswith("shaping.") for error in found)
    assert all(error.exit_code == ExitCode.SETTINGS for error in found)
    now = placement(settings)
    require_fitting(found, now, now)
    older: dict[str, str] = {}
    for then in (None, placement({}), older):
        if found and (then is None or then or "partition_by" in settings):
            with pytest.raises(SettingsError):
                require_fitting(found, then, now)
        else:
            require_fitting(found, then, now)


def test_columns_that_are_left_out_later_are_refused() -> None:
    settings = BY_TENANT | {"columns": {"*.*": {"exclude": ["tenant"]}}}
    found = errors(settings, relation())
    with pytest.raises(SettingsError, match=r"public\.t does not publish column tenant"):
        require_fitting(found, placement(BY_TENANT), placement(settings))


@given(st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES)), st.booleans())
def test_a_partition_is_partial_by_the_catalog_or_by_the_stream(
    now: set[str], then: set[str], whole: bool
) -> None:
    """Its identity may have been another when the change was made that is now decoded."""
    below = [partition("t1", "f" if whole else "i", *(NAMES if whole else now))]
    found = leaf_identities(relation(), below, sent(replace(relation("i", tuple(then)), oid=8)))
    numbers = [{NAMES.index(name) for name in names} for names in (now, then)]
    expected = numbers[1:] if whole else numbers
    assert {leaf.indexes for leaf in found} == {frozenset(one) for one in expected if one}


@pytest.mark.parametrize("root", ["d", "i", "n"])
def test_the_stream_says_what_a_partition_tells_and_the_catalog_of_others(root: str) -> None:
    """The catalog is of today: columns may be renamed, and keys changed, behind the change."""
    table = relation(root, ("id", "tenant"))
    as_root, other = frozenset[str](), frozenset({"tenant"})
    catalog = [
        Partition(8, "public", "t1", "i", frozenset({"note"}), other),
        Partition(9, "public", "t2", "d", frozenset({"renamed"}), as_root),
        Partition(10, "public", "t3", "f", frozenset(NAMES), as_root),
        Partition(11, "public", "t4", "n", frozenset(), other),
    ]
    assert [leaf.columns for leaf in leaf_identities(table, catalog, sent())] == [("note",)]
    described = leaf_identities(table, catalog, sent(replace(relation("d", ("id",)), oid=8)))
    assert [(leaf.columns, leaf.indexes) for leaf in described] == [(("id",), frozenset({0}))]
    whole = sent(*(replace(relation("f"), oid=oid) for oid in (8, 10)))
    assert leaf_identities(table, catalog, whole) == ()


def test_the_stream_tells_partitions_without_the_catalog() -> None:
    """The root is described, then the partition, then a change of the root alone comes."""
    root = relation("i", ("id", "tenant"))
    leaf, other = replace(relation("d", ("id",)), oid=8), replace(relation("d", ("id",)), oid=9)
    found = SentRelations()
    for one in (root, leaf, root, other):  # as a prepared transaction keeps them
        found.take(one)
    found.settle([root.oid])
    assert {*found.partitions(root.oid)} == {leaf, other}
    assert [one.indexes for one in leaf_identities(root, (), found)] == [{0}]
    found.take(replace(leaf, replica_identity="f"))  # detached, and published as itself
    found.settle([leaf.oid])
    assert {*found.partitions(root.oid)} == {other}
    found.take(root)
    found.take(leaf)
    found.settle([root.oid, leaf.oid])  # a TRUNCATE of both
    found.take(root)
    found.settle()  # the transaction ended
    found.take(other)
    assert not [*found.partitions(root.oid)]


def test_a_change_is_hidden_where_it_may_be_of_a_partition_that_does_not_tell() -> None:
    table = relation("d", ("id", "tenant"))
    first, second = relation("d", ("id",)), relation("d", ("tenant", "id"))
    catalog = [partition("t1", "d"), replace(partition("t2", "d"), oid=9)]
    found = sent(replace(first, oid=8), replace(second, oid=9))
    leaves = leaf_identities(table, catalog, found)
    assert hiding(leaves, {0}) == hiding(leaves, ()) == ()
    narrow = hiding(leaves, {0, 1})
    assert [leaf.columns for leaf in narrow] == [("id",)]
    new: Row = [b"1", b"a", b"x"]
    key, wide, whole = [b"1", None, None], [b"1", b"a", None], [b"1", b"a", b"x"]
    assert hidden_by(narrow, Update(table, None, None, new)) == narrow
    assert hidden_by(narrow, Update(table, "K", [*key], new)) == narrow
    assert hidden_by(narrow, Delete(table, "K", [*key])) == narrow
    assert hidden_by(narrow, Delete(table, "K", [*wide])) == ()
    assert hidden_by(narrow, Delete(table, "K", [*whole])) == ()
    assert hidden_by(narrow, Delete(table, "O", [*key])) == ()
    assert hidden_by(narrow, Insert(table, new)) == ()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shaping": BY_TENANT}, ""),
        ({"shaping": {"partition_by": {"public.t": "row"}}}, ""),
        ({"shaping": BY_TENANT | {"columns": {"*.*": {"exclude": ["tenant"]}}}}, "tenant"),
        ({"shaping": BY_TENANT, "column_lists": {"public.t": ["id", "tenant"]}}, ""),
        (
            {"shaping": BY_TENANT, "column_lists": {"public.t": ["id", "tenants"]}},
            "did you mean tenants?",
        ),
    ],
)
def test_check_config_tells_of_a_column_that_is_left_out(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    source: dict[str, Any] = {"conninfo": "host=h dbname=d", "slot": "s", "publication": "p"}
    if lists := settings.get("column_lists"):
        source |= {"tables": ["public.t"], "column_lists": lists}
    file = tmp_path / "file.yaml"
    file.write_text(yaml.safe_dump({"source": source, "shaping": settings["shaping"]}))
    done = CliRunner().invoke(app, ["check-config", "--config", str(file)])
    assert done.exit_code == (ExitCode.SETTINGS if said else ExitCode.OK), done.output
    assert said in done.output


def test_settings_that_do_not_fit_their_tables_end_the_bridge_before_the_first_change(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, tenant text, note text)")
        connection.execute("CREATE PUBLICATION few FOR TABLE t (id, note)")
        connection.execute("CREATE PUBLICATION all_columns FOR TABLE t")
        for publication, parts in (
            ("few", ("public.t has no published column tenant", "column list")),
            ("all_columns", ("the old value of tenant", "ALTER TABLE public.t REPLICA IDENTITY")),
        ):
            bridge = new_bridge(conninfo, shaping=BY_TENANT, publication=publication)
            finding = Examined(bridge).one("shaping-does-not-fit", "shaping.partition_by")
            bridge.start()
            assert bridge.exit_code() == ExitCode.SETTINGS, bridge.output
            for part in parts:
                assert part in bridge.output.splitlines()[-1]
                assert part in finding["evidence"] + finding["remedy"]["text"]
        row = connection.execute(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", [bridge.slot]
        ).fetchone()
        assert row == (0,), "a refused first start makes no slot"


def _stopped(bridge: Bridge, code: ExitCode, *parts: str) -> None:
    assert bridge.exit_code() == code, bridge.output
    for part in parts:
        assert part in bridge.output.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("settings", [BY_TENANT, KEYED], ids=["partition_by", "keys"])
def test_a_partition_that_does_not_tell_old_values_is_refused_and_never_guessed(
    settings: dict[str, Any], pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Partitions do not inherit a replica identity: the server says O, and NULL for each value."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in (
            "CREATE TABLE t (id int PRIMARY KEY, tenant text, note text) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            "CREATE PUBLICATION root FOR TABLE t WITH (publish_via_partition_root)",
        ):
            connection.execute(statement)
        bridge = new_bridge(conninfo, shaping=settings, publication="root")
        assert Examined(bridge).one("partition-identity-differs")["subject"] == "public.t"
        _stopped(bridge.start(), ExitCode.SETTINGS, "partition public.t1", "ALTER TABLE public.t1")
        connection.execute("ALTER TABLE t1 REPLICA IDENTITY FULL")
        assert not [name for name, _ in Examined(bridge).names() if name.startswith("partition-")]
        bridge.start().streaming()
        connection.execute("INSERT INTO t SELECT g, 'a', 'x' FROM generate_series(1, 9) g")
        connection.execute("DELETE FROM t WHERE id = 7")
        bridge.caught_up()
        # A new partition, which is as its root before the bridge has read what it did until then.
        bridge.kill()
        connection.execute("CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (100) TO (200)")
        connection.execute("INSERT INTO t VALUES (101, 'a', 'x'), (102, 'a', 'x')")
        connection.execute("DELETE FROM t WHERE id IN (9, 102)")
        connection.execute("ALTER TABLE t2 REPLICA IDENTITY FULL")
        connection.execute("DELETE FROM t WHERE id IN (8, 101)")
        _stopped(bridge.start(), ExitCode.UNDECODABLE, "public.t", "REPLICA IDENTITY FULL")
    told = partitions_of(bridge, "t")
    assert {place for place, *_ in told} == {by_tenant("a", 2)}
    changes = [event for _, _, event in told if event is not None]
    assert {event["op"] for event in changes[10:]} <= {"c"}, "no part of the transaction"
    assert [event["op"] for event in changes[:10]] == ["c"] * 9 + ["d"]
    assert changes[9]["before"] == {"id": 7, "tenant": "a", "note": "x"}


FILTERED: dict[str, Any] = {
    "filters": {"public.t": "tenant == 'a'"},
    "keys": {"public.t": ["id"]},
}


@pytest.fixture
def partly_hidden(
    pair: Provider, fresh_database: str
) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
    """A database with t, whose identity is an index with the column of the filter; t1 has it, too.

    Its conninfo, and a connection to it.
    """
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in (
            "CREATE TABLE t (id int PRIMARY KEY, tenant text NOT NULL, note text)"
            " PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
            "CREATE UNIQUE INDEX told ON t (id, tenant)",
            "ALTER TABLE t REPLICA IDENTITY USING INDEX told",
            "ALTER TABLE t1 REPLICA IDENTITY USING INDEX t1_id_tenant_idx",
            "CREATE PUBLICATION root FOR TABLE t WITH (publish_via_partition_root)",
        ):
            connection.execute(statement)
        yield conninfo, connection


def _add_t2(connection: psycopg.Connection[Any], *rows: str) -> None:
    """Attach a partition with the identity of its primary key alone, and insert the rows into t."""
    connection.execute("CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (100) TO (200)")
    connection.execute(f"INSERT INTO t VALUES {', '.join(rows)}".encode())


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "code", "what"),
    [
        (BY_TENANT, ExitCode.UNDECODABLE, "columns that choose the partition"),
        (
            {"filters": {"public.t": "tenant == 'a'"}},
            ExitCode.RECORD_REFUSED,
            "columns of a filter",
        ),
    ],
    ids=["partition_by", "filter"],
)
def test_a_change_that_a_partition_hides_is_refused(
    settings: dict[str, Any],
    code: ExitCode,
    what: str,
    partly_hidden: tuple[str, psycopg.Connection[Any]],
    new_bridge: NewBridge,
) -> None:
    """The root's identity is an index with the column; a new partition has its key alone."""
    conninfo, connection = partly_hidden
    shaping = settings | {"keys": {"public.t": ["id"]}}
    bridge = new_bridge(conninfo, shaping=shaping, publication="root").start().streaming()
    connection.execute("INSERT INTO t VALUES (1, 'a', 'x'), (2, 'a', 'x')")
    connection.execute("UPDATE t SET note = 'y' WHERE id = 1")
    bridge.caught_up()
    with connection.transaction():
        _add_t2(connection, "(101, 'a', 'x')")
    bridge.caught_up()
    connection.execute("UPDATE t SET tenant = 'b' WHERE id = 101")
    named = ("partition public.t2", "DEFAULT (id)", "ALTER TABLE public.t2")
    _stopped(bridge, code, f"the old row's {what}", *named)
    assert sorted(event["op"] for event in bridge.events("t")) == ["c", "c", "c", "u"]


@pytest.mark.long
def test_a_partition_that_is_detached_after_a_refusal_is_refused_again(
    partly_hidden: tuple[str, psycopg.Connection[Any]], new_bridge: NewBridge
) -> None:
    """The catalog does not know it as a partition any more; the stream describes it as one."""
    conninfo, connection = partly_hidden
    bridge = new_bridge(conninfo, shaping=FILTERED, publication="root").start().streaming()
    _add_t2(connection, "(101, 'a', 'x')")
    bridge.caught_up()
    connection.execute("UPDATE t SET tenant = 'b' WHERE id = 101")
    named = ("partition public.t2", "DEFAULT (id)")
    _stopped(bridge, ExitCode.RECORD_REFUSED, *named)
    connection.execute("ALTER TABLE t DETACH PARTITION t2")
    _stopped(bridge.start(), ExitCode.RECORD_REFUSED, *named, "detached or dropped")
    connection.execute("DROP TABLE t2")
    _stopped(bridge.start(), ExitCode.RECORD_REFUSED, *named)
    assert [event["op"] for event in bridge.events("t")] == ["c"]


@pytest.mark.long
def test_a_hidden_change_that_was_prepared_is_refused_after_a_restart(
    partly_hidden: tuple[str, psycopg.Connection[Any]], new_bridge: NewBridge
) -> None:
    """Kafka has it with the partition's identity as it was; the catalog has the later one."""
    conninfo, connection = partly_hidden
    settings = {"shaping": FILTERED, "publication": "root", "two_phase": True}
    bridge = new_bridge(conninfo, **settings).start().streaming()
    _add_t2(connection, "(101, 'a', 'x')")
    bridge.caught_up()
    connection.execute("BEGIN")
    connection.execute("UPDATE t SET tenant = 'b' WHERE id = 101")
    connection.execute("PREPARE TRANSACTION 'hidden'")
    connection.execute("INSERT INTO t VALUES (3, 'a', 'x')")
    bridge.caught_up()
    assert bridge.stop() == ExitCode.OK
    connection.execute("COMMIT PREPARED 'hidden'")
    connection.execute("ALTER TABLE t2 REPLICA IDENTITY FULL")
    _stopped(bridge.start(), ExitCode.RECORD_REFUSED, "partition public.t2", "DEFAULT (id)")
    assert [event["op"] for event in bridge.events("t")] == ["c", "c"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("altered", "on_refused"),
    [("before", "stop"), ("before", "dead_letter"), ("inside", "stop"), ("after", "stop")],
)
def test_a_mended_partition_stops_no_prepared_transaction_of_another(
    altered: str,
    on_refused: str,
    partly_hidden: tuple[str, psycopg.Connection[Any]],
    new_bridge: NewBridge,
) -> None:
    """Kafka does not keep what an earlier transaction has told, and what may differ by then."""
    conninfo, connection = partly_hidden
    alter: LiteralString = "ALTER TABLE t2 REPLICA IDENTITY FULL"
    settings = {"publication": "root", "on_refused": on_refused, "two_phase": True}
    bridge = new_bridge(conninfo, shaping=FILTERED, **settings).start().streaming()
    _add_t2(connection, "(1, 'a', 'x')", "(101, 'a', 'x')")
    bridge.caught_up()
    if altered == "before":
        connection.execute(alter)
    connection.execute("BEGIN")
    if altered == "inside":
        connection.execute(alter)
    connection.execute("UPDATE t SET note = 'y' WHERE id = 1")
    connection.execute("PREPARE TRANSACTION 'mended'")
    bridge.caught_up()
    connection.execute("COMMIT PREPARED 'mended'")
    if altered == "after":
        _stopped(bridge, ExitCode.RECORD_REFUSED, "partition public.t2", "DEFAULT (id)")
        connection.execute(alter)
        bridge.start()
    bridge.caught_up()
    assert bridge.stop() == ExitCode.OK, bridge.output
    events = [(event["op"], event["after"]["id"]) for event in bridge.events("t")]
    assert sorted(events) == [("c", 1), ("c", 101), ("u", 1)]
    assert bridge.output.count("session lost: starting a new one") == 1


@pytest.mark.long
@pytest.mark.parametrize("on_refused", ["stop", "dead_letter"])
def test_a_partition_whose_identity_was_mended_stops_no_other(
    on_refused: str, partly_hidden: tuple[str, psycopg.Connection[Any]], new_bridge: NewBridge
) -> None:
    """The server describes it anew only before its own next change: a new session asks for that."""
    conninfo, connection = partly_hidden
    settings = {"shaping": FILTERED, "publication": "root", "on_refused": on_refused}
    bridge = new_bridge(conninfo, **settings).start().streaming()
    _add_t2(connection, "(1, 'a', 'x')", "(101, 'a', 'x')")
    bridge.caught_up()
    connection.execute("ALTER TABLE t2 REPLICA IDENTITY FULL")
    connection.execute("UPDATE t SET note = 'y' WHERE id = 1")
    connection.execute("UPDATE t SET tenant = 'b' WHERE id = 101")
    bridge.caught_up()
    assert bridge.stop() == ExitCode.OK, bridge.output
    events = [
        (event["op"], (event["after"] or event["before"])["id"]) for event in bridge.events("t")
    ]
    assert sorted(events) == [("c", 1), ("c", 101), ("d", 101), ("u", 1)]
    assert bridge.output.count("session lost: starting a new one") == 1


@pytest.mark.long
def test_each_change_before_an_identity_was_mended_may_cost_a_session(
    partly_hidden: tuple[str, psycopg.Connection[Any]], new_bridge: NewBridge
) -> None:
    """An update names no partition: where a backlog has many, the log tells the number."""
    conninfo, connection = partly_hidden
    bridge = new_bridge(conninfo, shaping=FILTERED, publication="root").start().streaming()
    assert bridge.stop() == ExitCode.OK
    _add_t2(connection, "(1, 'a', 'x')")
    for number in range(2):
        connection.execute("INSERT INTO t VALUES (%s, 'a', 'x')", [101 + number])
        connection.execute("UPDATE t SET note = %s WHERE id = 1", [str(number)])
    connection.execute("ALTER TABLE t2 REPLICA IDENTITY FULL")
    connection.execute("UPDATE t SET note = 'z' WHERE id = 101")
    connection.execute("UPDATE t SET note = 'z' WHERE id = 1")
    bridge.start().caught_up()
    assert bridge.stop() == ExitCode.OK, bridge.output
    assert sorted(event["op"] for event in bridge.events("t")) == [*"ccc", *"uuuu"]
    told = [line for line in bridge.output.splitlines() if "DEFAULT (id)" in line]
    told = [line for line in told if "session lost" not in line]
    assert len(told) == bridge.output.count("session lost: starting a new one") == 2
    for number, line in enumerate(told, 1):
        assert f"sessions={number}" in line
        assert "docs/guides/shaping.md" in line


@pytest.mark.long
@pytest.mark.parametrize(
    "change", ["ALTER TABLE t2 REPLICA IDENTITY FULL", "ALTER TABLE t DETACH PARTITION t2"]
)
def test_a_hidden_change_before_its_partition_was_mended_is_refused(
    change: LiteralString, partly_hidden: tuple[str, psycopg.Connection[Any]], new_bridge: NewBridge
) -> None:
    """The new session, in which the partition is described as it was at the change, refuses it."""
    conninfo, connection = partly_hidden
    bridge = new_bridge(conninfo, shaping=FILTERED, publication="root").start().streaming()
    assert bridge.stop() == ExitCode.OK
    _add_t2(connection, "(101, 'a', 'x')")
    connection.execute("UPDATE t SET tenant = 'b' WHERE id = 101")
    connection.execute(change)
    _stopped(bridge.start(), ExitCode.RECORD_REFUSED, "public.t2", "DEFAULT (id)")
    assert [event["op"] for event in bridge.events("t")] == ["c"]
    assert bridge.output.count("session lost: starting a new one") == 1
