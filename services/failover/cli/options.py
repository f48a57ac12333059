"""The options that all commands share, and the settings that they read."""

from pathlib import Path
from typing import Annotated

import typer

from schemas.settings import FailoverSettings, load_settings, require
from services.failover.observe.bridge_client import Bridge, bridge_of

Config = Annotated[Path, typer.Option("--config", "-c", help="YAML configuration file.")]
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
To = Annotated[str, typer.Option("--to", metavar="NODE", help="The standby to promote.")]
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
