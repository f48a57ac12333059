"""Rounds of power cuts: both nodes, the subscriber and two replicas of `watch` die at once.

They are started again in every order: nothing was promoted, or the old primary is among them, or
the standby is promoted while it still lies dead. An old primary that comes back writable is ended
by the operator in the end; until then no subscription may be led to it.
"""

import itertools
import time

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tests.promises.failover.rounds.rig import PATIENCE_S, PROMOTED, Rig, Round
from tests.promises.failover.servers import ask
from tests.promises.failover.watch.test_live import promote
from tests.promises.failover.watch.watch_process import Watching
from tests.providers.waiting import eventually

OLD, NEW, WATCHES = "old primary", "standby", ("watch 1", "watch 2")
STORIES = ("promoted before", "promoted between", "nothing was promoted")
LEADS_TO = "SELECT subconninfo FROM pg_subscription WHERE subname = 's1'"
LOOKS = 5
"""After so many observations `watch` would have acted."""
LOCKED = 15


class PowerCut:
    """Calls are rounds."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._watches: dict[str, Watching] = {}
        self._started = itertools.count(1)
        orders = list(itertools.permutations((OLD, NEW, *WATCHES)))
        rig.dice.shuffle(orders)
        self._orders = itertools.cycle(orders)
        self._stories = itertools.cycle(STORIES)
        for name in WATCHES:
            self._start_watch(name)

    def __call__(self) -> Round:
        """One power cut."""
        rig = self._rig
        story, order = next(self._stories), next(self._orders)
        old = rig.primary
        new = rig.other(old)
        if story == "promoted before":
            promote_as_somebody_else(rig, old, new)
            self._watch_acts_or_not(new)
        led = self._leads_to()
        self._power_off(old, new)
        codes = self._power_on(story, order, old, new)
        if new in rig.writable():
            self._old_primary_is_not_followed(led, old, new)
            rig.kill(old)
            eventually(
                lambda: self._leads_to() == new,
                what=f"watch leads the subscription to {new}",
                timeout_s=PATIENCE_S,
            )
            rig.complete("rejoin", old)
        else:
            assert self._leads_to() == old
        rig.settle()
        return Round(f"{story}: {', '.join(order)}", codes, rig.primary)

    def close(self) -> None:
        """End the replicas; none may have failed in a way of its own."""
        for watch in self._watches.values():
            watch.end()
            assert "Traceback" not in watch.output, watch.output

    def _power_off(self, *nodes: str) -> None:
        for watch in self._watches.values():
            watch.kill()
            assert "Traceback" not in watch.output, watch.output
        self._watches.clear()
        for name in ("sub", *nodes):
            self._rig.kill(name)

    def _power_on(self, story: str, order: tuple[str, ...], old: str, new: str) -> list[int]:
        """Start them in that order, the subscriber at any time; returns exit codes of orders."""
        rig, codes = self._rig, []
        begins: list[str] = list(order)
        begins.insert(rig.dice.randrange(len(order) + 1), "sub")
        for name in begins:
            if name in WATCHES:
                self._start_watch(name)
            else:
                rig.servers[{OLD: old, NEW: new}.get(name, name)].start()
            dead = begins.index(OLD) > begins.index(name)
            if story == "promoted between" and name == NEW and dead:
                codes += self._fail_over()
            self._look()
        return codes

    def _fail_over(self) -> list[int]:
        """By an operator, who repeats it while a replica of `watch` is at work."""
        codes = []
        for _ in range(20):
            ran = self._rig.order("failover")
            codes.append(ran.code)
            if ran.code != LOCKED:
                break
        assert codes[-1] in PROMOTED, ran.err
        return codes

    def _look(self) -> None:
        for watch in self._watches.values():
            watch.await_rounds(LOOKS)

    def _watch_acts_or_not(self, new: str) -> None:
        """Let the power fail before, while or after the subscription is led to the new primary."""
        if self._rig.dice.random() < 0.5:
            eventually(
                lambda: self._leads_to() == new, what=f"watch follows {new}", timeout_s=PATIENCE_S
            )
        else:
            time.sleep(self._rig.dice.uniform(0, 2))

    def _old_primary_is_not_followed(self, led: str, old: str, new: str) -> None:
        """Both are writable now, and stay so for a while."""
        assert sorted(self._rig.writable()) == sorted((old, new))
        self._look()
        now = self._leads_to()
        assert now in (led, new), f"the subscription led to {led}, and now to {now}"

    def _leads_to(self) -> str:
        """The node that the subscription leads to."""
        rig = self._rig
        try:
            conninfo = ask(rig.servers["sub"], LEADS_TO, rig.trio.dbname)
        except psycopg.OperationalError:
            return ""
        port = conninfo_to_dict(conninfo)["port"]
        return next(name for name in "ab" if str(rig.servers[name].port) == port)

    def _start_watch(self, name: str) -> None:
        config = self._rig.settings("watch.yaml")
        self._watches[name] = Watching(config, f"{name.replace(' ', '-')}-{next(self._started)}")


def promote_as_somebody_else(rig: Rig, old: str, new: str) -> None:
    """The old primary dies, and another manager promotes the standby."""
    rig.kill(old)
    promote(rig.servers[old], rig.servers[new])
    eventually(lambda: rig.writable() == [new], what=f"{new} is promoted", timeout_s=PATIENCE_S)
