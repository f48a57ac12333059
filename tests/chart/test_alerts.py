"""The alerts, judged by Prometheus itself: each one fires when it must, and is quiet else.

`promtool test rules` evaluates the rules as the chart renders them over series that are made up
here, a sample a minute.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

from schemas.errors import ExitCode
from tests.chart.helm import NAMESPACE, Helm, documents, helm_program
from tests.providers.waiting import patient
from tools.generate import CHART, ROOT

pytestmark = pytest.mark.long
RUNBOOKS: Final = (ROOT / "docs/reference/runbooks.md").read_text(encoding="utf-8")
EXIT_CODES: Final = (ROOT / "docs/reference/exit-codes.md").read_text(encoding="utf-8")
HOUR: Final = 60


class Case(NamedTuple):
    """Series -> values that make the alert fire at minute `at`, and others that do not."""

    fires: dict[str, str]
    quiet: dict[str, str]
    at: int = 20
    labels: dict[str, str] = {}  # noqa: RUF012 - never changed


def level(name: str, fires: str, quiet: str, at: int = 20, **labels: str) -> Case:
    """A case of one series that stays at a value."""
    return Case({name: f"{fires}x200"}, {name: f"{quiet}x200"}, at, labels)


_WAL: Final = 'slotbridge_slot_wal_status{slot="s1",status="%s"}'
CASES: Final = {
    "SlotbridgeNotStreaming": Case({}, {"slotbridge_streaming": "1x200"}),
    "SlotbridgeNoStandby": Case(
        {"slotbridge_streaming": "1x200"},
        {"slotbridge_streaming": "1x200", 'slotbridge_streaming{pod="@-bridge-1"}': "0x200"},
    ),
    "SlotbridgeCommitsWithheld": level("slotbridge_standbys_awaited", "1", "0"),
    "SlotbridgeDeliveryLate": Case(
        {"slotbridge_delivery_age_seconds": "0+60x200"},
        {
            "slotbridge_delivery_age_seconds": "0+60x200",
            'slotbridge_delivery_age_seconds{pod="@-bridge-1"}': "2x200",
        },
    ),
    "SlotbridgeKafkaBehind": Case(
        {"slotbridge_received_lsn_bytes": "9e9x200", "slotbridge_durable_lsn_bytes": "1e9x200"},
        {"slotbridge_received_lsn_bytes": "9e9x200", "slotbridge_durable_lsn_bytes": "9e9x200"},
    ),
    "SlotbridgeSlotAtRisk": Case(
        {_WAL % "unreserved": "1x200", _WAL % "reserved": "0x200"},
        {
            _WAL % "unreserved": "0x200",
            _WAL % "lost": "0x200",
            'slotbridge_slot_safe_wal_bytes{slot="s1"}': "9e9x200",
        },
        labels={"slot": "s1"},
    ),
    "SlotbridgePreparedWaits": level("slotbridge_prepared_transactions", "1", "0", 2 * HOUR),
    "SlotbridgeReconnects": Case(
        {"slotbridge_reconnects_total": "0+1x200"}, {"slotbridge_reconnects_total": "0 1x200"}
    ),
    "SlotbridgeDeadLetters": Case(
        {"slotbridge_dead_letters_total": "0+1x200"}, {"slotbridge_dead_letters_total": "7x200"}
    ),
    "SlotbridgeSnapshotWaits": Case(
        {"slotbridge_snapshot_waiting_seconds": "0+60x200"},
        {
            "slotbridge_snapshot_waiting_seconds": "0+60x10 0x200",
            'slotbridge_snapshot_waiting_seconds{pod="@-bridge-1"}': "0x200",
        },
    ),
    "SlotfailoverNotObserving": Case(
        {"slotfailover_last_observation_timestamp_seconds": "0x200"},
        {"slotfailover_last_observation_timestamp_seconds": "0+60x200"},
    ),
    "SlotfailoverServerDown": level('slotfailover_up{server="b"}', "0", "1", server="b"),
    "SlotfailoverNoPrimary": level('slotfailover_primary{server="a"}', "0", "1"),
    "SlotfailoverNoLeader": Case(
        {"slotfailover_leader": "0x200"},
        {"slotfailover_leader": "0x200", 'slotfailover_leader{pod="@-failover-1"}': "1x200"},
    ),
    "SlotfailoverProblem": level(
        'slotfailover_problems{check="slot-wal",severity="critical"}', "1", "0", check="slot-wal"
    ),
    "SlotfailoverSlotNotReady": level(
        'slotfailover_slot_ready{slot="s1",standby="b"}', "0", "1", slot="s1", standby="b"
    ),
    "SlotfailoverSlotInvalidated": level(
        'slotfailover_slot_invalidated{server="a",slot="s1",reason="wal_removed"}',
        *("1", "0"),
        server="a",
        slot="s1",
        reason="wal_removed",
    ),
    "SlotfailoverFenced": level('slotfailover_fenced{server="a"}', "1", "0", server="a"),
    "SlotfailoverUnfinishedRun": Case(
        {'slotfailover_unfinished_run{command="failover"}': "1x200"},
        {'slotfailover_unfinished_run{command="failover"}': "1x10 stale"},
        labels={"command": "failover"},
    ),
    "SlotfailoverStandbyBehind": level(
        'slotfailover_standby_lag_seconds{server="b"}', "500", "3", server="b"
    ),
    "SlotfailoverDrillFailed": level("slotfailover_last_drill_success", "0", "1"),
    "SlottablesNotRunning": Case({}, {"slottables_epoch": "7x200"}),
    "SlottablesBehind": level("slottables_lag_seconds", "2000", "30", 30),
    "SlottablesTableParked": Case(
        {'slottables_table_parked{table="public.t",reason="no value fits"}': "1x200"},
        {'slottables_table_parked{table="public.t",reason="no value fits"}': "0x200"},
        labels={"table": "public.t", "reason": "no value fits"},
    ),
    "SlottablesQuarantined": Case(
        {"slottables_quarantined_total": "0+1x200"}, {"slottables_quarantined_total": "7x200"}
    ),
    "SlottablesDeadLetters": Case(
        {"slottables_dead_letters_total": "0+1x200"}, {"slottables_dead_letters_total": "7x200"}
    ),
    "SlottablesAuditDifferences": level(
        'slottables_audit_differences{table="public.t"}', "1", "0", table="public.t"
    ),
    "SlottablesAuditStale": level(
        'slottables_verified_age_seconds{table="public.t"}',
        *("100000", "3600"),
        at=30,
        table="public.t",
    ),
}


class Rules(NamedTuple):
    """The rules as the chart renders them for Prometheus."""

    path: Path
    by_name: dict[str, dict[str, Any]]
    pods: str
    """The names of the release's pods begin with this."""


@pytest.fixture(scope="module")
def promtool() -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("NOT TESTED: the alerts. There is no promtool (Debian: prometheus)")
    return program


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Rules:
    rendered = Helm(helm_program()).render(CHART / "ci/full-values.yaml")
    (rule,) = [m for m in documents(rendered) if m["kind"] == "PrometheusRule"]
    path = tmp_path_factory.mktemp("alerts") / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": rule["spec"]["groups"]}), encoding="utf-8")
    found = {each["alert"]: each for each in rule["spec"]["groups"][0]["rules"]}
    return Rules(path, found, rule["metadata"]["name"])


def test_promtool_accepts_the_rules(promtool: str, rules: Rules) -> None:
    done = run(promtool, "check", "rules", str(rules.path))
    assert f"SUCCESS: {len(rules.by_name)} rules found" in done.stdout


def test_promtool_accepts_the_examples_without_the_chart(promtool: str, rules: Rules) -> None:
    """`slotbridge examples prometheus.yml`, and the alerts that it names."""
    run(promtool, "check", "config", str(ROOT / "examples/prometheus/prometheus.yml"))
    document = yaml.safe_load((ROOT / "examples/prometheus/alerts.yml").read_text())
    assert {one["alert"] for one in document["groups"][0]["rules"]} == set(rules.by_name)


def test_every_alert_has_a_case(rules: Rules) -> None:
    assert set(CASES) == set(rules.by_name)


@pytest.mark.parametrize("alert", CASES)
def test_each_alert_fires_when_it_must_and_only_then(
    promtool: str, rules: Rules, alert: str
) -> None:
    case, rule = CASES[alert], rules.by_name[alert]
    expected = [
        {
            "exp_labels": {**rule["labels"], **case.labels},
            "exp_annotations": rule["annotations"],
        }
    ]
    tests = [
        _test(rules, alert, case.fires, case.at, expected),
        _test(rules, alert, case.quiet, case.at, []),
    ]
    if "for" in rule:  # a moment alone is not an alert
        tests.append(_test(rules, alert, case.fires, 0, []))
    path = rules.path.with_name(f"{alert}.yaml")
    document = {"rule_files": [rules.path.name], "evaluation_interval": "1m", "tests": tests}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    run(promtool, "test", "rules", str(path))


def test_series_of_another_release_are_left_alone(promtool: str, rules: Rules) -> None:
    """The alert fires because its own release has none, whatever others have."""
    rule = rules.by_name["SlotbridgeNotStreaming"]
    other = [{"series": 'slotbridge_streaming{namespace="other",pod="x"}', "values": "1x200"}]
    test = _test(rules, "SlotbridgeNotStreaming", {}, 20, [])
    test["input_series"] = other
    test["alert_rule_test"][0]["exp_alerts"] = [
        {"exp_labels": rule["labels"], "exp_annotations": rule["annotations"]}
    ]
    path = rules.path.with_name("other.yaml")
    document = {"rule_files": [rules.path.name], "evaluation_interval": "1m", "tests": [test]}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    run(promtool, "test", "rules", str(path))


def test_the_pages_have_a_section_for_each_alert_and_each_exit_code_and_no_other(
    rules: Rules,
) -> None:
    alerts = dict(re.findall(r"^### (\S.*)\n((?:(?!^##).*\n)*)", RUNBOOKS, re.MULTILINE))
    assert set(alerts) == set(rules.by_name)
    codes = dict(re.findall(r"^## (\S.*)\n((?:(?!^##).*\n)*)", EXIT_CODES, re.MULTILINE))
    assert set(codes) == {f"Exit code {int(code)}: {code.name}" for code in ExitCode}
    for name, text in {**alerts, **codes}.items():
        for word in ("Meaning", "Look at", "Do"):
            assert f"**{word}**: " in text, f"{name} lacks {word}"


def test_every_alert_links_to_its_section(rules: Rules) -> None:
    for name, rule in rules.by_name.items():
        assert rule["annotations"]["runbook_url"].endswith(f"#{name.lower()}")


def _test(
    rules: Rules, alert: str, series: dict[str, str], at: int, expected: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [
            {"series": _of_release(rules, name), "values": values}
            for name, values in series.items()
        ],
        "alert_rule_test": [{"eval_time": f"{at}m", "alertname": alert, "exp_alerts": expected}],
    }


def _of_release(rules: Rules, series: str) -> str:
    """The series with the labels that every series of the release's pods has."""
    name, _, labels = series.rstrip("}").partition("{")
    labels = labels.replace("@", rules.pods)
    if "pod=" not in labels:
        labels = ",".join(filter(None, (labels, f'pod="{rules.pods}-0"')))
    return f'{name}{{namespace="{NAMESPACE}",{labels}}}'


def run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=patient(300)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
