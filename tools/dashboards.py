"""The JSON of the chart's three Grafana dashboards, made from tools.dashboard_panels."""

import json
import re
from typing import Any, Final

from tools.dashboard_panels import BRIDGE, FAILOVER, TABLES, Panel

FILTER: Final = 'namespace=~"$namespace"'
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


DASHBOARDS: Final = {
    "bridge": ("Slotbridge: bridge", BRIDGE, "slotbridge_streaming"),
    "failover": ("Slotbridge: failover", FAILOVER, "slotfailover_observations_total"),
    "tables": ("Slotbridge: tables", TABLES, "slottables_epoch"),
}


def queries(name: str) -> list[tuple[str, str]]:
    """Return (panel, PromQL) of a dashboard, as Grafana would ask with all namespaces chosen."""
    _, panels, _ = DASHBOARDS[name]
    return [
        (
            panel.title,
            _filtered(query).replace("$__rate_interval", "30s").replace("$namespace", ".*"),
        )
        for panel in panels
        for query in panel.asked.values()
    ]


def dashboard(name: str) -> str:
    """Return the JSON of a dashboard."""
    title, panels, known = DASHBOARDS[name]
    document = {
        "title": title,
        "uid": f"slotbridge-{name}",
        "tags": ["slotbridge"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(known)},
        "panels": _placed(panels),
    }
    return json.dumps(document, indent=1) + "\n"


def _variables(known: str) -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "namespace",
            "type": "query",
            "datasource": _DATASOURCE,
            "query": f"label_values({known}, namespace)",
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "refresh": 2,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _placed(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Panels from left to right: four figures in a row, or two graphs."""
    placed, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        width, height = (6, 4) if panel.kind == "stat" else (12, 8)
        if x + width > 24:
            x, y, row_height = 0, y + row_height, 0
        placed.append(_panel(panel, number, {"x": x, "y": y, "w": width, "h": height}))
        x, row_height = x + width, max(row_height, height)
    return placed


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "title": panel.title,
        "type": panel.kind,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": _filtered(query),
                "legendFormat": legend or "__auto",
            }
            for index, (legend, query) in enumerate(panel.asked.items())
        ],
    }


def _filtered(query: str) -> str:
    """Return the query with the filter by namespace in every selector."""
    query = re.sub(
        r"\{([^}]*)\}", lambda m: "{" + ",".join(filter(None, (m[1], FILTER))) + "}", query
    )
    return query.replace("$window", "$__rate_interval")
