"""The two settings that name standbys, read and cut down to what is there. Pure.

    synchronized_standby_slots  slot [, …]                        decoding waits for all of them
    synchronous_standby_names   [FIRST | ANY] n (name [, …])      commits wait for n of them
                                n (name [, …])  |  name [, …]

Source: PostgreSQL documentation 19.6.2 Primary Server; syncrep_gram.y.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from services.failover.model.view import FENCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.failover.model.view import NodeState
    from services.postgres.slots import Slot

_COUNTED = re.compile(r"\s*(?:(?:FIRST|ANY)\s+)?(\d+)\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)
_ITEM = re.compile(r'\s*(?:"((?:[^"]|"")*)"|([^\s,"]+))\s*(?:,|$)')


def listed(setting: str) -> tuple[str, ...]:
    """Return the items of a comma-separated list, unquoted."""
    return tuple(
        (match[1].replace('""', '"') if match[1] is not None else match[2])
        for match in _ITEM.finditer(setting)
    )


def slots_that_exist(setting: str, slots: Iterable[Slot]) -> tuple[str, ...]:
    """Return the names in synchronized_standby_slots that are valid physical slots of the server.

    By membership, not by who is connected: a standby that is away for a moment stays.
    """
    valid = {
        slot.slot_name
        for slot in slots
        if slot.slot_type == "physical" and slot.invalidation_reason is None
    }
    return tuple(name for name in listed(setting) if name in valid)


def slots_in_use(setting: str, slots: Iterable[Slot]) -> tuple[str, ...]:
    """Return the items of synchronized_standby_slots that a standby uses now.

    This is for a node that is to be the primary: its standbys come to it later, and are added then.
    A slot that exists unused, as other managers make them ahead, would keep every consumer waiting.
    """
    active = [slot for slot in slots if slot.active_pid is not None]
    return slots_that_exist(setting, active)


def quorum(setting: str) -> tuple[int, frozenset[str]] | None:
    """Return how many standbys a commit awaits, and among which names; None if it awaits none."""
    if not setting.strip():
        return None
    counted = _COUNTED.fullmatch(setting)
    count, names = (int(counted[1]), counted[2]) if counted else (1, setting)
    return count, frozenset(name.lower() for name in listed(names))


def commits_can_go_on(setting: str, followers: Iterable[str]) -> bool:
    """Tell whether enough of the named standbys stream for synchronous_standby_names to be met."""
    found = quorum(setting)
    if found is None:
        return True
    count, wanted = found
    present = [name for name in followers if name.lower() in wanted or "*" in wanted]
    return len(present) >= count


def on_command_line(state: NodeState, setting: str) -> bool:
    """Tell whether a setting comes from the server's command line, which beats ALTER SYSTEM."""
    known = state.settings.get(setting)
    return known is not None and known.source == "command line"


def why_fixed(state: NodeState) -> str:
    """Return why a fence, or a standby's upstream, can't be changed on a node; "" if they can."""
    if state.setting("allow_alter_system") == "off":
        return "allow_alter_system is off"
    fixed = [name for name in (FENCE, "primary_conninfo") if on_command_line(state, name)]
    return f"the server's command line sets {' and '.join(fixed)}" if fixed else ""
