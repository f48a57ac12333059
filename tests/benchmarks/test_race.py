"""Medians, ratios, table and plots of a race."""

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.race.plot import bars, lines
from benchmarks.race.results import medians, table
from benchmarks.race.workload_run import Trial


def trial(contender: str, seconds: float, cpu_s: float = 1.0) -> Trial:
    return Trial(contender, 1000, 10**6, seconds, cpu_s, cpu_s, 64.0, 0.5, 0.1)


def test_medians_and_ratios_of_ours_to_each() -> None:
    trials = [trial("peer", 4.0, 8.0), trial("slotbridge", 1.0), trial("peer", 2.0, 6.0)]
    trials += [trial("slotbridge", 3.0), trial("peer", 9.0, 7.0), trial("slotbridge", 2.0)]
    peer, ours = medians(trials)
    assert (peer["contender"], peer["trials"], peer["seconds"]) == ("peer", 3, 4.0)
    assert ours["rows_s"] == 500.0
    assert peer["ours_rows_s_ratio"] == pytest.approx(2.0)
    assert peer["ours_cpu_ratio"] == pytest.approx(7.0)


def test_the_table_has_a_line_for_each_contender() -> None:
    text = table({"a": medians([trial("peer", 4.0), trial("slotbridge", 2.0)])})
    _, _, peer, ours = text.splitlines()
    assert peer.startswith("| a | peer | 1 | 250 | 0.2 | 1000.0 | 64 |")
    assert "| 2.00 | 1.00 |" in peer
    assert ours.startswith("| a | slotbridge | 1 | 500 |")


def test_plots_are_well_formed() -> None:
    plots = (
        bars({"a": {"peer <1>": 10.0, "ours": 40.0}}, unit="rows/s"),
        lines({"ours": [(100, 3.0), (1000, 8.0)]}, x_title="x", y_title="y"),
    )
    for plot in plots:
        assert ElementTree.fromstring(plot).tag.endswith("svg")
