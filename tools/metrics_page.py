"""docs/reference/metrics.md, made from the metrics that the services declare."""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from services.bridge import metrics as bridge
from services.failover.watch.web import metrics as failover
from services.runtime.families import Family
from spark_consumers.epochs.metrics import Metrics

_HEAD: Final = """# Metrics

Every metric of the three services, with its kind, labels and HELP text. They serve `/metrics` at
`bridge.http_port`, `failover.watch.http_port` and `tables.http_port`. Alerts on these metrics:
[runbooks](runbooks.md). Without Kubernetes: `slotbridge examples prometheus.yml`, `alerts.yml`, and
for Grafana `dashboards/bridge.json`, `failover.json`, `tables.json`.

Labels have few values: names from the settings, slots, fixed states, and at most {tables:,} tables
of the bridge. An unknown value has no series: a bridge that stands by has none for its slot, and a
server that does not answer has no position. `make generate` makes this page from the code.
"""


class Shown(NamedTuple):
    """One metric as the page tells it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def metrics_page() -> str:
    """Return the page: one table for each service."""
    parts = [_HEAD.format(tables=bridge.TABLES_MAX)]
    for title, found in all_metrics().items():
        parts += [f"\n## {title}\n", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        parts += [
            f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {_cell(each.help)} |"
            for each in sorted(found)
        ]
    return "\n".join(parts) + "\n"


def all_metrics() -> dict[str, list[Shown]]:
    """Return service -> its metrics."""
    declared = [value for value in vars(bridge).values() if isinstance(value, MetricWrapperBase)]
    return {
        "slotbridge run": [*map(_wrapped, declared), *_families(bridge.FAMILIES)],
        "slotfailover watch": list(_families(failover.FAMILIES)),
        "slottables run": [*map(_wrapped, _declared(Metrics().registry))],
    }


def _families(families: Iterable[Family]) -> Iterator[Shown]:
    for family in families:
        yield Shown(family.shown, family.kind, family.labels, family.help)


def _wrapped(metric: MetricWrapperBase) -> Shown:
    (described,) = metric.describe()
    name = described.name + "_total" * (described.type == "counter")
    return Shown(name, described.type, tuple(metric._labelnames), described.documentation)


def _declared(registry: CollectorRegistry) -> list[MetricWrapperBase]:
    """Return the metrics of a registry; those with labels may have no series yet."""
    return [each for each in registry._collector_to_names if isinstance(each, MetricWrapperBase)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
