"""The images on a real engine, as a careful operator runs them: rows move, and nothing is lost."""

import ast
import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import psycopg
import pytest
import yaml

from schemas.version import version
from services.demo.copies import database_rows, kafka_tables
from tests.image.conftest import NewContainer
from tests.image.engine import ROOT, Contained
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

Image = Callable[[str], str]
LOOK = """command -v gcc cc pip; id -u
exec python3 -c 'import json
with open("/opt/slotbridge/sbom.cdx.json") as bill:
    print(json.dumps([component["name"] for component in json.load(bill)["components"]]))'
"""


class Flow:
    """A database, a prefix, the configuration for them, and a table that a thread writes to."""

    def __init__(self, bed: Provider, dbname: str, prefix: str, folder: Path) -> None:
        self.conninfo = bed.primary.conninfo(dbname)
        self.brokers = bed.kafka.bootstrap_servers
        self.prefix = prefix
        self.config = folder / "slotbridge.yaml"
        self.document: dict[str, Any] = {
            "source": {
                "conninfo": self.conninfo,
                "slot": f"s_{prefix}",
                "publication": f"p_{prefix}",
            },
            "kafka": {"bootstrap_servers": self.brokers, "topic_prefix": prefix},
            "snapshot": {"mode": "never"},
            "bridge": {"spool_folder": "/var/lib/slotbridge", "heartbeat_interval_ms": 200},
            "failover": {
                "nodes": {
                    "a": bed.primary.conninfo(dbname),
                    "b": bed.standby.conninfo(dbname),
                },
                "journal_database": dbname,
            },
            "tables": {"warehouse": "/var/lib/slotbridge/warehouse", "driver_memory": "1g"},
        }
        self.write()
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            connection.execute("CREATE TABLE t (id bigserial PRIMARY KEY, body text)")

    def write(self) -> None:
        """Write the configuration."""
        self.config.write_text(yaml.safe_dump(self.document), encoding="utf-8")
        self.config.chmod(0o644)

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Insert and update, a transaction at a time, while the block runs."""
        done = threading.Event()

        def work() -> None:
            with psycopg.connect(self.conninfo, autocommit=True) as connection:
                while not done.is_set():
                    connection.execute("INSERT INTO t (body) VALUES (repeat('x', 100))")
                    connection.execute("UPDATE t SET body = 'y' WHERE id = (SELECT max(id) FROM t)")

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def rows(self) -> int:
        """How many rows the table has."""
        return sum(database_rows(self.conninfo, ("t",))["t"].values())

    def await_rows(self, wanted: int) -> None:
        """Wait until the load has made more rows than `wanted`."""
        eventually(lambda: self.rows() > wanted, what=f"{wanted} rows", timeout_s=120)

    def await_streaming(self, bridge: Contained) -> None:
        """Wait until the slot is active, and fail with the bridge's log when it ends."""
        active = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
        with psycopg.connect(self.conninfo, autocommit=True) as connection:

            def streams() -> bool:
                assert bridge.running, bridge.output
                row = connection.execute(active, [f"s_{self.prefix}"]).fetchone()
                return row is not None and bool(row[0]) and "streaming" in bridge.output

            eventually(streams, what="the bridge in the container streams", timeout_s=60)

    def await_confirmed(self, bridge: Contained) -> None:
        """Wait until the slot is confirmed up to where the WAL is now."""
        passed = (
            "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots"
            " WHERE slot_name = %s"
        )
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None

            def confirmed() -> bool:
                assert bridge.running, bridge.output
                found = connection.execute(passed, [row[0], f"s_{self.prefix}"]).fetchone()
                return found is not None and bool(found[0])

            eventually(confirmed, what="the slot is confirmed", timeout_s=60)

    def assert_equal(self) -> None:
        """The table rebuilt from Kafka is the database's, and no event came twice."""
        truth = database_rows(self.conninfo, ("t",))["t"]
        rebuilt = kafka_tables(self.brokers, self.prefix, ("t",))["t"]
        assert truth == rebuilt.rows
        assert rebuilt.repeated == 0


@pytest.fixture
def flow(bed: Provider, fresh_database: str, topic_prefix: str, tmp_path: Path) -> Flow:
    return Flow(bed, fresh_database, topic_prefix, tmp_path)


LICENSES = {
    "bridge": ["Apache-2.0"],
    "failover": ["Apache-2.0", "PostgreSQL"],
    "tables": ["Apache-2.0", "GPL-2.0-only WITH Classpath-exception-2.0"],
}


@pytest.mark.parametrize("target", ["bridge", "failover", "tables"])
def test_an_image_is_small_in_rights_and_says_what_it_is(
    client: docker.DockerClient, image: Image, target: str
) -> None:
    found = client.images.get(image(target))
    labels = found.attrs["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == version()
    assert labels["org.opencontainers.image.licenses"].split(" AND ") == LICENSES[target]
    assert found.attrs["Config"]["User"] == "10001:10001"
    container = client.containers.create(
        found, entrypoint=["sh", "-c", LOOK], read_only=True, network_mode="none"
    )
    try:
        container.start()
        container.wait()
        told = container.logs(stderr=False).decode()
    finally:
        container.remove(force=True)
    user, _, bill = told.partition("\n")
    assert user == "10001", "a compiler or pip is in the image"
    names = set(json.loads(bill))
    assert {"slotbridge", "psycopg", "confluent-kafka"} <= names
    assert ("pyspark" in names) == (target == "tables")


@pytest.mark.parametrize(
    ("target", "rooms"),
    [
        ("bridge", ("services/bridge", "slotbridge")),
        ("failover", ("services/failover",)),
        ("tables", ("spark_consumers",)),
    ],
)
def test_an_image_has_every_package_that_its_code_imports(
    client: docker.DockerClient, image: Image, target: str, rooms: tuple[str, ...]
) -> None:
    """Also what is imported where a setting asks for it, such as Avro's and the registry's."""
    shared = ("schemas", "services/kafka", "services/postgres", "services/runtime")
    names = imported(*(shared if target != "tables" else ("schemas",)), *rooms)
    assert "psycopg" in names or target == "tables"
    told = client.containers.run(
        image(target),
        entrypoint=["python3", "-c", IMPORT],
        command=names,
        read_only=True,
        network_mode="none",
        remove=True,
    )
    assert json.loads(told) == []


IMPORT = """import importlib, json, sys
def lacks(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return error.name
print(json.dumps(sorted(filter(None, map(lacks, sys.argv[1:])))))
"""


def imported(*rooms: str) -> list[str]:
    """Modules that are not ours and not Python's, of every import statement in the rooms."""
    found: set[str] = set()
    for room in rooms:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module)
    ours = {"schemas", "services", "slotbridge", "spark_consumers", *sys.stdlib_module_names}
    return sorted(name for name in found if name.partition(".")[0] not in ours)


def test_rows_move_and_docker_stop_ends_the_bridge_cleanly(
    flow: Flow, image: Image, new_container: NewContainer, spool: Path
) -> None:
    bridge = new_container(image("bridge"), config=flow.config, spool=spool).start()
    flow.await_streaming(bridge)
    with flow.load():
        flow.await_rows(200)
    flow.await_confirmed(bridge)
    assert bridge.stop() == 0, bridge.output
    flow.assert_equal()


def test_docker_kill_under_load_loses_and_repeats_nothing(
    flow: Flow, image: Image, new_container: NewContainer, spool: Path
) -> None:
    bridge = new_container(image("bridge"), config=flow.config, spool=spool).start()
    flow.await_streaming(bridge)
    with flow.load():
        for wanted in (100, 200, 300):
            flow.await_rows(wanted)
            bridge.kill()
            bridge.start()
        flow.await_streaming(bridge)
    flow.await_confirmed(bridge)
    assert bridge.stop() == 0, bridge.output
    flow.assert_equal()


def test_the_failover_manager_judges_the_pair_and_has_its_programs(
    flow: Flow, image: Image, new_container: NewContainer, spool: Path
) -> None:
    command = ["check", "--config", "/etc/slotbridge/slotbridge.yaml", "--json"]
    check = new_container(
        image("failover"), config=flow.config, spool=spool, command=command
    ).start()
    assert check.finished() in (0, 1), check.output
    assert '"checks"' in check.output or '"findings"' in check.output, check.output
    watch = new_container(image("failover"), config=flow.config, spool=spool).start()
    eventually(lambda: "watching" in watch.output, what="watch watches", timeout_s=60)
    for program in ("pg_basebackup", "pg_rewind", "pg_ctl", "psql", "postgres"):
        code, told = watch.run(program, "--version")
        assert (code, "18." in told) == (0, True), told
    assert watch.run("ssh", "-V")[0] == 0
    assert watch.stop() == 0, watch.output


def test_iceberg_tables_follow_and_equal_their_source(
    flow: Flow, image: Image, new_container: NewContainer, spool: Path
) -> None:
    bridge = new_container(image("bridge"), config=flow.config, spool=spool).start()
    flow.await_streaming(bridge)
    with flow.load():
        flow.await_rows(100)
    flow.await_confirmed(bridge)
    config = "/etc/slotbridge/slotbridge.yaml"
    for command in (["run", "--until-idle", "5"], ["verify"]):
        tables = new_container(
            image("tables"), config=flow.config, spool=spool, command=[*command, "--config", config]
        ).start()
        assert tables.finished() == 0, tables.output
    assert "equal" in tables.output, tables.output
