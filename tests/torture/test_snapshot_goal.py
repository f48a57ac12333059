"""The long run within snapshots: when it ends, what it asks for, and its comparison of folds."""

import json
from pathlib import Path

import pytest

from services.bridge.failpoints import OF_A_SNAPSHOT
from services.testbed.bed import Bed
from tests.promises.bridge.reading import Record
from tests.torture.checker import Finding
from tests.torture.folds import check_folds
from tests.torture.rig import Rig, kept
from tests.torture.snapshot_checker import Told
from tests.torture.snapshot_goal import Asking, Met, faults_until
from tests.torture.test_short_run import straight


def test_kills_and_failovers_come_until_the_goal_is_met() -> None:
    names: list[str] = []
    done = {"kills": 0, "failovers": 0}
    for fault in faults_until(1, Met(20, 3), lambda: Met(**done)):
        names.append(fault.name)
        failover = fault.name == "failover"
        done["failovers" if failover else "kills"] += len(fault.points)
    assert done["kills"] >= 20
    assert done["failovers"] == 3
    first, last = names.index("failover"), len(names) - 1 - names[::-1].index("failover")
    assert 0 < first < last < len(names) - 1, "between the kills"


def test_rows_are_asked_for_again_where_all_are_read_and_resumed_where_none_come() -> None:
    asking = Asking()
    assert asking.wanted(Told([], []), ("t",)) == ""
    assert asking.wanted(Told([], []), ("t",)) == "resume"
    assert asking.wanted(Told([], []), ()) == "execute"


def record(offset: int, op: str, position: int, value: int, key: bytes | None = b"1") -> Record:
    source = {"table": "t", "commit_lsn": position, "seq": 0}
    event = {"op": op, "source": source, "after": {"v": value} if op != "d" else None}
    return Record("p.public.t", 0, offset, key, json.dumps(event).encode(), {})


@pytest.mark.parametrize("op", ["u", "d", "t"])
def test_an_older_row_behind_a_newer_one_is_found(op: str) -> None:
    older = record(0, "c", 5, 1)
    newer = record(1, op, 7, 2, key=None if op == "t" else b"1")
    again = record(2, "r", 6, 1)
    assert not list(check_folds([older, again._replace(offset=1), newer._replace(offset=2)]))
    found = list(check_folds([older, newer, again]))
    assert [type(one) for one in found] == [Finding], "by position the row is another, or gone"


@pytest.mark.long
def test_a_few_kills_and_a_failover_within_snapshots(local_bed: Bed, tmp_path: Path) -> None:
    """The long one: make torture KILLS=200 FAILOVERS=5."""
    ground = straight(local_bed)
    with ground.new_pair() as (pair, subscriber):
        rig = Rig(ground.bed, tmp_path, 3, brokers=ground.brokers, goal=Met(4, 1))
        report = rig.run((pair.primary, pair.standby), 600, subscriber)
    kept(tmp_path, report)
    assert not report.findings, report.as_json()
    assert report.sigkills >= 4
    assert report.failovers == 1
    assert report.chunks > 50
    assert sum(report.failpoints[seam] for seam in OF_A_SNAPSHOT) > 0
