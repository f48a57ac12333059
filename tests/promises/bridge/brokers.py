"""What happens to the brokers of a cluster while a bridge writes to it; and it again and again:

    python -m tests.promises.bridge.brokers --rounds 20 [--faults roll,kill,disk]

Each round has its faults under load; then the tables rebuilt from Kafka must be the database's, no
event twice. Ends with 1 at the first round that loses or repeats something.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psycopg

from services.testbed.bed import Bed
from services.testbed.kafka import KafkaBroker
from services.testbed.pair import create_database
from tests.promises.bridge.faults.load import TABLE, Load
from tests.promises.bridge.oracle import assert_rebuilt
from tests.promises.bridge.running import Bridge
from tests.providers.kafka_cluster import KafkaCluster

DOWN_S: Final = 12.0
"""Longer than a broker's session: others lead its partitions by then."""
LED_BY: Final = "progress"


def roll(cluster: KafkaCluster, load: Load, bridge: Bridge) -> None:
    """Every broker is restarted in turn, while transactions go on."""
    load.more(5)
    cluster.roll(between=lambda _broker: load.more(5))
    load.more(5)


def kill(cluster: KafkaCluster, load: Load, bridge: Bridge) -> None:
    """The leader of the progress topic dies, and comes again after 12 s."""
    _without(cluster, load, bridge, KafkaBroker.kill)


def disk(cluster: KafkaCluster, load: Load, bridge: Bridge) -> None:
    """The same, and comes again without anything on its disk."""
    _without(cluster, load, bridge, cluster.lose_disk)


FAULTS: Final[dict[str, Callable[[KafkaCluster, Load, Bridge], None]]] = {
    "roll": roll,
    "kill": kill,
    "disk": disk,
}


def _without(
    cluster: KafkaCluster, load: Load, bridge: Bridge, lose: Callable[[KafkaBroker], None]
) -> None:
    load.more(5)
    leader = cluster.leader(f"{bridge.prefix}.{LED_BY}")
    assert leader is not None
    lose(leader)
    until = time.monotonic() + DOWN_S
    while time.monotonic() < until:
        load.more(5)
    leader.start()
    cluster.await_in_sync()
    load.more(5)


def main(arguments: list[str]) -> int:
    """Run the rounds; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.promises.bridge.brokers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--faults", default=",".join(FAULTS))
    options = parser.parse_args(arguments)
    faults = [FAULTS[name] for name in options.faults.split(",")]
    with tempfile.TemporaryDirectory(prefix="slotbridge-brokers-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL may run as another user
        with Bed(folder / "bed", lazy=True) as bed:
            bed.start("pair")
            with KafkaCluster(bed.folder / "cluster", processes=bed.processes) as cluster:
                return _rounds(bed, cluster, folder, faults, options.rounds)


def _rounds(
    bed: Bed,
    cluster: KafkaCluster,
    folder: Path,
    faults: list[Callable[[KafkaCluster, Load, Bridge], None]],
    rounds: int,
) -> int:
    for number in range(1, rounds + 1):
        create_database(bed.primary, f"round{number}")
        conninfo = bed.primary.conninfo(f"round{number}")
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(TABLE)
        bridge = Bridge(folder, conninfo, cluster, f"round{number}")
        bridge.start().streaming()
        began = time.monotonic()
        try:
            with Load(conninfo) as load:
                for fault in faults:
                    fault(cluster, load, bridge)
                load.stop()
                bridge.caught_up()
            assert bridge.stop() == 0, bridge.output
            assert_rebuilt(bridge)
        except AssertionError as error:
            print(f"round {number}: FAILED: {error}", flush=True)  # noqa: T201
            return 1
        finally:
            bridge.end()
        print(  # noqa: T201
            f"round {number}: {', '.join(fault.__name__ for fault in faults)}: "
            f"{load.committed} transactions in {time.monotonic() - began:.0f} s, "
            f"{bridge.sessions} sessions, lost 0, twice 0",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
