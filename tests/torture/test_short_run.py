"""Short runs of the rig: fixed seeds, every kind of fault, nothing found.

Longer ones: `make torture`; docs/contributing/evidence.md has the totals.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from services.testbed.bed import Bed
from tests.conftest import OLDEST_POSTGRES
from tests.providers.databases import connect
from tests.torture.brokers import Brokers
from tests.torture.faults import Fault, faults_with, schedule, shuffled_schedule
from tests.torture.fork_server import STREAMS
from tests.torture.report import (
    FULL_RUN_SEEDS,
    KINDS,
    Report,
    exit_code,
    never,
    sums,
    table,
)
from tests.torture.rig import Rig, kept
from tests.torture.servers import Kafka, Servers
from tests.torture.servers import servers as started
from tests.torture.torture_run import TortureRun

SECONDS = 45.0
SHORT_SECONDS = 15.0
MET = (
    *("sent", "part sent", "spooled", "staged", "decided", "staging loaded", "after origin"),
    *("chunk secured", "chunk handed", *STREAMS),
)


def test_nothing_is_lost_or_repeated_under_a_few_faults(local_bed: Bed, tmp_path: Path) -> None:
    report = run(straight(local_bed), tmp_path, 52, seconds=SHORT_SECONDS, met=most_kinds)
    assert len([kind for kind in KINDS if report.kinds[kind]]) > len(KINDS) / 2, report.kinds


@pytest.mark.long
def test_nothing_is_lost_or_repeated_under_faults(local_bed: Bed, tmp_path: Path) -> None:
    report = run(straight(local_bed), tmp_path, 52, met=everything)
    assert not [kind for kind in KINDS if not report.kinds[kind]], report.kinds
    assert not [name for name in MET if not report.passages[name]], report.passages


@pytest.mark.long
def test_nothing_is_lost_while_commits_wait_and_in_tables(local_bed: Bed, tmp_path: Path) -> None:
    report = run(straight(local_bed), tmp_path, 10, commits_wait=True, to_tables=True)
    assert report.table_rows > 100


@pytest.mark.long
def test_nothing_is_lost_over_tls_on_the_oldest_postgresql(servers: None, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with started(tmp_path / "servers", OLDEST_POSTGRES, Kafka(secured=True)) as ground:
        report = run(ground, tmp_path, 52)
    assert report.by_tls >= 2


def straight(bed: Bed) -> Servers:
    """Its broker, without a proxy."""
    bed.start("kafka")
    return Servers(bed, Brokers(bed.kafka), None)


def much(run: TortureRun) -> bool:
    """What each run is to meet."""
    return run.supervised.ends.sigkills >= 3 and sum(kinds_of(run).values()) > 20


def most_kinds(run: TortureRun) -> bool:
    """And more than half of the kinds of transactions."""
    return much(run) and len(kinds_of(run)) > len(KINDS) / 2 + 1  # one may not be of KINDS


def everything(run: TortureRun) -> bool:
    """And every kind of transaction, and every seam of MET; the rig asks by signals at the end."""
    kinds, passages = kinds_of(run), run.supervised.passages()
    wanted = {*KINDS} - {"signal"}
    return much(run) and wanted <= kinds.keys() and all(passages[name] for name in MET)


def kinds_of(run: TortureRun) -> Counter[str]:
    """Transactions by their kind; none while no server answers."""
    with contextlib.suppress(psycopg.Error), connect(run.primary, run.dbname) as connection:
        return Counter(kind for (kind,) in connection.execute("SELECT kind FROM ledger"))
    return Counter()


def run(
    ground: Servers,
    folder: Path,
    seed: int,
    *,
    commits_wait: bool = False,
    to_tables: bool = False,
    seconds: float = SECONDS,
    met: Callable[[TortureRun], bool] = much,
) -> Report:
    """Find nothing, but meet much."""
    with ground.new_pair() as (pair, subscriber):
        rig = Rig(
            *(ground.bed, folder, seed),
            brokers=ground.brokers,
            tls=ground.tls.conninfo if ground.tls is not None else None,
            faults=shuffled_schedule(seed),
            commits_wait=commits_wait,
            to_tables=to_tables,
        )
        report = rig.run((pair.primary, pair.standby), seconds, subscriber, met)
    kept(folder, report)
    assert not report.findings, report.as_json()
    assert report.transactions > 20
    assert report.sigkills >= 3
    assert report.rows_read > 500
    return report


@pytest.mark.parametrize("brokers", [1, 3])
@pytest.mark.parametrize("faults", [schedule, shuffled_schedule])
def test_a_seed_is_a_schedule(faults: Callable[[int, int], Iterator[Fault]], brokers: int) -> None:
    first, again = faults(3, brokers), faults(3, brokers)
    assert [next(first) for _ in range(50)] == [next(again) for _ in range(50)]
    assert {next(first).name for _ in range(1000)} == set(faults_with(brokers))


@pytest.mark.parametrize("brokers", [1, 3])
def test_a_shuffled_schedule_has_every_fault_soon(brokers: int) -> None:
    cards, names = shuffled_schedule(1, brokers), faults_with(brokers)
    assert {next(cards).name for _ in range(2 * len(names))} == set(names)


def test_faults_of_a_cluster_are_missed_only_where_there_is_one() -> None:
    alone, cluster = (json.loads(Report(1, brokers=brokers).as_json()) for brokers in (1, 3))
    assert "fault 'disk lost' not drawn" not in never(alone)
    assert "fault 'disk lost' not drawn" in never(cluster)


def test_a_short_run_that_has_not_met_everything_is_told_and_right() -> None:
    short = sums([Report(seed).as_json() for seed in range(FULL_RUN_SEEDS - 1)])
    full = sums([Report(seed).as_json() for seed in range(FULL_RUN_SEEDS)])
    assert "NEVER: fault 'kill' not drawn" in "\n".join(table(short))
    assert exit_code(short, wrong=False) == 0
    assert exit_code(short, wrong=True) == 1
    assert exit_code(full, wrong=False) == 1


def test_faults_that_were_not_drawn_are_told() -> None:
    report = Report(1)
    report.kinds["items"] = 3
    report.passages["sent"] = 7
    lines = [report.as_json(), report.as_json()]
    total = sums(lines)
    assert total["kinds"] == {"items": 6}
    assert "no transaction of kind 'large'" in never(total)
    assert not [line for line in never(total) if "'items'" in line or "'sent'" in line]
    assert "| sent | 14 | 0 |" in list(table(total))
