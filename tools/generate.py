"""What the chart takes from the settings' classes: values.schema.json, and the table of its README.

python -m tools.generate      writes both, and the pages and examples made from the code
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import yaml

from schemas.example import SECTIONS, example_file
from schemas.json_schema import all_models, schema_file_text
from schemas.reference import field_meanings, page
from schemas.settings import Settings
from tools.alerts import alerts
from tools.commands_page import commands_page
from tools.dashboards import DASHBOARDS, dashboard
from tools.metrics_page import metrics_page
from tools.modules_table import PAGE, architecture_page

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "helm" / "slotbridge"
CHOSEN_BY_THE_CHART: Final = {
    "BridgeSettings": ("http_host", "http_port", "spool_folder", "standby"),
    "WatchSettings": ("http_host", "http_port"),
    "FailoverSettings": ("journal",),
    "LeaseSettings": ("name",),
    "DrillSettings": ("folder",),
    "TablesSettings": ("http_host", "http_port"),
}
SECRET: Final = {
    "BridgeSettings": ("token",),
    "WatchSettings": ("token",),
    "ShapingSettings": ("salt",),
    "RegistrySettings": ("password",),
}
FROM_THE_ENVIRONMENT: Final = {
    "SourceSettings": ("conninfo",),
    "KafkaSettings": ("bootstrap_servers", "topic_prefix"),
    "FailoverSettings": ("nodes",),
    "TablesSettings": ("warehouse",),
}
"""Required keys that a Secret may bring; the templates say which is missing."""
OF_A_BRIDGE: Final = ("source", "kafka", "bridge", "shaping", "snapshot")
"""Sections that may differ from bridge to bridge."""
ADDITIONS: Final = {
    "ports": {"type": "array", "minItems": 1, "items": {"type": "integer", "maximum": 65535}},
    "quantity": {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"},
    "secretName": {"type": "string", "pattern": "^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"},
}
_KNOWN: Final[dict[str, dict[str, Any]]] = {
    "bridge.replicas": {"type": "integer", "minimum": 1, "maximum": 10},
    "failover.replicas": {"type": "integer", "minimum": 1, "maximum": 10},
    "tables.spark.mode": {"enum": ["local", "kubernetes"]},
    "tables.spark.executors.count": {"type": "integer", "minimum": 1},
    "tables.spark.executors.cores": {"type": "integer", "minimum": 1},
    "tables.spark.executors.cpu": {"type": "string", "pattern": "^[0-9]+m?$"},
    "tables.spark.executors.memory": {"type": "string", "pattern": "^[0-9]+[mg]$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "networkPolicy.postgresPorts": {"$ref": "#/$defs/ports"},
    "networkPolicy.kafkaPorts": {"$ref": "#/$defs/ports"},
    "networkPolicy.apiServerPorts": {"$ref": "#/$defs/ports"},
    "drill.schedule": {"type": "string", "minLength": 9},
    "maintain.schedule": {"type": "string", "minLength": 9},
    "monitoring.prometheusRule.lagBytes": {"type": "integer", "minimum": 1},
    "monitoring.prometheusRule.lagSeconds": {"type": "integer", "minimum": 1},
    "monitoring.prometheusRule.tablesLagSeconds": {"type": "integer", "minimum": 1},
    "monitoring.prometheusRule.tablesAuditSeconds": {"type": "integer", "minimum": 1},
}
_FREE: Final = ("resources", "nodeSelector", "affinity", "annotations", "labels", "podLabels")
_FREE_TOO: Final = ("podAnnotations", "podSecurityContext", "securityContext")


def schema() -> dict[str, Any]:
    """Return values.schema.json: the chart's own values by their defaults, `config` by Settings."""
    sections = Settings.model_json_schema()
    definitions = sections["$defs"]
    for model in all_models():
        _adapt(definitions[model.__name__], model.__name__, field_meanings(model))
    properties = {
        name: _own(value, name)
        for name, value in values().items()
        if name not in ("config", "bridges")
    }
    config = {
        name: {"$ref": _reference(section)} for name, section in sections["properties"].items()
    }
    properties["config"] = _closed(config)
    properties["bridges"] = {
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {
            "^[a-z0-9]{1,20}$": _closed({name: config[name] for name in OF_A_BRIDGE})
        },
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart slotbridge",
        "type": "object",
        "additionalProperties": False,
        "properties": {**properties, "global": {"type": "object"}},
        "$defs": {**definitions, **ADDITIONS},
    }


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def values() -> dict[str, Any]:
    """Return the chart's default values."""
    loaded = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def _adapt(definition: dict[str, Any], name: str, meanings: dict[str, str]) -> None:
    """Leave out what the chart or a Secret sets, and defaults, which may be of this machine."""
    properties = definition["properties"]
    for key in (*CHOSEN_BY_THE_CHART.get(name, ()), *SECRET.get(name, ())):
        del properties[key]
    required = [
        key
        for key in definition.get("required", ())
        if key not in FROM_THE_ENVIRONMENT.get(name, ())
    ]
    definition.pop("required", None)
    if required:
        definition["required"] = required
    for key, meaning in meanings.items():
        if key in properties:
            properties[key]["description"] = meaning
    _strip(definition)


def _strip(node: Any) -> None:
    """Remove titles, defaults and formats: helm judges values, not where they come from."""
    if isinstance(node, dict):
        for key in ("default", "format", "writeOnly"):
            node.pop(key, None)
        if isinstance(node.get("title"), str):
            del node["title"]
        for key, value in node.items():
            if key == "minItems" and node.get("type") == "object":
                continue
            _strip(value)
    elif isinstance(node, list):
        for value in node:
            _strip(value)


def _reference(section: dict[str, Any]) -> str:
    if "$ref" in section:
        return str(section["$ref"])
    return next(str(part["$ref"]) for part in section["anyOf"] if "$ref" in part)


def _own(value: Any, path: str) -> dict[str, Any]:
    name = path.rpartition(".")[2]
    if path in _KNOWN:
        return _KNOWN[path]
    if name in (*_FREE, *_FREE_TOO):
        return {"type": "object"}
    if name == "existingSecret":
        return {"$ref": "#/$defs/secretName"}
    if name == "size":
        return {"$ref": "#/$defs/quantity"}
    if isinstance(value, dict):
        return {
            "type": "object",
            "additionalProperties": False,
            "properties": {key: _own(part, f"{path}.{key}") for key, part in value.items()},
        }
    if isinstance(value, list):
        return {"type": "array"}
    kinds = {bool: "boolean", int: "integer", str: "string"}
    return {"type": kinds[type(value)]}


def readme() -> str:
    """Return the chart's README with a table of all values."""
    text = (CHART / "README.md.in").read_text(encoding="utf-8")
    rows = ["| value | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{path}` | `{json.dumps(default)}` | {meaning.replace('|', chr(92) + '|')} |"
        for path, default, meaning in _documented(values(), _comments())
    ]
    return text.replace("@VALUES@", "\n".join(rows)).replace("@VERSION@", version())


def version() -> str:
    """Return the version that pyproject.toml has, the one place where it is written."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def chart_file() -> str:
    """Return Chart.yaml with the version of the package as its own and its application's."""
    text = (CHART / "Chart.yaml").read_text(encoding="utf-8")
    return re.sub(r"^(version|appVersion): .*$", rf"\1: {version()}", text, flags=re.MULTILINE)


def _documented(
    node: dict[str, Any], comments: dict[str, str], prefix: str = ""
) -> list[tuple[str, Any, str]]:
    found: list[tuple[str, Any, str]] = []
    for name, value in node.items():
        path = f"{prefix}{name}"
        deeper = isinstance(value, dict) and value and name not in (*_FREE, *_FREE_TOO)
        if deeper:
            if path in comments:
                found.append((path, "…", comments[path]))
            found += _documented(value, comments, f"{path}.")
        else:
            found.append((path, value, comments.get(path, "")))
    return found


def _comments() -> dict[str, str]:
    """Return path -> the comment that begins with `# --` above it in values.yaml."""
    found: dict[str, str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            if text.startswith("# -- "):
                comment = [text.removeprefix("# -- ")]
            elif comment:
                comment.append(text.removeprefix("# "))
            continue
        match = re.match(r"( *)([A-Za-z]+):", line)
        if match:
            path = [*path[: len(match[1]) // 2], match[2]]
            if comment:
                found[".".join(path)] = " ".join(comment)
        comment = []
    return found


def generated() -> dict[Path, str]:
    """Return file -> what it must be."""
    return {
        CHART / "values.schema.json": json.dumps(schema(), indent=1, sort_keys=True) + "\n",
        CHART / "README.md": readme(),
        CHART / "Chart.yaml": chart_file(),
        **{CHART / "dashboards" / f"{name}.json": dashboard(name) for name in DASHBOARDS},
        ROOT / "examples/prometheus/alerts.yml": alerts(),
        ROOT / "docs/reference/settings.md": page(),
        ROOT / "docs/reference/metrics.md": metrics_page(),
        ROOT / "docs/reference/commands.md": commands_page(),
        PAGE: architecture_page(),
        ROOT / "docs/reference/configuration.schema.json": schema_file_text(),
        ROOT / "examples" / "bridge.yaml": example_file(),
        ROOT / "examples" / "failover.yaml": example_file(["failover"]),
        ROOT / "examples" / "all.yaml": example_file(SECTIONS),
    }


if __name__ == "__main__":
    for file, content in generated().items():
        file.write_text(content, encoding="utf-8")
