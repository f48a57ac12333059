"""What holds up the standby's replay holds up a switchover before its fence, not after it."""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from services.testbed.bed import Bed
from tests.failover.conftest import NewTrio, machines
from tests.failover.drill import both
from tests.failover.servers import ask, configuration, slotfailover, subscribe, tell
from tests.providers.databases import connect
from tests.providers.interface import Trio
from tests.providers.waiting import eventually

DELAY_S = 6


class Writer:
    """Writes row by row, and remembers when each was acknowledged."""

    def __init__(self, trio: Trio) -> None:
        self._trio = trio
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._number = 0
        self.acknowledged: list[float] = []

    def __enter__(self) -> "Writer":
        self._thread.start()
        eventually(lambda: len(self.acknowledged) > 5, what="it writes")
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def gap_s(self) -> float:
        """The longest time between two acknowledged writes."""
        return max(later - at for at, later in itertools.pairwise(self.acknowledged))

    def _write(self) -> None:
        while not self._ended.is_set():
            try:
                with psycopg.connect(both(self._trio), autocommit=True) as session:
                    while not self._ended.wait(0.01):
                        self._number += 1
                        session.execute("INSERT INTO t VALUES (%s)", [self._number])
                        self.acknowledged.append(time.monotonic())
            except psycopg.Error:
                time.sleep(0.01)


@contextlib.contextmanager
def replay_held_up(trio: Trio) -> Iterator[None]:
    """A query on the standby that keeps its replay from a lock of the primary."""
    tell(trio.primary, "CREATE TABLE held ()", dbname=trio.dbname)
    known = "SELECT count(*) = 1 FROM pg_class WHERE relname = 'held'"
    eventually(lambda: ask(trio.standby, known, trio.dbname), what="the table is there")
    reader = psycopg.connect(trio.standby.conninfo(trio.dbname))
    try:
        reader.execute("SELECT FROM held")
        with connect(trio.primary, trio.dbname) as primary, primary.transaction():
            primary.execute("LOCK TABLE held IN ACCESS EXCLUSIVE MODE")
        yield
    finally:
        reader.close()


def test_a_query_on_the_standby_holds_up_a_switchover_while_writes_go_on(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    """It keeps the replay from a lock until max_standby_streaming_delay, and would a promotion."""
    trio = local_trio(settings={"max_standby_streaming_delay": f"{DELAY_S}s"})
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, machines=machines(trio, local_bed))
    with Writer(trio) as writer, replay_held_up(trio):
        began = time.monotonic()
        ran = slotfailover("switchover", "--to", "b", "--config", config, "--yes", "--json")
        assert ran.code == 0, ran.err
        written = len(writer.acknowledged)
        eventually(lambda: len(writer.acknowledged) > written + 5, what="writes go on")
    seconds = {step["step"]: step["seconds"] for step in ran.json["steps"]}
    assert seconds["wait until b has replayed all WAL that it received"] > DELAY_S / 2
    assert time.monotonic() - began > DELAY_S / 2
    assert writer.gap_s() < DELAY_S / 2


def test_a_replay_that_is_held_up_for_good_ends_a_switchover_before_the_fence(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio(settings={"max_standby_streaming_delay": "-1"})
    subscribe(trio, "s1")
    config = configuration(
        tmp_path, trio, machines=machines(trio, local_bed), step_deadline_ms=4_000
    )
    with Writer(trio) as writer, replay_held_up(trio):
        ran = slotfailover("switchover", "--to", "b", "--config", config, "--yes")
        assert ran.code == 13, ran.err
        assert "are not replayed: a query on b may hold them up" in ran.err
        assert "fence" not in ran.err
    assert writer.gap_s() < 2
