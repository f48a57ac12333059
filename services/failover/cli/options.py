"""The options that all commands share, and the settings that they read."""

from pathlib import Path
from typing import Annotated

import typer

from schemas.settings import FailoverSettings, load_settings, require
from services.failover.observe.bridge_client import Bridge, bridge_of

Config = Annotated[Path, typer.Option("--config", help="The YAML file of settings.")]
Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document on stdout.")]


def settings_of(config: Path) -> tuple[FailoverSettings, Bridge | None]:
    """Return the section `failover`, and the bridge if the file has one."""
    settings = load_settings(config)
    return require(settings.failover, "failover"), bridge_of(settings)
