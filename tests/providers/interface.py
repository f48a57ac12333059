"""What a test may ask of servers, whoever provides them: the embedded test bed or containers."""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol


class Server(Protocol):
    """A PostgreSQL 18 server; services.testbed.postgres.PostgresServer documents the methods."""

    @property
    def name(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def running(self) -> bool: ...
    def conninfo(self, dbname: str = "postgres", **extra: Any) -> str: ...
    def start(self, *, timeout_s: float = 60.0) -> None: ...
    def stop(self, mode: Literal["fast", "immediate"] = "fast", *, timeout_s: float = 60.0) -> None:
        """Raise Retryable when it still runs after `timeout_s` seconds."""

    def kill(self) -> None:
        """SIGKILL, as when the machine dies."""

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None: ...
    def run_tool(
        self,
        program: str,
        arguments: Sequence[str | Path],
        *,
        timeout_s: float = 300.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a PostgreSQL program that, by default, connects to this server."""
        ...


class Broker(Protocol):
    """A Kafka broker; services.testbed.kafka.KafkaBroker documents the methods."""

    @property
    def bootstrap_servers(self) -> str: ...
    @property
    def running(self) -> bool: ...
    def start(self, *, timeout_s: float = 90.0) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def restart(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Trio:
    """A primary, its standby, a subscriber; the database `dbname` is on all of them."""

    primary: Server
    standby: Server
    subscriber: Server
    dbname: str


class Provider(Protocol):
    """Where servers come from. Parts are "pair", "subscriber" and "kafka"; each starts once."""

    @property
    def primary(self) -> Server: ...
    @property
    def standby(self) -> Server: ...
    @property
    def subscriber(self) -> Server: ...
    @property
    def kafka(self) -> Broker: ...
    @property
    def dbname(self) -> str: ...
    def start(self, *parts: str) -> None:
        """Bring up those of `parts` that are not up yet, concurrently."""

    def new_trio(
        self, *, synchronous: bool, settings: Mapping[str, str | int]
    ) -> AbstractContextManager[Trio]:
        """A fresh pair with a subscriber, gone at the end of the block."""
        ...
