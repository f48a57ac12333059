"""A metric that is computed at each scrape: its name, HELP, labels and kind, said once.

The collectors make their samples from these, and docs/reference/metrics.md is made from them.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

Kind = Literal["gauge", "counter"]
Samples = Mapping[tuple[str, ...], float]
"""The values of the labels -> the value; the key () for a metric without labels."""


class Family(NamedTuple):
    """One metric. A counter's `name` goes without `_total`, which every exposition adds."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Kind = "gauge"

    @property
    def shown(self) -> str:
        """The name of the metric's series, as queries use it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def of(self, samples: Samples | float) -> Metric:
        """Return the metric with these samples; a metric without samples has no series."""
        made: CounterMetricFamily | GaugeMetricFamily
        if self.kind == "counter":
            made = CounterMetricFamily(self.name, self.help, labels=self.labels)
        else:
            made = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        values = samples if isinstance(samples, Mapping) else {(): samples}
        for labels, value in values.items():
            made.add_metric(labels, float(value))
        return made


def one_of(
    states: Iterable[str], present: str | None, *labels: str
) -> dict[tuple[str, ...], float]:
    """Return samples of a state: 1 for the one that is present, 0 for each other.

    All states get a sample, so their number is bounded.
    """
    return {(*labels, state): float(state == present) for state in states}
