"""`rejoin` moves no data before it is proven that it can succeed, on real servers."""

import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from services.failover.model.destination import MARK
from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer
from services.testbed.procfs import identify
from tests.promises.failover.conftest import NewTrio, end, machines
from tests.promises.failover.servers import (
    COMMAND,
    accepting,
    ask,
    configuration,
    slotfailover,
    subscribe,
    tell,
    write,
)
from tests.providers.interface import Trio
from tests.providers.roles import make_roles
from tests.providers.waiting import eventually, patient, patient_ms

REJOIN = Path(__file__).parents[3] / "examples" / "rejoin"
CANNOT = "case \"$1\" in --version) exit 0;; esac; echo 'pg_rewind: error: no way' >&2; exit 1"


class Old:
    """A pair whose primary `a` was killed and replaced by `b`; `a` is to rejoin."""

    def __init__(self, trio: Trio, bed: Bed, folder: Path) -> None:
        assert isinstance(trio.primary, PostgresServer)
        assert isinstance(trio.standby, PostgresServer)
        self.trio = trio
        self.a, self.b = trio.primary, trio.standby
        self.folder = folder
        self.machines = machines(trio, bed)

    def fail_over(self) -> None:
        """Kill a, promote b, and let b write."""
        config = self.config()
        self.a.kill()
        ran = slotfailover("failover", "--config", config, "--yes")
        assert ran.code == 0, ran.err
        write(self.b, self.trio.dbname, 101)

    def config(self, **changes: Any) -> Path:
        return configuration(self.folder, self.trio, **{"machines": self.machines, **changes})

    def rejoin(self, *options: str, **changes: Any) -> Any:
        return slotfailover("rejoin", "a", "--config", self.config(**changes), *options)

    @property
    def beside(self) -> set[str]:
        """What lies beside the data folder under its name, and its files' identity."""
        return {path.name for path in self.a.data.parent.glob(f"{self.a.data.name}.*")}

    def programs(self, **scripts: str) -> dict[str, Any]:
        """The machines, with programs of a's replaced by shell scripts."""
        folder = self.bin
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        for program in self.a.programs.iterdir():
            replaced = folder / program.name
            replaced.unlink(missing_ok=True)
            if program.name in scripts:
                replaced.write_text(f"#!/bin/sh\n{scripts[program.name]}\n")
                replaced.chmod(0o755)
            else:
                replaced.symlink_to(program)
        return {**self.machines, "a": {**self.machines["a"], "bin_folder": str(folder)}}

    @property
    def bin(self) -> Path:
        """Beside the data folders, where the servers' user can reach it."""
        return self.a.data.with_name(f"bin-of-{self.a.data.name}")


@pytest.fixture
def old(local_trio: NewTrio, local_bed: Bed, tmp_path: Path) -> Old:
    trio = local_trio()
    subscribe(trio, "s1")
    return Old(trio, local_bed, tmp_path)


@pytest.mark.long
def test_a_role_without_the_rights_is_refused_before_anything_is_touched(old: Old) -> None:
    role = make_roles(old.a, old.trio.dbname, publication="p").failover
    tell(old.a, "SELECT pg_switch_wal()")
    old.fail_over()
    nodes = {name: server.conninfo(user=role) for name, server in (("a", old.a), ("b", old.b))}
    inode = old.a.data.stat().st_ino
    for option in ("--dry-run", "--yes"):
        ran = old.rejoin(option, nodes=nodes)
        assert ran.code == 20, (option, ran.out, ran.err)
        assert "REPLICATION" in ran.err
        assert "slotfailover_a" not in ask(
            old.b, "SELECT coalesce(string_agg(slot_name, ','), '') FROM pg_replication_slots"
        )
        assert (old.a.data.stat().st_ino, old.beside) == (inode, set())
    ran = old.rejoin("--yes")
    assert ran.code == 0, ran.err
    assert (old.a.data.stat().st_ino, old.beside) == (inode, set())  # rewound in place


@pytest.mark.long
def test_a_rewind_that_cannot_begin_moves_nothing_and_says_why(old: Old) -> None:
    old.fail_over()
    inode = old.a.data.stat().st_ino
    ran = old.rejoin("--yes", machines=old.programs(pg_rewind=CANNOT))
    assert ran.code == 1, ran.err
    assert "no way" in ran.out
    assert "--copy" in ran.out
    assert old.a.data.stat().st_ino == inode
    assert not any(".before-" in name or ".copying" in name for name in old.beside)
    assert old.rejoin("--yes").code == 0
    assert old.a.data.stat().st_ino == inode


@pytest.mark.long
def test_a_copy_is_swapped_in_at_its_end_and_an_interrupted_one_ends_with_us(old: Old) -> None:
    old.fail_over()
    inode = old.a.data.stat().st_ino
    pid_file = old.bin / "pid"
    endless = f"echo $$ > {pid_file}; exec sleep 600"
    config = old.config(machines=old.programs(pg_rewind=CANNOT, pg_basebackup=endless))
    options = ["--config", str(config), "--yes", "--copy"]
    command = [sys.executable, "-c", COMMAND, "rejoin", "a", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            eventually(
                lambda: pid_file.exists() and pid_file.read_text(), what="the copy has begun"
            )
            child = int(pid_file.read_text())
            running.send_signal(signal.SIGTERM)
            _, err = running.communicate(timeout=patient(120))
        finally:
            running.kill()
    assert running.returncode not in (0, 70), err
    eventually(lambda: identify(child) is None, what="the copy has ended with its command")
    assert old.a.data.stat().st_ino == inode
    assert not any(".before-" in name for name in old.beside)

    ran = old.rejoin("--yes", "--copy", machines=old.programs(pg_rewind=CANNOT))
    assert ran.code == 0, ran.err
    assert old.a.data.stat().st_ino != inode
    kept = list(old.a.data.parent.glob(f"{old.a.data.name}.before-*"))
    assert [path.stat().st_ino for path in kept] == [inode]
    assert str(kept[0]) in ran.err + ran.out
    assert not any(".copying" in name or ".rejoining" in name for name in old.beside)


def test_what_is_not_the_old_primary_for_certain_is_not_rebuilt(old: Old) -> None:
    """The folder of another server; a node that a killed run may have promoted since."""
    old.fail_over()
    wrong = {**old.machines["a"], "data_folder": str(old.b.data)}
    for option in ("--dry-run", "--yes"):
        ran = old.rejoin(option, machines={"a": wrong})
        assert ran.code == 2, (option, ran.out, ran.err)
        assert str(old.b.data) in ran.err
    system = ask(old.b, "SELECT system_identifier::text FROM pg_control_system()")
    mark = f"[slotfailover leads to a: system {system}, beyond 0/1 of timeline 1] {MARK}"
    with psycopg.connect(old.trio.subscriber.conninfo(old.trio.dbname)) as connection:
        connection.execute("ALTER SUBSCRIPTION s1 DISABLE")
        connection.execute(f"COMMENT ON SUBSCRIPTION s1 IS '{mark}'")
    for option in ("--dry-run", "--yes"):
        ran = old.rejoin(option)
        assert ran.code == 35, (option, ran.out, ran.err)
        assert "disabled sub/s1 to lead it to a" in ran.err
    word = accepting(ran)
    ran = old.rejoin("--dry-run", *word)
    assert ran.code == 0, ran.err
    assert f"overridden by {' '.join(word)}" in ran.out + ran.err
    assert ask(old.b, "SELECT pg_is_in_recovery()") is False


@pytest.mark.long
def test_a_rejoin_has_a_deadline_of_its_own_and_service_names_work(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    old.fail_over()
    services = old.folder / "services.conf"
    services.write_text(
        "".join(
            f"[{name}]\nhost=127.0.0.1\nport={server.port}\nuser=postgres\ndbname=postgres\n"
            for name, server in (("svc_a", old.a), ("svc_b", old.b))
        )
    )
    services.chmod(0o644)
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    real = old.a.programs / "pg_rewind"
    step_ms = patient_ms(2_700)
    late_s = 1 + step_ms // 1000
    slow = old.programs(
        pg_rewind=f'case "$*" in *-n*|--version) ;; *) sleep {late_s};; esac; exec {real} "$@"'
    )
    nodes = {"a": "service=svc_a", "b": "service=svc_b"}
    inode = old.a.data.stat().st_ino
    ran = old.rejoin("--yes", nodes=nodes, machines=slow, step_deadline_ms=step_ms)
    assert ran.code == 0, ran.err
    assert old.a.data.stat().st_ino == inode


@pytest.mark.long
def test_the_script_that_is_shipped_rejoins_a_node_of_another_machine(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ssh would call it; first refused, as it may not rewind, and without a copy."""
    old.fail_over()
    machine = old.machines["a"]
    options = " ".join(machine["server_options"])
    control = f"runuser -u {machine['os_user']} -- " if machine["os_user"] else ""
    control += f"{old.a.programs}/pg_ctl -D {old.a.data} -w"
    settings = {
        "DATA": str(old.a.data),
        "BIN": str(old.a.programs),
        "OS_USER": machine["os_user"],
        "STOP": f"{control} stop -m fast",
        "START": f"cd / && {control} -o '{options}' -l {old.a.data}/log start >/dev/null",
        "SOURCE": "user=postgres dbname=postgres",
        "REPLICATION": "user=postgres dbname=postgres",
    }
    conf = old.folder / "rejoin.conf"
    monkeypatch.setenv("REJOIN_CONF", str(conf))
    words = f"{REJOIN} {{primary_host}} {{primary_port}} {{slot}} {{copy}}"
    machines_ = {"a": {"rejoin": words, "environment": ["REJOIN_CONF"]}}

    def rejoin(*given: str, **changes: str) -> Any:
        said = {**settings, **changes}
        conf.write_text("".join(f"{key}={shlex.quote(value)}\n" for key, value in said.items()))
        return old.rejoin("--yes", *given, machines=machines_)

    inode = old.a.data.stat().st_ino
    refused = rejoin(SOURCE="user=nobody_here dbname=postgres")
    assert (refused.code, "does not let us in" in refused.out) == (1, True), refused.out
    old.programs(pg_rewind=CANNOT)
    refused = rejoin(BIN=str(old.bin))
    assert (refused.code, "no way" in refused.out) == (1, True), refused.out
    assert "--copy" in refused.out
    assert old.a.data.stat().st_ino == inode
    ran = rejoin()
    assert ran.code == 0, ran.out + ran.err
    assert old.a.data.stat().st_ino == inode
    end(old.a)
    copied = rejoin("--copy", BIN=str(old.bin))
    assert copied.code == 0, copied.out + copied.err
    assert old.a.data.stat().st_ino != inode
    assert any(".before-" in name for name in old.beside)


def test_links_of_the_servers_user_lead_root_to_no_other_file(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither slotfailover nor the script reads, empties or gives away what root alone may use."""
    user = old.machines["a"]["os_user"]
    if os.geteuid() != 0 or not user:
        pytest.skip("root alone can work on the files of another user")
    old.fail_over()
    others = old.folder / "of-root"
    others.mkdir(mode=0o700)
    secret = others / "secret"
    secret.write_text("of root\n")
    secret.chmod(0o600)
    data = old.a.data
    kept = data.with_name(f"{data.name}.rejoining")
    control = f"runuser -u {user} -- {old.a.programs}/pg_ctl -D {data} -w"
    options = " ".join(old.machines["a"]["server_options"])
    settings = {
        "DATA": str(data),
        "BIN": str(old.a.programs),
        "OS_USER": user,
        "STOP": f"{control} stop -m fast",
        "SOURCE": "user=postgres dbname=postgres",
        "START": f"cd / && {control} -o '{options}' -l {data}/log start >/dev/null",
        "REPLICATION": "user=postgres dbname=postgres",
    }
    conf = old.folder / "rejoin.conf"
    conf.write_text("".join(f"{key}={shlex.quote(value)}\n" for key, value in settings.items()))
    monkeypatch.setenv("REJOIN_CONF", str(conf))
    words = f"{REJOIN} {{primary_host}} {{primary_port}} {{slot}} {{copy}}"
    shutil.chown(data.parent, user)
    script = {"machines": {"a": {"rejoin": words, "environment": ["REJOIN_CONF"]}}}
    for link, target, changes in (
        (kept, others, {}),
        (kept / "lock", secret, {}),
        (data / "pg_ident.conf", secret, {}),
        (data.with_name(f"{data.name}.rejoin-lock"), secret, script),
        (data / "pg_ident.conf", secret, script),
        (data / "postgresql.auto.conf.new", secret, script),  # once it is rewound
    ):
        if link.name.endswith(".new"):
            kept.mkdir()
            (kept / "done").touch()
        before = link.read_bytes() if link.exists() else None
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        for planted in {link.parent, link} - {data, data.parent}:
            shutil.chown(planted, user) if planted != link else os.lchown(link, *ids(user))
        ran = old.rejoin("--yes", **changes)
        assert ran.code != 0, (link, ran.out)
        assert "traceback" not in ran.err.lower(), ran.err
        assert [path.name for path in others.iterdir()] == ["secret"], link
        assert (secret.read_text(), secret.stat().st_uid) == ("of root\n", 0), link
        if not kept.is_symlink():
            copies = [path for path in kept.glob("*") if path.is_file() and path != link]
            assert not any("of root" in path.read_text() for path in copies), link
        link.unlink(missing_ok=True)
        if before is not None:
            link.write_bytes(before)
            os.chown(link, *ids(user))
        shutil.rmtree(kept, ignore_errors=True)
    ran = old.rejoin("--yes", **script)
    assert ran.code == 0, ran.out + ran.err


def ids(user: str) -> tuple[int, int]:
    """The numbers of an account."""
    entry = pwd.getpwnam(user)
    return entry.pw_uid, entry.pw_gid
