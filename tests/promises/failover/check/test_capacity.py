"""A standby whose limits are lower than its primary's can't be promoted: seen, and refused."""

from pathlib import Path

import pytest

from services.failover.checks.capacity import RECOVERY_SETTINGS
from tests.promises.failover.check.examining import Examiner, examiner_of, set_on
from tests.promises.failover.check.test_promotion import findings, pair
from tests.promises.failover.servers import ask, slotfailover, tell
from tests.providers.interface import Server
from tests.providers.waiting import eventually

LIMITS = dict.fromkeys(RECOVERY_SETTINGS, "100")


def raise_limit(server: Server) -> None:
    """More sessions than SETTINGS of the bed allow."""
    set_on(server, max_connections="210")
    server.restart()


def test_a_standby_with_lower_limits_is_seen_and_never_promoted(fresh: Examiner) -> None:
    """Its replay pauses for good: a promotion would be ordered, would never end, and could not be
    taken back.
    """
    trio = fresh.trio
    raise_limit(trio.primary)
    paused = "SELECT pg_get_wal_replay_pause_state() = 'paused'"
    eventually(lambda: ask(trio.standby, paused), what="replay is paused")
    found: dict[str, list[dict[str, str]]] = {}

    def seen() -> bool:
        found.update(fresh.problems())
        return {"recovery-settings", "replay"} <= set(found)

    eventually(seen, what="it is seen")
    (finding,) = found["recovery-settings"]
    assert finding["severity"] == "critical"
    assert "max_connections = 200 on b, 210 on a" in finding["evidence"]
    assert not found["replay"][0]["remedy"]["sql"]  # type: ignore[index]
    orders = (("switchover", "--to", "b", "--dry-run"), ("switchover", "--to", "b", "--yes"))
    for order in (*orders, ("failover", "--fence", "--yes"), ("plan",)):
        ran = slotfailover(*order, "--config", fresh.config)
        assert ran.code == 34, ran.err
        assert "limits of b are lower than those of a: max_connections (200, 210 on a)" in ran.err
    trio.primary.kill()
    ran = slotfailover("failover", "--yes", "--config", fresh.config)
    assert ran.code == 34, ran.err
    assert "replay is paused on b" in ran.err
    assert ask(trio.standby, "SELECT pg_is_in_recovery()")
    fresh.carry_out(finding)
    trio.standby.restart()
    ran = slotfailover("failover", "--yes", "--config", fresh.config)
    assert ran.code == 0, ran.err
    assert not ask(trio.standby, "SELECT pg_is_in_recovery()")


def test_a_standby_that_a_person_has_paused_is_not_promoted_either(fresh: Examiner) -> None:
    """Whose pause it is can't be told once the primary is gone."""
    trio = fresh.trio
    tell(trio.standby, "SELECT pg_wal_replay_pause()")
    trio.primary.kill()
    ran = slotfailover("failover", "--yes", "--config", fresh.config)
    assert ran.code == 34, ran.err
    assert "SELECT pg_wal_replay_resume() on b" in ran.err
    tell(trio.standby, "SELECT pg_wal_replay_resume()")
    assert slotfailover("failover", "--yes", "--config", fresh.config).code == 0


@pytest.mark.parametrize("name", RECOVERY_SETTINGS)
def test_each_limit_that_recovery_needs(name: str) -> None:
    lower = findings(pair(LIMITS, {**LIMITS, name: "99"}))["recovery-settings"]
    assert [(f.subject, f.wrong) for f in lower] == [("b", True)]
    assert name in lower[0].what
    (equal,) = findings(pair(LIMITS, {**LIMITS, name: "101"}))["recovery-settings"]
    assert equal.ok


def test_a_standby_with_too_few_walsenders_for_a_primary() -> None:
    few = {"max_wal_senders": "0", "max_replication_slots": "10"}
    found = findings(pair(few, few))["promotion-capacity"]
    assert [f.wrong for f in found] == [True, False]
    assert "max_wal_senders = 0 on b; as the primary it needs 1" in found[0].evidence


def test_a_dry_run_tells_of_a_missing_fence_command(fresh: Examiner, tmp_path: Path) -> None:
    (folder := tmp_path / "bare").mkdir()
    bare = examiner_of(fresh.trio, folder, machines={})
    fresh.trio.primary.kill()
    for examiner, told in ((bare, True), (fresh, False)):
        ran = slotfailover("failover", "--dry-run", "--config", examiner.config)
        assert ran.code == 0, ran.err
        assert ("a has no `fence` command" in " ".join(ran.out.split())) is told
