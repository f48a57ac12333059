"""A promoted node waits for nobody, and who was waited for before is not forgotten."""

from pathlib import Path

import pytest

from services.testbed.bed import Bed
from tests.promises.failover.check.examining import set_on
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.servers import (
    ask,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    tell,
    write,
)

MEMBER = "SELECT pg_create_physical_replication_slot('a_member', true)"


@pytest.mark.long
def test_an_unused_slot_in_the_standbys_list_keeps_nobody_waiting(
    local_trio: NewTrio, tmp_path: Path
) -> None:
    """Other managers keep slots of all members on every node."""
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    tell(trio.standby, MEMBER)
    set_on(trio.standby, synchronized_standby_slots="a_member")
    found = slotfailover("check", "--config", config, "--json").json["findings"]
    (stale,) = [f for f in found if f["check"] == "standby-list-stale"]
    assert "a_member" in stale["what"]
    trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes")
    assert ran.code == 0, ran.out + ran.err
    assert ask(trio.standby, "SHOW synchronized_standby_slots") == ""
    write(trio.standby, trio.dbname, 101)
    await_equal(trio, trio.standby)

    # Whoever sets it again: repoint names the slot, failover takes it out, consumers go on.
    set_on(trio.standby, synchronized_standby_slots="a_member")
    write(trio.standby, trio.dbname, 201)
    left = slotfailover("repoint", "--config", config, "--yes")
    assert (left.code, "a_member" in left.out + left.err) == (1, True), left.out + left.err
    again = slotfailover("failover", "--config", config, "--yes")
    assert again.code == 0, again.out + again.err
    await_equal(trio, trio.standby)


@pytest.mark.long
def test_synchronous_replication_is_restored_once_a_standby_is_back(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, machines=machines(trio, local_bed))
    assert ask(trio.primary, "SHOW synchronous_standby_names") == "standby_1"
    assert slotfailover("check", "--config", config).code == 0
    trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes")
    assert ran.code == 0, ran.err
    assert "they waited for 'standby_1'" in ran.out
    assert ask(trio.standby, "SHOW synchronous_standby_names") == ""
    found = slotfailover("check", "--config", config, "--json").json["findings"]
    assert [f["severity"] for f in found if f["check"] == "synchronous-before"] == ["warning"]
    back = slotfailover("rejoin", "a", "--config", config, "--yes")
    assert back.code == 0, back.err
    assert ask(trio.standby, "SHOW synchronous_standby_names") == 'ANY 1 ("slotfailover_a")'
    write(trio.standby, trio.dbname, 101)
