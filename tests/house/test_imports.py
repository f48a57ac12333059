"""Who may import whom (docs/ARCHITECTURE.md), read from the code's own imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "services", "spark_consumers", "benchmarks")

# room -> the rooms of ours that it may import; the longest room that fits a module is its own.
ALLOWED = {
    "schemas": {"schemas"},
    "services.start": {"services.bridge", "services.failover", "spark_consumers"},
    "services.process": {"schemas"},
    "services.slots": {"schemas"},
    "services.access": {"schemas"},
    "services.shipped": {"schemas"},
    "services.kafka": {"schemas", "services.kafka"},
    "services.bridge": {
        *("schemas", "services.process", "services.slots", "services.kafka", "services.bridge"),
        "services.access",
    },
    "services.bridge.command": {"services.demo"},
    "services.bridge.setup_commands": {"services.shipped"},
    "services.failover": {
        *("schemas", "services.process", "services.slots", "services.kafka", "services.failover"),
        "services.access",
    },
    "services.local": {"schemas", "services.local"},
    "services.demo": {"schemas", "services.process", "services.local", "services.demo"},
    "spark_consumers": {"schemas", "spark_consumers"},
    "benchmarks": {
        *("schemas", "services.local", "services.bridge", "services.demo", "spark_consumers"),
        "benchmarks",
    },
}
PURE = (
    "schemas.lsn",
    "schemas.naming",
    "schemas.shaping",
    "services.bridge.decoding.messages",
    "services.bridge.decoding.decoder",
    "services.bridge.decoding.errors",
    "services.bridge.kafka.waiting",
    "services.bridge.postgres.refusals",
    "services.bridge.stagnation",
    "services.bridge.decoding.pg_types",
    *(
        f"services.bridge.events.values.{name}"
        for name in ("arrays", "catalog", "decimals", "encoders", "geometry", "hstore")
    ),
    *(f"services.bridge.events.values.{name}" for name in ("intervals", "moments", "plain")),
    "services.bridge.events.envelope",
    "services.bridge.events.errors",
    "services.bridge.events.event",
    "services.bridge.events.keys",
    "services.bridge.transactions.assembler",
    "services.bridge.transactions.streams",
    "services.bridge.progress.agreement",
    "services.bridge.progress.errors",
    "services.bridge.progress.evidence",
    "services.bridge.kafka.refused",
    "services.bridge.events.rows",
    "services.bridge.events.shapes",
    "services.bridge.events.writers",
    "services.bridge.events.shaping.masks",
    "services.bridge.events.shaping.outbox",
    "services.bridge.events.shaping.tables",
    "services.failover.address",
    "services.failover.checks.consumers",
    "services.failover.checks.facts",
    "services.failover.checks.hba",
    "services.failover.checks.lag",
    "services.failover.checks.leftovers",
    "services.failover.checks.model",
    "services.failover.checks.pair",
    "services.failover.checks.promotion",
    "services.failover.checks.registry",
    "services.failover.checks.remedies",
    "services.failover.checks.retention",
    "services.failover.checks.slots",
    "services.failover.checks.standby",
    "services.failover.checks.standby_slots",
    "services.failover.checks.upstream",
    "services.failover.checkup",
    "services.failover.effects",
    "services.failover.plan",
    "services.failover.readiness",
    "services.failover.sighting",
    "services.failover.standby_lists",
    "services.failover.statements",
    "services.failover.verdicts",
    "services.failover.view",
    *(
        f"services.failover.watch.{name}"
        for name in ("curves", "decision", "markup", "page", "sight", "status", "topology")
    ),
    "services.demo.comparison",
    "spark_consumers.epochs.parts",
    "spark_consumers.events",
    "spark_consumers.iceberg.layout",
)
IMPURE_IMPORTS = {
    *("psycopg", "confluent_kafka", "socket", "select", "threading", "time", "concurrent"),
    *("subprocess", "asyncio", "requests", "urllib", "http", "random"),
}


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def allowed_for(module: str) -> set[str]:
    rooms = [room for room in ALLOWED if within(module, room)]
    return set().union(*(ALLOWED[room] for room in rooms))


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: str(value))
def test_rooms_import_only_what_they_may(module: str, path: Path) -> None:
    ours = {name for name in imports(path) if name.split(".")[0] in PACKAGES}
    rooms = allowed_for(module)
    strangers = {name for name in ours if not any(within(name, room) for room in rooms)}
    if module != "services":
        assert not strangers, f"{module} may not import {sorted(strangers)}"


def pure_modules() -> list[str]:
    """PURE, a package as all of its modules."""
    names = [name for name, _ in modules()]
    assert all(room in names for room in PURE)
    return [name for name in names if any(within(name, room) for room in PURE)]


@pytest.mark.parametrize("module", pure_modules())
def test_pure_modules_import_no_driver_socket_thread_or_clock(module: str) -> None:
    path = dict(modules())[module]
    impure = {name for name in imports(path) if name.split(".")[0] in IMPURE_IMPORTS}
    assert not impure


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: str(value))
def test_rooms_stay_small(module: str, path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400, f"{module} has {len(lines)} lines"
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1
            assert length <= 70, f"{module}.{node.name} has {length} lines"
