"""Outlives its owner for a moment: when the owner dies without stopping its servers, it does so.

The owner holds the other end of standard input. A line on it means that all was stopped in order;
its end without one means that the owner was killed.

    python -m services.testbed.reaper FOLDER OWNER_PID
"""

import signal
import sys
from pathlib import Path

from services.testbed.processes import end_leftovers


def main() -> None:
    """Wait for the owner's word or its death."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not sys.stdin.readline():
        end_leftovers(Path(sys.argv[1]), owner_pid=int(sys.argv[2]))


if __name__ == "__main__":
    main()
