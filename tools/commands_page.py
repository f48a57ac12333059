"""docs/reference/commands.md, made from the commands' own arguments, options and help."""

from collections.abc import Iterator
from typing import Any, Final

import typer

from services.adoption.command import app as slotbridge
from services.failover.cli.app import app as slotfailover
from spark_consumers.command import app as slottables

_HEAD: Final = """# Commands

Every command of the three programs, as `--help` prints it. All take `--help`, and the programs
`--version`. `SLOTBRIDGE_CONFIG` names the configuration file in the place of `--config`.
[Exit codes](exit-codes.md). `make generate` makes this page from the code.
"""
_PROGRAMS: Final = {
    "slotbridge": slotbridge,
    "slotfailover": slotfailover,
    "slottables": slottables,
}
_EVERYWHERE: Final = ("--help", "--version", "--install-completion", "--show-completion")


def commands_page() -> str:
    """Return the page: a part for each program, with a heading for each command."""
    parts = [_HEAD]
    for name, app in _PROGRAMS.items():
        parts += [*_program(name, typer.main.get_command(app))]
    return "\n".join(parts)


def _program(name: str, command: Any) -> Iterator[str]:
    """Yield the parts of a program or a command; `command` is click's."""
    level = "##" if " " not in name else "###"
    rows = [*_rows(command)]
    yield f"{level} {name}\n"
    yield f"{_text(command.help or '')}\n"
    if rows:
        yield "\n".join(["| argument | meaning | default |", "|---|---|---|", *rows, ""])
    for word, inner in sorted(getattr(command, "commands", {}).items()):
        if not inner.hidden:
            yield from _program(f"{name} {word}", inner)


def _rows(command: Any) -> Iterator[str]:
    """Yield a row of the table for each argument and option that `--help` shows."""
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        if getattr(parameter, "hidden", False) or set(names) & set(_EVERYWHERE):
            continue
        option = parameter.param_type_name == "option"
        shown = (
            ", ".join(f"`{name}`" for name in names) if option else f"`{parameter.name.upper()}`"
        )
        meaning = getattr(parameter, "help", "") or ""
        yield f"| {shown} | {_text(meaning).replace('|', chr(92) + '|')} | {_default(parameter)} |"


def _default(parameter: Any) -> str:
    """Return the default as the table shows it, "" where there is none to tell."""
    if parameter.required:
        return "required"
    value = parameter.default
    if callable(value) or value in (None, False, "", (), []):
        return ""
    return f"`{value}`"


def _text(text: str) -> str:
    """Return a help text on one line; angle brackets would be taken for HTML."""
    return " ".join(text.split()).replace("<", "&lt;")
