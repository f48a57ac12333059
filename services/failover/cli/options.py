"""The options that all commands share, and the settings that they read."""

from pathlib import Path
from typing import Annotated

import typer

from schemas.settings import FailoverSettings, load_settings, require
from services.failover.observe.bridge_client import Bridge, bridge_of

Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document on stdout.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print each step and its exact SQL; change nothing.")
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
RequireSubscribers = Annotated[
    bool,
    typer.Option(
        "--require-subscribers",
        help="Refuse while a subscription would be left behind, for example because its "
        "subscriber gives no answer. Without it, a later run moves the subscription.",
    ),
]


def settings_of(config: Path) -> tuple[FailoverSettings, Bridge | None]:
    """Return the section `failover`, and the bridge if the file has one."""
    settings = load_settings(config)
    return require(settings.failover, "failover"), bridge_of(settings)
