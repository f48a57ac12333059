"""What stands in the way once the standby is the primary: caused, seen, repaired."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from schemas.findings import Finding, Severity
from services.failover.checks.facts import facts_of
from services.failover.checks.readiness import candidate
from services.failover.checks.registry import run_checks
from services.failover.model.view import FENCE, Node, Reach, View
from services.postgres.server import SettingValue
from tests.promises.failover.check.examining import Examiner, examiner_of, reset_on, set_on
from tests.promises.failover.servers import tell
from tests.promises.failover.views import node, state, subscriber, subscription, views
from tests.providers.databases import connect
from tests.providers.waiting import eventually


def test_a_fenced_primary_is_critical(sound: Examiner) -> None:
    primary = sound.trio.primary
    set_on(primary, default_transaction_read_only="on")
    (finding,) = sound.expect("primary-fenced")["primary-fenced"]
    assert "a is fenced" in finding["what"]
    assert "resume --rollback" in finding["remedy"]["text"]
    assert sound.run("--nagios").code == 2
    sound.carry_out(finding)


def test_a_read_only_standby_is_critical(sound: Examiner) -> None:
    set_on(sound.trio.standby, default_transaction_read_only="on")
    sound.carry_out(sound.expect("standby-read-only")["standby-read-only"][0])


def test_a_database_that_overrides_the_fence(sound: Examiner, tmp_path: Path) -> None:
    named = f"ALTER DATABASE {sound.trio.dbname}"
    tell(sound.trio.primary, f"{named} SET {FENCE} = off")
    bare = examiner_of(sound.trio, tmp_path, machines={})
    found = bare.expect("fence-overrides", "fence-command", "stop-command")
    (finding,) = found["fence-overrides"]
    assert f"the database {sound.trio.dbname} has a {FENCE} of its own" in finding["what"]
    tell(sound.trio.primary, f"{named} RESET {FENCE}")


def test_nodes_without_commands_that_end_them(sound: Examiner, tmp_path: Path) -> None:
    half = examiner_of(sound.trio, tmp_path, machines={"a": {"fence": "false"}})
    found = half.expect("fence-command", "stop-command")
    assert [f["subject"] for f in found["fence-command"]] == ["b"]
    assert [f["subject"] for f in found["stop-command"]] == ["a", "b"]
    assert "(--accept)" in found["fence-command"][0]["consequence"]
    managed = examiner_of(sound.trio, tmp_path, machines={}, managed_by="patroni")
    managed.expect()


@pytest.mark.long
@pytest.mark.since_18  # idle_replication_slot_timeout
def test_slots_that_may_be_idle_for_a_while_only(sound: Examiner) -> None:
    set_on(sound.trio.primary, idle_replication_slot_timeout="'1d'")
    sound.carry_out(sound.expect("idle-slot-timeout")["idle-slot-timeout"][0])
    reset_on(sound.trio.primary, "idle_replication_slot_timeout")


def test_a_subscription_in_a_database_that_is_not_named(sound: Examiner) -> None:
    trio = sound.trio
    tell(trio.subscriber, "CREATE DATABASE forgotten")
    with connect(trio.subscriber, "forgotten") as there:
        publisher = trio.primary.conninfo(trio.dbname)
        there.execute(
            f"CREATE SUBSCRIPTION lost CONNECTION '{publisher}' PUBLICATION p"
            " WITH (connect = false, slot_name = NONE, enabled = false, create_slot = false)"
        )
    (finding,) = sound.expect("subscriptions-elsewhere")["subscriptions-elsewhere"]
    assert "lost in the database forgotten of sub" in finding["what"]
    tell(trio.subscriber, "DROP SUBSCRIPTION lost", dbname="forgotten")
    tell(trio.subscriber, "DROP DATABASE forgotten")


@pytest.mark.long
@pytest.mark.since_18  # idle_replication_slot_timeout
def test_only_what_is_wrong_is_printed_with_problems(sound: Examiner) -> None:
    quiet = sound.run("--problems")
    assert quiet.code == 0
    assert "  ok  " not in quiet.out
    # Beside a busy machine, a receiver may be silent for longer than a check lets pass.

    told: list[str] = []

    def strictly_sound() -> bool:
        ran = sound.run("--strict", "--problems")
        told.append(ran.out)
        return ran.code == 0

    try:
        eventually(strictly_sound, what="nothing is wrong", interval_s=0.5)
    except AssertionError as error:
        raise AssertionError(f"{error}: {told[-1]}") from None
    set_on(sound.trio.primary, idle_replication_slot_timeout="'1d'")
    sound.expect("idle-slot-timeout")
    assert "idle-slot-timeout" in sound.run("--problems").out
    assert (sound.run().code, sound.run("--strict").code) == (0, 1)
    reset_on(sound.trio.primary, "idle_replication_slot_timeout")


def test_a_dead_primary_leaves_much_unjudged_and_nothing_of_it_ok(fresh: Examiner) -> None:
    fresh.trio.primary.kill()
    report = fresh.run("--json").json
    verdicts = {f["check"]: f["severity"] for f in report["findings"]}
    for name in ("standby-streams", "slotsync-worker", "commits-wait", "pg-hba", "standby-lag"):
        assert verdicts[name] == "not judged", name
    for absent in ("bridge-connected", "kafka-record"):
        assert absent not in verdicts
    people = fresh.run()
    assert "NOT JUDGED" in people.out
    assert "no node answers as the primary" in people.out
    assert fresh.run("--strict").code == 1


# -- on views --------------------------------------------------------------------------------------


def findings(view: View) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in run_checks(facts_of(view, candidate(view))):
        found.setdefault(finding.check, []).append(finding)
    return found


def pair(above: dict[str, str], below: dict[str, str]) -> View:
    """A pair with these settings."""

    def given_(settings: dict[str, str], *, standby: bool) -> object:
        said = state(standby=standby)
        values = {k: SettingValue(v, "configuration file") for k, v in settings.items()}
        return replace(said, settings={**said.settings, **values})

    return View(
        (
            node("a", given_(above, standby=False)),  # type: ignore[arg-type]
            node("b", given_(below, standby=True)),  # type: ignore[arg-type]
        ),
        (),
    )


ARCHIVED = {"archive_mode": "on", "archive_command": "cp %p /x", "archive_library": ""}
PLAIN = {"archive_mode": "off", "archive_command": "(disabled)", "archive_library": ""}
NO_COMMAND = {"archive_mode": "on", "archive_command": "", "archive_library": ""}


@pytest.mark.parametrize(
    ("check", "above", "below", "wrong"),
    [
        ("archiving", ARCHIVED, ARCHIVED, False),
        ("archiving", ARCHIVED, PLAIN, True),
        ("archiving", ARCHIVED, NO_COMMAND, True),
        ("archiving", PLAIN, PLAIN, False),
        ("alter-system-allowed", {"allow_alter_system": "off"}, {"allow_alter_system": "on"}, True),
        (
            "rewind-possible",
            {"wal_log_hints": "off", "data_checksums": "off"},
            {"wal_log_hints": "off", "data_checksums": "on"},
            True,
        ),
    ],
)
def test_settings_that_a_promotion_or_a_rejoin_depends_on(
    check: str, above: dict[str, str], below: dict[str, str], wrong: bool
) -> None:
    found = findings(pair(above, below))[check]
    assert any(finding.wrong for finding in found) is wrong
    hidden = findings(without(pair({}, {}), check))[check]
    assert {finding.severity for finding in hidden} == {Severity.NOT_JUDGED}


@pytest.mark.parametrize(
    ("failing", "severity"),
    [("", Severity.OK), ("started 0.1 s ago", Severity.WARNING), (None, Severity.NOT_JUDGED)],
)
def test_a_worker_whose_age_is_hidden_is_not_judged(
    failing: str | None, severity: Severity
) -> None:
    fed = subscriber("sub", subscription("s1", failing=failing, fed=True))
    view = replace(pair({}, {}), subscribers=(fed,))
    assert {one.severity for one in findings(view)["subscription-worker"]} == {severity}


@pytest.mark.parametrize(
    ("age_s", "severity"),
    [
        (None, Severity.NOT_JUDGED),
        (0.1, Severity.NOT_JUDGED),
        (39.0, Severity.NOT_JUDGED),
        (41.0, Severity.WARNING),
    ],
)
def test_a_worker_without_a_message_is_never_ok(age_s: float | None, severity: Severity) -> None:
    """Workers that can't connect fail before PostgreSQL counts their errors."""
    silent = subscriber("sub", subscription("s1", worker_age_s=age_s))
    view = replace(pair({}, {}), subscribers=(silent,))
    (found,) = findings(view)["subscription-worker"]
    assert found.severity == severity
    assert "sub/s1" in found.what
    if found.wrong:
        assert "41 s after its worker was started" in found.evidence
        assert found.remedy is not None and "conninfo" in found.remedy.text


def without(view: View, check: str) -> View:
    """The view without the settings that the check reads."""
    of_check = {"alter-system-allowed": ("allow_alter_system",)}.get(check, ())

    def less(found: Node) -> Node:
        assert found.state is not None
        kept = {k: v for k, v in found.state.settings.items() if k not in of_check}
        return replace(found, state=replace(found.state, settings=kept))

    return replace(view, nodes=tuple(map(less, view.nodes)))


def weakened(view: View) -> list[tuple[str, View]]:
    """The view with less known: of each node, subscriber and setting in turn."""
    found = []
    for number, there in enumerate(view.nodes):
        if there.state is None:
            continue
        before, after = view.nodes[:number], view.nodes[number + 1 :]
        gone = replace(there, state=None, reach=Reach.SILENT)
        silent = replace(view, nodes=(*before, gone, *after))
        found.append((f"{there.name} is silent", silent))
        for name in there.state.settings:
            kept = {k: v for k, v in there.state.settings.items() if k != name}
            less = replace(there, state=replace(there.state, settings=kept))
            found.append((name, replace(view, nodes=(*before, less, *after))))
    return found


DECIDED_BY_SIGHT = {"primary-answers", "node-answers", "standby-answers", "subscriber-answers"}


@settings(max_examples=40)
@given(views())
def test_knowing_less_never_makes_a_problem_ok(view: View) -> None:
    """What is wrong is not called ok once a node is silent or a setting is hidden: a check that
    found a problem still finds one, or says that it was not judged, or looks at another standby.
    """
    if len(view.writable) > 1:
        return
    chosen = candidate(view)
    full = findings(view)
    for what, less in weakened(view):
        if candidate(less) != chosen and "silent" in what:
            continue
        left = findings(less)
        for check, found in full.items():
            if check in DECIDED_BY_SIGHT or not any(f.wrong for f in found):
                continue
            said = left.get(check, [])
            assert said, (what, check)
            assert not all(f.ok for f in said), (what, check, found[0].what)
