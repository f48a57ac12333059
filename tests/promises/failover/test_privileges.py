"""`slotfailover check` and `failover` as the roles that sql/ makes, not as superusers."""

from pathlib import Path

import pytest

from services.postgres.identifiers import identifier, literal
from tests.conftest import NewPair
from tests.promises.failover.servers import (
    ask,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    tell,
    write,
)
from tests.providers.interface import Server
from tests.providers.roles import ODD, make_roles, make_subscriber_role

SUBSCRIPTION = "S1" + ODD


def test_failover_as_the_scripts_roles_with_odd_names(new_pair: NewPair, tmp_path: Path) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    renamed = f"ALTER SUBSCRIPTION s1 RENAME TO {identifier(SUBSCRIPTION)}"
    tell(trio.subscriber, renamed, dbname=trio.dbname)
    role = make_roles(trio.primary, trio.dbname, publication="p", suffix=ODD).failover
    assert make_subscriber_role(trio.subscriber, trio.dbname, suffix=ODD) == role
    for server in (trio.primary, trio.subscriber):
        rights = f"SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = {literal(role)}"
        assert ask(server, rights) is False

    def as_role(server: Server, dbname: str = "postgres") -> str:
        return server.conninfo(dbname, user=role)

    config = configuration(
        tmp_path,
        trio,
        nodes={"a": as_role(trio.primary), "b": as_role(trio.standby)},
        subscribers={"sub": as_role(trio.subscriber, trio.dbname)},
    )
    write(trio.primary, trio.dbname, 1)
    await_equal(trio, trio.primary)
    for required, code in (("false", 1), ("true", 0)):
        altered = f"ALTER SUBSCRIPTION {identifier(SUBSCRIPTION)} SET (password_required = "
        tell(trio.subscriber, f"{altered}{required})", dbname=trio.dbname)
        checked = slotfailover("check", "--config", config)
        assert checked.code == code, checked.out + checked.err
        assert ("may not change the subscription" in checked.out) is bool(code)
    trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes", "--json")
    assert ran.code == 0, ran.out + ran.err
    assert ran.json["new_primary"] == "b"
    write(trio.standby, trio.dbname, 101)
    await_equal(trio, trio.standby)
    kept = "SELECT count(*) FROM slotfailover.journal WHERE step = 'end'"
    assert ask(trio.standby, kept) == 1


@pytest.mark.long
def test_a_database_that_publishes_all_its_tables_gets_none_of_ours(new_pair: NewPair) -> None:
    trio = new_pair()
    tell(trio.primary, "CREATE PUBLICATION everything FOR ALL TABLES", dbname=trio.dbname)
    make_roles(trio.primary, trio.dbname, publication="everything", journal=trio.dbname)
    ours = "SELECT count(*) FROM pg_publication_tables WHERE schemaname = 'slotfailover'"
    assert ask(trio.primary, ours, trio.dbname) == 0
