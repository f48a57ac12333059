"""Debezium connectors under load in one Kafka Connect; killed, adopted, and compared."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import yaml
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from services.testbed.java import SHORT_LIVED
from services.testbed.processes import Processes
from tests.promises.adoption import pgbench_load
from tests.promises.adoption.load import SETUP, Compared, Decode, Load, compare, plain_json
from tests.promises.adoption.pgbench_load import PgbenchLoad
from tests.promises.bridge.running import Bridge
from tests.providers.databases import REMOVED, connect, create, once_free, origins
from tests.providers.debezium import Connector, Debezium, DistributedDebezium
from tests.providers.interface import Broker, Server
from tests.providers.waiting import eventually, patient

PROGRAM = str(Path(sys.executable).parent / "slotbridge")
PARTITIONS = 3
LIMIT_S = patient(300)
UNWRAP = {
    "transforms": "unwrap",
    "transforms.unwrap.type": "io.debezium.transforms.ExtractNewRecordState",
    "transforms.unwrap.delete.tombstone.handling.mode": "rewrite-with-tombstone",
    "transforms.unwrap.add.fields": "op,txId,lsn,source.ts_ms,table",
}


@dataclass
class Taken:
    """One connector, its database and its load."""

    server: Server
    broker: Broker
    folder: Path
    connector: Connector
    decode: Decode = plain_json
    """How a consumer reads its topics."""
    load: Load | PgbenchLoad | None = None
    pgbench: bool = False
    """Whether its load is pgbench."""
    worker: Path = Path()
    """The folder of its Kafka Connect."""
    bridge: Bridge | None = None
    limit_s: float = LIMIT_S
    """How long one run of `adopt` may take."""

    @property
    def prefix(self) -> str:
        """Of its topics."""
        return self.connector.topic_prefix

    @property
    def conninfo(self) -> str:
        """Of its database."""
        return self.connector.conninfo

    @property
    def config(self) -> Path:
        """The bridge's settings, translated from the connector's."""
        return self.folder / f"{self.prefix}.yaml"

    def new_load(self, seed: int) -> Load | PgbenchLoad:
        """Make the load, which does not work yet."""
        if self.pgbench:
            self.load = PgbenchLoad(self.conninfo, seed, self.folder)
        else:
            self.load = Load(self.conninfo, seed)
        return self.load

    def connector_file(self) -> Path:
        """What Connect's REST interface would answer."""
        file = self.folder / f"{self.prefix}.json"
        config = {key: str(value) for key, value in self.connector.properties().items()}
        file.write_text(json.dumps({"name": self.connector.name, "config": config}))
        return file

    def arguments(self) -> list[str]:
        """The options that name the connector and its worker."""
        worker = str(self.worker / "worker.properties")
        return ["--from-debezium", str(self.connector_file()), "--worker", worker]

    def translate(self) -> None:
        """Make the settings, as an operator does; heartbeats as in all tests."""
        done = run("adopt", *self.arguments(), "--write", str(self.config))
        assert done.returncode == 0, done.stderr
        document = yaml.safe_load(self.config.read_text())
        document["bridge"] |= {"heartbeat_interval_ms": 200, "commit_interval_ms": 20}
        document["bridge"]["spool_folder"] = str(self.folder)
        self.config.write_text(yaml.safe_dump(document))

    def adopt(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `slotbridge adopt` to its end; yes to all."""
        given = ["--config", str(self.config), "--yes", "--json", *options]
        return run_within(self.limit_s, "adopt", *self.arguments(), *given, **environment)

    def release(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `slotbridge release` to its end."""
        named = ["--to-debezium", *self.arguments()[1:]]
        given = ["--config", str(self.config), "--yes", *options]
        return run("release", *named, *given, **environment)

    def new_bridge(self) -> Bridge:
        """A bridge with the translated settings, running."""
        source = self.connector
        bridge = Bridge(
            *(self.folder, self.conninfo, self.broker, self.prefix),
            slot=source.slot,
            publication=source.publication,
            loaded=False,
        )
        bridge.config.write_text(self.config.read_text())
        self.bridge = bridge.start()
        return bridge

    def compared(self) -> Compared:
        """Stop the load, wait until the bridge has all of it, and compare."""
        assert self.load is not None and self.bridge is not None
        self.load.stop()
        self.bridge.caught_up()
        assert self.bridge.stop() == 0, self.bridge.output
        return compare(self.conninfo, self.broker.bootstrap_servers, self.prefix, self.decode)

    def end(self) -> None:
        """End what runs; the database and its slot go."""
        if self.load is not None:
            self.load.stop()
        if self.bridge is not None:
            self.bridge.end()
        name = str(conninfo_to_dict(self.conninfo)["dbname"])
        with connect(self.server) as connection:
            eventually(partial(_dropped, connection, name), what="the slot is dropped")
            for origin in {f"slotbridge_{self.connector.slot}"} & origins(self.server):
                once_free(connection, "SELECT pg_replication_origin_drop(%s)", origin)
            comment = sql.SQL("COMMENT ON DATABASE {} IS {}")
            connection.execute(comment.format(sql.Identifier(name), REMOVED))


def _dropped(connection: psycopg.Connection[Any], dbname: str) -> bool:
    """Drop the database's slots; False where one is still in use."""
    of_it = "FROM pg_replication_slots WHERE database = %s"
    connection.execute(f"SELECT pg_terminate_backend(active_pid) {of_it}".encode(), [dbname])
    try:
        connection.execute(f"SELECT pg_drop_replication_slot(slot_name) {of_it}".encode(), [dbname])
    except psycopg.errors.ObjectInUse:
        return False
    return True


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program `slotbridge`."""
    return run_within(LIMIT_S, *arguments, **environment)


def run_within(
    limit_s: float, /, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the program `slotbridge`, for `limit_s` seconds at most."""
    return subprocess.run(
        [PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=limit_s,
    )


@contextlib.contextmanager
def connectors(
    server: Server,
    broker: Broker,
    folder: Path,
    processes: Processes,
    rng: random.Random,
    count: int,
    *,
    exactly_once: bool = False,
    flat: int = 0,
    pgbench: bool = False,
    converters: Mapping[str, str] | None = None,
) -> Iterator[tuple[Debezium, list[Taken]]]:
    """`count` connectors in one worker that is not started yet, each with a database.

    `exactly_once`: a distributed worker, whose producers are transactional. `flat`: how many, the
    last ones, have the transformation that makes flat rows. `pgbench`: is their load.
    `converters`: properties of the connectors' own converters, else JSON without schemas.
    """
    made: list[Taken] = []
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    for number in range(count):
        name = f"a{os.urandom(4).hex()}"
        create(server, name)
        conninfo = server.conninfo(name)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(SETUP.encode())
        if pgbench:
            pgbench_load.make_tables(server, name)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [f"s_{name}"]
            )
        given = {
            "topic.creation.default.partitions": PARTITIONS,
            "max.batch.size": rng.choice((50, 500, 2048)),
            "poll.interval.ms": rng.choice((10, 100, 500)),
            **({"exactly.once.support": "required"} if exactly_once else {}),
            **(converters or {}),
            **(UNWRAP if number >= count - flat else {}),
        }
        one = Connector(f"c{number}-{name}", conninfo, f"s_{name}", "pub", name, given)
        made.append(Taken(server, broker, folder, one, pgbench=pgbench))
    kind = DistributedDebezium if exactly_once else Debezium
    debezium = kind(
        folder / f"connect-{os.urandom(4).hex()}",
        [one.connector for one in made],
        bootstrap_servers=broker.bootstrap_servers,
        processes=processes,
        name=f"connect-{folder.name}",
        jvm_options=SHORT_LIVED,
        jars=("debezium", "connect-avro"),
        settings={"offset.flush.interval.ms": rng.choice((300, 2000, 10_000))},
    )
    for taken in made:
        taken.worker = debezium.folder
    try:
        yield debezium, made
    finally:
        debezium.kill()
        for taken in made:
            taken.end()


def kill_at_random(debezium: Debezium, taken: list[Taken], rng: random.Random, seed: int) -> int:
    """Start it under load and kill it, once or several times; return how often."""
    loads = [one.new_load(seed * 100 + number) for number, one in enumerate(taken)]
    kills = rng.choice((1, 1, 2, 3))
    for number in range(kills):
        debezium.start(timeout_s=patient(100))
        for load in loads:
            load.go()
        if number == 0:
            for one in taken:
                eventually(partial(_has_events, one), what="Debezium's events", timeout_s=60)
        time.sleep(rng.uniform(0.1, 8.0))
        debezium.kill()
        time.sleep(rng.choice((0.0, 0.5)))
        for load in loads:
            load.pause()
    for one in taken:
        eventually(partial(_free, one), what="the slot is free", timeout_s=60)
    return kills


def _has_events(one: Taken) -> bool:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": one.broker.bootstrap_servers})
    return f"{one.prefix}.public.counters" in admin.list_topics(timeout=patient(60)).topics


def _free(one: Taken) -> bool:
    with psycopg.connect(one.conninfo, autocommit=True) as connection:
        row = connection.execute(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [one.connector.slot]
        ).fetchone()
    assert row is not None
    return not row[0]
