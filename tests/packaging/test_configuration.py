"""What a newcomer writes a configuration with: `init`, `check-config`, examples/, the reference."""

import json
import os
import py_compile
import re
import tempfile
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from schemas.errors import ExitCode
from schemas.example import SECTIONS
from schemas.json_schema import all_models, settings_schema
from schemas.reference import keys
from schemas.settings import load_settings
from services.bridge.cli.app import app
from services.failover.cli.app import app as failover
from services.shipped import names, text
from spark_consumers.command import app as tables
from tools.generate import generated

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def slotbridge(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


@pytest.mark.parametrize("sections", [(), *((section,) for section in SECTIONS), SECTIONS])
def test_init_writes_a_file_that_check_config_accepts(
    sections: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    chosen = [part for section in sections for part in ("--section", section)]
    code, told = slotbridge("init", *chosen, file)
    assert code == ExitCode.OK, told
    assert file.stat().st_mode & 0o777 == 0o600
    code, told = slotbridge("check-config", "--config", file)
    assert code == ExitCode.OK, told
    assert "not judged: whether servers answer" in told


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each program; a file that is named on the command line goes before it."""
    file = tmp_path / "c.yaml"
    assert slotbridge("init", file)[0] == ExitCode.OK
    monkeypatch.setenv("SLOTBRIDGE_CONFIG", str(file))
    assert slotbridge("check-config")[0] == ExitCode.OK
    assert slotbridge("check-config", "--config", tmp_path / "other")[0] == ExitCode.SETTINGS
    for program, command in ((failover, "check"), (tables, "epochs")):
        done = CliRunner().invoke(program, [command, "--help"])
        assert "SLOTBRIDGE_CONFIG" in done.output


def test_check_config_parses_expressions(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("shaping: {filters: {public.t: 'n >'}}")
    code, told = slotbridge("check-config", "--config", file)
    assert (code, "Syntax error" in told) == (ExitCode.SETTINGS, True)
    file.write_text("shaping: {filters: {public.t: 'n > 2'}}")
    code, told = slotbridge("check-config", "--config", file)
    assert (code, "whether shaping fits its tables" in told) == (ExitCode.OK, True)


def test_init_keeps_a_file_that_exists(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("mine")
    code, told = slotbridge("init", file)
    assert code == ExitCode.SETTINGS
    assert "does not exist" in told
    assert file.read_text() == "mine"


@pytest.mark.slow
def test_every_commented_key_of_init_is_accepted_when_uncommented(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    written = slotbridge("init", "--all")[1]
    lines = [
        line.replace("# ", "", 1)
        for line in written.splitlines()
        if not line.lstrip().startswith("# ") or _is_a_key(line)
    ]
    file.write_text("\n".join(lines))
    assert load_settings(file).failover is not None


def _is_a_key(line: str) -> bool:
    name = line.strip().removeprefix("# ").partition(":")[0]
    return name in {key.path.rpartition(".")[2] for key in keys()} and "#" not in line.strip()[1:]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_accepted(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTBRIDGE_SHAPING__SALT", "a secret of at least sixteen characters")
    code, told = slotbridge("check-config", "--config", example)
    assert code == ExitCode.OK, told


def test_alerts_and_dashboards_are_there_without_the_chart() -> None:
    """Each alert has a runbook; no expression selects pods or has a part of the template."""
    rules = yaml.safe_load(slotbridge("examples", "alerts.yml")[1])["groups"][0]["rules"]
    runbooks = (ROOT / "docs/reference/runbooks.md").read_text(encoding="utf-8")
    assert {rule["alert"] for rule in rules} == set(re.findall(r"^### (Slot\w+)", runbooks, re.M))
    for rule in rules:
        assert not {"{{", "pod=", "namespace=", "$"} & set(
            re.findall(r"\{\{|\w+=|\$", rule["expr"])
        )
        assert rule["annotations"]["runbook_url"].endswith(f"#{rule['alert'].lower()}")
    assert yaml.safe_load(slotbridge("examples", "prometheus.yml")[1])["rule_files"] == [
        "alerts.yml"
    ]
    for name in ("bridge", "failover", "tables"):
        chart = ROOT / "helm/slotbridge/dashboards" / f"{name}.json"
        shown = slotbridge("examples", f"dashboards/{name}.json")[1]
        assert json.loads(shown) == json.loads(chart.read_text(encoding="utf-8"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_json_schema_accepts_every_example(example: Path) -> None:
    document = yaml.safe_load(example.read_text(encoding="utf-8"))
    jsonschema.validate(document, settings_schema())


@pytest.mark.parametrize(
    "document", [{"sauce": {}}, {"source": {"slots": "s"}}, {"kafka": {"partitions": "three"}}]
)
def test_the_json_schema_refuses_what_check_config_refuses(
    document: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, settings_schema())
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(document))
    assert slotbridge("check-config", "--config", file)[0] == ExitCode.SETTINGS


def test_the_json_schema_is_of_no_machine_and_knows_every_key() -> None:
    schema = settings_schema()
    assert slotbridge("schema")[1] == json.dumps(schema, indent=1) + "\n"
    assert tempfile.gettempdir() not in json.dumps(schema)
    described = {
        f"{name}.{key}"
        for name, definition in schema["$defs"].items()
        for key, value in definition["properties"].items()
        if value["description"]
    }
    known = {f"{m.__name__}.{key}" for m in all_models() for key in m.model_fields}
    assert known == described


@pytest.mark.parametrize(
    ("options", "advised"),
    [({}, True), ({"spark.jars": "a.jar"}, False), ({"spark.jars.packages": "g:a:1"}, False)],
)
def test_check_config_tells_of_jars_that_nobody_names(
    tmp_path: Path, options: dict[str, str], *, advised: bool
) -> None:
    file = tmp_path / "c.yaml"
    document = {"tables": {"warehouse": str(tmp_path), "spark_options": options}}
    file.write_text(yaml.safe_dump(document))
    code, told = slotbridge("check-config", "--config", file)
    assert (code, "has no spark.jars" in told) == (0, advised), told


def test_check_config_refuses_and_advises(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "source: {conninfo: host=a}\n"
        "kafka: {bootstrap_servers: b, topic_prefix: p, replication_factor: 1}"
    )
    code, told = slotbridge("check-config", "--config", file)
    assert code == ExitCode.OK
    assert "kafka.replication_factor is 1" in told
    assert "source.conninfo names one host" in told
    file.write_text("source: {conninfo: nonsense}")
    code, told = slotbridge("check-config", "--config", file)
    assert code == ExitCode.SETTINGS
    assert "source.conninfo is not a connection string" in told


def test_every_key_has_a_meaning() -> None:
    assert [key.path for key in keys() if not key.meaning] == []


def test_files_generated_from_the_settings_are_current() -> None:
    made = generated()
    stale = [path for path in made if path.read_text(encoding="utf-8") != made[path]]
    assert not stale, "run: make generate"


def test_scripts_are_printed_whole() -> None:
    assert names("sql") == sorted(path.stem for path in (ROOT / "sql").glob("*.sql"))
    roles = text("sql", "roles.sql")
    assert "pg_promote" in roles
    assert "\\ir" not in roles
    code, told = slotbridge("sql", "rolls")
    assert code == ExitCode.SETTINGS
    assert "one of failover_functions" in told
    assert slotbridge("docs", "operate")[1] == slotbridge("docs", "guides/operate")[1]
    assert {"rejoin", "bridge.yaml", "systemd/slotbridge.service"} <= set(names("examples"))
    program = slotbridge("examples", "consumer.py")
    assert program[0] == 0 and "slotbridge.consumer" in program[1]
    assert slotbridge("examples", "consumer") == program
    assert slotbridge("examples", "systemd/slotbridge") == slotbridge(
        "examples", "systemd/slotbridge.service"
    )
    code, told = slotbridge("examples", "consume")
    assert code == ExitCode.SETTINGS and "consumer.py, " in told
    assert slotbridge("examples", "rejoin")[1].startswith("#!/bin/sh")


def test_what_python_compiles_beside_an_example_is_not_an_example() -> None:
    """An installer compiles all modules of a wheel, among them consumer.py."""
    compiled = ROOT / "examples" / "__pycache__" / f"of_test-{os.getpid()}.pyc"
    compiled.parent.mkdir(exist_ok=True)
    py_compile.compile(str(ROOT / "examples" / "consumer.py"), cfile=str(compiled), doraise=True)
    try:
        assert [name for name in names("examples") if "__pycache__" in name] == []
    finally:
        compiled.unlink()


def test_compose_mounts_files_that_exist_and_a_configuration_that_is_accepted() -> None:
    document = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    services = document["services"]
    assert set(services) == {"pg-a", "pg-b", "kafka", "bridge", "failover", "tables"}
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in document["volumes"] or (ROOT / source).exists(), source
    kafka = services["kafka"]
    assert kafka["volumes"] == [f"kafka:{kafka['environment']['KAFKA_LOG_DIRS']}"]
    assert services["bridge"]["tmpfs"] == ["/var/lib/slotbridge:uid=10001,gid=10001,mode=700"]
    code, told = slotbridge("check-config", "--config", ROOT / "examples/compose/slotbridge.yaml")
    assert code == ExitCode.OK, told
    targets = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for name in ("bridge", "failover", "tables"):
        assert f" AS {services[name]['build']['target']}\n" in targets
