"""Checks as functions of views: any view is judged, and what no server here can show."""

import ipaddress
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SettingsError
from schemas.findings import Finding, Severity
from services.failover.checks import hba
from services.failover.checks.check_report import check_up, nagios_of
from services.failover.checks.facts import facts_of, required_slots
from services.failover.checks.readiness import candidate, judge_all
from services.failover.checks.registry import CHECKS, run_checks
from services.failover.model.loss_limit import Sighting
from services.failover.model.node_details import HbaRule, NodeDetails
from services.failover.model.timelines import Milestone
from services.failover.model.topology import keep_off, replaced_by
from services.failover.model.view import Node, View
from services.postgres.server import SettingValue
from tests.promises.failover.views import node, slot, state, subscriber, subscription, views


def with_version(found: Node, version: int) -> Node:
    assert found.state is not None
    server = replace(found.state.server, version=version)
    return replace(found, state=replace(found.state, server=server))


def pair(**of_slot: object) -> View:
    """`a` is the primary of `b`, with a slot s1 on both."""
    above = state(slot("s1", synced=False, **of_slot), standby=False)
    below = state(slot("s1", **of_slot))
    subscriptions = subscriber("sub", subscription("s1"))
    return View((node("a", above), node("b", below)), (subscriptions,))


def problems(view: View) -> dict[str, Finding]:
    return {f.check: f for f in run_checks(facts_of(view, candidate(view))) if f.wrong}


@pytest.mark.parametrize(
    ("version", "two_phase", "found"),
    [(170006, True, True), (170006, False, False), (180000, True, False)],
)
def test_two_phase_and_failover_on_17(version: int, two_phase: bool, found: bool) -> None:
    """Breaker 26; on a view, as only PostgreSQL 18 is packaged."""
    view = pair(two_phase=two_phase)
    old = replace(view, nodes=tuple(with_version(n, version) for n in view.nodes))
    assert ("slot-two-phase" in problems(old)) is found
    alone = replace(old, nodes=(node("a", None), old.nodes[1]))
    assert ("slot-two-phase" in problems(alone)) is found
    if found:
        finding = problems(old)["slot-two-phase"]
        assert "two_phase = t, failover = t" in finding.evidence
        assert "prepared" in finding.consequence


def with_servers(view: View, **changes: object) -> View:
    """The view with other servers: no server of 19 is packaged."""
    nodes = []
    for one in view.nodes:
        assert one.state is not None
        server = replace(one.state.server, **changes)  # type: ignore[arg-type]
        nodes.append(replace(one, state=replace(one.state, server=server)))
    return replace(view, nodes=tuple(nodes))


def with_setting(view: View, name: str, value: str) -> View:
    nodes = []
    for one in view.nodes:
        assert one.state is not None
        settings = {**one.state.settings, name: SettingValue(value, "configuration file")}
        nodes.append(replace(one, state=replace(one.state, settings=settings)))
    return replace(view, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("level", "effective", "found"),
    [
        ("logical", "", False),
        ("replica", "", True),
        ("replica", "logical", False),
        ("replica", "replica", False),  # the first logical slot raises it
        ("minimal", "minimal", True),
    ],
)
def test_levels_of_19(level: str, effective: str, found: bool) -> None:
    """On a view: effective_wal_level came with 19, and "" is a server without it."""
    view = with_setting(with_servers(pair(), effective_wal_level=effective), "wal_level", level)
    assert ("wal-level" in problems(view)) is found


@pytest.mark.parametrize(("version", "found"), [(170010, False), (180006, False), (200000, True)])
def test_a_newer_server_is_a_warning(version: int, found: bool) -> None:
    finding = problems(with_servers(pair(), version=version)).get("server-version")
    assert (finding is not None) is found
    if finding is not None:
        assert finding.severity is Severity.WARNING
        assert "PostgreSQL 20 is newer than 19" in finding.what


def test_a_password_in_primary_conninfo_is_a_warning() -> None:
    view = pair()
    assert "primary-conninfo-password" not in problems(view)
    below = view.node("b").known_state
    assert below.upstream is not None
    given = below.upstream.with_value("password", "hidden-1")
    details = NodeDetails(frozenset(), (), None, None, upstream=given)
    changed = replace(view.node("b"), state=replace(below, details=details))
    finding = problems(replace(view, nodes=(view.nodes[0], changed)))["primary-conninfo-password"]
    assert finding.severity is Severity.WARNING
    assert "hidden-1" not in str(finding.as_json())
    assert "passfile" in finding.remedy.text


@pytest.mark.parametrize(("version", "found"), [(180003, True), (180004, False)])
def test_a_server_whose_slotsync_worker_blocks_promotions_is_a_warning(
    version: int, found: bool
) -> None:
    finding = problems(with_servers(pair(), version=version)).get("server-version")
    assert (finding is not None and "18.4" in finding.remedy.text) is found


@pytest.mark.parametrize("may", [False, True])
def test_a_subscription_that_our_role_may_not_change(may: bool) -> None:
    found = subscriber("sub", subscription("s1", changeable=may))
    finding = problems(replace(pair(), subscribers=(found,))).get("subscription-changeable")
    assert (finding is not None and "password_required" in finding.remedy.text) is not may


@pytest.mark.parametrize(("confirmed", "found"), [(1000, False), (999, True)])
def test_a_new_worker_that_has_all_wal_has_not_failed(confirmed: int, found: bool) -> None:
    """A failover ends the workers with an error, and starts them anew."""
    view = pair(confirmed_flush_lsn=confirmed, active_pid=7)
    failed = subscription("s1", fed=True, failing="apply_error_count = 1")
    seen = problems(replace(view, subscribers=(subscriber("sub", failed),)))
    assert ("subscription-worker" in seen) is found


@pytest.mark.parametrize(
    ("reason", "temporary", "found"),
    [
        (None, False, set()),
        ("wal_not_flushed", False, set()),
        ("wal_or_rows_removed", False, {"slot-skipped"}),
        ("no_consistent_snapshot", True, {"slot-idle"}),
    ],
)
def test_a_copy_that_19_leaves_out(reason: str | None, temporary: bool, found: set[str]) -> None:
    """Readiness tells the reason; the column came with 19."""
    view = pair(slotsync_skip_reason=reason, temporary=temporary)
    wrong = problems(view)
    assert {name for name in wrong if name.startswith("slot-")} >= found
    assert ("slot-skipped" in wrong) is ("slot-skipped" in found)
    for name in found:
        assert f"slotsync_skip_reason = {reason}" in wrong[name].evidence


def test_a_setting_of_the_command_line_is_not_for_alter_system() -> None:
    view = pair()
    below = view.nodes[1].state
    assert below is not None
    settings = {**below.settings, "hot_standby_feedback": SettingValue("off", "command line")}
    off = replace(view.nodes[1], state=replace(below, settings=settings))
    finding = problems(replace(view, nodes=(view.nodes[0], off)))["hot-standby-feedback"]
    assert not finding.remedy.fixes
    assert "command line of b" in finding.remedy.by_hand


def test_names_of_checks_are_stable_and_unique() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() and " " not in name for name in names)


@given(views())
def test_every_view_is_judged(view: View) -> None:
    """Every check that applies has a finding; a slot is ready if no check of it is critical."""
    if len(view.writable) > 1:
        with pytest.raises(OperatorNeeded) as refusal:
            check_up(view)
        assert refusal.value.exit_code is ExitCode.SPLIT_BRAIN
        return
    checkup = check_up(view)
    facts = facts_of(view, candidate(view))
    applying = {check.name for check in CHECKS if check.applies(facts)}
    assert {finding.check for finding in checkup.findings} == applying
    assert json.loads(json.dumps(checkup.as_json()))["severity"] == checkup.severity
    assert "\n" not in checkup.nagios
    assert checkup.nagios.count("|") == 1
    for finding in checkup.problems:
        assert finding.what
        assert finding.evidence
        assert finding.consequence
        assert finding.remedy.fixes or finding.remedy.by_hand
        assert finding.remedy.full
    if not checkup.ready:
        assert checkup.severity is Severity.CRITICAL or not checkup.slots
    chosen = candidate(view)
    assert {slot.slot for slot in judge_all(view, chosen)} == {r.slot for r in required_slots(view)}


def test_who_was_cut_off_is_led_to_no_primary_that_never_fed_it() -> None:
    """Another node is the primary by now, or none answers: the run that did it is gone on with."""
    cut = node("c", state(cut=True))
    promoted = node("b", state(standby=False, timeline=2, cut=True))
    for others, severity in (((promoted,), "warning"), ((), "critical")):
        view = View((node("a", None), *others, cut), ())
        found = {
            f.subject: f for f in run_checks(facts_of(view, cut)) if f.check == "standby-cut-off"
        }
        assert found["c"].severity == "critical"
        assert "slotfailover resume" in found["c"].remedy.text
        assert not found["c"].remedy.fixes
        assert max(f.severity for f in found.values()) == severity
        assert len(found) == 1 + len(others)


def test_who_was_cut_off_is_not_led_back_to_an_old_primary() -> None:
    """It is up alone again, and somebody remembers that another node was promoted since."""
    cut = state(cut=True)
    around = NodeDetails(frozenset(), (), None, None, upstream=cut.upstream)
    led, old = replace(cut, details=around), node("a", state(standby=False))
    for met, fixes in (((), True), ((("Kafka", Milestone("7000", 2, None)),), False)):
        view = View((old, node("b", None), node("c", led)), (), milestones=met)
        (found,) = (
            f for f in run_checks(facts_of(view, view.node("c"))) if f.check == "standby-cut-off"
        )
        assert found.remedy.fixes is fixes, found.remedy


def test_errors_as_a_plugin_says_them() -> None:
    assert nagios_of(OperatorNeeded("two | primaries")) == (
        "SLOTFAILOVER CRITICAL - two / primaries",
        2,
    )
    for error in (SettingsError("x"), Retryable("y")):
        assert nagios_of(error)[1] == 3


# -- pg_hba.conf ---------------------------------------------------------------------------------

_names = st.sampled_from(["all", "bank", "repl", "replication", "sameuser", "+staff", "/^r", "x"])
_rules = st.builds(
    HbaRule,
    line=st.integers(1, 99),
    type=st.sampled_from(["local", "host", "hostssl", "hostnossl", "hostgssenc", "hostnogssenc"]),
    databases=st.lists(_names, min_size=1, max_size=2).map(tuple),
    users=st.lists(_names, min_size=1, max_size=2).map(tuple),
    address=st.sampled_from(["", "all", "10.0.0.0", "10.0.0.7", "::1", "db.example", "samenet"]),
    netmask=st.sampled_from(["255.0.0.0", "255.255.255.255", "ffff::"]),
    method=st.sampled_from(["trust", "reject", "scram-sha-256"]),
    broken=st.booleans(),
)


def rule(line: int, **changes: object) -> HbaRule:
    values: dict[str, object] = {
        "type": "host",
        "databases": ("all",),
        "users": ("all",),
        "address": "10.0.0.0",
        "netmask": "255.0.0.0",
        "method": "trust",
        "broken": False,
        **changes,
    }
    return HbaRule(line, **values)  # type: ignore[arg-type]


def refused(*rules: HbaRule, address: str = "10.1.2.3", encrypted: bool = False) -> bool:
    verdict = hba.verdict(rules, database="bank", user="repl", address=address, encrypted=encrypted)
    return verdict.refuses


def test_lines_of_pg_hba() -> None:
    assert not refused(rule(1))
    assert refused()
    assert refused(rule(1, databases=("replication",)))
    assert refused(rule(1, users=("postgres",)))
    assert refused(rule(1, address="11.0.0.0"))
    assert refused(rule(1, method="reject"), rule(2))
    assert not refused(rule(1), rule(2, method="reject"))
    assert refused(rule(1, type="hostssl"))
    assert not refused(rule(1, type="hostssl"), encrypted=True)
    assert refused(rule(1, type="hostnossl"), encrypted=True)
    assert refused(rule(1, databases=("sameuser",)))
    assert refused(rule(1), address="")
    assert not refused(rule(1, type="local", address="", netmask=""), address="")
    assert not refused(rule(1, address="::", netmask="::"), address="fe80::1")
    assert refused(rule(1, address="::", netmask="::"))


@pytest.mark.parametrize(
    "unknown",
    [
        {"users": ("+staff",)},
        {"databases": ("/^b",)},
        {"address": "db.example", "netmask": ""},
        {"type": "hostgssenc"},
        {"broken": True},
    ],
)
def test_unknown_facts_refuse_nothing(unknown: dict[str, object]) -> None:
    assert not refused(rule(1, method="reject", **unknown), rule(2, method="reject"))


@given(st.lists(_rules, max_size=5), st.sampled_from(["", "10.0.0.7", "::1"]), st.booleans())
def test_the_line_that_is_advised_admits(
    rules: list[HbaRule], address: str, encrypted: bool
) -> None:
    """Put before all others, it decides; and its address is that one alone."""
    kind, database, user, *place = hba.line_for("bank", "repl", address).split()
    width = ipaddress.ip_network(place[0]) if address else None
    advised = rule(
        0,
        type=kind,
        databases=(database,),
        users=(user,),
        address=str(width.network_address) if width else "",
        netmask=str(width.netmask) if width else "",
        method=place[-1],
    )
    assert not refused(advised, *rules, address=address, encrypted=encrypted)


def test_a_node_that_was_replaced_is_not_to_be_started() -> None:
    """Unless it was a standby when it was last seen; without a primary, the memory tells."""
    down, c = node("a", None), node("c", None)
    b = node("b", state(standby=False, timeline=2))
    promoted = View((down, b, c), (), known_standbys=frozenset("c"))
    assert [replaced_by(promoted, each) for each in promoted.nodes] == ["b", "", ""]
    assert keep_off(promoted, down) == "do NOT start a as it is; run: slotfailover rejoin a"
    (answers,) = [f for f in run_checks(facts_of(promoted, None)) if f.check == "node-answers" and
                  f.subject == "a"]  # fmt: skip
    assert "do NOT start a" in answers.remedy.text
    first = View((down, node("b", state(standby=False))), ())
    assert not replaced_by(first, down)
    gone = View((down, node("b", None)), ())
    seen, ordered = Sighting("b", 2, 1000, 4.0, ""), (("b", "2026-01-01T00:00:00+00:00"),)
    for less in (replace(gone, sighting=seen), replace(gone, promotions=ordered)):
        assert [replaced_by(less, each) for each in less.nodes] == ["b", ""]
    assert not replaced_by(gone, down)
    still = View((down, node("b", state())), (), promotions=ordered)
    assert not replaced_by(still, down)
