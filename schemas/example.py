"""The commented configuration file that `slotbridge init` writes.

Keys that a person must or should set are there with an example; all others are comments with their
default, so that the file works as it is once the examples are replaced.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import yaml

from schemas.reference import Key, keys

Value = str | Sequence[str] | None
"""A value, the lines below its key, or None: only the key's default, as a comment."""

SECTIONS: Final = (
    *("source", "kafka", "registry", "bridge", "shaping", "snapshot", "failover", "tables"),
    "claim_check",
    "tracing",
)
USUAL: Final = ("source", "kafka", "bridge")
_WIDTH: Final = 96
_EXAMPLES: Final = {
    "source.conninfo": "host=pg-a,pg-b port=5432,5432 dbname=bank user=slotbridge"
    " target_session_attrs=read-write",
    "kafka.bootstrap_servers": "kafka-1:9092,kafka-2:9092,kafka-3:9092",
    "kafka.topic_prefix": "bank",
    "kafka.replication_factor": "3",
    "registry.url": "https://registry:8081",
    "claim_check.uri": "s3://bucket/large-values",
    "bridge.spool_folder": "/var/lib/slotbridge",
    "bridge.http_host": "127.0.0.1",
    "bridge.http_port": "9187",
    "failover.nodes": "{a: host=pg-a dbname=bank user=slotfailover,"
    " b: host=pg-b dbname=bank user=slotfailover}",
    "failover.journal": "/var/lib/slotbridge/failover.jsonl",
    "tables.warehouse": "/var/lib/slotbridge/warehouse",
    "tables.http_port": "9189",
}


def example_file(sections: Iterable[str] = USUAL, values: Mapping[str, Value] | None = None) -> str:
    """Return the file with `sections`, in the order of SECTIONS.

    `values`: key with dots -> what stands in place of its example.
    """
    wanted, given = set(sections), values or {}
    lines = [
        "# Configuration of Slotbridge. All keys: docs/reference/settings.md (`slotbridge docs`).",
        "# Judge it with: slotbridge check-config --config FILE",
        "# Every key is also an environment variable, which wins: SLOTBRIDGE_SOURCE__SLOT.",
        "# A commented key shows its default.",
    ]
    optional_depth: int | None = None
    for key in keys():
        if key.path.split(".")[0] not in wanted:
            continue
        if optional_depth is not None and key.depth <= optional_depth:
            optional_depth = None
        if ".NAME." in key.path or optional_depth is not None:
            continue  # told by the section's meaning and by docs/reference/settings.md
        if key.path in ("shaping.annotations", "shaping.outbox"):
            optional_depth = key.depth
            lines += _entry(key._replace(section=False, default="null"), given)
            continue
        lines += _entry(key, given)
    return "\n".join(lines) + "\n"


def as_yaml(text: str) -> str:
    """Return a text as a YAML scalar in one line."""
    plain, *more = yaml.safe_dump(text, width=10_000, allow_unicode=True).splitlines()
    if not any(one != "..." for one in more):
        return plain
    return yaml.safe_dump(text, width=10_000, default_style='"').rstrip("\n")


def _entry(key: Key, values: Mapping[str, Value]) -> list[str]:
    """Return a key's lines: its meaning, and its value, or its default as a comment."""
    indent = "  " * key.depth
    name = key.path.rpartition(".")[2]
    comment = textwrap.wrap(key.meaning, _WIDTH - len(indent))
    lines = [f"{indent}# {line}" for line in comment]
    if key.section:
        return ["", *lines, f"{indent}{name}:"] if key.depth == 0 else [*lines, f"{indent}{name}:"]
    value = values.get(key.path, "")
    example = _EXAMPLES.get(key.path) if value == "" else None
    if value and not isinstance(value, str):
        return [*lines, f"{indent}{name}:", *(f"{indent}  {line}" for line in value)]
    if value or example is not None:
        return [*lines, f"{indent}{name}: {example or as_yaml(str(value))}"]
    if key.default.startswith("the "):
        return [*lines, f"{indent}# {name}:   # {key.default}"]
    return [*lines, f"{indent}# {name}: {key.default or 'null'}"]
