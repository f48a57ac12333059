"""Whether a snapshot can read the tables that it is to read. Pure.

A table that the settings do not fit now may fit the changes that the stream has yet to bring: the
stream goes on up to the first change that does not fit, and rows wait until the settings fit again.
That is so where each start judges the settings (services.bridge.recovery.fit): they have fitted.
"""

from collections.abc import Callable
from typing import Final, NoReturn

from schemas.errors import SettingsError
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.messages import Relation
from services.bridge.snapshot.progress import SnapshotPlan
from services.bridge.snapshot.signal_conditions import foreign_name

_OPERATION: Final = "begin the snapshot"


def refuse_parked(found: SnapshotPlan, parked: Callable[[Relation], str]) -> None:
    """Refuse the tables with rows left to read that `parked` gives a reason for."""
    for name, table in list(found.tables.items()):
        if not table.done and (reason := parked(table.shape.relation)):
            found.refuse(name, reason)


def refuse_conditions(found: SnapshotPlan) -> None:
    """Refuse the tables whose signal has a condition that could call somebody's function."""
    for name, table in list(found.tables.items()):
        foreign = table.asked and foreign_name(table.where, table.shape.built_in_columns)
        if foreign and not table.done:
            found.refuse(
                name,
                f"is asked for with a condition on {foreign}: only published columns of built-in "
                "types can be compared",
                f"send a signal with another condition, or `slotbridge snapshot stop {name}`",
            )


def refuse_unfit(found: SnapshotPlan, shaping: Shaping) -> None:
    """Refuse the tables with rows left to read that the settings do not fit as they are now."""
    for name, table in list(found.tables.items()):
        keyed = table.shape.keyed([column.name for column in table.shape.key])
        error = None if table.done else _error(shaping.plan, keyed)
        if error is None:
            continue
        found.refuse(name, f"does not fit the settings: {error.message}", error.hint)
        if _error(shaping.check, table.shape.relation) is None:
            found.unjudged.add(name)


def _error(asked: Callable[[Relation], object], relation: Relation) -> SettingsError | None:
    try:
        asked(relation)
    except SettingsError as error:
        return error
    return None


def require_readable(found: SnapshotPlan) -> None:
    """Raise SettingsError that names the tables which can't be read, whatever the stream brings."""
    if refusals := found.refusals(unfit=False):
        raise SettingsError(
            f"rows of tables can't be read: {refusals}",
            operation=_OPERATION,
            hint="GRANT SELECT to the role; give tables a primary key or a replica identity index; "
            "or name them in snapshot.exclude: then only their changes are published. For a slot "
            "that is yet to be made, `snapshot.without_key: read` does without a key",
        )
    if found.unjudged:
        _refuse(found)


def require_all_read(found: SnapshotPlan) -> None:
    """Raise SettingsError that names the tables which were not read, at the snapshot's end."""
    require_readable(found)
    if found.unfit:
        _refuse(found)


def _refuse(found: SnapshotPlan) -> NoReturn:
    raise SettingsError(
        f"rows of tables can't be read: {found.refusals(unfit=True)}",
        operation=_OPERATION,
        hint=remedies(found),
    )


def remedies(found: SnapshotPlan) -> str:
    """Return the hints of the tables that the settings do not fit, each once."""
    return "; ".join(dict.fromkeys(found.unfit.values()))
