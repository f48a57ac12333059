"""Who may import whom (docs/why/architecture.md), read from the code's own imports."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("slotbridge", "schemas", "services", "spark_consumers", "benchmarks")

# What is one state machine, or one table of transitions, stays in one module of up to 600 lines.
STATE_MACHINES = {
    "services.bridge.events.envelope",
    "services.bridge.session.start",
    "services.bridge.snapshot.snapshotter",
    "services.failover.execute.run",
}

# room -> the rooms of ours that it may import; the longest room that fits a module is its own.
ALLOWED = {
    "slotbridge": {"schemas", "services.kafka", "slotbridge"},
    "schemas": {"schemas"},
    "services.start": {"services.adoption", "services.failover", "spark_consumers"},
    "services.runtime": {"schemas"},
    "services.runtime.process": {"services.runtime.http_server"},
    "services.runtime.tracing": {"services.runtime.otlp"},
    "services.postgres": {"schemas", "services.postgres"},
    "services.shipped": {"schemas"},
    "services.waiter": set(),
    "services.kafka": {"schemas", "services.kafka", "services.waiter"},
    "services.bridge": {
        *("schemas", "services.runtime", "services.postgres", "services.kafka"),
        *("services.bridge", "services.waiter"),
    },
    "services.bridge.cli.app": {"services.demo"},
    "services.bridge.cli.setup": {"services.shipped"},
    "services.bridge.cli.tail": {"spark_consumers.formats"},
    "services.adoption": {
        *("schemas", "services.runtime", "services.postgres", "services.kafka"),
        *("services.bridge", "services.adoption"),
    },
    "services.failover": {
        *("schemas", "services.runtime", "services.postgres", "services.kafka"),
        "services.failover",
    },
    "services.testbed": {"schemas", "services.testbed"},
    "services.demo": {"schemas", "services.runtime", "services.testbed", "services.demo"},
    "spark_consumers": {"schemas", "services.runtime.tracing", "spark_consumers"},
    **{
        f"spark_consumers.epochs.{name}": {"services.runtime"}
        for name in ("job", "metrics", "wait_page")
    },
    "spark_consumers.epochs.tracing": {"services.runtime.otlp"},
    "spark_consumers.command": {"services.testbed.jars"},
    "spark_consumers.verify": {"services.postgres.sessions"},
    "spark_consumers.restore": {"services.postgres.sessions"},
    "spark_consumers.kafka.formats": {"services.kafka.schema_registry"},
    "spark_consumers.kafka.reader": {"services.kafka.client"},
    "spark_consumers.kafka.small_topic_tail": {"services.kafka.client"},
    "benchmarks": {
        *("schemas", "services.testbed", "services.bridge", "services.demo", "spark_consumers"),
        *("services.waiter", "benchmarks"),
    },
}
LAYERS = {
    "services.bridge": (
        *(("failpoints", "metrics", "descriptors", "compiled"), ("pgoutput",), ("progress",)),
        *(("source",), ("events",), ("transactions",), ("sink",), ("recovery",)),
        *(("snapshot", "hanging"), ("repair", "publication", "preflight", "status", "proposal")),
        *(("session",), ("cli",)),
    ),
    "services.failover": (
        *(("model",), ("checks",), ("observe",), ("plan",), ("execute",), ("drill", "watch")),
        ("cli",),
    ),
    "spark_consumers": (
        (
            "java",
            "java_program",
            "session",
            "sql",
            "key_index",
            "executor",
            "liveness",
            "status",
            "formats",
        ),
        ("events",),
        *(
            ("failures", "kafka"),
            ("iceberg",),
            ("apply",),
            ("epochs",),
            ("blame", "verify", "operations"),
        ),
        *(("restore", "audit", "terminal"), ("command",), ("submit",)),
    ),
}
"""Service -> its rooms from the ground up: each imports itself and rooms below it."""
IMPURE_IMPORTS = {
    *("psycopg", "confluent_kafka", "socket", "select", "threading", "time", "concurrent"),
    *("subprocess", "asyncio", "requests", "urllib", "http", "random"),
}
PURE_IMPORTS = {"psycopg.sql", "urllib.parse.quote", "urllib.parse.unquote"}
"""Parts of those packages that only make text."""


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


@functools.cache
def imports(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def allowed_for(module: str) -> set[str]:
    rooms = [room for room in ALLOWED if within(module, room)]
    return set().union(*(ALLOWED[room] for room in rooms))


def floor(service: str, module: str) -> tuple[int, str]:
    """The layer of a module of the service, and the room that it is in."""
    room = module.removeprefix(service + ".").partition(".")[0]
    return next(n for n, rooms in enumerate(LAYERS[service]) if room in rooms), room


@pytest.mark.parametrize("service", LAYERS)
def test_no_room_of_a_service_imports_one_above_it_or_beside_it(service: str) -> None:
    wrong = []
    for module, path in modules():
        if not within(module, service) or module == service:
            continue
        layer, room = floor(service, module)
        for name in imports(path):
            if within(name, service) and name != service:
                there, other = floor(service, name)
                if other != room and there >= layer:
                    wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


DOORS = {"services.bridge.hanging": "services.bridge.hanging.settle_all"}
"""Room -> the one name that modules outside of it may import."""


@pytest.mark.parametrize("room", DOORS)
def test_a_room_with_a_door_is_entered_by_it(room: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules()
        for name in imports(path)
        if not within(module, room) and within(name, room) and name != DOORS[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_import_only_what_they_may() -> None:
    wrong = []
    for module, path in modules():
        ours = {name for name in imports(path) if name.split(".")[0] in PACKAGES}
        rooms = allowed_for(module)
        strangers = {name for name in ours if not any(within(name, room) for room in rooms)}
        if strangers and module != "services":
            wrong.append(f"{module} may not import {sorted(strangers)}")
    assert not wrong, "\n".join(wrong)


WITHOUT_SPARK = ("spark_consumers.command", "spark_consumers.epochs.metrics")
"""What the wheel without the extra `spark` can import: `--version`, `--help`, its metrics."""


@pytest.mark.slow
@pytest.mark.parametrize("module", WITHOUT_SPARK)
def test_what_tells_of_slottables_needs_no_spark(module: str) -> None:
    hidden = "sys.modules.update(dict.fromkeys(('pyspark', 'py4j', 'pyarrow'), None))"
    code = f"import sys; {hidden}; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tests_of_other_services_need_no_spark() -> None:
    """`make pythons` runs them in an environment without it, for every Python."""
    own = ("spark_consumers", "promises/tables")
    spark = re.compile("spark_consumers|benchmarks|import pyspark|from pyspark")
    found = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if not any(path.is_relative_to(ROOT / "tests" / folder) for folder in own)
        and spark.search(path.read_text(encoding="utf-8"))
    ]
    assert "tests.providers.iceberg_sink" in found
    hidden = "sys.modules.update(dict.fromkeys(('pyspark', 'py4j', 'pyarrow'), None))"
    code = f"import sys, importlib; {hidden}; [importlib.import_module(n) for n in {found}]"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def is_pure(path: Path) -> bool:
    """Whether the docstring of the module says "Pure", as the first word of a sentence."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.search(r"\bPure\b", docstring) is not None


def test_pure_modules_import_no_driver_socket_thread_or_clock() -> None:
    pure = {module: imports(path) - PURE_IMPORTS for module, path in modules() if is_pure(path)}
    assert len(pure) > 200
    impure = {
        module: names
        for module, imported in pure.items()
        if (names := [name for name in imported if name.split(".")[0] in IMPURE_IMPORTS])
    }
    assert not impure


def test_rooms_stay_small() -> None:
    wrong = []
    for module, path in modules():
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > (600 if module in STATE_MACHINES else 400):
            wrong.append(f"{module} has {len(lines)} lines")
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                length = node.end_lineno - node.lineno + 1
                if length > 70:
                    wrong.append(f"{module}.{node.name} has {length} lines")
    assert not wrong, "\n".join(wrong)
