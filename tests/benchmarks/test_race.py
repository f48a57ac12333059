"""Medians, ratios, table and plots of a race."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from benchmarks.race.__main__ import CONTENDERS, entries
from benchmarks.race.formats import FORMATS, RacedFormat
from benchmarks.race.plot import bars, lines
from benchmarks.race.results import medians, table
from benchmarks.race.workload_run import Trial
from schemas.kafka import KafkaSettings


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
    assert peer.startswith("| a | peer | json | 1 | 250 | 0.2 | 1000.0 | 64 |")
    assert "| 2.00 | 1.00 |" in peer
    assert ours.startswith("| a | slotbridge | json | 1 | 500 |")


def test_ratios_are_those_of_the_same_format() -> None:
    trials = [trial("peer", 4.0), trial("slotbridge", 1.0), trial("pg_recvlogical", 1.0)]
    trials[2] = replace(trials[2], form="")
    trials += [replace(one, form="avro", seconds=one.seconds * 3) for one in trials[:2]]
    trials[3] = replace(trials[3], seconds=6.0)
    ratios = [
        (line["contender"], line["form"], line["ours_rows_s_ratio"]) for line in medians(trials)
    ]
    assert ratios == [
        ("peer", "json", 4.0),
        ("slotbridge", "json", 1.0),
        ("pg_recvlogical", "", 1.0),
        ("peer", "avro", 2.0),
        ("slotbridge", "avro", 1.0),
    ]


def test_a_contender_races_in_the_formats_that_it_has() -> None:
    raced = [RacedFormat(name, "http://r/ccompat", "http://r/own") for name in FORMATS]
    found = [(name, form.name) for name, form in entries([*CONTENDERS], raced)]
    assert found[0] == ("pg_recvlogical", "json")
    assert [name for name, _ in found].count("pg_recvlogical") == 1
    assert [form for name, form in found if name == "slotbridge"] == [*FORMATS]
    assert [form for name, form in found if name == "debezium"] == [*FORMATS][:-1]
    for form in raced:
        KafkaSettings.model_validate(
            {"bootstrap_servers": "b", "topic_prefix": "p", **form.of_bridge()["kafka"]}
        )
    assert raced[0].of_worker() == {}, "Debezium's own settings stay"


def test_plots_are_well_formed() -> None:
    plots = (
        bars({"a": {"peer <1>": 10.0, "ours": 40.0}}, unit="rows/s"),
        lines({"ours": [(100, 3.0), (1000, 8.0)]}, x_title="x", y_title="y"),
    )
    for plot in plots:
        assert ElementTree.fromstring(plot).tag.endswith("svg")
