"""The options --config and --accept, as every command has them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

from schemas.acceptance import Acceptance, Token
from schemas.errors import SettingsError

CONFIG_OPTION: Final = typer.Option(
    "--config", "-c", envvar="SLOTBRIDGE_CONFIG", help="YAML configuration file."
)
ConfigFile = Annotated[Path, CONFIG_OPTION]
AcceptTokens = Annotated[
    list[str] | None,
    typer.Option(
        "--accept",
        metavar="TOKEN",
        help="Accept the refusal that printed this token, and no other. Repeatable.",
    ),
]


def acceptance_of(tokens: Iterable[str] | None) -> Acceptance:
    """Return what the options --accept accept. Raise SettingsError for what is not a token."""
    try:
        return Acceptance(map(Token.parse, tokens or ()))
    except ValueError as error:
        raise SettingsError(str(error), operation="--accept") from None
