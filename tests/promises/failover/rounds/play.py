"""The rounds of one case, and what came of them."""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.testbed.bed import Bed
from tests.promises.bridge.running import Bridge
from tests.promises.failover.rounds.cases import cut_off, freeze, signals
from tests.promises.failover.rounds.clients import TABLE
from tests.promises.failover.rounds.history import Outcome
from tests.promises.failover.rounds.outage import PowerCut
from tests.promises.failover.rounds.partition import STEP_DEADLINE_MS, Partition
from tests.promises.failover.rounds.paths import Paths
from tests.promises.failover.rounds.rig import Rig, Round
from tests.promises.failover.servers import subscribe, tell
from tests.providers.interface import Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import patient

CASES = ("cut-off", "freeze", "signals", "power-cut", "partition")
REFUSALS_FROM = 20
"""Exit codes from there on want an operator."""


def play(case: str, rounds: int, seed: int, folder: Path, trio: Trio, bed: Bed) -> dict[str, Any]:
    """Play them; return what was seen. Raises AssertionError at the first that went wrong."""
    for server in (trio.primary, trio.subscriber):
        tell(server, TABLE, dbname=trio.dbname)
    subscribe(trio, "s1")
    with contextlib.ExitStack() as stack:
        rig = Rig(folder, trio, bed, seed)
        one = _case(case, rig, bed, stack)
        done: list[Round] = []
        stack.enter_context(rig.load())
        rig.settle()
        for number in range(rounds):
            before = len(rig.said)
            try:
                done.append(one())
            except BaseException:
                sys.stderr.write("\n".join([f"{case} {number + 1}:", *rig.said[before:]]))
                raise
            sys.stderr.write(f"{case} {number + 1}: {done[-1]}\n")
            sys.stderr.flush()
    return _report(case, rig, done)


def _case(case: str, rig: Rig, bed: Bed, stack: contextlib.ExitStack) -> Callable[[], Round]:
    """A function that plays one round."""
    if case == "power-cut":
        power_cut = PowerCut(rig)
        stack.callback(power_cut.close)
        return power_cut
    if case == "partition":
        paths = Paths(rig.servers)
        stack.callback(paths.close)
        rig.through(paths)
        rig.step_deadline_ms = STEP_DEADLINE_MS
        _add_bridge(rig, bed, stack, paths)
        return Partition(rig, paths)
    one = {"cut-off": cut_off, "freeze": freeze, "signals": signals}[case]
    return lambda: one(rig)


def _add_bridge(rig: Rig, bed: Bed, stack: contextlib.ExitStack, paths: Paths) -> None:
    """A bridge that comes to each node by a way of its own."""
    bed.start("kafka")
    trio = rig.trio
    conninfo = trio.primary.conninfo(
        trio.dbname,
        host="127.0.0.1,127.0.0.1",
        port=",".join(str(paths.proxy("bridge", name).port) for name in "ab"),
        target_session_attrs="read-write",
        connect_timeout=round(patient(0.7)),
    )
    rig.bridge = Bridge(rig.folder, conninfo, bed.kafka, "rounds")
    stack.callback(rig.bridge.end)
    rig.bridge.start().streaming(trio.primary.conninfo(trio.dbname))
    await_ready(trio.primary, trio.standby, rig.bridge.slot)


def _report(case: str, rig: Rig, done: list[Round]) -> dict[str, Any]:
    """Counts; nothing is lost and there was one primary, or there is no report."""
    codes = Counter(code for each in done for code in each.codes)
    outcomes = Counter(each.outcome for each in rig.history)
    return {
        "case": case,
        "rounds": len(done),
        "acknowledged": outcomes[Outcome.OK],
        "unknown": outcomes[Outcome.INFO],
        "failed": outcomes[Outcome.FAIL],
        "anomalies": 0,
        "accepted_losses_bytes": [loss.size for loss in rig.accepted],
        "timelines": len({each.timeline for each in rig.history if each.timeline}),
        "orders": sum(codes.values()),
        "refusals": sum(count for code, count in codes.items() if code >= REFUSALS_FROM),
        "exit_codes": {str(code): codes[code] for code in sorted(codes)},
        "kinds": dict(sorted(Counter(each.what for each in done).items())),
    }
