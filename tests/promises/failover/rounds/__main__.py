"""Rounds of what tempts a failover manager into two primaries, under load, and their history.

    python -m tests.promises.failover.rounds --case cut-off --rounds 20

cut-off    the manager alone does not reach the primary: its address refuses, resets, or takes
           connections and never answers
freeze     the postmaster, or all of the server, stands still; it is thawed, or fenced
signals    INT, TERM or HUP, some of them twice, at any time of a switchover
power-cut  all nodes, the subscriber and two replicas of `watch` die and start in every order
partition  manager, standby, bridge, subscriber or client is cut off from one other

Clients at each node append to lists and note which node acknowledged what. After every round the
history is checked against the primary (`history`), and the copies are compared.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

from services.testbed.bed import Bed
from tests.promises.failover.conftest import end
from tests.promises.failover.rounds.play import CASES, play
from tests.providers.interface import Trio


def main() -> None:
    """Play one case and print what was seen as one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rounds-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with Bed(folder / "bed", lazy=True) as bed, bed.new_pair() as (pair, subscriber):
            trio = Trio(pair.primary, pair.standby, subscriber, pair.dbname)
            with contextlib.ExitStack() as stack:
                for server in (pair.primary, pair.standby, subscriber):
                    stack.callback(end, server)
                report = play(given.case, given.rounds, given.seed, folder, trio, bed)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
