"""A real Patroni pair with a real etcd, all of them processes on this machine."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import yaml
from psycopg.conninfo import make_conninfo

from services.testbed.ports import free_port
from services.testbed.users import ServerUser, postgres_programs, server_user
from tests.providers.waiting import eventually, patient

SETTINGS: dict[str, Any] = {
    "wal_level": "logical",
    "hot_standby": "on",
    "hot_standby_feedback": "on",
    "sync_replication_slots": "on",
    "max_wal_senders": 20,
    "max_replication_slots": 20,
    "max_worker_processes": 16,
    "unix_socket_directories": "",
    "fsync": "off",
    "shared_buffers": "64MB",
    "wal_receiver_status_interval": "1s",
}
TTL_S = round(patient(7))
"""So long nobody is promoted after the leader has died. Patroni takes none under 20 s."""


@dataclass
class Member:
    """A node: Patroni and the PostgreSQL that it runs."""

    name: str
    folder: Path
    port: int = field(default_factory=free_port)
    rest_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def conninfo(self, dbname: str = "postgres", **more: Any) -> str:
        given = {"host": "127.0.0.1", "port": self.port, "user": "postgres", "dbname": dbname}
        return make_conninfo(**{**given, **more})

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def leads(self) -> bool:
        """What its REST interface tells a load balancer."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.rest_port}/primary", timeout=patient(5)
            ) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def may_lead(self) -> bool:
        """Whether Patroni has it as the synchronous standby, the only one that it promotes."""
        return _is_200(f"http://127.0.0.1:{self.rest_port}/sync")

    def kill(self) -> None:
        """SIGKILL to Patroni and to every process of its PostgreSQL, as when the machine dies."""
        assert self.process is not None
        mine = psutil.Process(self.process.pid)
        everything = [mine, *mine.children(recursive=True)]
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            number = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
            postmaster = psutil.Process(number)
            everything += [postmaster, *postmaster.children(recursive=True)]
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(patient(30))
        psutil.wait_procs([p for p in everything if p.pid != self.process.pid], timeout=patient(30))


class PatroniPair:
    """Members a and b; `a` is made the leader."""

    def __init__(self, folder: Path, user: ServerUser) -> None:
        self._folder = folder
        self._user = user
        self._etcd_port = free_port()
        self._etcd: subprocess.Popen[bytes] | None = None
        self.members = {name: Member(name, folder / name) for name in ("a", "b")}
        self._logs: list[IO[bytes]] = []

    def start(self) -> None:
        """etcd, then the leader, then its standby, which streams."""
        peer = f"http://127.0.0.1:{free_port()}"
        client = f"http://127.0.0.1:{self._etcd_port}"
        self._etcd = self._run(
            "etcd",
            [
                *(Path(sys.executable).parent / "etcd", "--data-dir", self._folder / "etcd"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"default={peer}", "--unsafe-no-fsync"),
            ],
        )
        for member in self.members.values():
            self.start_member(member)
            if member.name == "a":
                eventually(member.leads, what="a leads", timeout_s=60)
        b = self.members["b"]
        url = f"http://127.0.0.1:{b.rest_port}/replica"
        eventually(lambda: _is_200(url), what="b is a replica", timeout_s=60)

    def start_member(self, member: Member) -> None:
        member.folder.mkdir(exist_ok=True)
        self._user.own(member.folder)
        config = member.folder / "patroni.yaml"
        config.write_text(yaml.safe_dump(self._settings(member)))
        self._user.own(config)
        command = [*self._prefix(), sys.executable, "-m", "patroni", str(config)]
        member.process = self._run(member.name, command)

    def end(self) -> None:
        """Whatever runs still."""
        for member in self.members.values():
            if member.running:
                member.kill()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait(patient(30))
        for log in self._logs:
            log.close()

    def log_of(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def _run(self, name: str, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        log = (self._folder / f"{name}.log").open("ab")
        self._logs.append(log)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "PATRONI", "ETCD"))}
        return subprocess.Popen(
            [os.fspath(part) for part in command],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd="/",
            env={**kept, "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
        )

    def _prefix(self) -> list[str]:
        """Patroni runs as the servers' user; where that user can't read Python, it may read all."""
        if not self._user.switch:
            return []
        program = shutil.which("setpriv")
        assert program, "install util-linux, which has setpriv"
        ids = [f"--reuid={self._user.uid}", f"--regid={self._user.gid}", "--clear-groups"]
        caps = "+dac_read_search"
        return [program, *ids, f"--inh-caps={caps}", f"--ambient-caps={caps}"]

    def _settings(self, member: Member) -> dict[str, Any]:
        roles = {"username": "postgres", "password": "of-postgres"}
        return {
            "scope": "bank",
            "name": member.name,
            "restapi": {
                "listen": f"127.0.0.1:{member.rest_port}",
                "connect_address": f"127.0.0.1:{member.rest_port}",
            },
            "etcd3": {"host": f"127.0.0.1:{self._etcd_port}"},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL_S,
                    "loop_wait": 1,
                    "retry_timeout": TTL_S // 2 - 1,
                    "synchronous_mode": True,
                    "postgresql": {"use_slots": True, "parameters": SETTINGS},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, "no-sync"],
                "pg_hba": [f"host {d} all 127.0.0.1/32 trust" for d in ("all", "replication")],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{member.port}",
                "connect_address": f"127.0.0.1:{member.port}",
                "data_dir": str(member.folder / "data"),
                "bin_dir": str(postgres_programs(self._user)),
                "pgpass": str(member.folder / "pgpass"),
                "authentication": {"superuser": roles, "replication": roles, "rewind": roles},
            },
        }


@contextlib.contextmanager
def patroni_pair() -> Iterator[PatroniPair]:
    """A pair that runs, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-patroni-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        pair = PatroniPair(folder, server_user())
        try:
            pair.start()
            yield pair
        except BaseException:
            for name in pair.members:
                print(f"the end of {name}'s log:", pair.log_of(name)[-5000:], sep="\n")  # noqa: T201
            raise
        finally:
            pair.end()


def _is_200(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=patient(5)) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
