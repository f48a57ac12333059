"""Rounds in which one taking part is cut off from one other, wholly or in one direction.

    who         from whom       what may happen
    manager     primary         nothing is promoted
    manager     standby         nothing is promoted
    manager     subscriber      nothing, or a whole switchover
    standby     primary         nothing, or a promotion with a fence and the loss accepted in bytes
    subscriber  primary         nothing, or a whole switchover
    bridge      primary         nothing, or a whole switchover
    client      primary         a whole switchover

Once the way is free again, the same order completes the switchover.
"""

import itertools
import re
from collections.abc import Callable

from tests.promises.failover.rounds.history import AcceptedLoss
from tests.promises.failover.rounds.paths import Paths
from tests.promises.failover.rounds.rig import PROMOTED, REFUSED, Rig, Round
from tests.promises.failover.servers import ask, tell, word_of
from tests.providers.proxy import Proxy
from tests.providers.waiting import patient_ms

WAYS: tuple[tuple[str, str], ...] = (
    ("manager", "primary"),
    ("manager", "standby"),
    ("manager", "subscriber"),
    ("standby", "primary"),
    ("subscriber", "primary"),
    ("bridge", "primary"),
    ("client", "primary"),
)
FAULTS: dict[str, Callable[[Proxy], None]] = {
    "reset": Proxy.cut,
    "stalled": Proxy.stall,
    "deaf": lambda proxy: proxy.stall("to_server"),
    "mute": lambda proxy: proxy.stall("to_client"),
    "half open": lambda proxy: proxy.half_open("client"),
}
STEP_DEADLINE_MS = patient_ms(2_700)
"""A consumer that is cut off is waited for so long."""
ACCEPT = re.compile(r"--accept (lost-wal:\S+?[+])(\d+)")
MORE_BYTES = 2**22
"""What clients may write after a refusal has named the bytes."""
ATTEMPTS = 3
BRANCHED = r"""
    SELECT (split_part(line, E'\t', 2)::pg_lsn - '0/0')::bigint
      FROM pg_walfile_name(pg_current_wal_lsn()) file,
           regexp_split_to_table(
             pg_read_file('pg_wal/' || substr(file, 1, 8) || '.history'), '\n') line
     WHERE line ~ '^[0-9]' ORDER BY split_part(line, E'\t', 1)::int DESC LIMIT 1
"""
"""Where a primary's timeline left its parent."""


class Partition:
    """Calls are rounds."""

    def __init__(self, rig: Rig, paths: Paths) -> None:
        self._rig = rig
        self._paths = paths
        ways = list(WAYS)
        rig.dice.shuffle(ways)
        self._ways = itertools.cycle(ways)

    def __call__(self) -> Round:
        """One way is cut, orders are given, the way is free again, and a switchover completes."""
        rig, paths = self._rig, self._paths
        who, whom = next(self._ways)
        fault = rig.dice.choice(list(FAULTS))
        old = rig.primary
        new = rig.other(old)
        paths.lead_standby(new, old)
        paths.lead_subscriber(rig.trio.dbname, old)
        given_up = (who, whom) == ("standby", "primary") and rig.dice.random() < 0.5
        if given_up and rig.dice.random() < 0.5:
            commits_wait_for_nobody(rig, old)
        name = {"primary": old, "standby": new, "subscriber": "sub"}[whom]
        proxy = paths.proxy(who, name)
        FAULTS[fault](proxy)
        if who == "manager":
            conninfo = rig.servers[name].conninfo("postgres" if name != "sub" else rig.trio.dbname)
            codes = self._without_sight(whom, old, new, **{name: f"{conninfo} port={proxy.port}"})
        elif given_up:
            codes = self._give_up(old)
        else:
            codes = self._switch_over(old, new)
        if fault == "half open":
            proxy.cut()  # what has lost an end would be waited for until a time-out of the server
        proxy.heal()
        codes += self._complete(old, new)
        rig.settle()
        what = f"{who} from {whom}, {fault}{', loss accepted' if given_up else ''}"
        return Round(what, codes, rig.primary)

    def _without_sight(self, whom: str, old: str, new: str, **cut: str) -> list[int]:
        """Orders of a manager that does not reach one server."""
        rig = self._rig
        if whom == "subscriber":
            return [self._given(old, new, "switchover", "--to", new, **cut)]
        word = word_of(rig.servers[new], old)
        orders = (("failover",), ("failover", *word), ("switchover", "--to", new))
        codes = [self._given(old, new, *order, **cut) for order in orders]
        assert rig.primary == old, codes
        assert codes[:2] == [REFUSED, REFUSED], codes
        return codes

    def _switch_over(self, old: str, new: str) -> list[int]:
        """A living primary is not replaced; a switchover is whole, or has changed nothing."""
        codes = [self._given(old, new, "failover")]
        assert codes == [REFUSED], codes
        return [*codes, self._given(old, new, "switchover", "--to", new)]

    def _give_up(self, old: str) -> list[int]:
        """The standby does not have all, and an operator wants it promoted nevertheless."""
        rig, codes = self._rig, []
        timeline, size = rig.timeline, 0
        accepted: list[str] = []
        for more in (0, MORE_BYTES, 0):
            ran = rig.order("failover", "--fence", *accepted)
            codes.append(ran.code)
            if ran.code in PROMOTED:
                break
            assert rig.primary == old, ran.err
            if named := ACCEPT.search(ran.err):
                size = int(named[2]) + more
                accepted = ["--accept", f"{named[1]}{size}"]
        if ran.code in PROMOTED and size:
            branched = ask(rig.servers[rig.primary], BRANCHED)
            rig.accepted.append(AcceptedLoss(timeline, branched, size))
        return codes

    def _given(self, old: str, new: str, *words: str, **cut: str) -> int:
        """The exit code of an order: there is one primary, and the new one where it says so."""
        ran = self._rig.order(*words, **cut)
        primary = self._rig.primary
        assert primary == new or ran.code not in PROMOTED, ran.err
        assert primary in (old, new)
        return ran.code

    def _complete(self, old: str, new: str) -> list[int]:
        """Without the fault, the switchover is completed."""
        rig, codes = self._rig, []
        for _ in range(ATTEMPTS):
            ran = rig.order("switchover", "--to", new)
            codes.append(ran.code)
            if ran.code == 0:
                break
        assert codes[-1] == 0, (codes, ran.err)
        if not rig.is_standby(old):
            rig.complete("rejoin", old)
        assert rig.primary == new
        return codes


def commits_wait_for_nobody(rig: Rig, name: str) -> None:
    """Acknowledged commits can be lost from now on."""
    set_to = "ALTER SYSTEM SET synchronous_standby_names = ''"
    tell(rig.servers[name], set_to, "SELECT pg_reload_conf()")
