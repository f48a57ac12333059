"""The options that all commands share, and the settings that they read."""

from pathlib import Path
from typing import Annotated

import typer

from schemas.errors import SettingsError
from schemas.settings import FailoverSettings, load_settings, require
from services.failover.model.view import View
from services.failover.observe.bridge_client import Bridge, bridge_of

Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document on stdout.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print each step and its exact SQL; change nothing.")
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SLOT", help="Continue although this slot is not ready and is lost. Repeatable."
    ),
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="NODE",
        help="The standby to promote. A switchover needs it; a failover without it takes the "
        "standby with the newest timeline and the most WAL.",
    ),
]
Fence = Annotated[
    bool, typer.Option("--fence", help="First keep the old primary from writing (fence it).")
]
IsOff = Annotated[
    bool,
    typer.Option(
        "--old-primary-is-off",
        help="You vouch that a primary without an answer is off. If it is only cut off from "
        "here, there will be two primaries.",
    ),
]
RequireSubscribers = Annotated[
    bool,
    typer.Option(
        "--require-subscribers",
        help="Refuse while a subscription would be left behind, for example because its "
        "subscriber gives no answer. Without it, a later run moves the subscription.",
    ),
]
AcceptLoss = Annotated[
    int | None,
    typer.Option(
        "--accept-data-loss",
        metavar="BYTES",
        min=0,
        help="Continue although up to this many bytes of the old primary's WAL are lost.",
    ),
]
NoNewerPrimary = Annotated[
    bool,
    typer.Option(
        "--no-newer-primary",
        help="You vouch that no node without an answer was promoted meanwhile. If one was, "
        "subscriptions follow an old primary and get rows that the newer one does not have.",
    ),
]


def settings_of(config: Path) -> tuple[FailoverSettings, Bridge | None]:
    """Return the section `failover`, and the bridge if the file has one."""
    settings = load_settings(config)
    return require(settings.failover, "failover"), bridge_of(settings)


def known_slots(view: View, slots: list[str] | None) -> frozenset[str]:
    """Return the slots whose loss is accepted. Raise SettingsError for an unknown slot."""
    known = {s.slot_name for node in view.nodes if node.state is not None for s in node.state.slots}
    known |= {found.slot_name or "" for _, found in view.ours()} | {view.bridge_slot or ""}
    known |= view.slots_last_seen or set()
    strangers = sorted(set(slots or ()) - known)
    if strangers:
        raise SettingsError(
            f"there is no slot {strangers[0]}",
            operation="--accept-loss-of",
            hint=f"the slots are {', '.join(sorted(known - {''})) or 'none'}",
        )
    return frozenset(slots or ())
