"""`slotbridge init --from`: what it proposes for a real pair, and that the pair is as before."""

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import yaml

from schemas.settings import Settings, load_settings
from tests.providers.databases import Connection
from tests.providers.interface import Provider

PROGRAM = Path(sys.executable).parent / "slotbridge"
TABLES = """
    CREATE TABLE orders (id int, part int, note text, PRIMARY KEY (part, id));
    INSERT INTO orders SELECT g, 0, 'x' FROM generate_series(1, 1000) g;
    CREATE TABLE plain (id int);
    CREATE UNLOGGED TABLE cache (id int PRIMARY KEY);
    CREATE TABLE "odd.name" (id int PRIMARY KEY);
    CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id);
    CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (9);
    CREATE TYPE mood AS ENUM ('glad'); CREATE TYPE pair AS (a int, b int);
    CREATE TYPE odd;
    CREATE FUNCTION odd_in(cstring) RETURNS odd LANGUAGE internal IMMUTABLE STRICT AS 'textin';
    CREATE FUNCTION odd_out(odd) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
    CREATE TYPE odd (INPUT = odd_in, OUTPUT = odd_out);
    CREATE TABLE typed (id int PRIMARY KEY, m mood, p pair, k public.mood[], v odd);
    ANALYZE
"""


class Asked:
    """The answer of `slotbridge init --from` for both servers of a pair."""

    def __init__(self, servers: Provider, database: str, file: Path, *more: str) -> None:
        pair = servers.primary.port, servers.standby.port
        given = f"host=127.0.0.1,127.0.0.1 port={pair[1]},{pair[0]} dbname={database}"
        command: list[str | Path] = [
            PROGRAM,
            "init",
            file,
            "--from",
            f"{given} user=postgres password=none",
            *more,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        assert "Traceback" not in done.stderr, done.stderr
        self.code, self.told, self.file = done.returncode, done.stderr, file
        self.text = file.read_text(encoding="utf-8") if file.exists() else ""

    @property
    def settings(self) -> Settings:
        return load_settings(self.file)


def state(connection: Connection) -> object:
    return connection.execute(
        "SELECT (SELECT count(*) FROM pg_replication_slots), (SELECT count(*) FROM pg_publication),"
        " (SELECT count(*) FROM pg_roles), (SELECT count(*) FROM pg_class)"
    ).fetchone()


def test_a_file_that_is_true_of_the_pair(
    pair: Provider, fresh_database: str, tmp_path: Path
) -> None:
    with psycopg.connect(pair.primary.conninfo(fresh_database), autocommit=True) as connection:
        connection.execute(TABLES)
        before = state(connection)
        asked = Asked(pair, fresh_database, tmp_path / "c.yaml", "--yes", "--kafka", "k:9092")
        assert state(connection) == before
    assert asked.code == 0, asked.told
    settings = asked.settings
    assert settings.source is not None and settings.kafka is not None
    assert settings.source.tables == ("public.orders", "public.parts", "public.typed")
    assert (settings.kafka.bootstrap_servers, settings.kafka.topic_prefix) == (
        "k:9092",
        fresh_database,
    )
    assert "kB; about 1,000 rows; key part, id" in asked.text
    assert "as PostgreSQL's text: v (public.odd)" in asked.text
    assert "# - public.plain  # not chosen:" in asked.text
    assert "UPDATE and DELETE fail" in asked.text
    assert "unlogged: its rows are not in the WAL" in asked.text
    assert "its name has a dot" in asked.text
    assert "password" not in settings.source.conninfo.get_secret_value()
    assert "none" not in settings.source.conninfo.get_secret_value()
    ports = f"{pair.primary.port},{pair.standby.port}"
    assert f"port={ports}" in settings.source.conninfo.get_secret_value()  # the primary first
    assert settings.failover is not None
    nodes = {name: one.get_secret_value() for name, one in settings.failover.nodes.items()}
    assert len(nodes) == 2
    assert sum(f"port={pair.standby.port}" in one for one in nodes.values()) == 1
    assert all("user=slotfailover" in one for one in nodes.values())


def test_a_table_without_an_identity_is_published_only_by_name(
    pair: Provider, fresh_database: str, tmp_path: Path
) -> None:
    with psycopg.connect(pair.primary.conninfo(fresh_database), autocommit=True) as connection:
        connection.execute(TABLES)
    chosen = ("--tables", "public.plain, public.or*", "--kafka", "k:9092", "--prefix", "shop")
    asked = Asked(pair, fresh_database, tmp_path / "c.yaml", *chosen)
    assert asked.code == 0, asked.told
    document = yaml.safe_load(asked.text)
    assert set(document["source"]["tables"]) == {"public.plain", "public.orders"}
    assert document["source"]["replica_identity"] == {"public.plain": "full"}
    assert document["kafka"]["topic_prefix"] == "shop"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--tables", "public.cache", "--yes"), "but unlogged"),
        (("--tables", "public.lost", "--yes"), "name some in --tables: public.cache"),
        ((), "Tables to publish"),
    ],
)
def test_it_does_not_choose_tables_by_silence(
    pair: Provider, fresh_database: str, tmp_path: Path, more: tuple[str, ...], told: str
) -> None:
    with psycopg.connect(pair.primary.conninfo(fresh_database), autocommit=True) as connection:
        connection.execute("CREATE UNLOGGED TABLE cache (id int PRIMARY KEY)")
    asked = Asked(pair, fresh_database, tmp_path / "c.yaml", *more)
    assert asked.code != 0
    assert told in asked.told
    assert not asked.file.exists()
