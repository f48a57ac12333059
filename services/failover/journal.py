"""The audit journal: one JSON line a step performed. It is written, and never read by the program.

{"at": …Z, "by": "user@host pid", "step": …, "server": …, "sql": […], "seen": {…}, "seconds": …}
"""

import getpass
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from schemas.lsn import format_lsn
from services.failover.effects.step import Step
from services.failover.view import View


class Journal:
    """Appends to `path`; None: keeps nothing. A line that can't be written stops no failover:
    `problem` tells then.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.problem = ""

    def write(self, step: Step, view: View, seconds: float, outcome: str) -> None:
        """Record a step and what was seen after it. Secrets are masked already."""
        if self._path is None:
            return
        entry = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "by": f"{_user()}@{socket.gethostname()} {os.getpid()}",
            "step": step.text,
            "server": step.server,
            "sql": list(step.shown),
            "outcome": outcome,
            "seen": _seen(view),
            "seconds": round(seconds, 3),
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        except OSError as error:
            self.problem = f"the journal {self._path} can't be written: {error.strerror}"


def _seen(view: View) -> dict[str, str]:
    """Each server in a few words."""
    seen = {}
    for node in view.nodes:
        if node.state is None:
            seen[node.name] = f"{node.reach}: {node.detail}"
            continue
        role = "primary" if node.writable else "standby"
        timeline = node.state.server.timeline
        seen[node.name] = f"{role}, timeline {timeline}, at {format_lsn(node.received)}"
    for subscriber in view.subscribers:
        if not subscriber.usable:
            seen[subscriber.name] = f"{subscriber.reach}: {subscriber.detail}"
    return seen


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
