"""The three services as the demonstration runs them: their own commands, one configuration file."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from services.testbed import jars
from services.testbed.bed import Bed
from services.testbed.java import find_java_home, short_lived_spark

PREFIX: Final = "bank"
BRIDGE_SLOT: Final = "slotbridge"
SUBSCRIPTION: Final = "bank_copy"
_POLL_S: Final = 0.1
_STOP_DEADLINE_S: Final = 120.0


class Services:
    """Starts, asks and stops `slotbridge`, `slotfailover` and `slottables` on a bed."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self.config = bed.folder / "slotbridge.yaml"
        self._java_home = find_java_home()
        self._bridge: subprocess.Popen[bytes] | None = None
        self._tables: subprocess.Popen[bytes] | None = None
        self._runs = 0

    def write_config(self) -> None:
        """Write one file for all three services, which does not name the node that is primary."""
        bed = self._bed
        ports = f"{bed.primary.port},{bed.standby.port}"
        hosts = "127.0.0.1,127.0.0.1"
        document = {
            "source": {
                "conninfo": f"host={hosts} port={ports} user=postgres dbname={bed.dbname} "
                "target_session_attrs=read-write",
                "slot": BRIDGE_SLOT,
            },
            "kafka": {
                "bootstrap_servers": bed.kafka.bootstrap_servers,
                "topic_prefix": PREFIX,
                "partitions": 2,
            },
            "bridge": {"spool_folder": str(bed.folder)},  # the default is shared with other users
            "snapshot": {"mode": "initial", "exclude": ["public.pgbench_history"]},
            "failover": {
                "nodes": {
                    "a": bed.primary.conninfo(bed.dbname),
                    "b": bed.standby.conninfo(bed.dbname),
                },
                "subscribers": {"copy": bed.subscriber.conninfo(bed.dbname)},
                "journal": str(bed.folder / "failover.jsonl"),
            },
            "tables": {
                "warehouse": str(bed.folder / "warehouse"),
                "trigger_interval_ms": 1000,
                "spark_options": {
                    "spark.jars": jars.class_path("spark", ","),
                    **short_lived_spark(bed.folder / "spark"),
                },
            },
        }
        self.config.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")

    def start_bridge(self) -> None:
        """Start `slotbridge run` as a process."""
        self._bridge = self._spawn("slotbridge", "run")

    def start_tables(self) -> None:
        """Start `slottables run` as a process."""
        self._tables = self._spawn("slottables", "run", "--json")

    def stop_bridge(self) -> None:
        """Stop the bridge by SIGTERM and wait. Raise SlotbridgeError unless it exits with 0."""
        process, self._bridge = self._bridge, None
        self._stop("slotbridge", process)

    def stop_tables(self) -> None:
        """Stop slottables by SIGTERM and wait. Raise SlotbridgeError unless it exits with 0."""
        process, self._tables = self._tables, None
        self._stop("slottables", process)

    def require_running(self) -> None:
        """Raise SlotbridgeError with its last words when one of the two has ended by itself."""
        for name, process in (("slotbridge", self._bridge), ("slottables", self._tables)):
            if process is not None and process.poll() is not None:
                raise self._ended(name, process.returncode)

    def slots_ready(self) -> bool:
        """Tell whether `slotfailover check` finds every failover slot ready."""
        return self._ask("slotfailover", "check", "--json")[0] == 0

    def snapshot_done(self) -> bool:
        """Tell whether `slotbridge snapshot status` says that all rows are in Kafka."""
        return self._ask("slotbridge", "snapshot", "status", "--json")[0] == 0

    def fail_over(self) -> dict[str, Any]:
        """Run `slotfailover failover --yes`; return its report. Raise where it fails."""
        code, report = self._ask("slotfailover", "failover", "--yes", "--json")
        if code != 0:
            raise SlotbridgeError(
                f"slotfailover failover ended with {code}: {json.dumps(report)[:500]}",
                operation="fail over",
                exit_code=ExitCode.NOT_READY,
            )
        return report

    def verify_tables(self) -> dict[str, Any]:
        """Run `slottables verify`; return its report, whether or not the tables are equal."""
        code, report = self._ask("slottables", "verify", "--json")
        if code not in (ExitCode.OK, ExitCode.CHECK_FAILED):
            raise SlotbridgeError(
                f"slottables verify ended with {code}: {self._last_words('slottables-verify')}",
                operation="verify the tables",
            )
        return report

    def wait(self, what: str, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Poll until `condition`; raise Retryable (DEADLINE), or what `require_running` raises."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.require_running()
            if time.monotonic() > deadline:
                raise Retryable(
                    f"condition not met after {timeout_s:.0f} s",
                    operation=f"wait until {what}",
                    hint=f"the logs are in {self._bed.processes.logs}",
                    exit_code=ExitCode.DEADLINE,
                )
            time.sleep(_POLL_S)

    def _spawn(self, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self._bed.spawn(command, self._argv(command, *arguments), env=self._environment())

    def _ask(self, command: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Run a command to its end; its exit code and the last JSON object that it printed."""
        name = f"{command}-{arguments[0]}"
        done = subprocess.run(
            self._argv(command, *arguments),
            env={**os.environ, **self._environment()},
            capture_output=True,
            text=True,
            check=False,
        )
        with self._bed.processes.log_path(name).open("a", encoding="utf-8") as log:
            log.write(done.stderr + done.stdout)
        start = done.stdout.find("{")
        try:
            report = json.loads(done.stdout[start:]) if start >= 0 else {}
        except json.JSONDecodeError:
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            report = json.loads(lines[-1])
        return done.returncode, report

    def _argv(self, command: str, *arguments: str) -> list[str | Path]:
        program = Path(sys.executable).parent / command
        return [program, *arguments, "--config", str(self.config)]

    def _environment(self) -> dict[str, str]:
        return {"JAVA_HOME": str(self._java_home), "PYTHONUNBUFFERED": "1"}

    def _stop(self, name: str, process: subprocess.Popen[bytes] | None) -> None:
        if process is None:
            raise RuntimeError(f"{name} was not started")
        code = self._bed.processes.stop(process, grace_s=_STOP_DEADLINE_S)
        if code != 0:
            raise self._ended(name, code)

    def _ended(self, name: str, code: int) -> SlotbridgeError:
        return SlotbridgeError(
            f"{name} ended with {code}: {self._last_words(name)}", operation="run the services"
        )

    def _last_words(self, name: str) -> str:
        path = self._bed.processes.log_path(name)
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return " ".join(text.strip()[-600:].split())
