"""The options that all commands share, and the settings that they read."""

from pathlib import Path
from typing import Annotated

import typer

from schemas.settings import FailoverSettings, load_settings, require

Config = Annotated[Path, typer.Option("--config", help="The YAML file of settings.")]
Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document on stdout.")]


def settings_of(config: Path) -> tuple[FailoverSettings, str | None]:
    """The section `failover`, and the bridge's slot where the file has a bridge."""
    settings = load_settings(config)
    bridge_slot = settings.source.slot if settings.source is not None else None
    return require(settings.failover, "failover"), bridge_slot
