"""Situations in which one mistake does its harm, staged step by step, under a load.

The faults that the rig draws come to them too rarely. The right bridge passes each of them.
"""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from schemas.errors import ExitCode
from services.testbed.bed import Bed
from services.testbed.pair import set_parameter
from tests.promises.bridge.evidence import cases, lone_witness
from tests.promises.bridge.evidence.ground import (
    DBNAME,
    Compared,
    Ground,
    NotRefused,
    compare,
    insert,
    new_ground,
    refusal,
    sessions_after,
)
from tests.promises.bridge.faults.following_transaction import commit_following
from tests.promises.bridge.faults.markers import is_any
from tests.promises.bridge.running import Bridge
from tests.providers.databases import connect
from tests.torture.brokers import Brokers
from tests.torture.checker import Finding

Drill = Callable[[Ground, Brokers], Compared]
_WHAT_CHARACTERS: Final = 1500
_LARGE_ROWS: Final = 60_000
"""It takes the server a while to decode them."""


def drilled(bed: Bed, brokers: Brokers, folder: Path, mistake: str, drill: str) -> list[Finding]:
    """What a drill finds of a bridge with a mistake, "" for none.

    Raises AssertionError where the situation did not come about.
    """
    program = [sys.executable, "-m", "tests.torture.sabotage_command", mistake] if mistake else ()
    with new_ground(bed, brokers.kafka, folder, 1, program) as ground:
        try:
            seen = DRILLS[drill](ground, brokers)
        except NotRefused as error:
            kind = "accepted" if error.streams else "wrong"
            return [Finding(kind, str(error)[:_WHAT_CHARACTERS])]
    assert seen.rows, "nothing was written"
    counts = {"lost": seen.lost, "duplicated": seen.twice, "phantom": seen.phantoms}
    return [
        Finding(kind, f"{count} of {seen.rows} rows: {kind}")
        for kind, count in counts.items()
        if count
    ]


def record_behind(ground: Ground, brokers: Brokers) -> Compared:
    """All markers of a transaction are lost, and nobody could tell the slot of it.

    Then Kafka has another one, of the other producer, whose markers all are there.
    """
    server = ground.server()
    bridge = ground.bridge(server, connect_deadline_ms=30_000).start().streaming()
    load = ground.load(server)
    load.more(20)
    bridge.kill()
    load.more(20)
    since_ms = time.time_ns() // 1_000_000
    _killed_at(bridge, "after kafka commit")
    record = bridge.progress()[-1]
    assert brokers.forget_markers(bridge.prefix, since_ms, is_any, {}) >= 3
    commit_following(bridge, record)
    sessions_after(bridge, bridge.start)
    load.more(10)
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return compare(server, bridge)


def written_on(ground: Ground, brokers: Brokers) -> Compared:
    """The end of a partition is gone on every broker, and somebody has written on behind it.

    It ends beyond what any record notes. Afterwards it is put right again.
    """
    server, bridge, load = cases.running(ground)
    topic = f"{bridge.prefix}.public.t"
    assert bridge.stop() == 0, bridge.output
    brokers.copy_partition(topic, 0, "old")
    sessions_after(bridge, bridge.start)
    load.more(50)
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    ends = dict(entry[:2] for entry in bridge.progress()[-1].kafka.ends[topic])
    brokers.swap_partition(topic, 0, "old", "new")
    brokers.write_up_to(topic, 0, ends[0] + 10)
    refusal(bridge.start(), ExitCode.WITNESSES_DISAGREE, "was cut off before")
    brokers.swap_partition(topic, 0, "new", "lost")
    sessions_after(bridge, bridge.start)
    load = ground.load(server)
    load.more(10)
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return compare(server, bridge)


def part_forgotten(ground: Ground, _brokers: Brokers) -> Compared:
    """Kafka has a part of a transaction. From now on the server tells of each commit without events
    at once, as commits wait for the bridge: also of one that came before that transaction's.
    """
    server = ground.server()
    settings = {"connect_deadline_ms": 60_000, "heartbeat_interval_ms": 60_000}
    bridge = ground.bridge(server, **settings).start().streaming()
    load = ground.load(server)
    load.more(20)
    load.stop()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    with connect(server, DBNAME) as one, connect(server, DBNAME) as other, one.transaction():
        insert(one, 1)
        other.execute("COMMENT ON TABLE t IS 'a commit without events'")
        insert(one, _LARGE_ROWS)
    _killed_at(bridge, "between parts")
    part = bridge.progress()[-1].position
    assert part.seq, part
    set_parameter(server, "synchronous_standby_names", f'"slotbridge_{bridge.slot}"')
    _killed_at(bridge, "after kafka commit")
    told = bridge.progress()[-1].position.end_lsn
    assert part.end_lsn < told < part.commit_lsn, "it was told of no position before that commit"
    sessions_after(bridge, bridge.start)
    load = ground.load(server)
    load.more(10)
    load.stop()
    set_parameter(server, "synchronous_standby_names", "")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return compare(server, bridge)


def _killed_at(bridge: Bridge, failpoint: str) -> None:
    bridge.start(SLOTBRIDGE_FAILPOINT=f"{failpoint}:1")
    assert bridge.exit_code() == -signal.SIGKILL, bridge.output


def _case(case: cases.Case) -> Drill:
    return lambda ground, _brokers: case(ground)[1]


DRILLS: Final[dict[str, Drill]] = {
    "record behind": record_behind,
    "part forgotten": part_forgotten,
    "written on": written_on,
    "set back soon": _case(cases.soon),
    "same number": _case(lone_witness.same_number),
    "foreign database": _case(lone_witness.foreign),
}
