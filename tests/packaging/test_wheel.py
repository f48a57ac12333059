"""The wheel, built from the sdist and installed into an empty environment, carries rows to Kafka.

Neither the checkout nor this environment is on the path of what runs: only what the wheel and the
locked packages bring.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from services.demo.copies import committed
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient

pytestmark = pytest.mark.long  # it gets packages and compiles
ROOT = Path(__file__).parents[2]
PACKAGES = ("slotbridge", "schemas", "services", "spark_consumers")
SOURCES = (*PACKAGES, "sql", "docs", "examples", "requirements", "helm")
FILES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "Makefile"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy of the sources, so that nothing is written into the checkout."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        ignored = shutil.ignore_patterns("*.so", "*.c", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    made = "from setuptools import build_meta; print(build_meta.build_sdist('out'))"
    run([sys.executable, "-c", made], folder)
    (found,) = (folder / "out").glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(sdist.parent)]
    run([sys.executable, "-m", "pip", "wheel", *options, str(sdist)], sdist.parent)
    (found,) = sdist.parent.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bin folder of an environment with the locked packages and the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    run([*pip, "--require-hashes", "-r", str(ROOT / "requirements/run.txt")], folder)
    run([*pip, str(wheel)], folder)
    yield folder / "bin"
    shutil.rmtree(folder)


def test_the_sdist_and_the_wheel_have_what_they_need(sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "sql/roles.sql", "examples/bridge.yaml"} <= inside
    assert {"docs/start/install.md", "docs/reference/configuration.schema.json"} <= inside
    assert "services/bridge/compiled/rows.pyx" in inside
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= inside
    names = zipfile.ZipFile(wheel).namelist()
    assert "services/shipped/sql/roles.sql" in names
    assert "services/shipped/docs/start/install.md" in names
    examples = ("rejoin", "bridge.yaml", "dashboards/bridge.json", "systemd/slotbridge.service")
    assert {f"services/shipped/examples/{name}" for name in examples} <= set(names)
    typed = {f"{name}/py.typed" for name in PACKAGES}
    assert typed <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_the_installed_commands_tell_one_version(programs: Path) -> None:
    told = {
        run([str(programs / name), "--version"], programs)
        for name in ("slotbridge", "slotfailover", "slottables")
    }
    assert len(told) == 1
    assert "unknown" not in told.pop()
    assert "CREATE ROLE" in run([str(programs / "slotbridge"), "sql", "roles"], programs)
    assert "# Install" in run([str(programs / "slotbridge"), "docs", "install"], programs)


@pytest.mark.long
def test_the_installed_bridge_brings_rows_to_kafka(
    bed: Provider, fresh_database: str, topic_prefix: str, programs: Path, tmp_path: Path
) -> None:
    where = "from services.bridge import compiled; print(compiled.__file__, bool(compiled.engine))"
    told = run([str(programs / "python"), "-c", where], tmp_path)
    assert str(ROOT) not in told
    assert shutil.which("cc") is None or told.endswith("True\n"), "the wheel is not compiled"

    conninfo = bed.primary.conninfo(fresh_database)
    config = tmp_path / "c.yaml"
    config.write_text(run([str(programs / "slotbridge"), "init"], tmp_path), encoding="utf-8")
    settings = {
        "SLOTBRIDGE_SOURCE__CONNINFO": conninfo,
        "SLOTBRIDGE_SOURCE__SLOT": f"s_{topic_prefix}",
        "SLOTBRIDGE_SNAPSHOT__MODE": "never",
        "SLOTBRIDGE_SOURCE__PUBLICATION": f"p_{topic_prefix}",
        "SLOTBRIDGE_KAFKA__BOOTSTRAP_SERVERS": bed.kafka.bootstrap_servers,
        "SLOTBRIDGE_KAFKA__TOPIC_PREFIX": topic_prefix,
        "SLOTBRIDGE_KAFKA__REPLICATION_FACTOR": "1",
        "SLOTBRIDGE_BRIDGE__SPOOL_FOLDER": str(tmp_path),
        "SLOTBRIDGE_BRIDGE__HTTP_PORT": "0",
    }
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        log = tmp_path / "log"
        with log.open("wb") as output:
            command = [str(programs / "slotbridge"), "run", "--config", str(config)]
            bridge = subprocess.Popen(
                command, cwd=tmp_path, env=alone() | settings, stdout=output, stderr=output
            )
        try:
            slots = "SELECT count(*) FROM pg_replication_slots WHERE active AND database = %s"

            def streams() -> bool:
                assert bridge.poll() is None, log.read_text()
                row = connection.execute(slots, [fresh_database]).fetchone()
                return row is not None and row[0] == 1 and "streaming" in log.read_text()

            eventually(streams, what="the installed bridge streams", timeout_s=60)
            connection.execute("INSERT INTO t SELECT generate_series(1, 100)")
            topic = f"{topic_prefix}.public.t"

            def arrived() -> bool:
                known = AdminClient({"bootstrap.servers": bed.kafka.bootstrap_servers})
                if topic not in known.list_topics(timeout=patient(60)).topics:
                    return False
                return len(list(committed(bed.kafka.bootstrap_servers, topic))) == 100

            eventually(arrived, what="100 events are in Kafka", timeout_s=60)
        finally:
            bridge.terminate()
            code = bridge.wait(timeout=patient(180))
        assert code == 0, log.read_text()


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=alone(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alone() -> dict[str, str]:
    """The environment without what would put other packages on the path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
