"""`slotfailover check` asked as a person would ask it, and its remedies carried out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.promises.failover.servers import (
    Ran,
    configuration,
    slotfailover,
    slotfailover_process,
    tell,
)
from tests.providers.databases import connect
from tests.providers.interface import Server, Trio
from tests.providers.waiting import eventually

Finding = dict[str, Any]


@dataclass(frozen=True)
class Examiner:
    """A trio and the settings that describe it: nodes a and b, subscriber sub."""

    trio: Trio
    config: Path
    process: bool = False
    """Run the command in a process of its own, as it sets up logging for the whole process."""

    def servers(self) -> dict[str, tuple[Server, str]]:
        """The servers by their names in the settings, each with its database."""
        return {
            "a": (self.trio.primary, "postgres"),
            "b": (self.trio.standby, "postgres"),
            "sub": (self.trio.subscriber, self.trio.dbname),
        }

    def run(self, *options: str) -> Ran:
        run = slotfailover_process if self.process else slotfailover
        return run("check", "--config", self.config, *options)

    def problems(self, *options: str) -> dict[str, list[Finding]]:
        """check -> what it found wrong."""
        found: dict[str, list[Finding]] = {}
        report = self.run("--json", *options).json
        assert "findings" in report, report
        for finding in report["findings"]:
            if finding["severity"] in ("warning", "critical"):
                found.setdefault(finding["check"], []).append(finding)
        return found

    def expect(self, *checks: str, options: Sequence[str] = ()) -> dict[str, list[Finding]]:
        """Wait until exactly these checks find something; each with all that it has to say."""
        found: dict[str, list[Finding]] = {}

        def so() -> bool:
            found.clear()
            found.update(self.problems(*options))
            return set(found) == set(checks)

        try:
            eventually(so, what=f"problems {sorted(checks)}", timeout_s=40, interval_s=0.2)
        except AssertionError as error:
            seen = {n: [(f["what"], f["evidence"]) for f in fs] for n, fs in found.items()}
            raise AssertionError(f"expected {sorted(checks)}, found {seen}") from error
        for name in checks:
            for finding in found[name]:
                for part in ("what", "evidence", "consequence", "remedy"):
                    assert finding[part], (name, part)
                assert finding["remedy"]["text"] or finding["remedy"]["sql"], name
                assert bool(finding["remedy"]["by_hand"]) != finding["remedy"]["fix"], name
        return found

    def settle(self) -> None:
        """Wait until nothing is wrong, and nothing is too young to be judged."""
        self.expect()
        eventually(lambda: self.run("--nagios").code == 0, what="everything is judged and sound")

    def fix(self) -> Ran:
        return self.run("--fix", "--yes", "--json")

    def hasten(self) -> None:
        """Do without the 10 s after which the server starts a slotsync worker again."""
        self.trio.standby.restart()

    def carry_out(self, finding: Finding) -> None:
        """Run the SQL of a remedy, as a person would who reads it."""
        for step in finding["remedy"]["sql"]:
            server, dbname = self.servers()[step["server"]]

            def run(server: Server = server, dbname: str = dbname, step: Any = step) -> bool:
                try:
                    tell(server, step["statement"], dbname=dbname)
                except psycopg.errors.ObjectInUse:  # the slot is still being released
                    return False
                return True

            eventually(run, what=step["statement"])


def set_on(server: Server, **settings: str) -> None:
    """ALTER SYSTEM, and reload; an empty value is an empty string."""
    for name, value in settings.items():
        tell(server, f"ALTER SYSTEM SET {name} = {value or quoted('')}")
    tell(server, "SELECT pg_reload_conf()")


def reset_on(server: Server, *settings: str) -> None:
    """ALTER SYSTEM RESET, and reload."""
    for name in settings:
        tell(server, f"ALTER SYSTEM RESET {name}")
    tell(server, "SELECT pg_reload_conf()")


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def make_slot(server: Server, dbname: str, name: str, *, failover: bool = True) -> None:
    """A permanent logical slot without a consumer."""
    with connect(server, dbname) as connection:
        connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, false, %s)",
            [name, failover],
        )


def examiner_of(trio: Trio, folder: Path, **changes: Any) -> Examiner:
    """An examiner with settings of its own in `folder`; `changes` as of `configuration`.

    Every node has commands, unless `changes` say otherwise: none of them is ever run.
    """
    nodes = changes.get("nodes", ("a", "b"))
    commands = {name: {"stop": "false", "fence": "false"} for name in nodes}
    return Examiner(trio, configuration(folder, trio, **{"machines": commands, **changes}))
