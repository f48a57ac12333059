"""Passwords, salts and options are in nothing that is written: logs, errors, status, metrics."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from schemas.errors import SettingsError
from schemas.settings import load_settings
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import PATIENCE_S, Bridge
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient_ms

HUSH = "Zq9-hush"
"""In every secret, so that one search finds them all."""
PASSWORD, OPTION, SALT, NODE = (f"{HUSH}-{n}-0123456789" for n in ("pg", "sasl", "salt", "node"))
DOCUMENT: dict[str, Any] = {
    "source": {"conninfo": f"host=127.0.0.1 port=1 user=x password={PASSWORD}"},
    "kafka": {
        "bootstrap_servers": "127.0.0.1:1",
        "topic_prefix": "p",
        "options": {"sasl.password": OPTION, "ssl.key.password": OPTION},
    },
    "shaping": {"salt": SALT},
    "bridge": {"connect_deadline_ms": patient_ms(500)},
    "failover": {
        "nodes": {"a": f"host=127.0.0.1 port=1 password={NODE}", "b": f"port=2 password={NODE}"},
        "subscribers": {"s": f"host=127.0.0.1 port=1 password={NODE}"},
        "connect_timeout_s": 2,
    },
}
BROKEN: dict[str, dict[str, Any]] = {
    "no conninfo": {"source": {"conninfo": f"host=x {PASSWORD} nonsense"}},
    "a URI's port": {"source": {"conninfo": f"postgresql://u:{PASSWORD}@h:nonsense/d"}},
    "a list": {"source": {"conninfo": [PASSWORD]}},
    "an unknown key": {"source": {"conninfo": "host=x", "password": PASSWORD}},
    "options that are none": {"kafka": {**DOCUMENT["kafka"], "options": OPTION}},
    "an option of a wrong form": {
        "kafka": {**DOCUMENT["kafka"], "options": {"sasl.password": {"x": OPTION}}}
    },
    "an option that librdkafka lacks": {
        "kafka": {**DOCUMENT["kafka"], "options": {"sasl.pasword": OPTION}}
    },
    "a list of salts": {"shaping": {"salt": [SALT]}},
    "no node": {"failover": {**DOCUMENT["failover"], "nodes": {"a": f"host=x {NODE} nonsense"}}},
}


def test_a_bridge_at_work_tells_no_secret_anywhere(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTBRIDGE_SHAPING__SALT", SALT)
    conninfo = pair.primary.conninfo(fresh_database, password=PASSWORD)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        options = {"sasl.password": OPTION, "sasl.username": OPTION}
        bridge = new_bridge(conninfo, options=options, http_port=0, loaded=False)
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (1)")
        bridge.caught_up()
        eventually(lambda: "/metrics" in bridge.output, what="the port is named")
        (url,) = re.findall(r"http://\S+/metrics", bridge.output)
        with urllib.request.urlopen(url) as answer:
            told = answer.read().decode()
        told += Path(f"/proc/{bridge.pid}/cmdline").read_text()
        told += " ".join(_run(bridge.config, "slotbridge", "status", "--json"))
        told += " ".join(_run(bridge.config, "slotbridge", "status"))
        told += str(connection.execute("SELECT query FROM pg_stat_activity").fetchall())
    assert bridge.stop() == 0, bridge.output
    told += bridge.output + _topics(bridge)
    assert "slotbridge_" in told
    assert HUSH not in told


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ("slotbridge", "run"),
        ("slotbridge", "status", "--json"),
        ("slotfailover", "check", "--json"),
        ("slotfailover", "failover", "--yes", "--json"),
    ],
)
def test_servers_that_do_not_answer_are_told_of_without_secrets(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    failover = {**DOCUMENT["failover"], "journal": str(journal)}
    config = tmp_path / "settings.yaml"
    config.write_text(yaml.safe_dump({**DOCUMENT, "failover": failover}))
    out, err = _run(config, *command)
    assert out + err
    assert "Traceback" not in err
    assert HUSH not in out + err + (journal.read_text() if journal.exists() else "")


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_settings_that_are_wrong_are_told_of_without_secrets(case: str, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(yaml.safe_dump({**DOCUMENT, **BROKEN[case]}))
    command = ("slotfailover", "check") if case == "no node" else ("slotbridge", "run")
    out, err = _run(config, *command)
    assert "error: " in err
    assert "Traceback" not in err
    assert HUSH not in out + err


def test_a_variable_that_is_not_json_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(yaml.safe_dump(DOCUMENT))
    monkeypatch.setenv("SLOTBRIDGE_KAFKA__OPTIONS", json.dumps({"sasl.password": "other"}))
    settings = load_settings(config)
    assert settings.kafka is not None
    assert settings.kafka.options == {"sasl.password": "other", "ssl.key.password": OPTION}
    assert HUSH not in repr(settings)
    monkeypatch.setenv("SLOTBRIDGE_KAFKA__OPTIONS", f'{{"sasl.password": "{OPTION}"')
    with pytest.raises(SettingsError, match="kafka") as caught:
        load_settings(config)
    assert HUSH not in str(caught.value)


def _run(config: Path, command: str, *arguments: str) -> tuple[str, str]:
    done = subprocess.run(
        [Path(sys.executable).parent / command, *arguments, "--config", config],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "COLUMNS": "400"},
    )
    return done.stdout, done.stderr


def _topics(bridge: Bridge) -> str:
    names = [name for name in bridge.topics() if name.startswith(f"{bridge.prefix}.")]
    return str([bridge.records(name[len(bridge.prefix) + 1 :]) for name in names])
