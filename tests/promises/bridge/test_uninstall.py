"""sql/remove_roles.sql: nothing is left of the services on a pair, and all that is others'."""

import psycopg
from psycopg import sql

from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.providers.databases import Connection
from tests.providers.roles import ODD, make_roles, remove_roles


def roles_and_schemas(connection: Connection) -> set[str]:
    rows = connection.execute(
        "SELECT rolname::text FROM pg_roles UNION ALL SELECT nspname::text FROM pg_namespace"
    ).fetchall()
    return {str(row[0]) for row in rows}


def test_roles_rights_and_schemas_go_and_what_they_own_stays(
    new_pair: NewPair, new_bridge: NewBridge, topic_prefix: str
) -> None:
    trio = new_pair()
    admin, postgres = trio.primary.conninfo(trio.dbname), trio.primary.conninfo("postgres")
    with (
        psycopg.connect(admin, autocommit=True) as connection,
        psycopg.connect(postgres, autocommit=True) as journal,
    ):
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        before = roles_and_schemas(connection), roles_and_schemas(journal)
        slot, publication = f"s_{topic_prefix}", f"p_{topic_prefix}"
        made = make_roles(
            trio.primary,
            trio.dbname,
            publication=publication,
            suffix=ODD,
            snapshot=True,
            sequence=slot,
        )
        owner = sql.Identifier(made.bridge)
        connection.execute(sql.SQL("CREATE SCHEMA mine AUTHORIZATION {}").format(owner))
        connection.execute(sql.SQL("CREATE TABLE mine.kept (id int)"))
        connection.execute(sql.SQL("ALTER TABLE mine.kept OWNER TO {}").format(owner))
        connection.execute("CREATE DATABASE other")
        grant = sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(owner)
        with psycopg.connect(trio.primary.conninfo("other"), autocommit=True) as other:
            other.execute(grant)
        connection.execute(
            sql.SQL("DROP SEQUENCE slotbridge.{}").format(sql.Identifier(f"witness_{slot}"))
        )
        told = remove_roles(trio.primary, trio.dbname, made)
        assert "the roles stay: they have rights in the databases other" in told
        told = remove_roles(trio.primary, "other", made)
        assert "the roles stay" not in told
        after = roles_and_schemas(connection) - {"mine"}, roles_and_schemas(journal)
        assert after == before
        assert connection.execute("SELECT count(*) FROM mine.kept").fetchone() == (0,)
        again = remove_roles(trio.primary, trio.dbname, made)
        assert "the roles stay" not in again
