"""Tables that the source renames or moves, through a running bridge: what was hidden stays so."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode
from schemas.events import progress_topic, table_names_topic
from services.bridge.failpoints import VARIABLE
from services.postgres.publications import table_catalog
from services.testbed.pair import set_parameter
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import committed
from tests.promises.bridge.recordings.scenario import STREAMED_ALWAYS
from tests.promises.bridge.recover_process import drop_slot, recover
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_shaping_live import everything
from tests.providers.interface import Provider
from tests.providers.tokens import token_of
from tests.providers.waiting import eventually, patient

RULES: dict[str, Any] = {"exclude": ["ssn"]}
MASKS: dict[str, Any] = {"email": {"text": "***"}}
FILTER = "id > 0"
CUSTOMERS: dict[str, Any] = {
    "columns": {"public.customers": RULES},
    "masks": {"public.customers": MASKS},
    "filters": {"public.customers": FILTER},
    "exclude": ["pay.salaries"],
}
BOTH: dict[str, Any] = {
    **CUSTOMERS,
    "columns": {"public.c*s": RULES},
    "masks": {"public.c*s": MASKS},
    "filters": {"public.customers": FILTER, "public.clients": FILTER},
}
WITHOUT_PAY: dict[str, Any] = {"exclude": ["pay.*"]}
REPAIRED: dict[str, Any] = {"shaping": WITHOUT_PAY, "snapshot": {"mode": "when_needed"}}
HIDDEN = (b"secret-", b"n-7")
"""What no topic may have: secrets, and the name in a row that the filter leaves out."""


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    """A database with a table of customers whose first row is published."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        _make(connection)
        connection.execute("CREATE SCHEMA pay CREATE TABLE salaries (id int PRIMARY KEY, n text)")
        connection.execute("INSERT INTO pay.salaries VALUES (1, 'secret-n')")
    return conninfo


@pytest.fixture
def wait_for(pair: Provider) -> Iterator[Callable[[str], None]]:
    """Let commits wait for a standby; for those of before at the end."""
    with psycopg.connect(pair.primary.conninfo(), autocommit=True) as connection:
        row = connection.execute("SHOW synchronous_standby_names").fetchone()
    assert row is not None
    yield lambda name: set_parameter(pair.primary, "synchronous_standby_names", name)
    set_parameter(pair.primary, "synchronous_standby_names", row[0])


def _make(connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "CREATE TABLE customers (id int PRIMARY KEY, name text, ssn text, email text)"
    )


def _insert(connection: psycopg.Connection[Any], table: str, first: int, last: int) -> None:
    connection.execute(
        f"INSERT INTO {table} SELECT g, 'n' || g, 'secret-s', 'secret-e'"
        f" FROM generate_series({first}, {last}) g".encode()
    )


def keys(records: Iterable[tuple[object, bytes | None, bytes | None]]) -> list[bytes]:
    return [key or b"" for _, key, _ in records]


def _refused(bridge: Bridge, table: str, former: str, *others: str) -> None:
    """Assert that the bridge stops and names what would be lost, and that nothing is leaked."""
    assert bridge.exit_code() == ExitCode.SETTINGS, bridge.output
    said = bridge.output.splitlines()[-1]
    for part in (table, former, "at LSN", "Hint", *others):
        assert part in said
    found = everything(bridge)
    assert not [hidden for hidden in HIDDEN if hidden in found]
    assert f"{bridge.prefix}.{table}" not in bridge.topics()


def test_a_table_that_is_renamed_in_a_streamed_transaction_is_not_published_unmasked(
    conninfo: str, new_bridge: NewBridge
) -> None:
    at_once = f"{conninfo} options='{STREAMED_ALWAYS}'"
    bridge = new_bridge(at_once, shaping=CUSTOMERS).start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        _insert(connection, "customers", 1, 1)
        bridge.caught_up()
        with connection.transaction():
            connection.execute("ALTER TABLE customers RENAME TO clients")
            _insert(connection, "clients", 2, 100)
    lost = ("shaping.columns", "shaping.masks", "shaping.filters", "ssn", "email")
    _refused(bridge, "public.clients", "public.customers", *lost)
    corrected = new_bridge(at_once, shaping=BOTH).start().streaming()
    corrected.caught_up()
    with psycopg.connect(conninfo, autocommit=True) as connection:  # and back
        connection.execute("ALTER TABLE clients RENAME TO customers")
        _insert(connection, "customers", 101, 101)
    corrected.caught_up()
    assert corrected.stop() == 0, corrected.output
    assert len([*corrected.events("clients")]) == 99
    assert len([*corrected.events("customers")]) == 2
    assert not [hidden for hidden in HIDDEN if hidden in everything(corrected)]
    with psycopg.connect(conninfo, autocommit=True) as connection:
        streamed = connection.execute(
            "SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = %s", [bridge.slot]
        ).fetchone()
    assert streamed is not None
    assert streamed[0]


@pytest.mark.long
def test_a_table_that_is_moved_while_no_bridge_runs_is_not_published_unmasked(
    conninfo: str, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, shaping=CUSTOMERS).start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        _insert(connection, "customers", 1, 1)
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        connection.execute("ALTER TABLE customers SET SCHEMA pay")
        connection.execute("TRUNCATE pay.customers")
        _insert(connection, "pay.customers", 2, 2)
    _refused(bridge.start(), "pay.customers", "public.customers", "shaping.masks")
    allowed = {**CUSTOMERS, "renames_allowed": ["pay.c*"]}
    open_one = new_bridge(conninfo, shaping=allowed).start().streaming()
    open_one.caught_up()
    assert open_one.stop() == 0, open_one.output
    records = committed(bridge.kafka.bootstrap_servers, f"{bridge.prefix}.pay.customers")
    rows = [json.loads(value or b"")["after"] for _, _, value in records]
    assert {"id": 2, "name": "n2", "ssn": "secret-s", "email": "secret-e"} in rows


@pytest.mark.long
def test_a_table_whose_name_another_one_has_taken_is_not_published_unmasked(
    conninfo: str, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, shaping=CUSTOMERS).start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        _insert(connection, "customers", 1, 1)
        bridge.caught_up()
        connection.execute("ALTER TABLE customers RENAME TO clients")
        connection.execute("ALTER INDEX customers_pkey RENAME TO clients_pkey")
        _make(connection)
        _insert(connection, "customers", -7, 2)  # the rules of the name go on to apply
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        _insert(connection, "clients", 3, 3)
    _refused(bridge.start(), "public.clients", "public.customers", "shaping.masks")


@pytest.mark.long
def test_a_table_that_was_left_out_is_not_published_under_another_schema_name(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """Kafka has nothing of it but its name: the catalog had, when the session began."""
    bridge = new_bridge(conninfo, shaping=CUSTOMERS).start().streaming()
    bridge.caught_up()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("ALTER SCHEMA pay RENAME TO wages")
        connection.execute("INSERT INTO wages.salaries VALUES (2, 'secret-n')")
    for _ in range(2):  # who starts it again changes nothing
        _refused(bridge, "wages.salaries", "pay.salaries", "shaping.exclude")
        bridge.start()
    _refused(bridge, "wages.salaries", "pay.salaries", "shaping.exclude")
    _lose(bridge, table_names_topic(bridge.prefix))
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    assert _names_gone(bridge) in bridge.output.splitlines()[-1]
    assert b"secret-" not in everything(bridge)


def _admin(bridge: Bridge) -> AdminClient:
    return AdminClient({"bootstrap.servers": bridge.kafka.bootstrap_servers})


def _lose(bridge: Bridge, *topics: str) -> None:
    admin = _admin(bridge)
    for deleted in admin.delete_topics([*topics]).values():
        deleted.result(patient(60))
    eventually(lambda: not {*topics} & bridge.topics(), what="they are gone", timeout_s=60)


def _make_again(bridge: Bridge, topic: str) -> None:
    new, admin = NewTopic(topic, 1, config={"cleanup.policy": "compact"}), _admin(bridge)
    admin.create_topics([new])[topic].result(patient(60))
    eventually(lambda: topic in bridge.topics(), what="it is there again", timeout_s=60)


def _names_gone(bridge: Bridge) -> str:
    return f"Kafka lost committed records: {table_names_topic(bridge.prefix)} is gone"


@pytest.mark.long
@pytest.mark.parametrize("interrupted", [False, True])
def test_lost_names_are_not_repaired_until_an_operator_accepts_the_loss(
    conninfo: str, new_bridge: NewBridge, *, interrupted: bool
) -> None:
    """A repair publishes all rows of a table, also of one that was hidden under its former name."""
    bridge = new_bridge(conninfo, **REPAIRED).start().streaming()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    if interrupted:  # which is another reason for a repair, and is found first
        assert recover(bridge, "--force", **{VARIABLE: "recover slot made:1"}).returncode == -9
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("ALTER SCHEMA pay RENAME TO wages")
        connection.execute("INSERT INTO wages.salaries VALUES (2, 'secret-n')")
        _lose(bridge, table_names_topic(bridge.prefix))
        assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
        done = recover(bridge)
        assert done.returncode == ExitCode.WITNESSES_DISAGREE, done.stderr
        for said in (bridge.output.splitlines()[-1], done.stderr.splitlines()[-1]):
            assert _names_gone(bridge) in said
            assert "lost-names:" in token_of(said)
            assert "slotbridge recover" not in said
        assert b"secret-" not in everything(bridge)
        drop_slot(connection, bridge.slot)  # with the changes under the other name
        connection.execute("ALTER SCHEMA wages RENAME TO pay")
    bridge.start(accept=bridge.token).streaming()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    bridge.start().streaming()  # it was accepted once: names are noted anew
    assert b"secret-" not in everything(bridge)


@pytest.mark.long
@pytest.mark.parametrize("running", [False, True])
def test_names_that_are_lost_with_the_progress_are_not_repaired_either(
    conninfo: str, new_bridge: NewBridge, *, running: bool
) -> None:
    bridge = new_bridge(conninfo, **REPAIRED).start().streaming()
    bridge.caught_up()
    assert running or bridge.stop() == 0, bridge.output
    topic = table_names_topic(bridge.prefix)
    _lose(bridge, topic, progress_topic(bridge.prefix))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("ALTER SCHEMA pay RENAME TO wages")
        if running:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        else:
            bridge.start()
    assert bridge.exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    said = bridge.output.splitlines()[-1]
    assert f"{topic} is not there, and no progress record tells whether it was" in said
    assert "lost-names:" in token_of(said)
    assert b"secret-" not in everything(bridge)


@pytest.mark.long
@pytest.mark.parametrize("interrupted", [False, True])
def test_nothing_is_repaired_where_no_record_tells_of_the_names_that_are_lost(
    conninfo: str, new_bridge: NewBridge, *, interrupted: bool
) -> None:
    """Who makes missing topics makes that of the names, too; a repair notes no ends at first."""
    bridge = new_bridge(conninfo, **REPAIRED).start().streaming()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    topic, progress = table_names_topic(bridge.prefix), progress_topic(bridge.prefix)
    _lose(bridge, progress)
    if interrupted:
        assert recover(bridge, **{VARIABLE: "recover slot made:1"}).returncode == -9
    _lose(bridge, topic)
    if not interrupted:
        _make_again(bridge, topic)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("ALTER SCHEMA pay RENAME TO wages")
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    seen = "not there" if interrupted else "empty"
    said = bridge.output.splitlines()[-1]
    assert f"{topic} is {seen}, and no progress record tells whether it was" in said
    assert "lost-names:" in token_of(said)
    assert b"secret-" not in everything(bridge)


@pytest.mark.long
def test_a_topic_without_names_has_lost_none(conninfo: str, new_bridge: NewBridge) -> None:
    bridge = new_bridge(conninfo, shaping={"exclude": ["nothing.*"]})
    topic = table_names_topic(bridge.prefix)
    for made_again in (True, False):
        bridge.start().streaming()
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        assert bridge.progress()[-1].kafka.ends[topic][0][1] == 0
        _lose(bridge, topic)
        if made_again:
            _make_again(bridge, topic)
    bridge.start().streaming()


@pytest.mark.long
def test_a_table_without_events_stays_hidden_though_it_is_renamed_between_two_sessions(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """Nothing but the noted name tells of it; the third table is hidden by the stream's name."""
    shaping = {"masks": {"pay.salaries": {"n": {"text": "***"}}}, "exclude": ["public.later"]}
    bridge = new_bridge(conninfo, shaping=shaping).start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE later (id int PRIMARY KEY, n text)")
        connection.execute("INSERT INTO later VALUES (1, 'secret-n')")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        connection.execute("ALTER TABLE pay.salaries RENAME TO staff")
        connection.execute("INSERT INTO pay.staff VALUES (2, 'secret-n')")
        _refused(bridge.start(), "pay.staff", "pay.salaries", "shaping.masks")
        connection.execute("ALTER TABLE later RENAME TO sooner")
        connection.execute("INSERT INTO sooner VALUES (2, 'secret-n')")
    renamed = {**shaping, "masks": {"pay.s*": {"n": {"text": "***"}}}}
    corrected = new_bridge(conninfo, shaping=renamed).start()
    _refused(corrected, "public.sooner", "public.later", "shaping.exclude")
    records = committed(bridge.kafka.bootstrap_servers, table_names_topic(bridge.prefix))
    noted = [(found["schema"], found["table"]) for found in map(json.loads, keys(records))]
    assert noted[:2] == [("pay", "salaries"), ("public", "later")]


@pytest.mark.long
def test_slot_does_not_pass_a_name_before_it_is_noted(
    conninfo: str, new_bridge: NewBridge, wait_for: Callable[[str], None]
) -> None:
    """While commits wait for the bridge, it confirms WAL without events at once."""
    bridge = (
        new_bridge(conninfo, shaping=WITHOUT_PAY, heartbeat_interval_ms=2_000).start().streaming()
    )
    wait_for(f'"slotbridge_{bridge.slot}"')
    eventually(
        lambda: bridge.progress()[-1].position.ahead_lsn > bridge.progress()[-1].position.end_lsn,
        what="the bridge knows that commits wait for it",
    )
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE pay.load (id int PRIMARY KEY, n text)")
        connection.execute("INSERT INTO pay.load VALUES (1, 'secret-n')")
        connection.execute("ALTER TABLE pay.load SET SCHEMA public")
        connection.execute("SET synchronous_commit = local")
        connection.execute("INSERT INTO public.load VALUES (2, 'secret-n')")
    _refused(bridge, "public.load", "pay.load", "shaping.exclude")
    wait_for("")
    _refused(bridge.start(), "public.load", "pay.load", "shaping.exclude")


@pytest.mark.long
def test_a_table_that_is_being_made_is_locked_until_the_catalog_has_it(conninfo: str) -> None:
    with psycopg.connect(conninfo) as maker, psycopg.connect(conninfo, autocommit=True) as reader:
        maker.execute("CREATE TABLE pay.load (id int PRIMARY KEY)")
        row = maker.execute("SELECT 'pay.load'::regclass::oid::bigint").fetchone()
        assert row is not None
        for seen in (False, True):
            with reader.transaction():
                found = table_catalog(reader)
            assert (row[0] in found.locked, row[0] in found.names) == (not seen, seen)
            maker.commit()


@pytest.mark.long
def test_a_table_whose_commit_waits_for_a_standby_is_not_taken_for_a_dropped_one(
    conninfo: str, new_bridge: NewBridge, wait_for: Callable[[str], None]
) -> None:
    """It is decoded before any snapshot of the database has it, and no later one has ended."""
    bridge = new_bridge(conninfo, shaping=WITHOUT_PAY, heartbeat_interval_ms=60_000)
    bridge.start().streaming()

    def noted() -> list[bytes | None]:
        return [value for key, value in bridge.records("table_names") if b"load" in (key or b"")]

    def make() -> None:
        with psycopg.connect(conninfo) as connection:
            connection.execute("CREATE TABLE pay.load (id int PRIMARY KEY, n text)")
            connection.execute("INSERT INTO pay.load VALUES (1, 'secret-n')")

    wait_for("nobody")
    maker = threading.Thread(target=make)
    try:
        maker.start()
        eventually(lambda: bool(noted()), what="the name is noted", timeout_s=60)
        bridge.kill()
        bridge.start().streaming()
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = local")
            connection.execute("INSERT INTO customers VALUES (1)")
        bridge.caught_up()
        assert maker.is_alive() and [value is None for value in noted()] == [False]
    finally:
        wait_for("")
        maker.join(patient(60))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("ALTER TABLE pay.load SET SCHEMA public")
        connection.execute("INSERT INTO public.load VALUES (2, 'secret-n')")
    _refused(bridge, "public.load", "pay.load", "shaping.exclude")
    _refused(bridge.start(), "public.load", "pay.load", "shaping.exclude")
