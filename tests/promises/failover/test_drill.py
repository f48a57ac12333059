"""Switchovers back and forth under pgbench, with a bridge and a subscriber: nothing is lost."""

from functools import partial
from pathlib import Path

from services.testbed.bed import Bed
from tests.promises.bridge.running import Bridge
from tests.promises.failover.conftest import NewTrio
from tests.promises.failover.drill import (
    Load,
    both,
    compare,
    drill_settings,
    prepare,
    script,
    switch_over,
)
from tests.promises.failover.servers import slotfailover
from tests.providers.interface import Broker
from tests.providers.waiting import eventually

ROUNDS = 2


def test_switchovers_under_load_lose_nothing_and_repeat_nothing(
    local_trio: NewTrio, local_bed: Bed, kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    trio = local_trio()
    bridge = Bridge(tmp_path, both(trio), kafka, topic_prefix)
    try:
        prepare(trio, bridge)
        config = drill_settings(tmp_path, trio, local_bed, bridge)
        check = partial(slotfailover, "check", "--config", config)
        with Load(trio, script(local_bed.folder)).running() as load:
            for number in range(ROUNDS):
                done = switch_over(config, load, "ba"[number % 2])
                assert done.ran.code == 0, done.ran.err
                assert f"wait for the bridge at {done.ran.json['new_primary']}" in done.ran.err
                eventually(lambda: check().code == 0, what="all is ready", interval_s=0.2)
        copies = compare(trio, trio.primary, bridge, load)
        assert copies["transactions"] > 100
        lost = {name: number for name, number in copies.items() if "lost" in name or "dup" in name}
        assert not any(lost.values()), lost
    finally:
        bridge.end()
