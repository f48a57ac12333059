"""The blocks of docs/start/quick-start.md, run as one script on a real pair and broker."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg

from services.testbed.ports import free_port
from tests.conftest import NewPair
from tests.providers.interface import Broker
from tests.providers.waiting import patient

PAGE = Path(__file__).parents[3] / "docs/start/quick-start.md"


def test_the_quick_start_as_it_is_written(new_pair: NewPair, kafka: Broker, tmp_path: Path) -> None:
    trio = new_pair()
    named, *blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    ours = {
        "PRIMARY_HOST": "127.0.0.1",
        "PRIMARY_PORT": str(trio.primary.port),
        "STANDBY_HOST": "127.0.0.1",
        "STANDBY_PORT": str(trio.standby.port),
        "DBNAME": trio.dbname,
        "ADMIN": "postgres",
        "KAFKA": kafka.bootstrap_servers,
    }
    shared = {"SLOTBRIDGE_BRIDGE__HTTP_PORT": str(free_port())}  # other tests run meanwhile
    assert set(re.findall(r"\b([A-Z_]+)=", named)) == ours.keys()
    programs = [Path(sys.executable).parent, trio.primary.tool_path("psql").parent]  # type: ignore[attr-defined]
    path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
    script = "set -euo pipefail\n" + "\n".join(blocks)
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **ours, **shared, "PATH": path, "PGCONNECT_TIMEOUT": "30"},
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(400),
    )
    log = tmp_path / "slotbridge.log"
    told = ran.stderr + (log.read_text() if log.exists() else "")
    assert ran.returncode == 0, told
    assert "a start is not refused" in ran.stdout
    assert "changes flow" in ran.stdout
    records = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"topic"')]
    assert [record["topic"] for record in records] == [f"{trio.dbname}.public.quickstart"]
    event = records[0]["value"]
    payload = event.get("payload", event)
    assert (payload["op"], payload["after"]) == ("c", {"id": 1, "note": "hello"})
    with psycopg.connect(trio.primary.conninfo(trio.dbname), autocommit=True) as connection:
        left = connection.execute(
            "SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'slotbridge')"
            " + (SELECT count(*) FROM pg_publication)"
        ).fetchone()
        assert left == (0,)
