"""Finds missing commands that end a primary before a failover needs them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from services.failover.checks import remedies
from services.failover.checks.model import Seen, check
from services.failover.model.managers import is_managed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.failover.checks.facts import Facts

GROUP = "promotion"


def _promotes(facts: Facts) -> bool:
    """Tell whether slotfailover promotes: a manager has its own ways to end a primary."""
    return not is_managed(facts.view.managed_by)


@check(
    "fence-command",
    group=GROUP,
    title="every node has a command that makes sure that it can't write",
    consequence="a primary that may be alive and gives no answer is not replaced (35) until a "
    "person has made sure that it is off, and says so (--accept); --fence fences only one that "
    "answers",
    severity=Severity.WARNING,
    applies=_promotes,
)
def fence_command(facts: Facts) -> Iterator[Seen]:
    yield from _commands(facts, "fence")


@check(
    "stop-command",
    group=GROUP,
    title="every node has a command that stops it in order",
    consequence="after a switchover the old primary runs on, fenced: if a client asks for READ "
    "WRITE itself, its writes there are lost at the rejoin; if the fence does not bind "
    "everybody, a switchover refuses (34)",
    severity=Severity.WARNING,
    applies=_promotes,
)
def stop_command(facts: Facts) -> Iterator[Seen]:
    yield from _commands(facts, "stop")


def _commands(facts: Facts, name: str) -> Iterator[Seen]:
    """See whether each node has the command, as any of them may come to be the primary."""
    for node in facts.view.nodes:
        has = node.has_command(name)
        yield Seen(
            node.name,
            f"failover.machines.{node.name} has {'a' if has else 'no'} `{name}` command",
            "" if has else f"{node.name} has no `{name}` command",
            remedies.manual(
                f"set failover.machines.{node.name}.{name}, or data_folder where its server is on "
                "this machine",
                because="slotfailover does not write its own settings",
            ),
        )
