"""What holds up the standby's replay holds up a switchover before its fence, not after it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from services.failover.execute import perform_step
from services.failover.plan.steps.step import Action, Step
from services.testbed.bed import Bed
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.drill import both
from tests.promises.failover.servers import ask, configuration, slotfailover, subscribe, tell
from tests.providers.databases import Connection, connect
from tests.providers.interface import Trio
from tests.providers.waiting import eventually, patient, patient_ms

FOR_GOOD = {"max_standby_streaming_delay": "-1"}


class Writer:
    """Writes row by row, and counts what was acknowledged."""

    def __init__(self, trio: Trio) -> None:
        self._trio = trio
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._number = 0
        self.acknowledged = 0

    def __enter__(self) -> "Writer":
        self._thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join(patient(60))

    def goes_on(self) -> None:
        """Wait until some more is acknowledged."""
        wanted = self.acknowledged + 5
        eventually(lambda: self.acknowledged >= wanted, what="writes go on")

    def _write(self) -> None:
        while not self._ended.is_set():
            try:
                with psycopg.connect(both(self._trio), autocommit=True) as session:
                    while not self._ended.wait(0.01):
                        self._number += 1
                        session.execute("INSERT INTO t VALUES (%s)", [self._number])
                        self.acknowledged += 1
            except psycopg.Error:
                time.sleep(0.01)


@contextlib.contextmanager
def replay_held_up(trio: Trio) -> Iterator[Connection]:
    """A query on the standby that keeps its replay from a lock of the primary."""
    tell(trio.primary, "CREATE TABLE held ()", dbname=trio.dbname)
    known = "SELECT count(*) = 1 FROM pg_class WHERE relname = 'held'"
    eventually(lambda: ask(trio.standby, known, trio.dbname), what="the table is there")
    reader = psycopg.connect(trio.standby.conninfo(trio.dbname))
    try:
        reader.execute("SELECT FROM held")
        with connect(trio.primary, trio.dbname) as primary, primary.transaction():
            primary.execute("LOCK TABLE held IN ACCESS EXCLUSIVE MODE")
        yield reader
    finally:
        reader.close()


@contextlib.contextmanager
def ordered(seen: Callable[[Step], None]) -> Iterator[None]:
    """Call `seen` before each order that a command of this process gives."""
    original: Callable[..., Any] = perform_step._order

    def ordering(step: Step, *arguments: Any) -> Any:
        seen(step)
        return original(step, *arguments)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(perform_step, "_order", ordering)
        yield


@pytest.mark.long
def test_a_query_on_the_standby_holds_up_a_switchover_while_writes_go_on(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    """It keeps the replay from a lock until it ends, and would a promotion."""
    trio = local_trio(settings=FOR_GOOD)
    subscribe(trio, "s1")
    config = configuration(
        tmp_path, trio, machines=machines(trio, local_bed), step_deadline_ms=60_000
    )
    ended: list[Future[None]] = []
    fenced: list[bool] = []
    with ThreadPoolExecutor(1) as pool, Writer(trio) as writer, replay_held_up(trio) as reader:

        def end_the_query() -> None:
            writer.goes_on()
            reader.close()

        def seen(step: Step) -> None:
            if step.action is Action.REPLAY and not ended:
                ended.append(pool.submit(end_the_query))
            if step.action is Action.FENCE:
                fenced.append(reader.closed)

        with ordered(seen):
            ran = slotfailover("switchover", "--to", "b", "--config", config, "--yes")
        assert ran.code == 0, ran.err
        assert fenced == [True], "the fence came before the replay was free"
        ended[0].result(patient(60))
        writer.goes_on()


@pytest.mark.long
def test_a_replay_that_is_held_up_for_good_ends_a_switchover_before_the_fence(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio(settings=FOR_GOOD)
    subscribe(trio, "s1")
    config = configuration(
        tmp_path, trio, machines=machines(trio, local_bed), step_deadline_ms=patient_ms(2_700)
    )
    orders: list[Action] = []
    with Writer(trio) as writer, replay_held_up(trio):
        written = writer.acknowledged
        with ordered(lambda step: orders.append(step.action)):
            ran = slotfailover("switchover", "--to", "b", "--config", config, "--yes")
        assert ran.code == 13, ran.err
        assert "are not replayed: a query on b may hold them up" in ran.err
        assert Action.REPLAY in orders and Action.FENCE not in orders
        assert "fence" not in ran.err
        assert writer.acknowledged > written + 5
