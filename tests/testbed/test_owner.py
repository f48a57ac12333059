"""What becomes of a bed's processes and folder when its owner ends, well or badly."""

import json
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import ExitCode, Retryable, SettingsError, SetupError
from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer
from services.testbed.processes import MARKER, STATE_FILE, end_leftovers
from tests.providers.waiting import eventually, patient
from tests.testbed.owners import ROOT, Owner, processes_of

pytestmark = pytest.mark.usefixtures("servers")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ending", "parts"),
    [(signal.SIGTERM, "subscriber,kafka"), (signal.SIGINT, "pair"), (None, "subscriber")],
)
def test_nothing_runs_after_the_owner_ended(
    folder: Path, tmp_path: Path, ending: signal.Signals | None, parts: str
) -> None:
    with Owner(folder, parts, log=tmp_path / "log") as owner:
        owner.await_up()
        assert len(processes_of(folder)) > 5
        if ending is not None:
            owner.process.send_signal(ending)
            owner.process.wait(timeout=patient(180))
    assert processes_of(folder) == []
    assert owner.process.returncode == {None: 0, signal.SIGTERM: 143, signal.SIGINT: -2}[ending]


def test_the_reaper_ends_the_servers_of_a_killed_owner(folder: Path, tmp_path: Path) -> None:
    with Owner(folder, "pair", log=tmp_path / "log") as owner:
        owner.await_up()
        owner.process.kill()
    eventually(lambda: processes_of(folder) == [], what="the keeper has ended all servers")


@pytest.mark.long
def test_the_next_start_ends_leftovers_and_deletes_old_data(folder: Path, tmp_path: Path) -> None:
    with Owner(folder, "subscriber", log=tmp_path / "log") as owner:
        owner.await_up()
        _kill_keeper(folder)
        owner.process.kill()
    assert len(processes_of(folder)) > 5
    (folder / "subscriber" / "old").touch()
    said: list[str] = []
    with Bed(folder, lazy=True, progress=said.append) as bed:
        assert processes_of(folder) == []
        assert not (folder / "subscriber").exists()
        bed.start("subscriber")
        assert bed.subscriber.run_tool("psql", ["-XAtc", "SELECT 1"]).stdout == "1\n"
    assert [line for line in said if "leftover" in line and "subscriber" in line]
    assert processes_of(folder) == []


@pytest.mark.long
def test_a_second_owner_is_refused(folder: Path) -> None:
    with (
        Bed(folder, lazy=True),
        pytest.raises(Retryable, match=f"process {os.getpid()} holds") as refusal,
        Bed(folder, lazy=True),
    ):
        pass
    assert refusal.value.exit_code == ExitCode.DEADLINE


@pytest.mark.long
def test_a_folder_of_others_is_refused_and_left_alone(folder: Path) -> None:
    (folder / "thesis.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(SettingsError, match="neither empty nor a test bed's folder"):
        Bed(folder, lazy=True).__enter__()
    assert (folder / "thesis.txt").read_text(encoding="utf-8") == "precious"


@pytest.mark.long
def test_a_later_process_with_a_recorded_pid_is_left_alone(folder: Path) -> None:
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        with Bed(folder, lazy=True) as bed:
            bed.spawn("child", ["sleep", "600"])
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        state["processes"][0]["pid"] = bystander.pid  # its start time is another
        (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
        assert end_leftovers(folder) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(timeout=patient(10))


@pytest.mark.long
def test_descendants_of_a_child_end_with_it(folder: Path) -> None:
    with Bed(folder, lazy=True) as bed:
        child = bed.spawn("child", ["sh", "-c", "trap '' TERM; sleep 601 & echo started; wait"])
        log = bed.processes.log_path("child")
        eventually(lambda: "started" in log.read_text(encoding="utf-8"), what="it has a child")
        bed.processes.stop(child, grace_s=0.1)
        assert child.returncode == -signal.SIGKILL
        assert [line for line in processes_of(folder) if "sleep 601" in line] == []


@pytest.mark.long
def test_a_missing_program_is_named(folder: Path) -> None:
    with Bed(folder, lazy=True) as bed, pytest.raises(SetupError, match="no-such-program") as error:
        bed.spawn("child", ["no-such-program"])
    assert error.value.exit_code == ExitCode.PROGRAM_MISSING


@pytest.mark.long
def test_a_taken_port_is_named(folder: Path) -> None:
    with Bed(folder, lazy=True) as bed:
        bed.start("subscriber")
        second = PostgresServer(
            "second",
            folder / "second",
            programs=bed.subscriber.programs,
            processes=bed.processes,
            user=bed.run_as,
            port=bed.subscriber.port,
        )
        second.create()
        with pytest.raises(SetupError, match=f"port {second.port} is in use") as error:
            second.start()
        assert error.value.exit_code == ExitCode.PORT_IN_USE


@pytest.mark.long
def test_a_server_that_refuses_to_start_says_why(folder: Path) -> None:
    with Bed(folder, lazy=True) as bed:
        server = bed.server("odd")
        server.create({"max_connections": 0})
        with pytest.raises(SetupError, match="max_connections"):
            server.start()
        assert processes_of(folder / "odd") == []


def test_an_ordinary_user_can_run_it(tmp_path: Path, folder: Path) -> None:
    """As root: by a process of the user nobody, who may read all that Python needs."""
    program = (
        "import os, sys; from pathlib import Path; from services.testbed.bed import Bed\n"
        "with Bed(Path(sys.argv[1]), lazy=True) as bed:\n"
        "    bed.start('subscriber', 'pair'); print(os.geteuid(), bed.run_as.switch)\n"
    )
    command = [sys.executable, "-c", program, str(folder / "bed")]
    uid = os.geteuid()
    if uid == 0:
        nobody = pwd.getpwnam("nobody")
        uid = nobody.pw_uid
        os.chown(folder, uid, nobody.pw_gid)
        read_all = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        user = [f"--reuid={uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
        command = ["setpriv", *user, *read_all, *command]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )
    assert done.stdout == f"{uid} False\n", done.stderr


def _kill_keeper(folder: Path) -> None:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"services.testbed.reaper" in command and str(folder).encode() in command:
            assert f"{MARKER}=".encode() not in (path / "environ").read_bytes()
            os.kill(int(path.name), signal.SIGKILL)
