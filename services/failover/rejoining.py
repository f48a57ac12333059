"""An old primary made a standby again, where its data folder is on this machine.

    stop -> keep its own configuration files -> pg_rewind, else pg_basebackup -> put the files back
    with where to stream from -> start

`<data_folder>.rejoining` holds the configuration meanwhile, and says once the data is being changed
(`changing`): what was broken off then is not rewound again but copied anew. The folder that a base
backup replaces is kept beside it (`<data_folder>.before-<time>`).
"""

import contextlib
import shutil
import time

from schemas.errors import SetupError
from services.failover import machines
from services.failover.address import Conninfo
from services.failover.cluster import Cluster
from services.failover.effects.step import Step
from services.failover.effects.topology import upstream_of
from services.failover.links import parse_conninfo
from services.failover.machine import Machine
from services.failover.view import FENCE
from services.slots import setting

_CONFIGURATION = ("postgresql.conf", "postgresql.auto.conf", "pg_hba.conf", "pg_ident.conf")
_OF_PRIMARIES = (FENCE, "synchronized_standby_slots", "synchronous_standby_names")


def rejoin(step: Step, cluster: Cluster, deadline_s: float) -> None:
    """Do what `step` (Action.REJOIN) says. Raises SetupError, Retryable."""
    machine = cluster.machines[step.server]
    if step.command:
        cluster.nodes[step.server].close()
        machines.run_command(
            step.command,
            operation=step.text,
            subject=step.server,
            deadline_s=deadline_s,
            os_user=machine.os_user,
        )
        return
    assert machine.data_folder is not None
    cluster.nodes[step.server].close()
    source = cluster.nodes[step.node].conninfo
    given = cluster.nodes[step.node].ask(lambda c: setting(c, "primary_conninfo"))
    replication = parse_conninfo(given, subject=step.node) if given else source
    upstream = upstream_of(cluster.address(step.node), replication, step.subject)
    _Folder(machine, step, deadline_s).rebuild(source, upstream)


class _Folder:
    """A data folder on this machine."""

    def __init__(self, machine: Machine, step: Step, deadline_s: float) -> None:
        assert machine.data_folder is not None
        self._machine = machine
        self._step = step
        self._deadline = time.monotonic() + deadline_s
        self._data = machine.data_folder
        self._kept = self._data.with_name(self._data.name + ".rejoining")
        self._changing = self._kept / "changing"

    def rebuild(self, source: Conninfo, upstream: Conninfo) -> None:
        self._stop()
        broken = self._changing.exists()
        if not broken:
            self._keep_configuration()
        self._changing.touch()
        with machines.service_file(source, self._machine.os_user) as environment:
            if broken or not self._rewound(environment):
                self._copy(environment)
        self._configure(upstream)
        self._run(self._machine.command("start"))
        shutil.rmtree(self._kept)

    def _stop(self) -> None:
        if (self._data / "postmaster.pid").exists():
            with contextlib.suppress(SetupError):  # what a killed server leaves: it does not run
                self._run(self._machine.command("stop"))

    def _keep_configuration(self) -> None:
        self._kept.mkdir(exist_ok=True)
        for name in _CONFIGURATION:
            if (self._data / name).exists():
                shutil.copy2(self._data / name, self._kept / name)

    def _rewound(self, environment: dict[str, str]) -> bool:
        program = self._machine.program("pg_rewind")
        source = f"--source-server=service={machines.SERVICE}"
        try:
            self._run((program, f"--target-pgdata={self._data}", source), environment)
        except SetupError:
            return False
        return True

    def _copy(self, environment: dict[str, str]) -> None:
        if self._data.exists():
            self._data.rename(self._data.with_name(f"{self._data.name}.before-{time.time_ns()}"))
        self._data.mkdir(mode=0o700)
        machines.own(self._data, self._machine.os_user)
        program = self._machine.program("pg_basebackup")
        where = ("-d", f"service={machines.SERVICE}", "-D", str(self._data))
        self._run((program, *where, "--checkpoint=fast", "--wal-method=stream"), environment)

    def _configure(self, upstream: Conninfo) -> None:
        """Its own configuration again, without what made it a primary."""
        for name in _CONFIGURATION:
            if (self._kept / name).exists():
                self._write(name, (self._kept / name).read_text(encoding="utf-8"))
        auto = self._data / "postgresql.auto.conf"
        values = {
            **dict.fromkeys(_OF_PRIMARIES, None),
            "primary_conninfo": upstream.text,
            "primary_slot_name": self._step.subject,
            "hot_standby_feedback": "on",
            "sync_replication_slots": "on",
        }
        lines = [
            line
            for line in auto.read_text(encoding="utf-8").splitlines()
            if line.partition("=")[0].strip() not in values
        ]
        lines += [f"{k} = {_quoted(v)}" for k, v in values.items() if v]
        self._write("postgresql.auto.conf", "\n".join(lines) + "\n")
        self._write("standby.signal", "")

    def _write(self, name: str, text: str) -> None:
        path = self._data / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        machines.own(path, self._machine.os_user)

    def _run(self, command: tuple[str, ...], environment: dict[str, str] | None = None) -> None:
        machines.run_command(
            command,
            operation=self._step.text,
            subject=self._step.server,
            deadline_s=max(1.0, self._deadline - time.monotonic()),
            os_user=self._machine.os_user,
            environment=environment,
        )


def _quoted(value: str) -> str:
    """As ALTER SYSTEM writes it: a backslash escapes in configuration files."""
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
