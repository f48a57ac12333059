"""The commands that act on a node's machine, from their templates. Pure.

    stop    -> it no longer runs             by default pg_ctl stop -m fast
    start   -> it runs                       by default pg_ctl start
    fence   -> it can't write, surely        by default pg_ctl stop -m immediate
    rejoin  -> it streams from {primary}     by default as execute.rejoin_node does it
    label   -> the outside knows its {role}  no default

The defaults need `data_folder`, the node's data on this machine.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

    from schemas.settings import MachineSettings
    from services.failover.model.conninfo import Address

Command = tuple[str, ...]
_NAMES = ("node", "host", "port", "primary", "primary_host", "primary_port", "slot", "role", "copy")


@dataclass(frozen=True, slots=True)
class Machine:
    """A node's commands: templates, each word of them; empty where there is none."""

    node: str
    address: Address
    templates: dict[str, Command]
    data_folder: Path | None = None
    bin_folder: Path | None = None
    os_user: str = ""
    environment: tuple[str, ...] = ()
    """The variables of our environment that the commands get."""
    copies: bool = False
    """A rejoin may take a base backup where pg_rewind can't do it."""

    def has(self, name: str) -> bool:
        """Tell whether the node has a command of that name."""
        return bool(self.templates.get(name))

    @property
    def may_rejoin(self) -> bool:
        """Whether slotfailover can make the node a standby from this machine."""
        return self.has("rejoin") or self.data_folder is not None

    def command(self, name: str, **values: str) -> Command:
        """Return the words of a command with its placeholders filled in."""
        known = {
            "node": self.node,
            "host": self.address.host or self.address.hostaddr,
            "port": self.address.port,
        }
        filled = {**dict.fromkeys(_NAMES, ""), **known, **values}
        words = tuple(word.format_map(filled) for word in self.templates[name])
        return tuple(word for word in words if word)

    def program(self, name: str) -> str:
        """Return the path of a PostgreSQL program on the node's machine."""
        return str(self.bin_folder / name) if self.bin_folder is not None else name


def machine_of(node: str, settings: MachineSettings, address: Address) -> Machine:
    """Return the node's commands from the settings. Raise SettingsError for a bad template."""
    templates = {}
    for name in ("stop", "start", "fence", "rejoin", "label"):
        words = _words(node, name, getattr(settings, name))
        templates[name] = words or _default(name, settings)
    return Machine(
        node,
        address,
        templates,
        settings.data_folder,
        settings.bin_folder,
        settings.os_user,
        settings.environment,
        settings.copies,
    )


def _words(node: str, name: str, text: str) -> Command:
    """Return a command's words. Raise SettingsError for wrong quotes or an unknown name in {}."""
    try:
        words = tuple(shlex.split(text))
        for word in words:
            word.format_map(dict.fromkeys(_NAMES, ""))
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise SettingsError(
            f"the command `{name}` is wrong: {type(error).__name__} {error}",
            operation="read settings",
            subject=f"failover.machines.{node}",
            hint=f"quote it as for a shell; known are {', '.join('{' + n + '}' for n in _NAMES)}, "
            "and a brace is written twice",
        ) from None
    return words


def _default(name: str, settings: MachineSettings) -> Command:
    """Return pg_ctl's command to start, stop or fence; () for others, or without data_folder."""
    if settings.data_folder is None:
        return ()
    program = str(settings.bin_folder / "pg_ctl") if settings.bin_folder is not None else "pg_ctl"
    data = _literal(str(settings.data_folder))
    if name == "start":
        log = _literal(str(settings.data_folder / "slotfailover-pg_ctl.log"))
        options = _literal(shlex.join(settings.server_options))
        extra = ("-o", options) if settings.server_options else ()
        return (_literal(program), "start", "-D", data, "-w", "-l", log, *extra)
    modes = {"stop": "fast", "fence": "immediate"}
    if name in modes:
        return (_literal(program), "stop", "-D", data, "-w", "-m", modes[name])
    return ()


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
