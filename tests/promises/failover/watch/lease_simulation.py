"""Candidates for a Lease and an API server in simulated time, with what can go wrong between them.

Requests arrive late, also after their sender has given up; answers are lost; processes freeze;
clocks run at other rates, and wall clocks say anything; the object is deleted or emptied.
"""

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from services.failover.watch.lease.election import Election, Lease, Rules

RULES = Rules(duration_s=15.0, deadline_s=10.0, retry_s=2.0)
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Refused(Exception):
    """409."""


@dataclass(frozen=True)
class Fate:
    """Of one request: how long it takes there and back, and what of it is lost."""

    out_s: float = 0.01
    back_s: float = 0.01
    lost: str = ""
    """"request", "answer", or nothing."""
    freeze_s: float = 0.0
    """How long the process stands still before it looks at the answer."""


@dataclass(frozen=True)
class Clocks:
    """Of one machine."""

    offset_s: float = 0.0
    rate: float = 1.0
    wall_s: tuple[float, ...] = (0.0,)
    """What the wall clock says, one after the other, then the last for ever."""


@dataclass
class Server:
    """The API server's one object."""

    lease: Lease | None = None
    version: int = 0

    def read(self) -> Lease:
        return self.lease or Lease()

    def write(self, lease: Lease) -> Lease:
        """Take a write that names the version it replaces; one without a change changes nothing."""
        present = self.read().metadata.get("resourceVersion")
        if lease.metadata.get("resourceVersion") != present:
            raise Refused
        if lease != self.lease:
            self.put(lease)
        return self.read()

    def put(self, lease: Lease) -> None:
        """Make it so, as an administrator does."""
        self.version += 1
        stamped = {"name": "l", "resourceVersion": str(self.version)}
        self.lease = Lease.of({"spec": lease.spec(), "metadata": stamped})


class Machine:
    """A candidate's process; `restart` makes another process of it."""

    def __init__(self, world: "World", name: str, clocks: Clocks) -> None:
        self.world = world
        self.name = name
        self.clocks = clocks
        self._walls = list(clocks.wall_s)
        self.processes = 0
        self.restart()

    def restart(self) -> None:
        self.processes += 1
        identity = f"{self.name}_{self.processes}"
        self.election = Election(identity, self.world.rules, self._now_s, self._wall)
        self.world.at(0.0, self._attempts(self.processes))

    def stop(self) -> None:
        """SIGTERM: it gives the Lease up; another process starts 5 s later."""
        last = self.election.give_up()
        self.processes += 1
        if last is not None:
            self.world.send(self.name, last, lambda _: None, lambda: None)
        self.world.at(5.0, self.restart)

    def kill(self) -> None:
        """SIGKILL, and another process 5 s later."""
        self.processes += 1
        self.election = Election("dead", self.world.rules, self._now_s, self._wall)
        self.world.at(5.0, self.restart)

    def _now_s(self) -> float:
        return self.clocks.offset_s + self.clocks.rate * self.world.now_s

    def _wall(self) -> datetime:
        said = self._walls.pop(0) if len(self._walls) > 1 else self._walls[0]
        return EPOCH + timedelta(seconds=said)

    def _attempts(self, process: int) -> Callable[[], None]:
        """One attempt after the other, as long as it is the machine's process."""

        def begin() -> None:
            if process == self.processes:
                requests = self.election.attempt()
                self._go_on(process, requests, lambda: next(requests))

        return begin

    def _go_on(
        self,
        process: int,
        requests: Generator[Lease | None, Lease, None],
        step: Callable[[], Lease | None],
    ) -> None:
        if process != self.processes:
            return
        again = self._attempts(process)
        try:
            wish = step()
        except StopIteration:
            self.world.at(self.world.rules.retry_s, again)
            return

        def answered(answer: Lease) -> None:
            self._go_on(process, requests, lambda: requests.send(answer))

        def failed() -> None:
            if process == self.processes:
                self.election.failed()
                self.world.at(self.world.rules.retry_s, again)

        self.world.send(self.name, wish, answered, failed)


@dataclass
class World:
    """Simulated time. `fates`: of the requests in the order in which they are sent."""

    rules: Rules = RULES
    fates: list[Fate] = field(default_factory=list)
    cut_off: set[str] = field(default_factory=set)
    """Machines that reach no server."""
    now_s: float = 0.0
    server: Server = field(default_factory=Server)
    machines: list[Machine] = field(default_factory=list)
    leaders: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    """(when, who) at each change."""
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _counter: int = 0

    @property
    def leading(self) -> tuple[str, ...]:
        """Who leads now."""
        return self.leaders[-1][1]

    def add(self, name: str, clocks: Clocks | None = None) -> Machine:
        machine = Machine(self, name, clocks or Clocks())
        self.machines.append(machine)
        return machine

    def at(self, delay_s: float, event: Callable[[], Any]) -> None:
        self._counter += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._counter, event))

    def send(
        self,
        sender: str,
        wish: Lease | None,
        answered: Callable[[Lease], None],
        failed: Callable[[], None],
    ) -> None:
        """A request: it takes place at the server, or not, and its sender hears of it, or not."""
        fate = self.fates.pop(0) if self.fates else Fate()
        timeout_s = self.rules.deadline_s / 2
        arrives = fate.lost != "request" and sender not in self.cut_off
        hears = arrives and fate.lost != "answer" and fate.out_s + fate.back_s <= timeout_s

        def arrive() -> None:
            try:
                answer = self.server.read() if wish is None else self.server.write(wish)
            except Refused:
                answer = None
            if hears:
                then = failed if answer is None else partial(answered, answer)
                self.at(fate.back_s + fate.freeze_s, then)

        if arrives:
            self.at(fate.out_s, arrive)
        if not hears:
            self.at(timeout_s + fate.freeze_s, failed)

    def run(self, until_s: float) -> None:
        """Let time pass; note who leads after each event."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            self._note()
        self.now_s = until_s
        self._note()

    def _note(self) -> None:
        found = tuple(m.election.candidate.identity for m in self.machines if m.election.holds())
        if not self.leaders or self.leaders[-1][1] != found:
            self.leaders.append((self.now_s, found))
