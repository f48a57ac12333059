"""The slot is lost, or moved by somebody; `slotbridge recover` repairs the topics in place."""

import os
import random
import subprocess
import sys
import time
from typing import Final

from services.bridge.failpoints import OF_A_RECOVERY, VARIABLE
from tests.promises.bridge.recover_process import drop_slot
from tests.providers.databases import connect
from tests.torture.checker import Finding
from tests.torture.clients import decide_leftovers
from tests.torture.faults import Fault
from tests.torture.torture_run import TortureRun

_KILLED: Final = -9
_RECOVER_S: Final = 600.0
_KILLED_SHARE: Final = 0.5


def lose_slot(run: TortureRun, fault: Fault) -> None:
    """No slot decodes what clients do meanwhile. The repair may be killed and run again."""
    if run.given_up or run.commits_wait:  # a repair is refused while commits wait for the bridge
        run.faults[fault.name] -= 1
        return
    moments = random.Random(f"{fault}")
    run.bridge_streams()
    if moments.random() < 0.5:
        run.supervised.kill()
    with run.supervised.paused():
        drop = moments.random() < 0.5
        with connect(run.primary) as connection:
            if drop:
                drop_slot(connection, run.bridge.slot)
            time.sleep(fault.seconds)
        with run.clients_held():
            with connect(run.primary, run.dbname) as connection:
                decide_leftovers(connection)
                if not drop:
                    connection.execute(
                        "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())",
                        [run.bridge.slot],
                    )
            killed_at = moments.choice(OF_A_RECOVERY)
            if moments.random() < _KILLED_SHARE:
                _recover(run, f"{killed_at}:1")
            code, output = _recover(run)
    run.note("slot dropped" if drop else "slot advanced", f"recover ended in {code}")
    if code:
        run.findings.append(Finding("wrong", f"recover ended in {code}: {output[-1500:]}"))
        run.supervised.operator_needed = code
    run.bridge_streams()


def _recover(run: TortureRun, failpoint: str = "") -> tuple[int, str]:
    """Run it to its end, which may be a failpoint's; its exit code, and what it writes."""
    command = [sys.executable, "-m", "tests.torture.recover_process", run.sabotage]
    options = ["--config", str(run.bridge.config), "--yes"]
    done = subprocess.run(
        [*command, "recover", *options],
        env={**os.environ, VARIABLE: failpoint},
        capture_output=True,
        text=True,
        check=False,
        timeout=_RECOVER_S,
    )
    with (run.folder / "recover.log").open("a", encoding="utf-8") as file:
        file.write(f"{failpoint} {done.returncode}\n{done.stdout}{done.stderr}\n")
    run.repair_kills += done.returncode == _KILLED
    return done.returncode, done.stderr
