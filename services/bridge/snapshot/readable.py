"""Whether a snapshot can read the tables that it is to read. Pure.

A table that the settings do not fit now may fit the changes that the stream has yet to bring: the
stream goes on up to the first change that does not fit, and rows wait until the settings fit again.
"""

from typing import Final

from schemas.errors import SettingsError
from services.bridge.events.shaping.tables import Shaping
from services.bridge.snapshot.progress import SnapshotPlan

_OPERATION: Final = "begin the snapshot"


def refuse_unfit(found: SnapshotPlan, shaping: Shaping) -> None:
    """Refuse the tables with rows left to read that the settings do not fit as they are now."""
    for name, table in list(found.tables.items()):
        if table.done:
            continue
        try:
            shaping.plan(table.shape.relation)
        except SettingsError as error:
            del found.tables[name]
            found.refused[name] = f"does not fit the settings: {error.message}"
            found.unfit[name] = error.hint


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


def require_all_read(found: SnapshotPlan) -> None:
    """Raise SettingsError that names the tables which were not read, at the snapshot's end."""
    require_readable(found)
    if refusals := found.refusals(unfit=True):
        raise SettingsError(
            f"rows of tables were not read: {refusals}",
            operation=_OPERATION,
            hint=remedies(found),
        )


def remedies(found: SnapshotPlan) -> str:
    """Return the hints of the tables that the settings do not fit, each once."""
    return "; ".join(dict.fromkeys(found.unfit.values()))
