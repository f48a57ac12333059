"""Which function does which fault, and whether the bridge may be killed meanwhile."""

import time
from collections.abc import Callable
from typing import Final

from tests.torture import bridge_faults, database_faults, kafka_faults, recover_faults
from tests.torture.faults import Fault
from tests.torture.torture_run import TortureRun

Do = Callable[[TortureRun, Fault], None]


def _far_away(run: TortureRun, fault: Fault) -> None:
    """The bridge starts while Kafka is far away."""
    with run.brokers.far_away():
        run.supervised.kill()
        time.sleep(2 * fault.seconds)


_TO_THE_BRIDGE: Final[dict[str, Do]] = {
    "kill": bridge_faults.kill,
    "failpoint": bridge_faults.crash,
    "crash loop": bridge_faults.crash,
    "seams": bridge_faults.seams,
    "sigterm": bridge_faults.terminated,
    "freeze": bridge_faults.freeze,
    "rival": bridge_faults.rival,
    "terminate": bridge_faults.disconnect,
    "leader killed inside": bridge_faults.lose_leader_inside,
    "markers lost": kafka_faults.lose_markers,
    "slot lost": recover_faults.lose_slot,
}
_TO_SERVERS: Final[dict[str, Do]] = {
    "network cut": database_faults.cut_network,
    "network stalled": database_faults.stall_network,
    "broker far away": _far_away,
    "publication altered": database_faults.alter_publication,
    "tables locked": database_faults.lock_tables,
    "primary restarted": database_faults.restart_primary,
    "standby killed": database_faults.kill_standby,
    "failover": database_faults.fail_over,
    "volume restored": database_faults.restore_volume,
    "stray bridge": bridge_faults.stray,
    "records lost": kafka_faults.lose_records,
}
"""Those of brokers besides; the bridge may be killed in a loop during all of them."""


def perform(run: TortureRun, fault: Fault) -> None:
    """Do it, and undo what it does to servers and network."""
    run.faults[fault.name] += 1
    run.note(fault.name, *fault.points, "kill loop" if fault.kill_loop else "")
    if fault.name in _TO_THE_BRIDGE:
        _TO_THE_BRIDGE[fault.name](run, fault)
    else:
        if fault.name == "failover":
            run.await_ready()
        with run.kill_loop(fault):
            if not run.brokers.perform(fault, run.bridge.prefix):
                _TO_SERVERS[fault.name](run, fault)
    run.note(fault.name, "done")
