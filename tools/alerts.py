"""The chart's alerts as a rule file of Prometheus, for services that run without the chart.

The chart's template is the source (`helm/slotbridge/templates/monitoring.yaml`): what selects pods
of a release goes, and its values are those of values.yaml.
"""

import re
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).parents[1] / "helm" / "slotbridge"
_HEAD: Final = """\
# Alerts of Prometheus, made from those of the chart by `make generate`; do not edit it here.
# Each has a runbook: docs/reference/runbooks.md (`slotbridge docs runbooks`).
# Leave out what you do not run: SlotbridgeNoStandby is for two bridges (bridge.standby),
# SlotfailoverNoLeader for `slotfailover watch` with repoint, Slottables… for the tables.
groups:
  - name: slotbridge
    rules:
"""
_VALUE: Final = re.compile(r"\{\{ (?:int64 )?\$rule\.(\w+) \}\}")
_OF_RELEASE: Final = re.compile(r"\{ \{\{- \$of -\}\} \}")
_BESIDE_OTHERS: Final = re.compile(r", \{\{-? ?\$of -\}\} \}")


def alerts() -> str:
    """Return the text of examples/prometheus/alerts.yml."""
    text = (CHART / "templates" / "monitoring.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    rule = values["monitoring"]["prometheusRule"]
    rules = text[text.index("      rules:\n") + len("      rules:\n") :]
    lines = (line for line in rules.splitlines() if not line.lstrip().startswith("{{"))
    made = "\n".join(line.removeprefix("  ") for line in lines)
    made = _VALUE.sub(lambda match: str(rule[match[1]]), made)
    made = _BESIDE_OTHERS.sub("}", _OF_RELEASE.sub("", made)).replace("{{ $label }}", "")
    return _HEAD + made.rstrip() + "\n"
