"""What `slottables verify` reads of the source, as the role that sql/roles.sql makes."""

from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from schemas.errors import ExitCode, SetupError
from schemas.settings import SourceSettings
from spark_consumers.verify import postgres
from spark_consumers.verify.source_identity import read_identity
from tests.providers.interface import Provider
from tests.providers.roles import ODD, make_roles


def test_the_source_is_read_as_the_scripts_role(
    pair: Provider, fresh_database: str, topic_prefix: str, tmp_path: Path
) -> None:
    table = sql.Identifier(ODD, "T" + ODD)
    admin = pair.primary.conninfo(fresh_database)
    publication, suffix = f"p_{topic_prefix}", ODD + topic_prefix
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(ODD)))
        connection.execute(sql.SQL("CREATE TABLE {} (id int PRIMARY KEY)").format(table))
        connection.execute(sql.SQL("INSERT INTO {} VALUES (7)").format(table))
        roles = make_roles(pair.primary, fresh_database, publication=publication, suffix=suffix)
        connection.execute("CREATE TABLE later (id int PRIMARY KEY)")
        connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [topic_prefix]
        )
    settings = SourceSettings.model_validate(
        {
            "conninfo": pair.primary.conninfo(fresh_database, user=roles.tables),
            "publication": publication,
            "slot": topic_prefix,
        }
    )
    with postgres.snapshot(settings) as source:
        identity = read_identity(source, settings)
        assert identity.slot_database == identity.database == fresh_database
        assert identity.timeline and identity.publication_oid and not identity.standby
        found = postgres.published(source, publication)
        assert set(found) == {f"{ODD}.T{ODD}", "public.later"}
        columns = postgres.source_columns(source, ODD, "T" + ODD)
        postgres.export(source, (ODD, "T" + ODD), columns, None, tmp_path)
    assert (tmp_path / "000000.json").read_text() == '{"c0":"7"}\n'
    with pytest.raises(SetupError) as refused, postgres.snapshot(settings) as source:
        columns = postgres.source_columns(source, "public", "later")
        postgres.export(source, ("public", "later"), columns, None, tmp_path)
    assert refused.value.exit_code == ExitCode.PRIVILEGE_MISSING
