"""The option --config, as every command has it."""

from pathlib import Path
from typing import Annotated, Final

import typer

CONFIG_OPTION: Final = typer.Option(
    "--config", "-c", envvar="SLOTBRIDGE_CONFIG", help="YAML configuration file."
)
ConfigFile = Annotated[Path, CONFIG_OPTION]
