"""`slotbridge run` as a process of its own, and what it leaves in Kafka."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
import yaml
from confluent_kafka.admin import AdminClient

from schemas.events import progress_topic
from schemas.progress import ProgressRecord
from schemas.shaping import ShapingSettings
from services.bridge import failpoints
from services.demo.copies import database_rows, kafka_tables
from tests.promises.bridge.reading import DECIDED_S, committed
from tests.providers.command_server import Loaded
from tests.providers.interface import Broker
from tests.providers.tokens import token_of
from tests.providers.waiting import eventually, patient

SLOT_OF_TEST = "s_{}"
UNDECIDED_S = patient(0.7)
PATIENCE_S = patient(60)
"""How long a process may take to end, and Kafka to answer, on a busy machine."""


class Bridge:
    """A bridge on one database and prefix; `start` and `kill` it as often as the test likes."""

    def __init__(
        self,
        folder: Path,
        conninfo: str,
        kafka: Broker,
        prefix: str,
        *,
        slot: str = "",
        tables: tuple[str, ...] = (),
        origin: str = "any",
        witness: str = "origin",
        shaping: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        two_phase: bool = False,
        bootstrap_servers: str = "",
        publication: str = "",
        loaded: bool = True,
        program: Sequence[str | Path] = (),
        replication_factor: int | None = None,
        snapshot: dict[str, Any] | None = None,
        formats: Mapping[str, Any] | None = None,
        registry: Mapping[str, Any] | None = None,
        claim_check: Mapping[str, Any] | None = None,
        **bridge: Any,
    ) -> None:
        """`loaded`: by tests.providers.command_server; else by its program, or by `program` if
        given. `formats`: of kafka.
        """
        self._loaded = loaded and not program
        self._program = program or [Path(sys.executable).parent / "slotbridge"]
        self.conninfo = conninfo
        self.prefix = prefix
        self.slot = slot or SLOT_OF_TEST.format(prefix)
        self.publication = publication or f"p_{prefix}"
        self.kafka = kafka
        self.shaping = ShapingSettings.model_validate(shaping or {})
        self.config = folder / f"{self.slot}-{os.urandom(3).hex()}.yaml"
        self.log = self.config.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | Loaded | None = None
        self._sessions_before = 0
        document = {
            "source": {
                "conninfo": conninfo,
                "slot": self.slot,
                "publication": self.publication,
                "tables": list(tables),
                "origin": origin,
                "witness": witness,
                "two_phase": two_phase,
            },
            "kafka": {
                "bootstrap_servers": bootstrap_servers or kafka.bootstrap_servers,
                "topic_prefix": prefix,
                "partitions": 2,
                "replication_factor": replication_factor,
                "options": options or {},
                **(formats or {}),
            },
            **({"registry": dict(registry)} if registry else {}),
            **({"claim_check": dict(claim_check)} if claim_check else {}),
            "shaping": shaping or {},
            "snapshot": {"mode": "never"} if snapshot is None else snapshot,
            "bridge": {"heartbeat_interval_ms": 200, "commit_interval_ms": 20, **bridge},
        }
        self.config.write_text(yaml.safe_dump(document), encoding="utf-8")

    def start(self, *, accept: str = "", **environment: str) -> "Bridge":
        """Start it; returns at once. `accept`: a token."""
        self._sessions_before = self.sessions
        accepting = ["--accept", accept] if accept else []
        command, whole = ["run", "--config", str(self.config)], {**os.environ, **environment}
        command += accepting
        if self._loaded and environment.keys() <= {failpoints.VARIABLE}:
            self._process = Loaded(command, log=self.log, environment=whole)
            return self
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._program, *command], stdout=log, stderr=log, env=whole
            )
        return self

    def streaming(self, conninfo: str = "") -> "Bridge":
        """Wait until it streams from the server of `conninfo` (by default its own)."""
        with psycopg.connect(conninfo or self.conninfo, autocommit=True) as connection:

            def active() -> bool:
                assert self.running, self.output
                if self.sessions == self._sessions_before:
                    return False  # a slot is active also while it is made
                row = connection.execute(
                    "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [self.slot]
                ).fetchone()
                return row is not None and bool(row[0])

            eventually(active, what=f"the bridge streams from {self.slot}")
        return self

    @property
    def token(self) -> str:
        """The token of the last refusal."""
        return token_of(self.output)

    @property
    def environment(self) -> dict[str, str]:
        """What its commands run in."""
        return {**os.environ}

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def output(self) -> str:
        """What it has logged."""
        return self.log.read_text(encoding="utf-8")

    @property
    def sessions(self) -> int:
        """How many sessions have come to stream, over all starts."""
        return self.output.count("[info     ] streaming") if self.log.exists() else 0

    @property
    def streams(self) -> bool:
        """Whether a session has come to stream since the last start."""
        return self.sessions > self._sessions_before

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=PATIENCE_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=PATIENCE_S)

    def exit_code(self) -> int:
        """Wait until it ends by itself; fail with its output where it does not."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {PATIENCE_S:.0f} s: {self.output}") from None

    def end(self) -> None:
        """End it in any case, after a test."""
        if self.running:
            self.kill()

    def caught_up(self, conninfo: str = "") -> None:
        """Wait until the slot is confirmed up to where the WAL is now."""
        with psycopg.connect(conninfo or self.conninfo, autocommit=True) as connection:
            row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None

            def confirmed() -> bool:
                assert self.running, self.output
                found = connection.execute(
                    "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots"
                    " WHERE slot_name = %s",
                    [row[0], self.slot],
                ).fetchone()
                return found is not None and bool(found[0])

            eventually(confirmed, what=f"{self.slot} is confirmed up to {row[0]}", timeout_s=60)

    def events(self, table: str, decided_s: float = DECIDED_S) -> Iterator[dict[str, Any]]:
        """The committed events of a table, tombstones left out."""
        for _key, value in self._committed(f"{self.prefix}.public.{table}", decided_s):
            if value is not None:
                yield json.loads(value)

    def records(self, topic: str) -> list[tuple[bytes | None, bytes | None]]:
        """(key, value) of the committed records of a topic, named without its prefix."""
        return [*self._committed(f"{self.prefix}.{topic}")]

    def _committed(
        self, topic: str, decided_s: float = DECIDED_S
    ) -> Iterator[tuple[bytes | None, bytes | None]]:
        """(key, value) of the committed records; what is undecided soon is waited for.

        A busy Kafka takes some time to tell its partitions of a commit. Of a bridge that was
        killed, the last transaction is decided by the next one alone.
        """
        killed = self._process is not None and self._process.poll() == -signal.SIGKILL
        wait_s = min(UNDECIDED_S, decided_s) if killed else decided_s
        servers = self.kafka.bootstrap_servers
        for _partition, key, value in committed(servers, topic, decided_s=wait_s):
            yield key, value

    def topics(self) -> set[str]:
        """The topics of the broker."""
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        return set(admin.list_topics(timeout=PATIENCE_S).topics)

    def progress(self) -> list[ProgressRecord]:
        """All committed progress records of the slot, in order."""
        return [
            ProgressRecord.model_validate_json(value)
            for key, value in self._committed(progress_topic(self.prefix))
            if value is not None and key == self.slot.encode()
        ]

    def assert_kafka_equals(self, conninfo: str, *tables: str) -> None:
        """The tables rebuilt from Kafka are the database's, and no event came twice."""
        truth = database_rows(conninfo, tables)
        rebuilt = kafka_tables(self.kafka.bootstrap_servers, self.prefix, tables)
        for table in tables:
            missing = truth[table] - rebuilt[table].rows
            extra = rebuilt[table].rows - truth[table]
            assert not missing, f"{table}: {missing.total()} rows lost"
            assert not extra, f"{table}: {extra.total()} rows too many"
            assert rebuilt[table].repeated == 0, f"{table}: events repeated"

    def identities(self, table: str) -> Counter[tuple[int, int]]:
        """How often each (commit_lsn, seq) is there."""
        return Counter((e["source"]["commit_lsn"], e["source"]["seq"]) for e in self.events(table))
