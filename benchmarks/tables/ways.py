"""Two ways from PostgreSQL into Iceberg tables, each as the processes that a user starts.

slottables                    the bridge, Kafka (the environment's), `slottables run`
debezium-server-iceberg       one Java process: upsert mode, settings as its documentation has them
debezium-server-iceberg-batches   the same, with batches of 50,000 events and without soft deletes

Both have a catalog in an SQLite file and a warehouse in a folder.
"""

import abc
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any, Final, NamedTuple

import psycopg
import yaml
from psycopg.conninfo import conninfo_to_dict

from benchmarks.race.environment import Environment
from benchmarks.tables.looks import Meter
from schemas.events import transaction_topic
from services.demo.copies import committed
from services.testbed import jars, procfs
from services.testbed.java import find_java_home, packaged_java_home
from services.testbed.ports import LOOPBACK, free_port

PREFIX: Final = "bench"
SLOT: Final = "bench"
TABLES: Final = (
    *("pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history"),
    *("accounts", "history"),
)
_STOP_S: Final = 120.0
_HEAP: Final = "2g"
"""The default of `tables.driver_memory`."""
_BATCHES: Final = {
    "sink.iceberg.upsert-keep-deletes": "false",
    "source.max.batch.size": "50000",
    "source.max.queue.size": "150000",
    "sink.batch.batch-size-wait": "MaxBatchSizeWait",
    "sink.batch.batch-size-wait.max-wait-ms": "10000",
    "sink.batch.batch-size-wait.wait-interval-ms": "1000",
}


class Commit(NamedTuple):
    """A source transaction: the value of `Way.position` in its rows, and its Unix time."""

    position: int
    at: float


def ends(bootstrap_servers: str, topic_prefix: str) -> list[dict[str, Any]]:
    """The ENDs of all transactions in Kafka."""
    found = committed(bootstrap_servers, transaction_topic(topic_prefix))
    boundaries = [json.loads(value) for _, _, value in found if value is not None]
    return [one for one in boundaries if one["status"] == "END"]


class Program(NamedTuple):
    """A process to start: the name of its log, its command line, environment and folder."""

    name: str
    argv: Sequence[str | Path]
    env: Mapping[str, str]
    folder: Path


class Way(abc.ABC):
    """Processes that may be started again after `stop` or `kill`, and go on where they were."""

    name = ""
    catalog = ""
    """The catalog's name in its own table."""
    position = ""
    """The column of the Iceberg tables that grows from one source transaction to the next."""
    live = ""
    """The condition on rows that are not marked as deleted, with WHERE; "": there are no others."""

    def __init__(self, environment: Environment, dbname: str) -> None:
        self._bed = environment.bed
        self._dbname = dbname
        self.conninfo = environment.server.conninfo(dbname)
        self.warehouse = self._bed.folder / f"warehouse-{self.name}"
        self.warehouse.mkdir()
        self._running: list[tuple[Program, subprocess.Popen[bytes]]] = []
        self.revived = 0
        """Processes that ended by themselves and were started again, as a supervisor does."""

    @property
    def database(self) -> Path:
        """The SQLite file of the catalog."""
        return self.warehouse / "catalog.db"

    @property
    def sessions(self) -> list[int]:
        """The sessions (setsid) of all processes."""
        return [process.pid for _, process in self._running]

    @property
    def beside(self) -> list[int]:
        """Sessions of servers that this way needs besides PostgreSQL."""
        return []

    @abc.abstractmethod
    def iceberg_name(self, table: str) -> str:
        """The name of a source table in the catalog's namespace."""

    @abc.abstractmethod
    def programs(self, events_max: int | None) -> list[Program]:
        """What is to be started; `events_max`: in an epoch, where there are epochs."""

    @abc.abstractmethod
    def commits(self) -> list[Commit]:
        """pgbench's transactions so far."""

    def start(self, *, events_max: int | None = None) -> None:
        """Start all, without waiting for anything."""
        self._running = [(one, self._spawn(one)) for one in self.programs(events_max)]

    def revive(self) -> None:
        """Start again what has ended by itself."""
        for number, (program, process) in enumerate(self._running):
            if process.poll() is not None:
                self._bed.processes.forget(process)
                self.revived += 1
                assert self.revived < 20, f"{program.name} ended with {process.returncode}"
                self._running[number] = program, self._spawn(program)

    def stop(self) -> None:
        """SIGTERM, the reader of a pair of processes first."""
        for _, process in reversed(self._running):
            self._bed.processes.stop(process, grace_s=_STOP_S)
        self._running = []

    def kill(self) -> None:
        """SIGKILL for all at once."""
        for session in self.sessions:
            for pid in procfs.members_of_session(session):
                procfs.signal_process(pid, SIGKILL)
        self.stop()

    def _spawn(self, program: Program) -> subprocess.Popen[bytes]:
        return self._bed.processes.spawn(
            program.name, program.argv, env=program.env, cwd=program.folder
        )


class Slottables(Way):
    """`slotbridge run` and `slottables run`, with default settings."""

    name = "slottables"
    catalog = "slotbridge"
    position = "_commit_lsn"

    @property
    def beside(self) -> list[int]:
        """Kafka's broker."""
        return [self._bed.kafka.pid]

    def iceberg_name(self, table: str) -> str:
        """Tables of the schema public keep their names."""
        return table

    def programs(self, events_max: int | None) -> list[Program]:
        """Both read one file."""
        tables: dict[str, Any] = {
            "warehouse": str(self.warehouse),
            "spark_options": {"spark.jars": jars.class_path("spark", ",")},
        }
        if events_max is not None:
            tables["offsets_per_trigger_max"] = events_max
        document = {
            "source": {
                "conninfo": self.conninfo,
                "slot": SLOT,
                "publication": SLOT,
                "tables": [f"public.{table}" for table in TABLES],
            },
            "kafka": {
                "bootstrap_servers": self._bed.kafka.bootstrap_servers,
                "topic_prefix": PREFIX,
                "partitions": 2,
            },
            "snapshot": {"mode": "initial"},
            "bridge": {"spool_folder": str(self._bed.folder)},
            "tables": tables,
        }
        config = self._bed.folder / "way.yaml"
        config.write_text(yaml.safe_dump(document), encoding="utf-8")
        folder, env = Path(sys.executable).parent, {"JAVA_HOME": str(find_java_home())}
        return [
            Program(name, [folder / name, "run", "--config", config], env, self._bed.folder)
            for name in ("slotbridge", "slottables")
        ]

    def commits(self) -> list[Commit]:
        """The ENDs of the transaction topic."""
        return [
            Commit(end["commit_lsn"], end["ts_ms"] / 1000)
            for end in ends(self._bed.kafka.bootstrap_servers, PREFIX)
            if len(end["data_collections"]) == 4
        ]


class ServerIceberg(Way):
    """debezium-server-iceberg on the test bed's Java 21: its Hadoop does not run on 24 and later.

    `properties` are added, without the `debezium.` before them.
    """

    name = "debezium-server-iceberg"
    catalog = "server"
    position = "__source_ts_ns"

    def __init__(
        self,
        environment: Environment,
        dbname: str,
        distribution: Path,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(environment, dbname)
        self._distribution = distribution
        self._properties = properties or {}
        self._folder = self._bed.folder / self.name
        (self._folder / "config").mkdir(parents=True)
        if self._properties.get("sink.iceberg.upsert-keep-deletes") != "false":
            self.live = " WHERE __deleted = 'false'"
        with psycopg.connect(self.conninfo) as connection:
            tables = ", ".join(TABLES)
            connection.execute(f"CREATE PUBLICATION {SLOT} FOR TABLE {tables}")

    def iceberg_name(self, table: str) -> str:
        """Topic prefix, schema and table."""
        return f"{PREFIX}_public_{table}"

    def programs(self, events_max: int | None) -> list[Program]:
        """One Java process, with the heap that Spark's has."""
        lines = [f"debezium.{name}={value}" for name, value in self._settings().items()]
        lines += ["quarkus.log.level=INFO", "quarkus.log.console.json=false"]
        lines += [f"quarkus.{which}.port={free_port()}" for which in ("http", "management")]
        config = self._folder / "config" / "application.properties"
        config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        (runner,) = self._distribution.glob("debezium-server-*runner.jar")
        (sqlite,) = (path for path in jars.resolve("spark") if "sqlite-jdbc" in path.name)
        home = packaged_java_home()
        path = f"{runner}:{self._distribution / 'lib'}/*:{sqlite}"
        argv = (home / "bin" / "java", f"-Xmx{_HEAP}", "-cp", path, "io.debezium.server.Main")
        return [Program(self.name, argv, {"JAVA_HOME": str(home)}, self._folder)]

    def commits(self) -> list[Commit]:
        """The rows of pgbench_history, as PostgreSQL has them: with xmin's commit times."""
        query = (
            "SELECT (extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1000000)::bigint"
            " FROM pgbench_history"
        )
        with psycopg.connect(self.conninfo) as connection:
            times = [us for (us,) in connection.execute(query)]
        return [Commit(us * 1000, us / 1_000_000) for us in times]

    def _settings(self) -> dict[str, Any]:
        source = conninfo_to_dict(self.conninfo)
        return {
            "sink.type": "iceberg",
            "sink.iceberg.upsert": "true",
            "sink.iceberg.catalog-name": self.catalog,
            "sink.iceberg.catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
            "sink.iceberg.uri": f"jdbc:sqlite:{self.database}?journal_mode=WAL&busy_timeout=20000",
            "sink.iceberg.jdbc.schema-version": "V1",
            "sink.iceberg.warehouse": self.warehouse,
            "sink.iceberg.table-namespace": PREFIX,
            "format.value": "connect",
            "format.key": "connect",
            "source.connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "source.offset.storage": "io.debezium.server.iceberg.offset.IcebergOffsetBackingStore",
            "source.offset.flush.interval.ms": "0",
            "source.database.hostname": source["host"] or LOOPBACK,
            "source.database.port": source["port"] or 5432,
            "source.database.user": source["user"] or "",
            "source.database.password": "none",
            "source.database.dbname": self._dbname,
            "source.topic.prefix": PREFIX,
            "source.plugin.name": "pgoutput",
            "source.slot.name": SLOT,
            "source.publication.name": SLOT,
            "source.publication.autocreate.mode": "disabled",
            "source.table.include.list": ",".join(f"public.{table}" for table in TABLES),
            "transforms": "unwrap",
            "transforms.unwrap.type": "io.debezium.transforms.ExtractNewRecordState",
            "transforms.unwrap.add.fields": "op,table,source.ts_ns,db,ts_ms",
            "transforms.unwrap.delete.tombstone.handling.mode": "rewrite",
            "transforms.unwrap.drop.tombstones": "true",
            **self._properties,
        }


class ServerIcebergBatches(ServerIceberg):
    """debezium-server-iceberg with the batches that its documentation advises against small files.

    Deletes remove rows, as in `slottables`.
    """

    name = "debezium-server-iceberg-batches"

    def __init__(self, environment: Environment, dbname: str, distribution: Path) -> None:
        super().__init__(environment, dbname, distribution, _BATCHES)


class Meters:
    """The contender's processes, and the servers beside it that the other does not need."""

    def __init__(self, way: Way) -> None:
        self._own = Meter(lambda: way.sessions)
        self._beside = Meter(lambda: way.beside)

    def __enter__(self) -> "Meters":
        self._own.__enter__()
        self._beside.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._own.__exit__()
        self._beside.__exit__()

    def figures(self) -> dict[str, Any]:
        """Seconds of processor, MiB."""
        found = {"cpu_s": round(self._own.cpu_s, 1), "peak_mib": round(self._own.peak_mib)}
        if self._beside.peak_mib:
            found["kafka_cpu_s"] = round(self._beside.cpu_s, 1)
            found["kafka_mib"] = round(self._beside.peak_mib)
        return found
