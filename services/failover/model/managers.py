"""Who promotes this pair: we, or a manager such as Patroni, whose decisions we never cross. Pure.

Under a manager `check`, `repoint`, `watch` and `drill` do their work. What promotes, fences or
rejoins, or changes settings of the pair, is refused and names the manager's own command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.failover.model.view import View

_COMMANDS = {
    "patroni": {
        "failover": "patronictl failover",
        "switchover": "patronictl switchover",
        "rejoin": "patronictl reinit",
        "resume": "patronictl list, and then patronictl failover or switchover",
        "check --fix": "patronictl edit-config",
    },
    "cloudnative-pg": {
        "failover": "kubectl cnpg promote CLUSTER INSTANCE",
        "switchover": "kubectl cnpg promote CLUSTER INSTANCE",
        "rejoin": "kubectl cnpg destroy CLUSTER INSTANCE, which makes the instance anew",
        "resume": "kubectl cnpg status CLUSTER, and then kubectl cnpg promote",
        "check --fix": "kubectl edit cluster, spec.postgresql.parameters",
    },
}


def is_managed(managed_by: str | None) -> bool:
    """Tell whether the settings name a manager."""
    return managed_by in _COMMANDS


def require_unmanaged(managed_by: str | None, command: str) -> None:
    """Raise SettingsError where a manager does what the command would do."""
    if managed_by is None or managed_by not in _COMMANDS:
        return
    raise SettingsError(
        f"{managed_by} manages the pair: a {command} by slotfailover would conflict with it",
        operation=command,
        subject="failover.managed_by",
        hint=f"use {_COMMANDS[managed_by][command]}; slotfailover watch or repoint moves the "
        "subscriptions and the bridge afterwards",
    )


def traces(view: View) -> Iterator[tuple[str, str]]:
    """Yield (node, manager with the evidence) for managers that the settings do not mention."""
    if view.managed_by is None:
        for node in view.nodes:
            for manager in node.state.provenance.managers if node.state is not None else ():
                yield node.name, manager


def forgotten(view: View, new_primary: str) -> tuple[str, ...]:
    """Warn of slots that the last primary had and that the new primary lacks.

    Nobody has named the consumers of these slots in the settings.
    """
    state = view.node(new_primary).state
    if state is None or not view.known_slots:
        return ()
    gone = sorted(view.known_slots - {slot.slot_name for slot in state.slots})
    text = (
        f"{', '.join(gone)}: failover slots of the primary at {view.known_slots_at}, and not on "
        f"{new_primary}: their consumers lose what came since, unless they were dropped"
    )
    return (text,) if gone else ()


def notes_on(view: View) -> tuple[str, ...]:
    """Return a warning for each manager that seems to be at work."""
    return tuple(
        f"{node} seems to be managed by {manager}: a promotion from here would cross it. Set "
        "failover.managed_by to patroni or cloudnative-pg, or to none where that is wrong"
        for node, manager in traces(view)
    )
