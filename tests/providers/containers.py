"""Servers in containers (CONTAINERS=1): the same settings and topology as the embedded ones."""

import contextlib
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import psycopg
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import make_conninfo

from schemas.errors import ExitCode, Retryable, SetupError
from services.testbed.kafka import node_settings
from services.testbed.pair import STANDBY_SLOT, create_database, prepare_primary, standby_settings
from services.testbed.ports import LOOPBACK, free_port
from services.testbed.postgres import SETTINGS, SUPERUSER
from tests.providers.engine import KAFKA_IMAGE, POSTGRES_IMAGE, Container
from tests.providers.interface import Broker, Provider, Server, Trio
from tests.providers.waiting import eventually

_PROGRAMS = "/usr/lib/postgresql/18/bin"
_OWN_SETTINGS = ("unix_socket_directories", "log_line_prefix")  # the image needs its own sockets
_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_CLUSTER_ID = "5L6g3nShT-eMCtK--X86sw"
_STANDBY = """
set -e
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  mkdir -p -m 700 "$PGDATA"
  pg_basebackup -d "$SOURCE" -D "$PGDATA" --checkpoint=fast --no-sync
  printf '%s\\n' "$STANDBY_SETTINGS" >> "$PGDATA/postgresql.auto.conf"
  touch "$PGDATA/standby.signal"
fi
exec postgres -c cluster_name="$CLUSTER_NAME"
"""


class ContainerServer:
    """A PostgreSQL 18 server in a container on the host's network."""

    def __init__(self, name: str, settings: Mapping[str, str | int] | None = None) -> None:
        self.name = name
        self.port = free_port()
        self._container = self._primary({**SETTINGS, **(settings or {})})

    def conninfo(self, dbname: str = "postgres", **extra: Any) -> str:
        """See Server."""
        here: dict[str, Any] = {"host": LOOPBACK, "port": self.port, "user": SUPERUSER}
        return make_conninfo(**{**here, "dbname": dbname, **extra})

    @property
    def running(self) -> bool:
        """See Server."""
        return self._container.running

    def become_standby_of(self, source: Server, *, slot: str, dbname: str) -> None:
        """Before the first start: be made from `source` by pg_basebackup."""
        self._container = Container(
            POSTGRES_IMAGE,
            environment={
                **self._environment(),
                "SOURCE": source.conninfo(),
                "STANDBY_SETTINGS": standby_settings(source, slot=slot, dbname=dbname),
                "CLUSTER_NAME": self.name,
            },
            entrypoint=["bash", "-c", _STANDBY],
            user=SUPERUSER,
        )

    def start(self, *, timeout_s: float = 60.0) -> None:
        """See Server."""
        self._container.start()
        eventually(
            lambda: self._accepts_connections() or not self.running,
            what=f"PostgreSQL {self.name} accepts connections",
            timeout_s=timeout_s,
        )
        if not self.running:
            raise SetupError(
                self._container.tail(3), operation=f"start PostgreSQL {self.name} in a container"
            )

    def stop(self, mode: Literal["fast", "immediate"] = "fast", *, timeout_s: float = 60.0) -> None:
        """See Server."""
        if not self._container.end(_SIGNALS[mode], timeout_s=timeout_s):
            raise Retryable(
                f"still stopping after {timeout_s:.0f} s",
                operation=f"stop PostgreSQL {self.name}",
                exit_code=ExitCode.DEADLINE,
            )

    def kill(self) -> None:
        """See Server."""
        assert self._container.end(signal.SIGKILL)

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """See Server."""
        self.stop(mode)
        self.start()

    def run_tool(
        self,
        program: str,
        arguments: Sequence[str | Path],
        *,
        timeout_s: float = 300.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """See Server."""
        path = f"{_PROGRAMS}/{program}"
        command = ["timeout", f"{timeout_s:.0f}", path, *(str(part) for part in arguments)]
        status, out, err = self._container.run(
            command, environment=self._environment(), user=SUPERUSER
        )
        if check and status != 0:
            raise SetupError(err or out, operation=f"run {program}", subject=self.name)
        return subprocess.CompletedProcess(command, status, out, err)

    def close(self) -> None:
        """Remove the container and its data."""
        self._container.close()

    def _primary(self, settings: Mapping[str, str | int]) -> Container:
        """The image's entrypoint runs initdb; what initdb is given, ALTER SYSTEM can override."""
        given = {key: value for key, value in settings.items() if key not in _OWN_SETTINGS}
        options = [part for key, value in given.items() for part in ("-c", f"{key}={value}")]
        options += ["--encoding=UTF8", "--locale=C", "--no-sync"]
        options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        return Container(
            POSTGRES_IMAGE,
            environment={
                **self._environment(),
                "POSTGRES_HOST_AUTH_METHOD": "trust",
                "POSTGRES_INITDB_ARGS": shlex.join(options),
            },
            command=["postgres", "-c", f"cluster_name={self.name}"],
        )

    def _environment(self) -> dict[str, str]:
        return {"PGHOST": LOOPBACK, "PGPORT": str(self.port), "PGUSER": SUPERUSER}

    def _accepts_connections(self) -> bool:
        try:
            with psycopg.connect(self.conninfo(connect_timeout=2)):
                return True
        except psycopg.OperationalError:
            return False


class ContainerBroker:
    """A Kafka broker in a container on the host's network."""

    def __init__(self) -> None:
        self._port = free_port()
        settings = node_settings(self._port, free_port())
        self._container = Container(
            KAFKA_IMAGE,
            environment={"CLUSTER_ID": _CLUSTER_ID}
            | {f"KAFKA_{key.upper().replace('.', '_')}": str(settings[key]) for key in settings},
        )

    @property
    def bootstrap_servers(self) -> str:
        """See Broker."""
        return f"{LOOPBACK}:{self._port}"

    @property
    def running(self) -> bool:
        """See Broker."""
        return self._container.running

    def start(self, *, timeout_s: float = 90.0) -> None:
        """See Broker."""
        self._container.start()
        eventually(
            lambda: self._answers() or not self.running, what="Kafka answers", timeout_s=timeout_s
        )
        if not self.running:
            raise SetupError(self._container.tail(3), operation="start Kafka in a container")

    def stop(self) -> None:
        """See Broker."""
        if not self._container.end(signal.SIGTERM, timeout_s=30):
            self.kill()

    def kill(self) -> None:
        """See Broker."""
        assert self._container.end(signal.SIGKILL)

    def pause(self) -> None:
        """See Broker."""
        self._container.pause()

    def resume(self) -> None:
        """See Broker."""
        self._container.resume()

    def restart(self) -> None:
        """See Broker."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Remove the container and its data."""
        self._container.close()

    def _answers(self) -> bool:
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        try:
            return bool(admin.list_topics(timeout=1).brokers)
        except KafkaException:
            return False


class Containers:
    """The Provider: servers are made when their part is started, and removed by `close`."""

    def __init__(self, exits: contextlib.ExitStack) -> None:
        self.dbname = "bank"
        self._primary = ContainerServer("primary")
        self._standby = ContainerServer("standby")
        self._subscriber = ContainerServer("subscriber")
        self._kafka = ContainerBroker()
        exits.callback(self._kafka.close)
        for server in (self._primary, self._standby, self._subscriber):
            exits.callback(server.close)
        self._started: set[str] = set()

    @property
    def primary(self) -> Server:
        """See Provider."""
        return self._primary

    @property
    def standby(self) -> Server:
        """See Provider."""
        return self._standby

    @property
    def subscriber(self) -> Server:
        """See Provider."""
        return self._subscriber

    @property
    def kafka(self) -> Broker:
        """See Provider."""
        return self._kafka

    def start(self, *parts: str) -> None:
        """See Provider."""
        starts = {
            "pair": lambda: _start_pair(self._primary, self._standby, self.dbname, True),
            "subscriber": lambda: _start_subscriber(self._subscriber, self.dbname),
            "kafka": self._kafka.start,
        }
        missing = [part for part in parts if part not in self._started]
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(starts[part]) for part in missing]:
                done.result()
        self._started.update(missing)

    @contextlib.contextmanager
    def new_trio(self, *, synchronous: bool, settings: Mapping[str, str | int]) -> Iterator[Trio]:
        """See Provider."""
        primary = ContainerServer("primary", settings)
        standby = ContainerServer("standby")
        subscriber = ContainerServer("subscriber")
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
            for server in (primary, standby, subscriber):
                stack.callback(server.close)
            for done in (
                pool.submit(_start_pair, primary, standby, self.dbname, synchronous),
                pool.submit(_start_subscriber, subscriber, self.dbname),
            ):
                done.result()
            yield Trio(primary, standby, subscriber, self.dbname)


@contextlib.contextmanager
def containers() -> Iterator[Provider]:
    """A provider whose containers are removed at the end of the block."""
    with contextlib.ExitStack() as exits:
        yield Containers(exits)


def _start_pair(
    primary: ContainerServer, standby: ContainerServer, dbname: str, synchronous: bool
) -> None:
    primary.start()
    await_standby = prepare_primary(primary, dbname)
    standby.become_standby_of(primary, slot=STANDBY_SLOT, dbname=dbname)
    standby.start()
    await_standby(synchronous)


def _start_subscriber(server: ContainerServer, dbname: str) -> None:
    server.start()
    create_database(server, dbname)
